"""Columns of an HDF5 segment: they stay small until they fill a chunk, then grow in place.

A column that never fills a chunk is written once, contiguous and of its exact size, when the segment closes. One that
does becomes a chunked dataset without filters whose chunks are allocated by HDF5 and filled with plain positioned
writes, so that every payload byte goes to the file once, when its frame is written, at an offset the log can record.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from h5py import h5a, h5d, h5p, h5s, h5t
from numpy.typing import NDArray

from zkl_debug.schema import U64, Json
from zkl_debug.store.layout import INDEX_CHUNK_BYTES, StoreError, chunk_rows, encode_json, fold_blocks, fold_hex

#: Chunks begin on a page, so that a positioned write does not touch a page twice.
PAGE_BYTES = 4096

Extents = tuple[tuple[int, int], ...]


def write_at(fd: int, data: NDArray[Any], offset: int) -> None:
    """Write an array's bytes at a file offset, all of them."""
    view = memoryview(data.reshape(-1).view(np.uint8))
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


class Output(Protocol):
    """Where a segment's bytes go."""

    def write(self, fd: int, data: NDArray[Any], offset: int) -> None:
        """Write an array's bytes at a file offset, at once or later."""

    def settle(self) -> None:
        """Return when everything is written."""


class Direct:
    """Writes at once."""

    def write(self, fd: int, data: NDArray[Any], offset: int) -> None:
        """Write an array's bytes at a file offset."""
        write_at(fd, data, offset)

    def settle(self) -> None:
        """Nothing is ever left."""


@dataclass(frozen=True)
class Target:
    """An open HDF5 file, a descriptor of the same file, and the output that writes to it."""

    file: Any
    fd: int
    output: Output

    def put(self, data: NDArray[Any], offset: int) -> None:
        """Write an array's bytes at a file offset."""
        self.output.write(self.fd, data, offset)


@lru_cache(maxsize=64)
def _hdf_type(dtype: np.dtype[Any]) -> Any:
    return h5t.py_create(dtype, logical=True)


@lru_cache(maxsize=256)
def _plist(chunk: tuple[int, ...]) -> Any:
    """Allocate in the file at once and never fill: the bytes are written by position."""
    plist = h5p.create(h5p.DATASET_CREATE)
    if chunk:
        plist.set_chunk(chunk)
    plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5d.FILL_TIME_NEVER)
    return plist


def create_dataset(parent: Any, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], chunk: int = 0) -> Any:
    """A dataset without filters: contiguous, or growing along the first axis by chunks of ``chunk`` rows."""
    limits = (h5s.UNLIMITED, *shape[1:]) if chunk else shape
    space = h5s.create_simple(shape, limits)
    return h5d.create(parent, name.encode(), _hdf_type(dtype), space, _plist((chunk, *shape[1:]) if chunk else ()))


def put_array(target: Target, parent: Any, name: str, data: NDArray[Any]) -> int:
    """Write a contiguous dataset of exactly ``data``; returns its byte offset in the file, -1 when it has no bytes."""
    data = np.ascontiguousarray(data)
    dset = create_dataset(parent, name, data.dtype, data.shape)
    if not data.size:
        return -1
    offset = int(dset.get_offset())
    target.put(data, offset)
    return offset


def put_json(target: Target, parent: Any, name: str, value: Json) -> None:
    """Write JSON as a uint8 dataset."""
    put_array(target, parent, name, np.frombuffer(encode_json(value), np.uint8))


_SCALAR = h5s.create(h5s.SCALAR)


@lru_cache(maxsize=256)
def _text_type(size: int) -> Any:
    kind = h5t.C_S1.copy()
    kind.set_size(size)
    kind.set_cset(h5t.CSET_UTF8)
    kind.set_strpad(h5t.STR_NULLPAD)
    return kind


def put_attr(parent: Any, name: str, value: str | int | Sequence[int]) -> None:
    """Write an attribute: a fixed-length UTF-8 string, an int64 or an int64 array."""
    if isinstance(value, str):
        raw = value.encode("utf-8", "replace")
        kind = _text_type(max(1, len(raw)))
        h5a.create(parent, name.encode(), kind, _SCALAR).write(np.array(raw, f"S{max(1, len(raw))}"), mtype=kind)
        return
    data = np.array(value, dtype="<i8")
    space = _SCALAR if data.ndim == 0 else h5s.create_simple(data.shape)
    attr = h5a.create(parent, name.encode(), h5t.STD_I64LE, space)
    if data.size:
        attr.write(data, mtype=h5t.STD_I64LE)


class Column:
    """A dataset that grows along its first axis.

    Args:
        target: the segment's file.
        parent: HDF5 group identifier.
        name: dataset name.
        dtype, row_shape: of one row.
        chunk_bytes: size of a chunk.
        write_through: once there is a chunk, rows go to the file at once instead of by full chunks.
    """

    def __init__(
        self,
        target: Target,
        parent: Any,
        name: str,
        dtype: np.dtype[Any],
        row_shape: tuple[int, ...],
        *,
        chunk_bytes: int = INDEX_CHUNK_BYTES,
        write_through: bool = False,
    ) -> None:
        self._target, self._parent, self._name = target, parent, name
        self.dtype, self.row_shape = dtype, row_shape
        self.row_bytes = dtype.itemsize * int(np.prod(row_shape, dtype=np.int64))
        self._chunk_rows = chunk_rows(self.row_bytes, chunk_bytes)
        self._write_through = write_through
        self._pending: list[NDArray[Any]] = []
        self._buffered = 0
        self._written = 0
        self._dset: Any = None
        self._chunk_offset = -1
        self._offsets: list[int] = []
        self._blocks: list[U64] = []
        self._total = 0

    @property
    def rows(self) -> int:
        """Rows so far."""
        return self._written + self._buffered

    def append(self, data: NDArray[Any]) -> Extents:
        """Add rows [n, *row_shape]; returns where in the file they went, or nothing for rows that are only buffered."""
        if self._dset is None:
            if self._buffered + len(data) < self._chunk_rows:
                self._keep(data)
                return ()
            self._dset = create_dataset(self._parent, self._name, self.dtype, (0, *self.row_shape), self._chunk_rows)
            if self._write_through:
                self._put(self._take())
        if self._write_through:
            return self._put(data)
        while len(data):
            count = min(self._chunk_rows - self._buffered, len(data))
            if count == self._chunk_rows:
                self._put(data[:count])
            else:
                self._keep(data[:count])
                if self._buffered == self._chunk_rows:
                    self._put(self._take())
            data = data[count:]
        return ()

    def finish(self) -> None:
        """Write what is buffered and fix the dataset's size."""
        if self._dset is None:
            data = self._take()
            self._note(data)
            offset = put_array(self._target, self._parent, self._name, data)
            self._offsets = [offset] if data.size else []
            self._written = len(data)
            return
        self._put(self._take())
        self._dset.set_extent((self._written, *self.row_shape))

    def place(self) -> list[int]:
        """Where its rows are in the file, once finished: rows of a chunk, then the byte offset of every chunk."""
        return [self._written if self._dset is None else self._chunk_rows, *self._offsets]

    def check(self) -> str:
        """Check value of all rows of a column that is not ``write_through``; call it after :meth:`finish`."""
        blocks = np.concatenate(self._blocks) if self._blocks else np.zeros((0, 2), np.uint64)
        return fold_hex(blocks, self._total * self.row_bytes)

    def _note(self, data: NDArray[Any]) -> None:
        self._total += len(data)
        if not self._write_through:
            self._blocks.append(fold_blocks(data))

    def _keep(self, data: NDArray[Any]) -> None:
        if len(data):
            base = data.base  # a view may hold on to much more memory than its rows
            owned = base is None or (isinstance(base, np.ndarray) and base.flags.owndata and base.nbytes == data.nbytes)
            self._pending.append(data if owned else data.copy())
            self._buffered += len(data)

    def _take(self) -> NDArray[Any]:
        pending, self._pending, self._buffered = self._pending, [], 0
        if len(pending) == 1:
            return pending[0]
        return np.concatenate(pending) if pending else np.empty((0, *self.row_shape), self.dtype)

    def _put(self, data: NDArray[Any]) -> Extents:
        extents: list[tuple[int, int]] = []
        data = np.ascontiguousarray(data)
        self._note(data)
        while len(data):
            inside = self._written % self._chunk_rows
            count = min(self._chunk_rows - inside, len(data))
            if inside == 0:
                self._chunk_offset = self._allocate(self._written + count)
                self._offsets.append(self._chunk_offset)
            offset = self._chunk_offset + inside * self.row_bytes
            self._target.put(data[:count], offset)
            if extents and sum(extents[-1]) == offset:
                extents[-1] = (extents[-1][0], extents[-1][1] + count * self.row_bytes)
            else:
                extents.append((offset, count * self.row_bytes))
            self._written += count
            data = data[count:]
        return tuple(extents)

    def _allocate(self, rows: int) -> int:
        """Extend the dataset into a new chunk and return the chunk's byte offset in the file."""
        nbytes = self._chunk_rows * self.row_bytes
        before = self._target.file.id.get_filesize()
        self._dset.set_extent((rows, *self.row_shape))
        after = self._target.file.id.get_filesize()
        if nbytes <= after - before < nbytes + PAGE_BYTES and (after - nbytes) % PAGE_BYTES == 0:
            return int(after - nbytes)  # the file grew by this chunk, aligned to a page, and by nothing behind it
        corner = (self._written, *(0 for _ in self.row_shape))
        offset = self._dset.get_chunk_info_by_coord(corner).byte_offset
        if offset is None:
            raise StoreError(f"HDF5 did not allocate a chunk of {self._name}")
        return int(offset)
