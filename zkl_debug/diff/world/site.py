"""One site of the whole model, made of what several ranks recorded of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.model import Bools, Ints, SiteLike
from zkl_debug.errors import Refused
from zkl_debug.schema import U64, SiteMeta


@dataclass(frozen=True)
class Part:
    """A rank's share in a site.

    Attributes:
        rank: the rank.
        site: as it recorded it.
        local: rows of ``site`` that are used, int64 [m].
        place: row of the joined site each of them belongs to, int64 [m].
    """

    rank: int
    site: SiteLike
    local: Ints
    place: Ints


class JoinedSite:
    """A site over all ranks. Digests of shards are added up; of rows that several ranks have whole, one is taken.

    Args:
        meta: of the whole row.
        rows: joined rows, int64 [n], increasing.
        parts: who has what; of whole rows every row is in one part, of shards in one part a shard.
        added: the parts are shards.
    """

    def __init__(self, meta: SiteMeta, rows: Ints, parts: Sequence[Part], added: bool) -> None:
        self.meta, self.rows, self.parts, self.added = meta, rows, tuple(parts), added

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def digest(self) -> U64:
        """multilinear-128 of each whole row, [n, 2] uint64."""
        out = np.zeros((len(self.rows), 2), np.uint64)
        for part in self.parts:
            own = np.asarray(part.site.digest, np.uint64).reshape(-1, 2)[part.local]
            if self.added:
                np.add.at(out, part.place, own)
            else:
                out[part.place] = own
        return out

    @property
    def has_payload(self) -> bool:
        """Whether the raw bits of any whole row are there."""
        return bool(len(self.payload_index))

    @cached_property
    def _payload_parts(self) -> list[tuple[Bools, Ints]]:
        """Per part: which rows have its bits, and where in the part's site they are."""
        found = []
        for part in self.parts:
            at = np.full(len(self.rows), -1, np.int64)
            if part.site.has_payload:
                size = int(part.local.max(initial=-1)) + 1
                known = np.zeros(max(size, int(part.site.payload_index.max(initial=-1)) + 1), np.bool_)
                known[part.site.payload_index] = True
                use = known[part.local]
                at[part.place[use]] = part.local[use]
            found.append((at >= 0, at))
        return found

    @cached_property
    def payload_index(self) -> Ints:
        """Rows of the site whose raw bits are there, of every shard, int64, increasing."""
        if not self.parts:
            return np.zeros(0, np.int64)
        masks = np.stack([have for have, _ in self._payload_parts])
        if not self.added:
            return np.flatnonzero(masks.any(axis=0))
        needed = np.zeros(len(self.rows), np.int64)
        for part in self.parts:
            needed[part.place] += 1
        return np.flatnonzero((masks.sum(axis=0) == needed) & (needed > 0))

    def payload(self, i: Ints | slice) -> NDArray[Any]:
        """Raw bits [len(i), W] of whole rows, put together from those of the ranks.

        Raises:
            Refused: when a row has no payload.
        """
        wanted = np.arange(*i.indices(len(self))) if isinstance(i, slice) else np.asarray(i, np.int64)
        if not np.isin(wanted, self.payload_index).all():
            raise Refused(f"site {self.meta.name}: rows without payload were asked for", "rows of payload_index")
        out: NDArray[Any] | None = None
        width = int(np.prod(self.meta.row_shape, dtype=np.int64))
        for part, (have, at) in zip(self.parts, self._payload_parts, strict=True):
            mine = np.flatnonzero(have[wanted])
            if not len(mine):
                continue
            bits = part.site.payload(at[wanted[mine]])
            if out is None:
                out = np.zeros((len(wanted), width), bits.dtype)
            if not self.added:
                out[mine] = bits
                continue
            shard, column = part.site.meta.shard, 0
            for first, count in shard.pieces if shard is not None else ():
                out[mine, first : first + count] = bits[:, column : column + count]
                column += count
        return np.zeros((0, width), np.uint8) if out is None else out

    def payload_blocks(self) -> Iterator[tuple[Ints, NDArray[Any]]]:
        """Yield (site rows, raw bits) over all payload, some thousand rows at a time."""
        index = self.payload_index
        for start in range(0, len(index), 4096):
            block = index[start : start + 4096]
            yield block, self.payload(block)
