"""Figures of earlier runs: one JSON line a run, and what changed since the last run of the same bench."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from zkl_debug.errors import UsageError
from zkl_debug.schema import Json

FORMAT = "zkl-bench-history"
_PACKAGES = ("zkl-debug", "numpy", "h5py", "torch")
_FIELDS = frozenset({"time", "parts", "document"})
_TOLD = 1.10  # change of a figure that is worth a line


def check(path: Path) -> list[dict[str, Json]]:
    """The runs in a history file, none when it is not there yet.

    Raises:
        UsageError: when its folder is not there, or the file is no history.
    """
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--history {path}: no folder {path.parent} to write to", "a folder that is there")
    if path.exists() and not path.is_file():
        raise _no_history(f"{path}")
    return _read(path)


def record(path: Path, document: dict[str, Json], settings: dict[str, Json]) -> list[str]:
    """Append a run to a history file and compare it with the last run of the same parts and settings there.

    Args:
        path: a JSON lines file; made when it is not there.
        document: a ``zkl-bench`` document.
        settings: what was asked for; runs of other settings are not compared.

    Returns:
        Lines about figures that changed by a tenth or more, and when the other run was; or that there is no such run.

    Raises:
        UsageError: when the file is not such a history, or its folder is not there.
    """
    parts = sorted(key for key, value in document.items() if isinstance(value, dict))
    settings = json.loads(json.dumps(settings))
    same = [entry for entry in check(path) if entry["parts"] == parts]
    earlier = [entry for entry in same if entry.get("settings") == settings]
    entry = {
        "format": FORMAT,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "parts": parts,
        "settings": settings,
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "python": platform.python_version(),
        "machine": {"cores": os.cpu_count(), "system": platform.system(), "processor": platform.machine()},
        "document": document,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, separators=(",", ":")) + "\n")
    if earlier:
        return _changes(earlier[-1], entry)
    others = f"; {len(same)} with others" if same else ""
    return [f"{path}: no earlier run of this bench with these settings to compare with{others}"]


def _read(path: Path) -> list[dict[str, Json]]:
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise _no_history(str(path)) from None
    entries = []
    for number, line in enumerate(lines if lines[-1] else lines[:-1], start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or entry.get("format") != FORMAT or not set(entry) >= _FIELDS:
            raise _no_history(f"{path} line {number}")
        entries.append(entry)
    return entries


def _no_history(what: str) -> UsageError:
    return UsageError(f"{what} is no run of a bench", "a file that --history made, or a new name", "another --history")


def _changes(before: dict[str, Json], now: dict[str, Json]) -> list[str]:
    old = dict(_numbers(before["document"], ""))
    lines = [
        f"{name}: {old[name]:.6g} -> {value:.6g} ({value / old[name]:.2f} x)"
        for name, value in _numbers(now["document"], "")
        if old.get(name, 0) > 0 and value > 0 and max(value / old[name], old[name] / value) >= _TOLD
    ]
    return [f"since {before['time']}, figures that changed by a tenth or more: {len(lines)}", *lines]


def _numbers(value: Json, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        with contextlib.suppress(OverflowError):  # a file may hold any number
            yield name, float(value)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _numbers(part, f"{name}[{number}]")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
