"""The log beside an open segment: what makes a killed capture repairable.

HDF5 metadata of a file that was never closed cannot be trusted. The log can: every record carries its length and a
CRC-32, is appended with plain writes after the bytes it speaks of are in the segment file, and a reader stops at the
first record that is not whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.schema import FRAME_DTYPE, ROW_DTYPE, U64, Json
from zkl_debug.store.layout import encode_json

_MAGIC = b"ZKLW"
_HEAD = struct.Struct("<4sIQI")  # magic, kind, length of the body, CRC-32 of kind + length + body
_COUNTS = struct.Struct("<II")
_IOV_MAX = 512
_ENTRY = np.dtype(
    [
        ("site", "<u4"),
        ("rows", "<u4"),
        ("dropped", "<u4"),
        ("has_payload", "<u4"),
        ("extents", "<u4"),
        ("inline", "<u8"),
    ]
)
_EXTENT = np.dtype([("offset", "<u8"), ("nbytes", "<u8")])


class Record(IntEnum):
    """Kinds of record."""

    HEADER = 1  # JSON: side, rank, world, segment, meta
    SITE = 2  # JSON: index, site, payload dtype and width once known
    FRAME = 3
    STATE = 4  # JSON
    EVENT = 5  # JSON
    NOTE = 6  # JSON text
    ABORT = 7  # JSON text


@dataclass(frozen=True)
class LoggedBlock:
    """One site's part of a logged frame.

    Attributes:
        site: index of the site.
        row: indices into the frame's rows, [n] uint32.
        digest: [n, 2] uint64.
        dropped: rows whose payload was not taken because of the byte budget.
        has_payload: whether the frame has payload for this site.
        inline: payload bytes kept in the log.
        extents: (byte offset, bytes) of payload in the segment file, in row order; empty when ``inline`` holds it.
    """

    site: int
    row: NDArray[np.uint32]
    digest: U64
    dropped: int = 0
    has_payload: bool = False
    inline: bytes | memoryview | NDArray[Any] = b""
    extents: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class LoggedFrame:
    """A logged frame: its record [1], its rows [n] and its blocks."""

    frame: NDArray[Any]
    rows: NDArray[Any]
    blocks: list[LoggedBlock] = field(default_factory=list)


class WalWriter:
    """Appends records to a log; holds a lock that tells ``repair`` the writer is alive."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(OSError):  # a file system without locks only loses that warning
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.nbytes = 0

    def json(self, kind: Record, value: Json) -> None:
        """Append a record whose body is JSON."""
        self._append(kind, [encode_json(value)])

    def frame(self, frame: NDArray[Any], rows: NDArray[Any], blocks: Sequence[LoggedBlock]) -> None:
        """Append a frame: record [1] of FRAME_DTYPE, rows [n] of ROW_DTYPE, and its blocks."""
        entries, rows_of, digests, inlines = [], [], [], []
        extents: list[tuple[int, int]] = []
        for block in blocks:
            inline = _raw(block.inline)
            entries.append(
                (block.site, len(block.row), block.dropped, block.has_payload, len(block.extents), len(inline))
            )
            rows_of.append(block.row)
            digests.append(block.digest)
            extents += block.extents
            if len(inline):
                inlines.append(inline)
        parts: list[Any] = [
            _COUNTS.pack(len(rows), len(blocks)),
            _raw(frame),
            _raw(rows),
            _raw(np.array(entries, _ENTRY)),
            _raw(np.concatenate(rows_of)) if rows_of else b"",
            _raw(np.concatenate(digests)) if digests else b"",
            _raw(np.array(extents, _EXTENT)),
            *inlines,
        ]
        self._append(Record.FRAME, parts)

    def _append(self, kind: Record, parts: list[Any]) -> None:
        length = sum(len(part) for part in parts)
        crc = zlib.crc32(struct.pack("<IQ", kind, length))
        for part in parts:
            crc = zlib.crc32(part, crc)
        head = _HEAD.pack(_MAGIC, kind, length, crc)
        self.nbytes += _HEAD.size + length
        queue = [memoryview(head), *(memoryview(part) for part in parts if len(part))]
        for start in range(0, len(queue), _IOV_MAX):
            self._write(queue[start : start + _IOV_MAX])

    def _write(self, parts: list[memoryview]) -> None:
        done = os.writev(self._fd, parts)
        for part in parts:
            if done >= len(part):
                done -= len(part)
                continue
            while done < len(part):  # a short write: the rest one part at a time
                done += os.write(self._fd, part[done:])
            done = 0

    def close(self) -> None:
        """Close the log, leaving the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _raw(data: Any) -> Any:
    """A flat view of bytes that has a length in bytes."""
    if isinstance(data, np.ndarray):
        return memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8)) if data.size else b""
    return data


def is_being_written(path: Path) -> bool:
    """Whether a living process of this machine still holds the log open."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


@dataclass
class WalReader:
    """Reads the whole records of a log; afterwards ``stopped`` says why it ended early, or is empty."""

    path: Path
    stopped: str = ""
    good_bytes: int = 0

    def records(self) -> Iterator[tuple[Record, Any]]:
        """Yield (kind, JSON value or :class:`LoggedFrame`) up to the first record that is cut off or damaged."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            while self.good_bytes < size:
                head = file.read(_HEAD.size)
                if len(head) < _HEAD.size:
                    self.stopped = "the last record is cut off"
                    return
                magic, kind, length, crc = _HEAD.unpack(head)
                if magic != _MAGIC or kind not in Record.__members__.values():
                    self.stopped = f"no record at byte {self.good_bytes}"
                    return
                if length > size - self.good_bytes - _HEAD.size:
                    self.stopped = "the last record is cut off"
                    return
                body = file.read(length)
                if zlib.crc32(body, zlib.crc32(struct.pack("<IQ", kind, length))) != crc:
                    self.stopped = f"the record at byte {self.good_bytes} does not match its checksum"
                    return
                try:
                    value = decode_frame(body) if kind == Record.FRAME else json.loads(body)
                except (ValueError, RecursionError) as error:
                    self.stopped = f"the record at byte {self.good_bytes} cannot be read: {error}"
                    return
                self.good_bytes += _HEAD.size + length
                yield Record(kind), value


class _Cursor:
    def __init__(self, body: bytes) -> None:
        self._body = memoryview(body)
        self._at = 0

    def take(self, nbytes: int) -> memoryview:
        if nbytes < 0 or nbytes > len(self._body) - self._at:
            raise ValueError("a count in the record is larger than the record")
        part = self._body[self._at : self._at + nbytes]
        self._at += nbytes
        return part

    def array(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    @property
    def left(self) -> int:
        return len(self._body) - self._at


def decode_frame(body: bytes) -> LoggedFrame:
    """Decode a frame record.

    Raises:
        ValueError: when counts and lengths in it do not add up.
    """
    cursor = _Cursor(body)
    n_rows, n_blocks = _COUNTS.unpack(cursor.take(_COUNTS.size))
    frame = cursor.array(FRAME_DTYPE, 1)
    rows = cursor.array(ROW_DTYPE, n_rows)
    entries = cursor.array(_ENTRY, n_blocks)
    counts = entries["rows"].tolist()
    row = cursor.array(np.dtype("<u4"), sum(counts))
    digest = cursor.array(np.dtype("<u8"), 2 * sum(counts)).reshape(-1, 2)
    extents = cursor.array(_EXTENT, sum(entries["extents"].tolist())).tolist()
    if len(row) and int(row.max()) >= n_rows:
        raise ValueError("a site points at a row the frame has not")
    blocks, at, piece = [], 0, 0
    for site, count, dropped, has_payload, n_extents, inline in entries.tolist():
        blocks.append(
            LoggedBlock(
                site,
                row[at : at + count],
                digest[at : at + count],
                dropped,
                bool(has_payload),
                cursor.take(inline),
                tuple(extents[piece : piece + n_extents]),
            )
        )
        at, piece = at + count, piece + n_extents
    if cursor.left:
        raise ValueError(f"{cursor.left} bytes too many in the record")
    return LoggedFrame(frame, rows, blocks)


def header_json(side: str, rank: int, world: int, segment: int, meta: Mapping[str, Json]) -> dict[str, Json]:
    """Body of a log's first record."""
    return {"side": side, "rank": rank, "world": world, "segment": segment, "meta": dict(meta), "pid": os.getpid()}
