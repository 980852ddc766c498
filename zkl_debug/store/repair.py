"""Recovering a capture whose process was killed.

A segment that was still open is rebuilt from its log: the HDF5 metadata of the open file is never read, only payload
bytes at the offsets the log names, and only payload that has the digest in the log is taken.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.digest import wrong_rows
from zkl_debug.errors import CaptureInvalid, Refused
from zkl_debug.schema import EventRecord, Json, SiteMeta, StateRecord
from zkl_debug.store.layout import (
    MANIFEST,
    SegmentFile,
    list_segment_files,
    part_path,
    payload_dtype,
    segment_path,
    site_from_json,
)
from zkl_debug.store.manifest import SegmentEntry, build_manifest, merge_parts, read_json, write_json
from zkl_debug.store.reader import Capture, lanes, open_capture, verify_payload
from zkl_debug.store.rest import NOTE, rest_path, rested
from zkl_debug.store.segment import Block, SegmentWriter
from zkl_debug.store.segment_reader import SegmentReader
from zkl_debug.store.wal import LoggedBlock, LoggedFrame, Record, WalReader, header_json, is_being_written


@dataclass(frozen=True)
class DroppedFrame:
    """A frame of a log that could not be verified and was left out."""

    rank: int
    segment: int
    frame: int
    reason: str


@dataclass(frozen=True)
class RepairReport:
    """What a repair found and did.

    Attributes:
        root: the capture folder.
        already_complete: nothing had to be done.
        frames, rows, payload_rows: in the repaired capture.
        recovered_frames: frames that came from logs; the others were in segments that had been closed.
        dropped: frames left out, with the reason.
        notes: what else was found, e.g. a log that ends in the middle of a record.
    """

    root: Path
    already_complete: bool
    frames: int
    rows: int
    payload_rows: int
    recovered_frames: int = 0
    dropped: list[DroppedFrame] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Json]:
        """The report as a JSON object."""
        return {
            **vars(self),
            "root": str(self.root),
            "dropped": [vars(frame) for frame in self.dropped],
        }


@dataclass
class _Work:
    """State of a repair: closed segments so far, and the side, world and metadata found in them."""

    root: Path
    header: dict[str, Json] | None = None
    metas: dict[int, dict[str, Json]] = field(default_factory=dict)
    entries: list[SegmentEntry] = field(default_factory=list)
    recovered: int = 0
    dropped: list[DroppedFrame] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    leftovers: list[Path] = field(default_factory=list)

    def agree(self, header: dict[str, Json], rank: int, path: Path) -> None:
        """Take side, world and metadata from the first file and hold the others against it."""
        self.metas.setdefault(rank, header["meta"])
        if self.header is None:
            self.header = header
        elif any(self.header[key] != header[key] for key in ("side", "world")):
            raise CaptureInvalid(f"{path} belongs to another capture", f"side {self.header['side']!r}")


def repair(path: Path) -> RepairReport:
    """Recover every flushed frame of a capture that was not closed, and write its manifest.

    The manifest says ``"complete": false``, ``"repaired": true`` and the reason; a capture whose process rested
    (:mod:`zkl_debug.store.rest`) is complete. Calling it again, or on a complete capture, changes nothing.

    Args:
        path: the capture folder.

    Raises:
        CaptureInvalid: when there is nothing of a capture in the folder, or nothing that can be read.
        Refused: when the process that writes the capture is still alive.
    """
    root = Path(path)
    if not root.is_dir():
        raise CaptureInvalid(f"{root} is not a folder", "a capture folder")
    if (root / MANIFEST).exists():
        return _already_done(root)
    files = list_segment_files(root)
    if not files:
        raise CaptureInvalid(f"{root} holds no capture", "a folder with rank*.seg* files", "pass the capture folder")
    for file in files:
        if file.path.is_symlink():
            raise CaptureInvalid(f"{file.path} is a symbolic link", "a file inside the capture folder")
        if file.kind == "wal" and is_being_written(file.path):
            raise Refused(
                f"{file.path} is still being written", "a capture whose process has ended", "wait for it, or stop it"
            )
    work = _Work(root)
    segments = sorted({(file.rank, file.segment) for file in files})
    for rank, segment in segments:
        own = {file.kind: file for file in files if (file.rank, file.segment) == (rank, segment)}
        _repair_segment(work, rank, segment, own)
    if work.header is None or not work.entries:
        raise CaptureInvalid(
            f"nothing in {root} can be recovered: {'; '.join(work.notes) or 'its files are empty'}",
            "at least the first record of a log, or one closed segment",
        )
    return _finish(work)


def _already_done(root: Path) -> RepairReport:
    with open_capture(root, partial=True) as capture:
        counts = capture.manifest["counts"]
        _check_closed(capture)
        if capture.manifest.get("repaired"):
            for file in list_segment_files(root):  # left by a repair that was killed after its manifest
                if file.kind != "h5":
                    file.path.unlink()
        return RepairReport(root, True, len(capture.frames), len(capture.rows), int(counts.get("payload_rows", 0)))


def _check_closed(capture: Capture) -> None:
    """Refuse a closed capture that is damaged: its log is gone, so this is no way to mend it."""
    try:
        for site in capture.sites.values():
            _ = site.rows, site.digest
        bad = verify_payload(capture)
        if bad:
            count = sum(row.site == bad[0].site for row in bad)
            raise CaptureInvalid(f"{capture.root}: {count} payload rows of {bad[0].site} are not what was written")
    except CaptureInvalid as error:
        raise CaptureInvalid(
            error.found, "the bytes that were written", "capture again: a closed segment has no log any more"
        ) from None


def _repair_segment(work: _Work, rank: int, segment: int, files: dict[str, SegmentFile]) -> None:
    for kind in ("h5.partial", "wal"):
        if kind in files:
            work.leftovers.append(files[kind].path)
    if "h5" in files:  # it was renamed after it had been closed
        _keep_closed(work, rank, segment, files["h5"].path)
    elif "wal" in files:
        _rebuild(work, rank, segment, files["wal"].path)
    else:
        work.notes.append(f"{files['h5.partial'].path.name} has no log: its frames cannot be verified and are left out")


def _keep_closed(work: _Work, rank: int, segment: int, path: Path) -> None:
    try:
        reader = SegmentReader(path)
    except CaptureInvalid as error:
        work.notes.append(f"{path.name} is left out: {error.found}")
        work.reasons.append(f"segment {segment} of rank {rank} is damaged")
        return
    with contextlib.closing(reader):
        work.agree({"side": reader.side, "world": reader.world, "meta": reader.meta}, rank, path)
        work.entries.append(SegmentEntry(rank, segment, path, reader.summary))


@dataclass
class _LoggedSite:
    meta: SiteMeta
    dtype: np.dtype[Any] | None = None
    width: int = 0


class _Rebuilder:
    """Replays one log into a new segment file."""

    def __init__(self, work: _Work, rank: int, segment: int, out: Path) -> None:
        self._work, self._rank, self._segment, self._out = work, rank, segment, out
        self._sites: dict[int, _LoggedSite] = {}
        self._fd = -1
        self.writer: SegmentWriter | None = None
        self.aborted = ""

    def run(self, wal: Path, partial: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._out.unlink()
        with contextlib.suppress(FileNotFoundError):
            self._fd = os.open(partial, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        reader = WalReader(wal)
        try:
            for kind, value in reader.records():
                if not self._replay(kind, value, wal):
                    break
        finally:
            if self._fd >= 0:
                os.close(self._fd)
        if reader.stopped:
            self._work.notes.append(f"{wal.name}: {reader.stopped}; everything before it was read")

    def _replay(self, kind: Record, value: Any, wal: Path) -> bool:
        """Apply one record; False to stop, when the log makes no sense from here on."""
        try:
            if kind == Record.HEADER:
                self._header(value, wal)
            elif self.writer is None:
                raise ValueError("it does not begin with a header")
            elif kind == Record.SITE:
                self._site(value)
            elif kind == Record.FRAME:
                self._frame(value)
            elif kind == Record.STATE:
                records = [_state(r) for r in value["records"]]
                self.writer.add_state(int(value["event_seq"]), records)
            elif kind == Record.EVENT:
                self.writer.add_event(EventRecord(**value))
            elif kind == Record.ABORT:
                self.aborted = str(value)
        except (ValueError, KeyError, TypeError) as error:
            self._work.notes.append(f"{wal.name}: {error}; the log is not used from there on")
            return False
        return True

    def _header(self, value: Any, wal: Path) -> None:
        if (value["rank"], value["segment"]) != (self._rank, self._segment):
            raise ValueError(f"it is the log of rank {value['rank']}, segment {value['segment']}")
        side, world, meta = str(value["side"]), int(value["world"]), dict(value["meta"])
        self._work.agree({"side": side, "world": world, "meta": meta}, self._rank, wal)
        self.writer = SegmentWriter(self._out, header_json(side, self._rank, world, self._segment, meta))

    def _site(self, value: Any) -> None:
        site = _LoggedSite(site_from_json(value["site"]))
        if value["payload"] is not None:
            site.dtype, site.width = payload_dtype(value["payload"][0]), int(value["payload"][1])
            if site.width < 0:
                raise ValueError(f"the payload width of site {site.meta.name} is negative")
        self._sites[int(value["index"])] = site

    def _frame(self, logged: LoggedFrame) -> None:
        assert self.writer is not None
        number = int(logged.frame["frame"][0])
        try:
            blocks = [self._block(block) for block in logged.blocks]
        except _UnverifiedError as error:
            self._work.dropped.append(DroppedFrame(self._rank, self._segment, number, str(error)))
            return
        self.writer.add_frame(logged.frame, logged.rows, blocks)
        self._work.recovered += 1

    def _block(self, logged: LoggedBlock) -> Block:
        site = self._sites.get(logged.site)
        if site is None:
            raise _UnverifiedError(f"site {logged.site} was never described")
        payload = self._payload(logged, site) if logged.has_payload else None
        return Block(logged.site, site.meta, logged.row, logged.digest, payload, logged.dropped)

    def _payload(self, logged: LoggedBlock, site: _LoggedSite) -> NDArray[Any]:
        name = site.meta.name
        if site.dtype is None:
            raise _UnverifiedError(f"the payload layout of site {name} is not known")
        expected = len(logged.row) * site.width * site.dtype.itemsize
        have = sum(nbytes for _, nbytes in logged.extents) if logged.extents else len(logged.inline)
        if have != expected:
            raise _UnverifiedError(f"the payload of site {name} has {have} bytes, not {expected}")
        raw = b"".join(self._read(o, n, name) for o, n in logged.extents) if logged.extents else logged.inline
        payload = np.frombuffer(raw, site.dtype).reshape(len(logged.row), site.width)
        if wrong_rows(payload, logged.digest, lanes(site.meta, payload)).any():
            raise _UnverifiedError(f"the payload of site {name} does not have its digest")
        return payload

    def _read(self, offset: int, nbytes: int, name: str) -> bytes:
        if self._fd < 0 or offset + nbytes > os.fstat(self._fd).st_size:
            raise _UnverifiedError(f"the payload of site {name} is not in the file")
        data = os.pread(self._fd, nbytes, offset)
        while len(data) < nbytes:
            more = os.pread(self._fd, nbytes - len(data), offset + len(data))
            if not more:
                raise _UnverifiedError(f"the payload of site {name} is not in the file")
            data += more
        return data


class _UnverifiedError(Exception):
    """A frame cannot be trusted."""


def _state(value: Any) -> StateRecord:
    return StateRecord(**{**value, "shape": tuple(value["shape"]), "digest": tuple(value["digest"])})


def _rebuild(work: _Work, rank: int, segment: int, wal: Path) -> None:
    out = work.root / f".rank{rank:05d}.seg{segment:03d}.h5.repair"
    rebuilder = _Rebuilder(work, rank, segment, out)
    try:
        rebuilder.run(wal, segment_path(work.root, rank, segment, "h5.partial"))
        if rebuilder.writer is None:
            work.notes.append(f"{wal.name} has no header: nothing of segment {segment} of rank {rank} can be recovered")
            return
        summary = rebuilder.writer.close()
        rebuilder.writer = None
    finally:
        if rebuilder.writer is not None:
            rebuilder.writer.abandon()
            out.unlink()
    path = segment_path(work.root, rank, segment)
    out.replace(path)
    work.entries.append(SegmentEntry(rank, segment, path, summary))
    why = f"stopped by the program: {rebuilder.aborted}" if rebuilder.aborted else "the process ended before closing it"
    work.reasons.append(f"rank {rank}: {why}")


def _finish(work: _Work) -> RepairReport:
    assert work.header is not None
    world = int(work.header["world"])
    ranks = {entry.rank for entry in work.entries}
    missing = sorted(set(range(min(world, 1 << 20))) - ranks)
    if missing:
        work.reasons.append(f"nothing of rank {', '.join(map(str, missing[:8]))}")
    parts = [_rank_part(work, rank, world) for rank in sorted(ranks)]
    manifest = merge_parts(parts)
    manifest |= {
        "complete": False,
        "repaired": True,
        "reason": "; ".join(work.reasons) or "it was not closed",
        "dropped_frames": [vars(frame) for frame in work.dropped],
    }
    facts = None if missing else rested(work.root, manifest)
    if facts is not None:
        manifest = {**facts, **manifest, "complete": True, "notes": [*manifest["notes"], NOTE]}
        manifest.pop("reason")
    write_json(work.root / MANIFEST, manifest)
    for path in [
        *work.leftovers,
        *(rest_path(work.root, rank) for rank in range(world) if rank in ranks),
        *(part_path(work.root, rank) for rank in range(world) if rank in ranks),
    ]:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    counts = manifest["counts"]
    return RepairReport(
        work.root,
        False,
        counts["frames"],
        counts["rows"],
        counts["payload_rows"],
        work.recovered,
        work.dropped,
        manifest["notes"],
    )


def _rank_part(work: _Work, rank: int, world: int) -> dict[str, Json]:
    """One rank's part: what the rank wrote itself when it closed, else built from its segments."""
    assert work.header is not None
    path = part_path(work.root, rank)
    own = [entry for entry in work.entries if entry.rank == rank]
    extra: dict[str, Json] = {}
    if path.exists():
        with contextlib.suppress(CaptureInvalid):
            document = read_json(path)
            extra = document if isinstance(document, dict) else {}
    notes = work.notes if rank == min(entry.rank for entry in work.entries) else []
    return build_manifest(
        side=work.header["side"],
        world=world,
        meta=work.metas[rank] if rank in work.metas else work.header["meta"],
        segments=own,
        notes=notes,
        extra=extra,
        reason="repaired",
    )
