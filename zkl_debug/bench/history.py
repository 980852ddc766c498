"""Figures of earlier runs: one JSON line a run, and what changed since the last run of the same bench."""

from __future__ import annotations

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
_TOLD = 1.10  # change of a figure that is worth a line


def record(path: Path, document: dict[str, Json]) -> list[str]:
    """Append a run to a history file and compare it with the last run of the same parts there.

    Args:
        path: a JSON lines file; made when it is not there.
        document: a ``zkl-bench`` document.

    Returns:
        Lines about figures that changed by a tenth or more, and when the other run was; empty for a first run.

    Raises:
        UsageError: when the file is not such a history.
    """
    parts = sorted(key for key, value in document.items() if isinstance(value, dict))
    earlier = [entry for entry in _read(path) if entry["parts"] == parts]
    entry = {
        "format": FORMAT,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "parts": parts,
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "python": platform.python_version(),
        "machine": {"cores": os.cpu_count(), "system": platform.system(), "processor": platform.machine()},
        "document": document,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, separators=(",", ":")) + "\n")
    return _changes(earlier[-1], entry) if earlier else []


def _read(path: Path) -> list[dict[str, Json]]:
    if not path.exists():
        return []
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or entry.get("format") != FORMAT or "document" not in entry:
            raise UsageError(f"{path} line {number} is no run of a bench", "a file that --history made, or a new name")
        entries.append(entry)
    return entries


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
