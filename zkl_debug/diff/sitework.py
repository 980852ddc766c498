"""The comparison of single sites: what one process does for another, and in which order the results come back.

A site is compared without looking at any other, so sites can be shared out; what follows from them is put together in
one place and in execution order. The results, and so the verdict, are the same whoever compared which site.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from zkl_debug.diff.bytewise import compare_bytes
from zkl_debug.diff.compare import compare_digests, locate
from zkl_debug.diff.coverage import site_row_skips
from zkl_debug.diff.edges import Pairs
from zkl_debug.diff.model import Bools, CaptureLike, Skip
from zkl_debug.diff.rows import RowSpace
from zkl_debug.diff.sites import SitePair


@dataclass(frozen=True)
class SiteOutcome:
    """What the comparison of a site gave.

    Attributes:
        present, differs: pairs compared, and those that differ, bool [P].
        complete: every present pair was compared by raw bytes; False also where nobody asked for that.
        skips: rows of the site that could not be compared.
    """

    present: Bools
    differs: Bools
    complete: bool
    skips: tuple[Skip, ...]


@dataclass(frozen=True)
class SiteWork:
    """Joined rows and sites: all that is needed to compare any site.

    Attributes:
        space, pairs, sites: rows, pairs and ordered sites.
        verify_bytes: compare raw bytes as well wherever both sides have them.
        captures, aliases: what they were joined from, for who must do it again elsewhere.
    """

    space: RowSpace
    pairs: Pairs
    sites: tuple[SitePair, ...]
    verify_bytes: bool = False
    captures: tuple[CaptureLike, ...] = ()
    aliases: Mapping[str, str] | None = None

    def compare(self, i: int) -> SiteOutcome:
        """Compare one site, by its number."""
        pair, space = self.sites[i], self.space
        where = locate(pair, space)
        present, differs = compare_digests(pair, where, space, self.pairs)
        complete, skips = False, []
        if self.verify_bytes:
            unequal, complete = compare_bytes(pair, where, space, self.pairs, present)
            differs = differs | unequal
            if not complete:
                skips.append(Skip(f"bytes of {pair.name}", "no payload on both rows: compared by digest alone"))
        return SiteOutcome(present, differs, complete, (*skips, *site_row_skips(pair, where, space)))

    @property
    def digests(self) -> int:
        """Digests of both sides."""
        return sum(len(site.rows) for pair in self.sites for site in (pair.a, pair.b) if site is not None)


@dataclass(frozen=True)
class Packed:
    """An outcome as it travels between processes: ``present`` and ``differs`` as bits, empty where none is set."""

    present: bytes
    differs: bytes
    complete: bool
    skips: tuple[Skip, ...]


def pack(outcome: SiteOutcome) -> Packed:
    """Make an outcome small."""
    differs = np.packbits(outcome.differs).tobytes() if outcome.differs.any() else b""
    return Packed(np.packbits(outcome.present).tobytes(), differs, outcome.complete, outcome.skips)


class Unpacker:
    """Inverse of :func:`pack`. Outcomes with equal ``present`` share the array."""

    def __init__(self, pairs: int) -> None:
        self._count = pairs
        self._none = np.zeros(pairs, np.bool_)
        self._last: tuple[bytes, Bools] = (b"", self._none)

    def __call__(self, packed: Packed) -> SiteOutcome:
        """The outcome."""
        if packed.present != self._last[0]:
            self._last = (packed.present, self._bools(packed.present))
        differs = self._bools(packed.differs) if packed.differs else self._none
        return SiteOutcome(self._last[1], differs, packed.complete, packed.skips)

    def _bools(self, bits: bytes) -> Bools:
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=self._count).astype(np.bool_)


class Runner(Protocol):
    """Who compares the sites."""

    def __call__(self, work: SiteWork, numbers: list[int]) -> Iterator[SiteOutcome]:
        """Outcomes of sites, in the order of their numbers. The caller may stop early and close the iterator."""


def in_process(work: SiteWork, numbers: list[int]) -> Iterator[SiteOutcome]:
    """Compare in this process, one site after the other, when its outcome is asked for."""
    return (work.compare(i) for i in numbers)


def chunks(numbers: list[int], workers: int) -> list[list[int]]:
    """Runs of site numbers for one task each: enough of them to keep every worker busy to the end."""
    size = max(1, min(32, len(numbers) // (workers * 4)))
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]
