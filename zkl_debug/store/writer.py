"""Writing a capture folder from a thread of its own."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.errors import UsageError
from zkl_debug.schema import FRAME_DTYPE, ROW_DTYPE, EventRecord, Json, SiteBlock, SiteMeta, StateRecord
from zkl_debug.store.layout import (
    MANIFEST,
    PAYLOAD_DTYPES,
    StoreError,
    list_segment_files,
    part_path,
    segment_path,
    site_to_json,
    variant_name,
)
from zkl_debug.store.manifest import SegmentEntry, build_manifest, write_json
from zkl_debug.store.pipeline import Pipeline
from zkl_debug.store.segment import Block, SegmentWriter
from zkl_debug.store.wal import LoggedBlock, Record, WalWriter, header_json


@dataclass
class _Known:
    """A site of the capture: ``payload`` is (dtype text, width) once a block had one."""

    index: int
    meta: SiteMeta
    payload: tuple[str, int] | None = None


@dataclass
class _Registry:
    """Files blocks under sites: the same name with another layout becomes another site."""

    sites: list[_Known] = field(default_factory=list)
    by_name: dict[str, list[_Known]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def file(self, block: SiteBlock) -> _Known:
        spec = None if block.payload is None else (block.payload.dtype.str, int(block.payload.shape[1]))
        variants = self.by_name.setdefault(block.meta.name, [])
        for known in variants:
            same = known.meta.torch_dtype == block.meta.torch_dtype and known.meta.row_shape == block.meta.row_shape
            if same and (spec is None or known.payload is None or known.payload == spec):
                known.payload = known.payload or spec
                return known
        meta = block.meta
        if variants:
            meta = replace(meta, name=variant_name(meta.name, len(variants) + 1))
            self.notes.append(
                f"site {block.meta.name} changed layout: "
                f"{meta.torch_dtype} {list(meta.row_shape)} is filed as {meta.name}"
            )
        known = _Known(len(self.sites), meta, spec)
        self.sites.append(known)
        variants.append(known)
        return known


class CaptureWriter:
    """Writes one rank's part of a capture folder.

    Everything handed over is written by a background thread; the writer keeps references to the arrays until they are
    on file, so the caller must not change them afterwards. A frame is recoverable once :meth:`flush` has returned,
    whatever happens to the process.

    Args:
        root: capture folder; made if missing.
        side: label of the observed system.
        rank, world: of the process in its job.
        meta: versions, resolved config, environment ...; anything JSON can hold.
        budget_bytes: hard cap on payload bytes. The first block that does not fit ends payload taking; digests go on.
        segment_bytes: a new segment is started once one has this many bytes.
        queue_bytes: bytes waiting for the thread beyond which a call waits.

    Raises:
        UsageError: when the folder already holds a capture or other files.
    """

    def __init__(
        self,
        root: Path,
        *,
        side: str,
        rank: int = 0,
        world: int = 1,
        meta: Mapping[str, Json],
        budget_bytes: int | None = None,
        segment_bytes: int = 4 << 30,
        queue_bytes: int = 256 << 20,
    ) -> None:
        self.root = Path(root)
        if not 0 <= rank < world:
            raise UsageError(f"rank {rank} of a world of {world}", "0 <= rank < world")
        _refuse_used(self.root, rank, world)
        self._released = False
        self._side, self._rank, self._world = side, rank, world
        self._meta = dict(meta)
        self._budget = budget_bytes
        self._payload_bytes = 0
        self._payload_over = False
        self._segment_bytes = segment_bytes
        self._registry = _Registry()
        self._entries: list[SegmentEntry] = []
        self._segment: SegmentWriter
        self._wal: WalWriter
        self._logged: dict[int, Any] = {}
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pipeline = Pipeline(queue_bytes)
        try:
            self._open_segment()
        except BaseException:
            self._pipeline.cancel()
            raise

    # What the observed program calls.

    def write_frame(self, frame: np.void | NDArray[Any], rows: NDArray[Any], sites: Sequence[SiteBlock]) -> None:
        """Queue one frame.

        Args:
            frame: one record of FRAME_DTYPE; ``n_rows`` is set here.
            rows: ROW_DTYPE, [n]; ``frame`` is set here.
            sites: blocks of this frame; the same site may come more than once.

        Raises:
            StoreError: when the thread has failed, or a block does not have the documented shapes.
        """
        record = np.zeros(1, FRAME_DTYPE)
        record[0] = np.asarray(frame, FRAME_DTYPE).reshape(())[()]
        record["n_rows"] = len(rows)
        table = np.array(rows, ROW_DTYPE)
        table["frame"] = record["frame"][0]
        for block in sites:
            _check_block(block, len(table))
        with self._lock:
            self._check()
            blocks = [self._file_block(block) for block in sites]
            nbytes = table.nbytes + sum(block.nbytes for block in blocks)
            self._submit(lambda: self._do_frame(record, table, blocks, nbytes), nbytes)

    def write_state(self, event_seq: int, records: Sequence[StateRecord]) -> None:
        """Queue state records that belong to an event; more records for the same event are added to it."""
        kept = list(records)
        with self._lock:
            self._check()
            self._submit(lambda: self._do_state(event_seq, kept))

    def write_event(self, event: EventRecord) -> None:
        """Queue an event."""
        with self._lock:
            self._check()
            self._submit(lambda: self._do_event(event))

    def flush(self) -> None:
        """Wait until everything queued so far is recoverable.

        Raises:
            StoreError: when the thread has failed.
        """
        self._check()
        self._guard(self._pipeline.drain)

    def close(self, *, manifest: Mapping[str, Json], reason: str = "") -> Path:
        """Finish the capture and write the manifest (the rank's part of it in a world of several).

        Args:
            manifest: further fields for the manifest. ``notes`` are added to the writer's own; counts, segments and
                coverage are computed here and cannot be replaced.
            reason: why the capture is incomplete though it was closed; empty for a complete one.

        Returns:
            Path of the file written last.

        Raises:
            StoreError: when the thread has failed; what was flushed can be repaired.
        """
        with self._lock:
            self._check()
            self._closed = True
            self._submit(self._close_segment)
            self._guard(self._pipeline.finish)
        notes = list(self._registry.notes)
        if self._payload_over:
            notes.append(f"payload budget of {self._budget} bytes reached: later payload was not taken, digests were")
        document = build_manifest(
            side=self._side,
            world=self._world,
            meta=self._meta,
            segments=self._entries,
            notes=notes,
            extra=manifest,
            reason=reason,
            repaired=False,
        )
        path = self.root / MANIFEST if self._world == 1 else part_path(self.root, self._rank)
        try:
            write_json(path, document)
        except OSError as error:
            raise self._explain(error) from error
        return path

    def abort(self, reason: str) -> None:
        """Stop at once without finishing: what has reached the log stays repairable. Never raises."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._pipeline.cancel()
        try:
            self._wal.json(Record.ABORT, reason)
            self._wal.close()
            self._segment.abandon()
        except Exception:
            return

    # Checks and filing, in the caller's thread.

    def _check(self) -> None:
        if self._pipeline.failure is not None:
            self._release()
            raise self._explain(self._pipeline.failure) from self._pipeline.failure
        if self._closed:
            raise StoreError("the capture is closed", "an open writer")
        if self._pid != os.getpid():
            raise StoreError("a forked child called its parent's writer", "a writer of its own, in another folder")

    def _release(self) -> None:
        """Let go of the files after a failure: what has reached the log is there to be repaired."""
        if self._released:
            return
        self._released = True
        self._segment.abandon()
        with contextlib.suppress(Exception):
            self._wal.close()

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if self._pipeline.failure is not None:
                self._release()
            raise self._explain(error) from error

    def _submit(self, task: Callable[[], None], nbytes: int = 0) -> None:
        self._guard(lambda: self._pipeline.submit(task, nbytes))

    def _explain(self, error: BaseException) -> StoreError:
        return StoreError(
            f"writing {self.root} failed: {error}",
            next_step=f"free space or fix the cause, then recover what was flushed with: zkl-debug repair {self.root}",
        )

    def _file_block(self, block: SiteBlock) -> Block:
        payload, dropped = block.payload, 0
        if payload is not None:
            over = self._budget is not None and self._payload_bytes + payload.nbytes > self._budget
            if self._payload_over or over:
                self._payload_over, payload, dropped = True, None, len(block.row)
            else:
                self._payload_bytes += payload.nbytes
        known = self._registry.file(block if payload is block.payload else replace(block, payload=None))
        row = np.ascontiguousarray(block.row, "<u4")
        digest = np.ascontiguousarray(block.digest, "<u8")
        return Block(known.index, known.meta, row, digest, payload, dropped)

    # The first thread of the pipeline; what writes to the log goes on to the second, behind the bytes it speaks of.

    def _open_segment(self) -> None:
        number = len(self._entries)
        header = header_json(self._side, self._rank, self._world, number, self._meta)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._wal = WalWriter(segment_path(self.root, self._rank, number, "wal"))
            self._wal.json(Record.HEADER, header)
            self._segment = SegmentWriter(
                segment_path(self.root, self._rank, number, "h5.partial"), header, self._pipeline
            )
        except OSError as error:
            raise self._explain(error) from error
        self._logged = {}

    def _close_segment(self) -> None:
        number = len(self._entries)
        summary = self._segment.close()
        path = segment_path(self.root, self._rank, number)
        self._segment.path.rename(path)
        self._wal.close()
        segment_path(self.root, self._rank, number, "wal").unlink()
        self._entries.append(SegmentEntry(self._rank, number, path, summary))

    def _rotate(self) -> None:
        if self._segment.nbytes >= self._segment_bytes:
            self._close_segment()
            self._open_segment()

    def _do_frame(self, frame: NDArray[Any], rows: NDArray[Any], blocks: Sequence[Block], nbytes: int) -> None:
        self._rotate()
        extents = self._segment.add_frame(frame, rows, blocks)
        logged = []
        for block, where in zip(blocks, extents, strict=True):
            self._log_site(block)
            payload = block.payload
            inline: Any = b"" if payload is None or where else payload
            logged.append(
                LoggedBlock(block.index, block.row, block.digest, block.dropped, payload is not None, inline, where)
            )
        wal = self._wal
        self._pipeline.then(lambda: wal.frame(frame, rows, logged), nbytes)

    def _log_site(self, block: Block) -> None:
        """Describe a site in the log before its first use, and again when its payload's layout becomes known."""
        spec = None if block.payload is None else [block.payload.dtype.str, int(block.payload.shape[1])]
        if block.index in self._logged and (spec is None or self._logged[block.index]):
            return
        self._logged[block.index] = spec
        self._log(Record.SITE, {"index": block.index, "site": site_to_json(block.meta), "payload": spec})

    def _log(self, kind: Record, value: Json) -> None:
        wal = self._wal
        self._pipeline.then(lambda: wal.json(kind, value))

    def _do_state(self, event_seq: int, records: Sequence[StateRecord]) -> None:
        self._segment.add_state(event_seq, records)
        self._log(Record.STATE, {"event_seq": event_seq, "records": [state_to_json(r) for r in records]})

    def _do_event(self, event: EventRecord) -> None:
        self._segment.add_event(event)
        self._log(Record.EVENT, event_to_json(event))


def state_to_json(record: StateRecord) -> dict[str, Json]:
    """A state record as JSON."""
    return {**vars(record), "detail": dict(record.detail)}


def event_to_json(event: EventRecord) -> dict[str, Json]:
    """An event as JSON."""
    return {**vars(event), "detail": dict(event.detail)}


def _check_block(block: SiteBlock, n_rows: int) -> None:
    row, digest, payload = block.row, block.digest, block.payload
    name = block.meta.name
    if row.ndim != 1 or (len(row) and int(row.max()) >= n_rows):
        raise StoreError(f"site {name}: rows {row.shape} point outside the frame", f"indices below {n_rows}")
    if digest.shape != (len(row), 2) or digest.dtype != np.uint64:
        raise StoreError(f"site {name}: digests are {digest.dtype} {digest.shape}", f"uint64 ({len(row)}, 2)")
    if payload is None:
        return
    if payload.ndim != 2 or len(payload) != len(row) or payload.dtype not in PAYLOAD_DTYPES:
        raise StoreError(
            f"site {name}: payload is {payload.dtype} {payload.shape}", f"raw bits, unsigned, ({len(row)}, W)"
        )


def _refuse_used(root: Path, rank: int, world: int) -> None:
    if not root.exists():
        return
    if not root.is_dir():
        raise UsageError(f"{root} is a file", "a folder for the capture", "choose another --out")
    own = [f.path.name for f in list_segment_files(root) if f.rank == rank]
    if world == 1:
        own = sorted(path.name for path in root.iterdir())
    elif (root / MANIFEST).exists() or part_path(root, rank).exists():
        own.append(MANIFEST)
    if own:
        raise UsageError(
            f"{root} is not empty: it holds {', '.join(own[:3])}{' ...' if len(own) > 3 else ''}",
            "a new or empty folder, so that no earlier capture is overwritten",
            "choose another --out, or remove the folder",
        )
