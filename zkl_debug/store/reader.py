"""Reading a capture folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zkl_debug.digest import wrong_rows
from zkl_debug.errors import CaptureInvalid
from zkl_debug.schema import (
    FORMAT,
    FORMAT_VERSION,
    FRAME_DTYPE,
    ROW_DTYPE,
    EventRecord,
    Json,
    SiteMeta,
    StateRecord,
)
from zkl_debug.store.layout import MANIFEST, list_segment_files, what_to_do_with
from zkl_debug.store.manifest import read_json
from zkl_debug.store.segment_reader import SegmentReader
from zkl_debug.store.site import Pages, Part, Site, join
from zkl_debug.store.table import Known
from zkl_debug.store.wal import is_being_written


class Capture:
    """An open capture; also a context manager.

    Attributes:
        root: the folder; ``place`` is it without links and dots.
        manifest: its manifest.
        side, meta: label of the observed system, and the versions, configuration and environment it was given.
        frames: FRAME_DTYPE, [F], over all ranks and segments; ``frame`` is the index in this array.
        frame_rank: rank of each frame, [F] int32.
        rows: ROW_DTYPE, [N]; ``frame`` indexes :attr:`frames`.
        sites: by name, in execution order. A site that other ranks have with another layout or shard is filed under
            ``owner@rank:port``.
        events, states: what happened between frames, and state snapshots by event sequence number. An event's
            ``frame`` indexes :attr:`frames`, or is -1.
    """

    def __init__(
        self, root: Path, manifest: dict[str, Json], readers: list[SegmentReader], meta: dict[str, Json] | None = None
    ) -> None:
        self.root, self.manifest, self._readers = root, manifest, readers
        self.place = root.resolve()
        self.side: str = manifest["side"]
        self.meta: dict[str, Json] = manifest["meta"] if meta is None else meta
        self.frames, self.frame_rank, self.rows = _join_tables(readers)
        self.events = _join_events(readers)
        self.states: dict[int, list[StateRecord]] = {}
        for reader in readers:
            for seq, records in reader.states.items():
                self.states.setdefault(seq, []).extend(records)

    @cached_property
    def sites(self) -> dict[str, Site]:
        """Sites by name, in execution order."""
        return _join_sites(self._readers)

    def by_rank(self) -> dict[int, Capture]:
        """What each rank recorded, as captures of their own over the same open files."""
        own: dict[int, list[SegmentReader]] = {}
        for reader in self._readers:
            own.setdefault(reader.rank, []).append(reader)
        return {r: Capture(self.root, self.manifest, own[r], dict(own[r][0].meta)) for r in sorted(own)}

    def close(self) -> None:
        """Close the files; arrays that were read stay valid."""
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _join_tables(
    readers: list[SegmentReader],
) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[Any]]:
    frames = np.array(join([r.frames for r in readers], np.zeros(0, FRAME_DTYPE)))
    rows = np.array(join([r.rows for r in readers], np.zeros(0, ROW_DTYPE)))
    ranks = np.repeat(np.array([r.rank for r in readers], np.int32), [len(r.frames) for r in readers])
    frames["frame"] = np.arange(len(frames))
    rows["frame"] = np.repeat(frames["frame"], frames["n_rows"])
    return frames, ranks, rows


def _join_sites(readers: list[SegmentReader]) -> dict[str, Site]:
    found: dict[str, tuple[SiteMeta, list[Part]]] = {}
    base = 0
    for reader in readers:
        for number, meta in enumerate(reader.table.metas):
            first = found.get(meta.name)
            if first is not None and first[0] is not meta and not _same_layout(first[0], meta):
                owner, _, port = meta.name.rpartition(":")
                meta = replace(meta, name=f"{owner}@{reader.rank}:{port}")
                first = found.get(meta.name)
            if first is None:
                first = found[meta.name] = (meta, [])
            first[1].append((reader, number, base))
        base += len(reader.rows)
    ordered = sorted(found.values(), key=lambda item: item[0].order)
    shared: dict[Any, NDArray[np.int64]] = {}
    pages = Pages(readers)
    return {meta.name: Site(meta, parts, shared, pages) for meta, parts in ordered}


def _same_layout(a: SiteMeta, b: SiteMeta) -> bool:
    return (a.torch_dtype, a.row_shape, a.tp_axis, a.lane_offset, a.shard) == (
        b.torch_dtype,
        b.row_shape,
        b.tp_axis,
        b.lane_offset,
        b.shard,
    )


def _join_events(readers: list[SegmentReader]) -> list[EventRecord]:
    numbers: dict[int, dict[int, int]] = {}
    start = 0
    for reader in readers:
        own = numbers.setdefault(reader.rank, {})
        for k, number in enumerate(reader.frames["frame"].tolist()):
            own[number] = start + k
        start += len(reader.frames)
    return [
        replace(event, frame=numbers[reader.rank].get(event.frame, -1)) for reader in readers for event in reader.events
    ]


def open_capture(path: Path, *, partial: bool = False) -> Capture:
    """Open a capture folder after checking that it is whole.

    Args:
        path: the folder.
        partial: accept a capture whose manifest says it is incomplete (one that was repaired).

    Raises:
        CaptureInvalid: no manifest, another format or version, a missing, truncated, altered or unreadable segment, a
            link out of the folder, or an incomplete capture without ``partial``.
    """
    root = Path(path)
    manifest = load_manifest(root)
    if not manifest["complete"] and not partial:
        raise CaptureInvalid(
            f"{root} is incomplete: {manifest.get('reason', 'it was not closed')}",
            "a capture that was closed",
            "pass --partial to use what is there",
        )
    readers: list[SegmentReader] = []
    known: Known = {}
    try:
        for segment in manifest["segments"]:
            readers.append(_open_segment(root, segment, manifest, known))  # noqa: PERF401 - closed below when one fails
        _check_ranks(root, manifest, readers, partial)
        return Capture(root, manifest, readers)
    except BaseException:
        for reader in readers:
            reader.close()
        raise


def load_manifest(root: Path) -> dict[str, Json]:
    """The manifest of a capture folder, checked for format, version and the fields every manifest has.

    Raises:
        CaptureInvalid: when there is none or it is not one.
    """
    if not root.is_dir():
        raise CaptureInvalid(f"{root} is not a folder", "a capture folder", what_to_do_with(root))
    path = root / MANIFEST
    if not path.exists() and not path.is_symlink():
        files = list_segment_files(root)
        if any(file.kind == "wal" and is_being_written(file.path) for file in files):
            raise CaptureInvalid(
                f"{root} is still being written", "a capture that was closed", "wait until it is closed"
            )
        if files:
            raise CaptureInvalid(
                f"{root} has no {MANIFEST}: the capture was not closed",
                "a complete capture",
                f"run `zkl-debug repair {root}`",
            )
        below = sorted(child.name for child in root.iterdir() if (child / MANIFEST).is_file())
        hint = f"one of its captures: {', '.join(str(root / name) for name in below[:4])}" if below else ""
        raise CaptureInvalid(f"{root} is not a capture: it has no {MANIFEST}", "a capture folder", hint)
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CaptureInvalid(f"{path} is not a capture manifest", f'"format": "{FORMAT}"')
    if manifest.get("version") != FORMAT_VERSION:
        raise CaptureInvalid(
            f"{path} has format version {manifest.get('version')!r}",
            f"version {FORMAT_VERSION}",
            "use the release of zkl-debug that wrote it",
        )
    for key, kind in _FIELDS.items():
        if not isinstance(manifest.get(key), kind):
            raise CaptureInvalid(f"{path}: field {key!r} is missing or damaged", "a manifest written by zkl-debug")
    return manifest


_FIELDS: dict[str, type] = {
    "side": str,
    "world": int,
    "complete": bool,
    "segments": list,
    "counts": dict,
    "sites": dict,
    "meta": dict,
    "notes": list,
}


def _open_segment(root: Path, segment: Any, manifest: dict[str, Json], known: Known) -> SegmentReader:
    if not isinstance(segment, dict) or not isinstance(segment.get("file"), str):
        raise CaptureInvalid(f"{root / MANIFEST}: an entry of segments is damaged")
    name = segment["file"]
    if name != Path(name).name:
        raise CaptureInvalid(f"{root / MANIFEST}: segment {name!r} lies outside the folder", "a file name")
    path = root / name
    if path.is_symlink():
        raise CaptureInvalid(f"{path} is a symbolic link", "a file inside the capture folder")
    if not path.exists():
        raise CaptureInvalid(f"{path} is missing", f"the file of rank {segment.get('rank')} named in the manifest")
    size = path.stat().st_size
    if size != segment.get("bytes"):
        raise CaptureInvalid(
            f"{path} has {size} bytes, the manifest says {segment.get('bytes')}", "the file as it was written"
        )
    reader = SegmentReader(path, str(segment.get("check", "")), known, str(segment.get("table", "")))
    wrong = ""
    if (reader.rank, reader.side, reader.world) != (segment.get("rank"), manifest["side"], manifest["world"]):
        wrong = "rank, side or world"
    elif (len(reader.frames), len(reader.rows)) != (segment.get("frames"), segment.get("rows")):
        wrong = "frames or rows"
    if wrong:
        reader.close()
        raise CaptureInvalid(f"{path} and the manifest disagree about {wrong}", "files of one capture")
    return reader


def _check_ranks(root: Path, manifest: dict[str, Json], readers: list[SegmentReader], partial: bool) -> None:
    seen: set[tuple[int, int]] = set()
    for reader in readers:
        if (reader.rank, reader.segment) in seen:
            raise CaptureInvalid(f"{root}: rank {reader.rank} has segment {reader.segment} twice", "every segment once")
        seen.add((reader.rank, reader.segment))
    missing = sorted(set(range(min(manifest["world"], 1 << 20))) - {reader.rank for reader in readers})
    if missing and not partial:
        raise CaptureInvalid(
            f"{root} has no segment of rank {', '.join(map(str, missing[:8]))}", f"{manifest['world']} ranks"
        )
    counts = manifest["counts"]
    have = (sum(len(r.frames) for r in readers), sum(len(r.rows) for r in readers))
    if have != (counts.get("frames"), counts.get("rows")):
        raise CaptureInvalid(
            f"{root} holds {have[0]} frames and {have[1]} rows",
            f"{counts.get('frames')} frames and {counts.get('rows')} rows, as counted in the manifest",
        )


def lanes(meta: SiteMeta, bits: NDArray[Any]) -> tuple[tuple[int, int], ...]:
    """Where the pieces of a shard lie, for :func:`zkl_debug.digest.wrong_rows`; ``bits`` tell the element size."""
    return () if meta.shard is None else meta.shard.lanes(bits.dtype.itemsize)


@dataclass(frozen=True)
class BadRow:
    """A payload row whose bytes do not have the digest recorded for it; ``row`` is a capture row."""

    site: str
    row: int
    site_row: int


def verify_payload(cap: Capture, names: Iterable[str] | None = None) -> list[BadRow]:
    """Recompute the digest of every payload row.

    Args:
        cap: an open capture.
        names: sites to check; default all that have a payload.

    Returns:
        The rows that fail, empty when every byte is as it was digested.
    """
    bad: list[BadRow] = []
    for name in cap.sites if names is None else names:
        site = cap.sites[name]
        digest = site.digest
        for rows, block in site.payload_blocks():
            wrong = wrong_rows(block, digest[rows], lanes(site.meta, block))
            bad += [BadRow(name, int(site.rows[k]), int(k)) for k in rows[wrong]]
    return bad
