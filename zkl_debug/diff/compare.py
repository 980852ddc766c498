"""Bit comparison of one site over all pairs: by digest, and by raw bytes where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.edges import Pairs
from zkl_debug.diff.model import Bools, Ints, SiteLike
from zkl_debug.diff.rows import RowSpace
from zkl_debug.diff.sites import SitePair
from zkl_debug.diff.sound import sound_bits
from zkl_debug.schema import U64

_BLOCK_BYTES = 32 << 20


@dataclass(frozen=True)
class Placement:
    """Where the rows of all sites are that have the same rows on both sides.

    Attributes:
        rows: rows of the sites in the captures of A and B, int64; None where the site is not there.
        at: index of each unified row into the site's rows of its side, -1 where the site has no such row, int64 [U].
        split: site rows of A.
        repeated: site rows left out because the same row was recorded twice under one name.
    """

    rows: tuple[Ints | None, Ints | None]
    at: Ints
    split: int
    repeated: int

    def index(self, space: RowSpace, rows: Ints) -> Ints:
        """Index of unified rows (all present) into the digests of A, then of B."""
        return np.asarray(self.at[rows] + np.where(space.side[rows] == 1, self.split, 0), np.int64)


@dataclass(frozen=True)
class PairPlaces:
    """The pairs of one placement: which are present, bool [P], and digest numbers of their left and right rows."""

    pairs: Pairs
    present: Bools
    chosen: Ints
    left: Ints
    right: Ints


@dataclass(frozen=True)
class SiteRows:
    """Where the rows of a site are; digests are read when they are first asked for."""

    pair: SitePair
    space: RowSpace
    place: Placement

    @property
    def at(self) -> Ints:
        """Index of each unified row into the site's rows of its side, -1 for none, int64 [U]."""
        return self.place.at

    @property
    def repeated(self) -> int:
        """Site rows left out because the same row was recorded twice under one name."""
        return self.place.repeated

    @cached_property
    def bits(self) -> Bools:
        """Unified rows whose raw bits are there, bool [U]."""
        bits = np.zeros(self.space.n_rows, np.bool_)
        parts = (slice(0, self.space.n_a), slice(self.space.n_a, None))
        for site, own in zip((self.pair.a, self.pair.b), parts, strict=True):
            if site is None or not site.has_payload:
                continue
            have = np.zeros(len(site.rows) + 1, np.bool_)
            have[site.payload_index] = True
            bits[own] = have[self.at[own]]  # -1 finds the last entry, which stays False
        return bits

    @cached_property
    def digest(self) -> U64:
        """Digests of the site rows of A, then of B, uint64 [n_a + n_b, 2]."""
        sites = [site for site in (self.pair.a, self.pair.b) if site is not None]
        return np.concatenate([np.asarray(site.digest, np.uint64).reshape(-1, 2) for site in sites])

    def index(self, space: RowSpace, rows: Ints) -> Ints:
        """Index of unified rows (all present) into ``digest``."""
        return self.place.index(space, rows)


def locate(pair: SitePair, space: RowSpace) -> SiteRows:
    """Find the rows of a site; when a row comes twice the first call counts."""
    rows = tuple(None if site is None else site.rows for site in (pair.a, pair.b))
    return SiteRows(pair, space, space.memo.get(("place", *rows), lambda: _place(rows, space)))


def _place(rows: tuple[Ints | None, ...], space: RowSpace) -> Placement:
    at = np.full(space.n_rows, -1, np.int64)
    repeated = 0
    for own, offset in zip(rows, (0, space.n_a), strict=True):
        if own is None:
            continue
        own = np.asarray(own, np.int64)
        at[offset + own[::-1]] = np.arange(len(own) - 1, -1, -1)
        filled = at[: space.n_a] if offset == 0 else at[space.n_a :]
        repeated += len(own) - int(np.count_nonzero(filled >= 0))
    return Placement((rows[0], rows[1]), at, 0 if rows[0] is None else len(rows[0]), repeated)


def pair_places(where: SiteRows, space: RowSpace, pairs: Pairs) -> PairPlaces:
    """Where the rows of all pairs are at a site."""
    return space.memo.get(("pairs", where.place, pairs), lambda: _pair_places(where.place, space, pairs))


def _pair_places(place: Placement, space: RowSpace, pairs: Pairs) -> PairPlaces:
    present = (place.at[pairs.left] >= 0) & (place.at[pairs.right] >= 0)
    chosen = np.flatnonzero(present)
    left, right = (place.index(space, rows[chosen]) for rows in (pairs.left, pairs.right))
    return PairPlaces(pairs, present, chosen, left, right)


def compare_digests(pair: SitePair, where: SiteRows, space: RowSpace, pairs: Pairs) -> tuple[Bools, Bools]:
    """Present and differing pairs of a site.

    Sites whose dtype or width differ between the sides differ at every row that is compared across.

    Returns:
        (present, differs), bool [P] each. Sites with equal rows share ``present``: never write to it.
    """
    places = pair_places(where, space, pairs)
    left = np.take(where.digest, places.left, axis=0)
    right = np.take(where.digest, places.right, axis=0)
    unequal = (left[:, 0] != right[:, 0]) | (left[:, 1] != right[:, 1])
    if pair.differ:
        unequal |= pairs.sides[places.chosen] == 2
    differs = np.zeros(len(pairs), np.bool_)
    differs[places.chosen] = unequal
    return places.present, differs


def side_site(pair: SitePair, side: int) -> SiteLike:
    """The site on a side where it is known to exist."""
    site = pair.b if side else pair.a
    assert site is not None
    return site


def row_bytes(pair: SitePair) -> int:
    """Bytes of one row, estimated from the metadata."""
    return max(1, int(np.prod(pair.meta.row_shape, dtype=np.int64))) * 8


def gather(pair: SitePair, where: SiteRows, space: RowSpace, rows: Ints, checked: bool = False) -> NDArray[Any]:
    """Raw bits of unified rows, shape [m, W]; every side that occurs must have the same dtype and width.

    Raises:
        CaptureInvalid: when the bits do not agree with their digests (not looked at where all were ``checked`` before).
    """
    out: NDArray[Any] | None = None
    for side in (0, 1):
        places = np.flatnonzero(space.side[rows] == side)
        if not len(places):
            continue
        site = side_site(pair, side)
        at = where.at[rows[places]]
        if checked:
            bits = site.payload(at)
        else:
            digest = where.digest[where.index(space, rows[places])]
            bits = sound_bits(site, at, f"{pair.name} of {'AB'[side]}", digest)
        if out is None:
            out = np.empty((len(rows), bits.shape[1]), bits.dtype)
        out[places] = bits
    assert out is not None
    return out


def comparable_blocks(pair: SitePair, where: SiteRows, pairs: Pairs, chosen: Ints) -> Iterator[Ints]:
    """The chosen pairs (indices) whose raw bits can be compared, in blocks of tens of MB.

    Pairs without raw bits on both rows are left out, and so are those across sides of different dtype or width.
    """
    chosen = chosen[where.bits[pairs.left[chosen]] & where.bits[pairs.right[chosen]]]
    for sides in (0, 1, 2):
        if sides == 2 and pair.differ:
            continue
        group = chosen[pairs.sides[chosen] == sides]
        step = max(1, _BLOCK_BYTES // row_bytes(pair))
        for start in range(0, len(group), step):
            yield group[start : start + step]
