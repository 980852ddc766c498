"""What an attached program is told, through its environment. Standard library only: every child process reads this."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

#: Environment variable that holds the settings as JSON; set by the command.
VARIABLE = "ZKL_DEBUG_ATTACH"
#: Environment variable that names a file of settings; set by a person, where no command starts the program.
FILE_VARIABLE = "ZKL_DEBUG"
#: Folder whose ``sitecustomize`` runs when an interpreter starts.
STARTUP = Path(__file__).resolve().parent / "startup"


@dataclass(frozen=True)
class Settings:
    """How to capture the models of a program.

    Attributes:
        out: folder of the first model that runs; later models and further processes get names derived from it.
        side: label of the observed system.
        level: ``digest`` or ``payload``.
        sites: shell-style patterns of sites; empty for all.
        layers: inclusive range, or None.
        budget: cap on payload bytes, or None.
        steps: stop after so many optimizer steps; 0 for no limit.
        requests: record while one of the first so many generation requests runs; 0 for all.
        models: models captured at most.
        model: ``module:Class`` of a model class to watch besides the known ones, or empty.
        strict: let failures of the probe stop the program.
        at_once: on a device, read each site when it is passed.
    """

    out: str
    side: str
    level: str = "digest"
    sites: tuple[str, ...] = ()
    layers: tuple[int, int] | None = None
    budget: int | None = None
    steps: int = 0
    models: int = 4
    model: str = ""
    strict: bool = False
    requests: int = 0
    at_once: bool = False

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables to set: the settings, and the start-up folder first on ``PYTHONPATH``."""
        path = (os.environ if base is None else base).get("PYTHONPATH", "")
        return {
            VARIABLE: json.dumps(asdict(self), separators=(",", ":")),
            "PYTHONPATH": os.pathsep.join([str(STARTUP), *([path] if path else [])]),
        }


def from_environment() -> Settings | None:
    """The settings of this process, or None when it is not to be attached to.

    Raises:
        ValueError: when a file of settings cannot be used; it says why.
    """
    text = os.environ.get(VARIABLE)
    if text:
        return from_mapping(json.loads(text))
    file = os.environ.get(FILE_VARIABLE)
    return from_file(Path(file)) if file else None


def from_file(path: Path) -> Settings:
    """Settings of a YAML or JSON file; its keys are the attributes of :class:`Settings`, ``out`` and ``side`` needed.

    Raises:
        ValueError: when it cannot be read or does not hold settings; it says why.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    if path.suffix == ".json":
        values = json.loads(text)
    else:
        import yaml

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    try:
        return from_mapping(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def from_mapping(values: Any) -> Settings:
    """Settings of plain values, checked.

    Raises:
        ValueError: for a key that is not known, one that is missing, or a value of another type.
    """
    if not isinstance(values, dict):
        raise ValueError("not a mapping of settings")
    known = {field.name: field for field in fields(Settings)}
    wrong = [str(key) for key in values if key not in known]
    if wrong:
        raise ValueError(f"no setting {wrong[0]}; there are {', '.join(known)}")
    missing = [key for key in ("out", "side") if not values.get(key)]
    if missing:
        raise ValueError(f"no {missing[0]}")
    made = {key: _checked(key, value) for key, value in values.items()}
    if made.get("level", "digest") not in ("digest", "payload"):
        raise ValueError(f"level {made['level']!r}; digest or payload")
    return Settings(**made)


def model_parts(text: str) -> tuple[str, str]:
    """Module and class of ``module:Class``.

    Raises:
        ValueError: anything else, or a class of the script itself, whose import nobody sees.
    """
    module, _, name = text.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"model is {text[:60]!r}; write MODULE:CLASS, e.g. my_package.model:MyModel")
    if module == "__main__":
        raise ValueError(f"model is {text[:60]!r}: the script itself is imported by nobody; put {name} into a module")
    return module, name


_NUMBERS = ("steps", "models", "requests")


def _checked(key: str, value: Any) -> Any:
    """A value as :class:`Settings` has it."""
    if key == "sites":
        value = [value] if isinstance(value, str) else value or []
        if all(isinstance(pattern, str) for pattern in value):
            return tuple(value)
    elif key == "layers":
        if isinstance(value, str):
            first, _, last = value.partition("-")
            value = [int(first), int(last or first)] if first.isdigit() and (last or "0").isdigit() else value
        value = [value, value] if type(value) is int else value
        if value is None or (isinstance(value, list | tuple) and [type(n) for n in value] == [int, int]):
            return tuple(value) if value is not None else None
    elif key == "budget":
        try:
            return None if value is None else parse_size(str(value) if type(value) is int else value)
        except ValueError as error:
            raise ValueError(f"budget: {error}") from None
    elif key in _NUMBERS:
        if type(value) is int and value >= 0:
            return value
    elif key in ("strict", "at_once"):
        if isinstance(value, bool):
            return value
    elif key == "model":
        if not value:
            return ""
        if isinstance(value, str):
            model_parts(value)
            return value
    elif isinstance(value, str):
        return value
    raise ValueError(f"{key} is {str(value)[:40]!r}")


_UNITS = {unit: 1 << 10 * power for power, unit in enumerate(("b", "kib", "mib", "gib", "tib", "pib", "eib"))} | {"": 1}
_LARGEST = (1 << 63) - 1  # what a file system can count


def parse_size(value: Any) -> int:
    """Bytes of ``4GiB``, ``512MiB`` or ``1000``.

    Raises:
        ValueError: no size, a negative one, or one that no disk has.
    """
    text = value.strip().lower() if isinstance(value, str) else ""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    try:
        size = float(digits) * _UNITS[text[len(digits) :].strip()]
    except (KeyError, ValueError):
        raise ValueError(f"{str(value)[:40]!r} is not a size; write for example 4GiB, 512MiB or 1000") from None
    if size < 0:
        raise ValueError(f"{text!r} is less than nothing; 0 or more, or no budget for no cap")
    if not size <= _LARGEST:
        raise ValueError(f"{text!r} is more than any disk holds; leave the budget out for no cap")
    return int(size)
