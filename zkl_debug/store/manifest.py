"""The manifest: written last, so that its presence says the capture is complete."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from zkl_debug.errors import CaptureInvalid
from zkl_debug.schema import FORMAT, FORMAT_VERSION, Json
from zkl_debug.store.layout import MANIFEST, encode_json, part_path
from zkl_debug.store.segment import Summary

#: Fields computed here; extra fields given by the caller cannot replace them.
RESERVED = frozenset(
    {"format", "version", "side", "world", "complete", "repaired", "segments", "counts", "sites", "meta", "notes"}
)
_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class SegmentEntry:
    """A closed segment and where it is."""

    rank: int
    segment: int
    path: Path
    summary: Summary


def build_manifest(
    *,
    side: str,
    world: int,
    meta: Mapping[str, Json],
    segments: Iterable[SegmentEntry],
    notes: Iterable[str] = (),
    extra: Mapping[str, Json] | None = None,
    reason: str = "",
    repaired: bool = True,
) -> dict[str, Json]:
    """A manifest (or one rank's part of it) of closed segments.

    Args:
        side, world, meta: of the capture.
        segments: closed segments, in order.
        notes: remarks for the reader.
        extra: further fields; those of :data:`RESERVED` are ignored, except ``notes``, which are added.
        reason: why the capture is incomplete; empty for a complete one.
        repaired: an incomplete one was put together from its log (not closed early by its own process).
    """
    entries = list(segments)
    more = dict(extra or {})
    manifest: dict[str, Json] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "side": side,
        "world": world,
        "complete": not reason,
    }
    if reason:
        manifest |= {"repaired": repaired, "reason": reason}
    manifest["segments"] = [_segment_json(entry) for entry in entries]
    sites = _coverage(entry.summary for entry in entries)
    manifest["counts"] = {
        "frames": sum(e.summary.frames for e in entries),
        "rows": sum(e.summary.rows for e in entries),
        "events": sum(e.summary.events for e in entries),
        "states": sum(e.summary.states for e in entries),
        **_site_counts(sites),
    }
    manifest["sites"] = sites
    manifest["meta"] = dict(meta)
    manifest["notes"] = [*notes, *more.pop("notes", [])]
    return manifest | {key: value for key, value in more.items() if key not in RESERVED}


def _segment_json(entry: SegmentEntry) -> dict[str, Json]:
    return {
        "rank": entry.rank,
        "segment": entry.segment,
        "file": entry.path.name,
        "bytes": entry.path.stat().st_size,
        "frames": entry.summary.frames,
        "rows": entry.summary.rows,
        "check": entry.summary.check,
        "table": entry.summary.table,
    }


def _coverage(summaries: Iterable[Summary]) -> dict[str, dict[str, Json]]:
    sites: dict[str, dict[str, Json]] = {}
    for summary in summaries:
        for entry in summary.sites:
            info = entry["site"]
            have = sites.setdefault(
                info["name"],
                {
                    "torch_dtype": info["torch_dtype"],
                    "row_shape": info["row_shape"],
                    "rows": 0,
                    "payload_rows": 0,
                    "payload_bytes": 0,
                    "payload_dropped_rows": 0,
                },
            )
            have["rows"] += entry["rows"]
            have["payload_dropped_rows"] += entry["dropped"]
            rows = entry.get("payload_rows", 0)
            have["payload_rows"] += rows
            have["payload_bytes"] += rows * payload_row_bytes(entry)
    return sites


def payload_row_bytes(entry: Mapping[str, Json]) -> int:
    """Bytes of one payload row of a site index entry, 0 without payload."""
    if "payload_dtype" not in entry:
        return 0
    return int(entry["payload_width"]) * int(entry["payload_dtype"][-1])


def _site_counts(sites: Mapping[str, Mapping[str, Json]]) -> dict[str, int]:
    return {
        "sites": len(sites),
        "digests": sum(s["rows"] for s in sites.values()),
        "payload_rows": sum(s["payload_rows"] for s in sites.values()),
        "payload_bytes": sum(s["payload_bytes"] for s in sites.values()),
        "payload_dropped_rows": sum(s["payload_dropped_rows"] for s in sites.values()),
    }


def write_json(path: Path, document: Mapping[str, Json]) -> None:
    """Write a JSON document so that the file is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = json.dumps(json.loads(encode_json(document)), indent=1, ensure_ascii=False)
    try:
        temporary.write_text(text + "\n", encoding="utf-8", errors="replace")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_json(path: Path) -> Any:
    """Read a JSON document of a capture folder.

    Raises:
        CaptureInvalid: when the file is a link, too large, or not JSON.
    """
    if path.is_symlink() or not path.is_file():
        raise CaptureInvalid(f"{path} is not a regular file", "a file inside the capture folder")
    if path.stat().st_size > _MAX_BYTES:
        raise CaptureInvalid(f"{path} has {path.stat().st_size} bytes", f"at most {_MAX_BYTES}")
    data = path.read_bytes()
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        # Why bytes are no text depends on an encoding that is guessed from the first of them: it says nothing.
        why = " text" if isinstance(error, UnicodeDecodeError) or 0 in data else f": {error}"
        raise CaptureInvalid(
            f"{path} is not JSON{why}",
            "a manifest written by zkl-debug",
            f"mv {quote(str(path))} {quote(f'{path}.bad')} && zkl-debug repair {quote(str(path.parent))}",
        ) from None


def finalize_manifest(root: Path, world: int) -> Path:
    """Merge the parts that the ranks of a capture left into ``manifest.json``.

    Call it once, after every rank has closed its writer.

    Raises:
        CaptureInvalid: when a rank's part is missing or the parts disagree about the side or world size.
    """
    parts: list[dict[str, Json]] = []
    for rank in range(world):
        path = part_path(root, rank)
        if not path.exists():
            raise CaptureInvalid(
                f"{path} is missing", f"one part for each of {world} ranks", f"zkl-debug repair {root}"
            )
        part = read_json(path)
        if part.get("world") != world or part.get("side") != (parts or [part])[0].get("side"):
            raise CaptureInvalid(f"{path} belongs to another capture", f"side and world of {part_path(root, 0)}")
        parts.append(part)
    manifest = merge_parts(parts)
    write_json(root / MANIFEST, manifest)
    for rank in range(world):
        part_path(root, rank).unlink()
    return root / MANIFEST


def merge_parts(parts: list[dict[str, Json]]) -> dict[str, Json]:
    """One manifest from those of the ranks; fields outside the format are taken from the lowest rank that has them."""
    merged: dict[str, Json] = {}
    for part in reversed(parts):
        merged |= part
    merged["complete"] = all(part["complete"] for part in parts)
    merged |= _merge_checks(parts)
    reasons = [f"rank {_rank_of(part)}: {part['reason']}" for part in parts if part.get("reason")]
    if reasons:
        merged["reason"] = "; ".join(reasons)
    merged["segments"] = [segment for part in parts for segment in part["segments"]]
    merged["notes"] = list(dict.fromkeys(note for part in parts for note in part["notes"]))
    sites: dict[str, dict[str, Json]] = {}
    for part in parts:
        for name, site in part["sites"].items():
            have = sites.setdefault(name, {**site, **dict.fromkeys(_SUMMED, 0)})
            for key in _SUMMED:
                have[key] += site[key]
    merged["sites"] = sites
    merged["counts"] = {
        **{key: sum(part["counts"][key] for part in parts) for key in ("frames", "rows", "events", "states")},
        **_site_counts(sites),
    }
    return merged


def _rank_of(part: Mapping[str, Json]) -> Json:
    """Rank of a part, as its segments say; a question mark for one without."""
    return next((segment.get("rank", "?") for segment in part["segments"]), "?")


def _merge_checks(parts: list[dict[str, Json]]) -> dict[str, Json]:
    """What each rank found of its own probe and of its own repetition: good only where it is good on all of them."""
    merged: dict[str, Json] = {}
    probes = [(_rank_of(p), p["probe"]) for p in parts if isinstance(p.get("probe"), Mapping)]
    if probes:
        errors = [f"rank {rank}: {error}" for rank, probe in probes for error in probe.get("errors") or ()]
        merged["probe"] = {**probes[0][1], "ok": all(p.get("ok", True) for _, p in probes), "errors": errors}
    tests = [p["self_test"] for p in parts if isinstance(p.get("self_test"), Mapping)]
    if tests:
        merged["self_test"] = {key: all(test.get(key, True) is not False for test in tests) for key in tests[0]}
    repeats = [p["self_repeat"] for p in parts if isinstance(p.get("self_repeat"), Mapping)]
    if repeats:
        merged["self_repeat"] = {key: _all_equal([r[key] for r in repeats if key in r]) for key in repeats[0]}
    not_rows = [p["not_rows"] for p in parts if isinstance(p.get("not_rows"), Mapping)]
    if not_rows:
        merged["not_rows"] = {name: shape for one in reversed(not_rows) for name, shape in one.items()}
    return merged


def _all_equal(entries: list[Json]) -> Json:
    counts = {key: sum(int(e.get(key) or 0) for e in entries) for key in ("values", "mismatched")}
    bad = next((e for e in entries if not e.get("equal")), None)
    return {**entries[0], **counts, "equal": bad is None, "first": "" if bad is None else bad.get("first", "")}


_SUMMED = ("rows", "payload_rows", "payload_bytes", "payload_dropped_rows")
