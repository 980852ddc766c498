"""Space files: the YAML a user writes, checked field by field.

::

    version: 1
    switches:
      - starve_cublas_workspace          # a name alone is enough
      - name: te_native
        env: NVTE_BATCH_INVARIANT        # or {name: X, when_on: "a", when_off: null}, or a list of them
        requires: [starve_cublas_workspace]
        conflicts: [other_backend]
        alternatives: [other_backend]    # may do the same job: tried first when this one is replaceable
        untestable: needs SM100          # never varied here, reported with this reason
        held: off                        # fixed, never varied
        doc: what it fixes
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from zkl_debug.bisect.space import EnvBinding, Space, Switch
from zkl_debug.errors import UsageError

_TOP_KEYS = ("format", "version", "switches")
_SWITCH_KEYS = ("name", "env", "requires", "conflicts", "alternatives", "untestable", "held", "doc")
_ENV_KEYS = ("name", "when_on", "when_off")
_MAX_BYTES = 1 << 20
#: Variables the oracle sets itself; a switch must not bind them.
_RESERVED = "ZKL_"


class _StrictLoader(yaml.SafeLoader):
    """Safe loading that refuses a key given twice and expands no aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not used in a space file")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool) and key in seen:
                raise yaml.MarkedYAMLError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(str(key) if not isinstance(key, str | int | float | bool) else key)
        return super().construct_mapping(node, deep)


def load_space(path: Path) -> Space:
    """Read a space file.

    Raises:
        UsageError: the file cannot be read, is not YAML, or does not describe a space.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the space file {path}: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{path} has {len(data)} bytes", f"a space file of at most {_MAX_BYTES} bytes")
    try:
        body = yaml.load(data.decode(), Loader=_StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not YAML: {_one_line(error)}") from error
    try:
        return parse_space(body)
    except UsageError as error:
        raise UsageError(f"{path}: {error.found}", error.expected, error.next_step) from error


def parse_space(body: Any) -> Space:
    """A space from parsed YAML.

    Raises:
        UsageError: it does not describe a space.
    """
    if not isinstance(body, dict):
        raise UsageError(f"the space is {_kind(body)}", "a mapping with the key 'switches'")
    _known_keys(body, _TOP_KEYS, "the space")
    if body.get("version", 1) != 1:
        raise UsageError(f"space version {body['version']!r} is unknown", "version 1")
    if body.get("format", "zkl-space") != "zkl-space":
        raise UsageError(f"format {body['format']!r} is not a space", "format: zkl-space")
    entries = body.get("switches")
    if not isinstance(entries, list):
        raise UsageError(f"'switches' is {_kind(entries)}", "a list of switches")
    return Space(tuple(_switch(entry, f"switch {i}") for i, entry in enumerate(entries, start=1)))


def _switch(entry: Any, where: str) -> Switch:
    if isinstance(entry, str):
        return Switch(entry)
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is {_kind(entry)}", "a name or a mapping (quote names like 'on' or '1')")
    name = entry.get("name")
    if not isinstance(name, str):
        raise UsageError(f"{where}: its name is {_kind(name)}", "a string (quote names like 'on' or '1')")
    where = f"switch {name!r}"
    _known_keys(entry, _SWITCH_KEYS, where)
    held = entry.get("held")
    if held not in (None, True, False):
        raise UsageError(f"{where}: held is {held!r}", "on or off")
    return Switch(
        name=name,
        requires=_names(entry, "requires", where),
        conflicts=_names(entry, "conflicts", where),
        alternatives=_names(entry, "alternatives", where),
        env=_bindings(entry.get("env"), where),
        untestable=_text(entry, "untestable", where),
        held=held,
        doc=_text(entry, "doc", where),
    )


def _names(entry: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = entry.get(key)
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise UsageError(f"{where}: {key} is {_kind(value)}", "a list of switch names (quote names like 'on' or '1')")
    return tuple(dict.fromkeys(value))


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UsageError(f"{where}: {key} is {_kind(value)}", "a text" + (", the reason" * (key == "untestable")))
    return value


def _bindings(value: Any, where: str) -> tuple[EnvBinding, ...]:
    if value is None:
        return ()
    entries = value if isinstance(value, list) else [value]
    return tuple(_binding(entry, where) for entry in entries)


def _binding(entry: Any, where: str) -> EnvBinding:
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise UsageError(
            f"{where}: env is {_kind(entry)}", "a variable name, or {name: X, when_on: ..., when_off: ...}"
        )
    _known_keys(entry, _ENV_KEYS, f"{where}: env")
    name = entry["name"]
    if not name or "=" in name or "\0" in name or name.startswith(_RESERVED):
        raise UsageError(f"{where}: {name!r} cannot be bound", f"a variable name that does not start with {_RESERVED}")
    values: dict[str, str | None] = {}
    for key, default in (("when_on", "1"), ("when_off", "0")):
        value = entry.get(key, default)
        if value is not None and (not isinstance(value, str | int) or isinstance(value, bool)):
            raise UsageError(f"{where}: env {name} has {key} = {value!r}", "a string (quote it) or null to remove it")
        values[key] = None if value is None else str(value)
    return EnvBinding(name, values["when_on"], values["when_off"])


def _known_keys(entry: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
            raise UsageError(f"{where} has the unknown key {key!r}", hint)


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "missing" if value is None else names.get(type(value), type(value).__name__)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
