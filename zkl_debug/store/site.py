"""One site of a capture over all its segments: rows, digests and payload, read on first use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.errors import Refused
from zkl_debug.schema import U64, SiteMeta
from zkl_debug.store.layout import fold_parts
from zkl_debug.store.mapped import ColumnData
from zkl_debug.store.segment_reader import SegmentReader

#: A site's data in one segment: the segment, the site's number there, and the capture row of the segment's first row.
#: A plain tuple: a large capture has hundreds of thousands of them.
Part = tuple[SegmentReader, int, int]


def join[T: np.generic](parts: Sequence[NDArray[T]], empty: NDArray[T]) -> NDArray[T]:
    """Parts one behind the other; the only one as it is."""
    if not parts:
        return empty
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Pages:
    """Keeps what was mapped of the files from filling the memory."""

    _LIMIT = 48 << 20

    def __init__(self, readers: Sequence[SegmentReader]) -> None:
        self._readers = readers
        self._read = 0

    def count(self, nbytes: int) -> None:
        """Take note of bytes that were read, and let go of the files' pages once they are many."""
        self._read += nbytes
        if self._read > self._LIMIT:
            self._read = 0
            for reader in self._readers:
                reader.release()


class Site:
    """One site of a capture, over all its segments. Data is read on first use and checked against the manifest.

    Attributes:
        meta: the site; ``order`` is its place in execution order.
    """

    def __init__(self, meta: SiteMeta, parts: list[Part], shared: dict[Any, NDArray[np.int64]], pages: Pages) -> None:
        self.meta = meta
        self._parts = parts
        self._shared = shared  # row numbers of the capture's sites, by segments and what stands for their rows there
        self._pages = pages
        self._sound = False  # whether the digests were checked

    @cached_property
    def _counts(self) -> list[int]:
        return [reader.table.rows[number] for reader, number, _ in self._parts]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.cumsum([0, *self._counts])

    def __len__(self) -> int:
        return sum(self._counts)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Capture row of each row of the site, [n] int64. Sites with equal rows share one array: never write to it."""
        key = tuple([(base, reader.table.row_codes[number]) for reader, number, base in self._parts])
        known = self._shared.get(key)
        if known is None:
            parts = [reader.site_rows(number).astype(np.int64) + base for reader, number, base in self._parts]
            known = self._shared[key] = join(parts, np.zeros(0, np.int64))
        return known

    @property
    def digest(self) -> U64:
        """multilinear-128 of each row, [n, 2] uint64. Read anew each time: those of all sites could fill the memory."""
        if len(self._parts) == 1:
            digest = self._parts[0][0].site_digest(self._parts[0][1])
        else:
            digest, at = np.empty((len(self), 2), np.uint64), 0
            if digest.size:
                out = memoryview(digest.reshape(-1)).cast("B")
                for reader, number, _ in self._parts:
                    at = reader.copy_digest(number, out, at)
            self._pages.count(digest.nbytes)
        if not self._sound:
            self._check(digest, self._parts)
            self._sound = True
        return digest

    @staticmethod
    def _check(digest: U64, parts: Sequence[Part]) -> None:
        """Compare the digests of every part with their check value."""
        found = fold_parts(digest, [reader.table.rows[number] for reader, number, _ in parts])
        expected = np.array([reader.table.check_digest[number] for reader, number, _ in parts]).reshape(-1, 2)
        for k in np.flatnonzero((found != expected).any(axis=1)).tolist():
            reader, number, _ = parts[k]
            raise reader.unlike(number)

    @property
    def head(self) -> U64:
        """Digests of the first rows, as many as the first segment that has any holds, [m, 2] uint64; m <= n."""
        for part in self._parts:
            reader, number, _ = part
            if reader.table.rows[number]:
                digest = reader.site_digest(number)
                if not self._sound:
                    self._check(digest, [part])
                return digest
        return np.zeros((0, 2), np.uint64)

    @property
    def has_payload(self) -> bool:
        """Whether any row has a payload."""
        return any(reader.table.payload_rows[number] for reader, number, _ in self._parts)

    @property
    def payload_rows(self) -> int:
        """Number of rows that have a payload."""
        return sum(reader.table.payload_rows[number] for reader, number, _ in self._parts)

    @property
    def payload_bytes(self) -> int:
        """Bytes of payload."""
        return sum(
            reader.table.payload_rows[number] * int(entry["payload_width"]) * int(entry["payload_item"])
            for reader, number, _ in self._parts
            for entry in [reader.table.table[number]]
        )

    @property
    def payload_dropped(self) -> int:
        """Rows whose payload was not taken because of the byte budget."""
        return sum(int(reader.table.table["dropped"][number]) for reader, number, _ in self._parts)

    @cached_property
    def payload_index(self) -> NDArray[np.int64]:
        """Which of the site's rows (0 .. n-1) have a payload, [m] int64, increasing."""
        return join(
            [
                reader.site_payload_row(number) + self._starts[k]
                for k, (reader, number, _) in enumerate(self._parts)
                if reader.table.payload_rows[number]
            ],
            np.zeros(0, np.int64),
        )

    @cached_property
    def _columns(self) -> list[ColumnData]:
        return [reader.site_payload(number) for reader, number, _ in self._parts if reader.table.payload_rows[number]]

    @cached_property
    def _column_starts(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(len(column) for column in self._columns)])

    def payload(self, i: NDArray[np.int64] | slice) -> NDArray[Any]:
        """Raw bits of rows of the site, mapped from the file.

        Args:
            i: numbers of the site's rows (0 .. n-1, as in :attr:`rows`), or a slice of them.

        Returns:
            [len(i), W] in the storage dtype; read-only where it is a view of the file.

        Raises:
            Refused: when a row has no payload.
        """
        wanted = np.arange(*i.indices(len(self))) if isinstance(i, slice) else np.asarray(i, np.int64)
        if not self.has_payload:
            raise Refused(f"site {self.meta.name} has no payload", "a capture made with --level payload")
        index = self.payload_index
        place = np.searchsorted(index, wanted)
        if len(wanted) and (place >= len(index)).any() | (index[np.minimum(place, len(index) - 1)] != wanted).any():
            raise Refused(
                f"site {self.meta.name}: {len(wanted)} rows asked for, some have no payload",
                "rows of Site.payload_index",
            )
        part = np.searchsorted(self._column_starts, place, side="right") - 1
        if len(place) and (part == part[0]).all():
            return self._columns[int(part[0])].take(place - self._column_starts[part[0]])
        out = np.empty((len(place), self._columns[0].shape[1]), self._columns[0].dtype)
        for k in np.unique(part):
            where = np.flatnonzero(part == k)
            out[where] = self._columns[int(k)].take(place[where] - self._column_starts[k])
        return out

    def payload_pieces(self, start: int, stop: int) -> Iterator[NDArray[Any]]:
        """Yield raw bits of the site's rows ``start`` .. ``stop - 1``, which all must have them, without copies.

        Yields:
            [k, W] in the storage dtype, in order; each is as long as the file has it in one piece.
        """
        first, last = np.searchsorted(self.payload_index, [start, stop]).tolist()
        if last - first != stop - start:
            raise Refused(f"site {self.meta.name}: some of its rows have no payload", "rows of Site.payload_index")
        for k, column in enumerate(self._columns):
            base = int(self._column_starts[k])
            yield from column.pieces(max(0, first - base), min(len(column), last - base))
        self._pages.count(self.row_bytes * (stop - start))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's payload; 0 without payload."""
        return self._columns[0].row_bytes if self._columns else 0

    def payload_blocks(self) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Yield (site rows [k], raw bits [k, W]) over all payload in file order, about 1 MiB at a time, no copies."""
        for start, column in zip(self._column_starts, self._columns, strict=False):
            for first, block in column.blocks():
                at = int(start) + first
                self._pages.count(block.nbytes)
                yield self.payload_index[at : at + len(block)], block
