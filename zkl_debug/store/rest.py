"""Captures at rest: everything is on file, and no forward has run since.

Some processes are ended from outside without notice, as a rule and not by accident: workers of a cluster, when the
program they served is done. Such a process says after each piece of work that it rests, with what its manifest will
need. What is then rebuilt from its log is all there was, and counts as complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from zkl_debug.errors import CaptureInvalid
from zkl_debug.schema import Json
from zkl_debug.store.manifest import RESERVED, read_json, write_json

NOTE = "its process was ended from outside while it rested; everything before that is on file"


def rest_path(root: Path, rank: int) -> Path:
    """Where a rank says that it rests."""
    return root / f"rank{rank:05d}.rest.json"


def write_rest(root: Path, rank: int, frames: int, facts: Mapping[str, Json]) -> None:
    """Say that a rank rests. Everything must have been flushed.

    Args:
        root: capture folder.
        rank: of this process.
        frames: frames written so far.
        facts: further fields of the manifest.
    """
    write_json(rest_path(root, rank), {"frames": frames, "facts": dict(facts)})


def end_rest(root: Path, rank: int) -> None:
    """Take it back, before anything more is recorded."""
    with contextlib.suppress(FileNotFoundError):
        rest_path(root, rank).unlink()


def rested(root: Path, manifest: Mapping[str, Json]) -> dict[str, Json] | None:
    """Fields of the manifest of a rebuilt capture whose ranks all rested, or None when one did not.

    Args:
        root: capture folder.
        manifest: as it was rebuilt from the logs.
    """
    facts: dict[str, Json] = {}
    frames = 0
    for rank in range(int(manifest["world"])):
        path = rest_path(root, rank)
        if not path.exists():
            return None
        try:
            document = read_json(path)
            frames += int(document["frames"])
            facts = {k: v for k, v in document["facts"].items() if k not in RESERVED} | facts
        except (CaptureInvalid, KeyError, TypeError, ValueError, AttributeError):
            return None
    if frames != manifest["counts"]["frames"] or manifest.get("dropped_frames"):
        return None
    return facts
