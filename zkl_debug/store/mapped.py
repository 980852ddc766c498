"""Bytes of a segment mapped into memory, and columns of rows in them. Opens nothing of HDF5."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class MappedFile:
    """A file mapped for reading. ``bytes`` is all of it, uint8; views of it stay valid after :meth:`release`."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # A plain array: every slice of a memmap object would run Python code of its own.
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def release(self) -> None:
        """Let go of the pages that were read: what is looked at again is read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def slice_rows(
    memory: NDArray[np.uint8], dtype: np.dtype[Any], row_shape: tuple[int, ...], rows: int, offset: int
) -> NDArray[Any]:
    """Rows that lie in one piece of a mapped file, [rows, *row_shape], without a copy.

    Raises:
        ValueError: when part of them would lie outside the file.
    """
    stop = offset + rows * dtype.itemsize * math.prod(row_shape)
    if offset < 0 or rows < 0 or stop > memory.size:
        raise ValueError("data lies outside the file, which is truncated or damaged")
    return memory[offset:stop].view(dtype).reshape(rows, *row_shape)


class ColumnData:
    """Rows of an uncompressed dataset, mapped straight from the file. ``shape`` and ``dtype`` are those of the data."""

    def __init__(self, memory: NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._memory, self.dtype, self.shape = memory, dtype, shape
        self.row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        self._chunk_rows = max(1, shape[0])
        self._offsets: list[int] = []

    def __len__(self) -> int:
        return self.shape[0]

    def place(self, chunk_rows: int, offsets: list[int]) -> None:
        """Say where the data lies: chunk ``k`` holds ``chunk_rows`` rows from byte ``offsets[k]`` on.

        Raises:
            ValueError: when part of the data would lie outside the file.
        """
        chunk_rows = max(1, chunk_rows)
        needed = -(-self.shape[0] // chunk_rows)
        if self.shape[0] * self.row_bytes > self._memory.size:
            raise ValueError("there is more data than the file can hold")
        if len(offsets) != needed:
            raise ValueError(f"{needed} chunks are needed and {len(offsets)} are there")
        for k, offset in enumerate(offsets):
            rows = min(chunk_rows, self.shape[0] - k * chunk_rows)
            if offset < 0 or offset + rows * self.row_bytes > self._memory.size:
                raise ValueError("data lies outside the file, which is truncated or damaged")
        self._chunk_rows, self._offsets = chunk_rows, offsets

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield (first row, rows) over all rows, without copies."""
        for k in range(len(self._offsets)):
            yield k * self._chunk_rows, self._chunk(k)

    def pieces(self, start: int, stop: int) -> Iterator[NDArray[Any]]:
        """Yield rows ``start`` .. ``stop - 1`` in order, in pieces that are views of the file."""
        while start < stop:
            k, inside = divmod(start, self._chunk_rows)
            piece = self._chunk(k)[inside : inside + stop - start]
            yield piece
            start += len(piece)

    def _chunk(self, k: int) -> NDArray[Any]:
        rows = min(self._chunk_rows, self.shape[0] - k * self._chunk_rows)
        start = self._offsets[k]
        flat = self._memory[start : start + rows * self.row_bytes]
        return flat.view(self.dtype).reshape(rows, *self.shape[1:])

    def all(self) -> NDArray[Any]:
        """All rows; a view of the file when the data is in one piece."""
        if len(self._offsets) == 1:
            return self._chunk(0)
        if not self._offsets:
            return np.zeros(self.shape, self.dtype)
        return np.concatenate([self._chunk(k) for k in range(len(self._offsets))])

    def take(self, index: NDArray[np.int64]) -> NDArray[Any]:
        """Rows by number, [len(index), ...]; a view of the file when they are consecutive and in one chunk."""
        if not len(index):
            return np.zeros((0, *self.shape[1:]), self.dtype)
        chunk = index // self._chunk_rows
        inside = index - chunk * self._chunk_rows
        if (chunk == chunk[0]).all():
            first, last = int(inside[0]), int(inside[-1])
            block = self._chunk(int(chunk[0]))
            if last - first + 1 == len(inside) and (np.diff(inside) == 1).all():
                return block[first : last + 1]
            return np.asarray(block[inside])
        out = np.empty((len(index), *self.shape[1:]), self.dtype)
        for k in np.unique(chunk):
            where = np.flatnonzero(chunk == k)
            out[where] = self._chunk(int(k))[inside[where]]
        return out
