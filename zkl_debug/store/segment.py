"""Writing one HDF5 segment: the tables of frames and rows, and for every site its columns."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5g
from numpy.typing import NDArray

from zkl_debug.schema import (
    EVENT_DTYPE,
    FORMAT,
    FORMAT_VERSION,
    FRAME_DTYPE,
    ROW_DTYPE,
    U64,
    EventRecord,
    Json,
    SiteMeta,
    StateRecord,
)
from zkl_debug.store.column import PAGE_BYTES, Column, Direct, Extents, Output, Target, put_array, put_attr, put_json
from zkl_debug.store.layout import CHUNK_BYTES, INDEX_CHUNK_BYTES, encode_json, kept_check, segment_check, site_to_json
from zkl_debug.store.table import encode_metas, metas_check, table_bytes, tabulate


@dataclass
class Site:
    """A site within a segment: its columns and counts. ``index`` is its number in the capture."""

    index: int
    meta: SiteMeta
    group: Any
    row: Column
    digest: Column
    payload: Column | None = None
    payload_row: list[NDArray[np.uint32]] | None = None  # set once the payload is not that of the first rows
    dropped: int = 0


@dataclass(frozen=True)
class Block:
    """One site's part of a frame, checked and filed under a site index; see :class:`zkl_debug.schema.SiteBlock`."""

    index: int
    meta: SiteMeta
    row: NDArray[np.uint32]
    digest: U64
    payload: NDArray[Any] | None
    dropped: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the segment."""
        return self.row.nbytes + self.digest.nbytes + (0 if self.payload is None else self.payload.nbytes)


@dataclass(frozen=True)
class Summary:
    """What a closed segment holds; ``sites`` is its site index as stored, ``table`` the check value of its table."""

    frames: int
    rows: int
    events: int
    states: int
    check: str
    sites: list[dict[str, Json]]
    table: str


class SegmentWriter:
    """One open HDF5 segment.

    Args:
        path: file to create; must not exist.
        header: root attributes: side, rank, world, segment, meta.
        output: what writes the bytes; default at once, in the calling thread.
    """

    def __init__(self, path: Path, header: Mapping[str, Json], output: Output | None = None) -> None:
        self.path = path
        self._file = h5py.File(
            path, "x", libver="earliest", alignment_threshold=INDEX_CHUNK_BYTES // 2, alignment_interval=PAGE_BYTES
        )
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._target = Target(self._file, self._fd, output or Direct())
        root = self._file.id
        put_attr(root, "format", FORMAT)
        put_attr(root, "version", FORMAT_VERSION)
        put_attr(root, "side", str(header["side"]))
        for key in ("rank", "world", "segment"):
            put_attr(root, key, int(header[key]))
        put_json(self._target, root, "meta", header["meta"])
        self._sites_group = h5g.create(root, b"sites")
        self._frames = Column(self._target, root, "frames", FRAME_DTYPE, ())
        self._rows = Column(self._target, root, "rows", ROW_DTYPE, ())
        self._sites: dict[int, Site] = {}
        self._events: list[EventRecord] = []
        self._states: dict[int, list[StateRecord]] = {}
        self.nbytes = 0
        self.header = dict(header)

    @property
    def frames(self) -> int:
        """Frames so far."""
        return self._frames.rows

    def has_site(self, index: int) -> bool:
        """Whether the site already has data in this segment."""
        return index in self._sites

    def add_frame(self, frame: NDArray[Any], rows: NDArray[Any], blocks: Sequence[Block]) -> list[Extents]:
        """Add a frame; returns for every block where its payload went, empty for payload that is only buffered."""
        base = self._rows.rows
        extents = [self._add_block(block, base) for block in blocks]
        self._rows.append(rows)
        self._frames.append(frame)
        self.nbytes += rows.nbytes + frame.nbytes
        return extents

    def _site(self, block: Block) -> Site:
        site = self._sites.get(block.index)
        if site is None:
            group = h5g.create(self._sites_group, f"{block.index:05d}".encode())
            row = Column(self._target, group, "row", np.dtype("<u4"), ())
            digest = Column(self._target, group, "digest", np.dtype("<u8"), (2,))
            site = self._sites[block.index] = Site(block.index, block.meta, group, row, digest)
        return site

    def _add_block(self, block: Block, base: int) -> Extents:
        site = self._site(block)
        first = site.row.rows
        site.row.append(block.row + np.uint32(base))
        site.digest.append(block.digest)
        site.dropped += block.dropped
        self.nbytes += block.nbytes
        if block.payload is None:
            return ()
        if site.payload is None:
            width = (block.payload.shape[1],)
            site.payload = Column(
                self._target,
                site.group,
                "payload",
                block.payload.dtype,
                width,
                chunk_bytes=CHUNK_BYTES,
                write_through=True,
            )
        have = site.payload.rows
        if site.payload_row is None and have != first:
            site.payload_row = [np.arange(have, dtype=np.uint32)]
        if site.payload_row is not None:
            site.payload_row.append(np.arange(first, first + len(block.row), dtype=np.uint32))
        return site.payload.append(block.payload)

    def add_event(self, event: EventRecord) -> None:
        """Add an event."""
        self._events.append(event)

    def add_state(self, event_seq: int, records: Sequence[StateRecord]) -> None:
        """Add records to the state snapshot of an event."""
        self._states.setdefault(event_seq, []).extend(records)

    def close(self) -> Summary:
        """Write everything that is left and close the file; returns what the manifest says of it."""
        root = self._file.id
        self._frames.finish()
        self._rows.finish()
        index = [self._close_site(site) for site in sorted(self._sites.values(), key=lambda s: s.index)]
        self._close_events(root)
        self._close_states(root)
        checks = {"frames": self._frames.check(), "rows": self._rows.check()}
        put_json(self._target, root, "index", index)
        check = segment_check(encode_json(index), **checks)
        table = self._close_table(root, index, check, checks)
        kept = kept_check(encode_json(self.header["meta"]), self._events, self._states)
        put_json(self._target, root, "check", {**checks, "kept": kept, "table": table})
        self._target.output.settle()
        self._file.close()
        os.close(self._fd)
        return Summary(
            frames=self._frames.rows,
            rows=self._rows.rows,
            events=len(self._events),
            states=sum(len(records) for records in self._states.values()),
            check=check,
            sites=index,
            table=table,
        )

    def _close_table(
        self, root: Any, index: Sequence[Mapping[str, Json]], check: str, checks: Mapping[str, str]
    ) -> str:
        """Write the site index once more in the form that is quick to read; returns its check value."""
        (table, places), metas = tabulate(index), encode_metas(index)
        put_array(self._target, root, "site_table", table)
        put_array(self._target, root, "site_places", places)
        put_array(self._target, root, "site_metas", np.frombuffer(metas, np.uint8))
        return segment_check(table_bytes(table, places, metas_check(metas), check), **checks)

    def _close_site(self, site: Site) -> dict[str, Json]:
        site.row.finish()
        site.digest.finish()
        info = site_to_json(site.meta)
        for key, value in info.items():
            put_attr(site.group, key, encode_json(value).decode() if isinstance(value, dict) else value)
        entry: dict[str, Json] = {
            "index": site.index,
            "site": info,
            "rows": site.row.rows,
            "dropped": site.dropped,
            "check_row": site.row.check(),
            "check_digest": site.digest.check(),
            "at": {"row": site.row.place(), "digest": site.digest.place()},
        }
        if site.payload is not None:
            site.payload.finish()
            entry |= {
                "payload_rows": site.payload.rows,
                "payload_dtype": site.payload.dtype.str,
                "payload_width": site.payload.row_shape[0],
            }
            if site.payload_row is not None:
                put_array(self._target, site.group, "payload_row", np.concatenate(site.payload_row))
                entry["payload_sparse"] = True
        return entry

    def _close_events(self, root: Any) -> None:
        table = np.zeros(len(self._events), EVENT_DTYPE)
        for i, event in enumerate(self._events):
            table[i] = (event.event_seq, event.step, event.weight_version, event.frame)
        put_array(self._target, root, "events", table)
        put_json(
            self._target, root, "events_detail", [{"name": e.name, "detail": dict(e.detail)} for e in self._events]
        )

    def _close_states(self, root: Any) -> None:
        group = h5g.create(root, b"state")
        for seq, records in self._states.items():
            sub = h5g.create(group, str(seq).encode())
            put_array(self._target, sub, "digest", np.array([r.digest for r in records], "<u8").reshape(-1, 2))
            put_array(self._target, sub, "data_ptr", np.array([r.data_ptr for r in records], "<u8"))
            put_json(
                self._target,
                sub,
                "records",
                [
                    {
                        "name": r.name,
                        "kind": r.kind,
                        "torch_dtype": r.torch_dtype,
                        "shape": list(r.shape),
                        "detail": dict(r.detail),
                    }
                    for r in records
                ],
            )

    def abandon(self) -> None:
        """Let go of the file; it is not a valid segment, the log has what is needed to rebuild it. Never raises.

        HDF5 would still write its metadata when it closes the file, and crash at the end of the process where the disk
        is full. Nobody reads that metadata, so it goes to memory instead.
        """
        with contextlib.suppress(Exception):
            _divert(int(self._file.id.get_vfd_handle()))
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _divert(descriptor: int) -> None:
    """Put an empty file without a name in the place of an open one."""
    if hasattr(os, "memfd_create"):
        sink = os.memfd_create("zkl")
        os.dup2(sink, descriptor)
        os.close(sink)
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), descriptor)
