"""What an attached program is told, through its environment. Standard library only: every child process reads this."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

#: Environment variable that holds the settings as JSON.
VARIABLE = "ZKL_DEBUG_ATTACH"
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
        models: models captured at most.
        model: ``module:Class`` of a model class to watch besides the known ones, or empty.
        strict: let failures of the probe stop the program.
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

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables to set: the settings, and the start-up folder first on ``PYTHONPATH``."""
        path = (os.environ if base is None else base).get("PYTHONPATH", "")
        return {
            VARIABLE: json.dumps(asdict(self), separators=(",", ":")),
            "PYTHONPATH": os.pathsep.join([str(STARTUP), *([path] if path else [])]),
        }


def from_environment() -> Settings | None:
    """The settings of this process, or None when it is not to be attached to."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    values = json.loads(text)
    values["sites"] = tuple(values["sites"])
    values["layers"] = tuple(values["layers"]) if values["layers"] else None
    return Settings(**values)
