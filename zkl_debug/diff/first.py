"""Which edge to name, and the first site and row on it.

Every edge has its own first site. The edge of the verdict is the one whose first site comes earliest in execution
order: later sites of any edge may be consequences of it. Several edges can first diverge at the same site; then the
most specific true statement wins:

1. ``within-a``, ``within-b``: one side does not even agree with itself, in one phase, on the same prefix. No second
   system is needed to show it, so nothing is blamed on the other side. One case is excepted: on another edge none of
   the varying copies equals what it is compared with. Then the variance cannot explain that edge, which shows the
   larger fault and is named first.
2. ``score-prefill`` (or the same phase of both captures): two implementations of the same computation differ. If
   prefill already differs from score, that decode differs from score too follows.
3. ``prefill-decode``: reached only when score-prefill is clean at this site: decode alone is off, and one system
   shows it by itself.
4. ``score-decode``: what is left when no row was both prefilled and decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zkl_debug.diff.edges import Pairs
from zkl_debug.diff.kinds import SiteKinds
from zkl_debug.diff.model import EDGE_PRIORITY, WITHIN_EDGES, Ints, Kind


@dataclass(frozen=True)
class EdgeFirst:
    """First divergence of an edge: indices of the site and of the pair."""

    site: int
    pair: int


def edge_firsts(pairs: Pairs, done: Sequence[SiteKinds]) -> dict[str, EdgeFirst | None]:
    """First site, in execution order, that differs anywhere on each edge, and the earliest pair there."""
    firsts: dict[str, EdgeFirst | None] = dict.fromkeys(pairs.slices)
    for i, kinds in enumerate(done):
        differs = kinds.differs
        if not differs.any():
            continue
        for name, part in pairs.slices.items():
            if firsts[name] is None and differs[part].any():
                firsts[name] = EdgeFirst(i, part.start + int(differs[part].argmax()))
    return firsts


def primary_edge(pairs: Pairs, done: Sequence[SiteKinds], firsts: Mapping[str, EdgeFirst | None]) -> str | None:
    """The edge to name; None when no edge diverges."""
    found = {name: first for name, first in firsts.items() if first is not None}
    if not found:
        return None
    site = min(first.site for first in found.values())
    tied = [name for name in EDGE_PRIORITY if name in found and found[name].site == site]
    if tied[0] not in WITHIN_EDGES:
        return tied[0]
    varying = [_varying_keys(name, pairs, done[site]) for name in tied if name in WITHIN_EDGES]
    crossing = [name for name in tied if name not in WITHIN_EDGES]
    unexplained = [name for name in crossing if not any(_explains(keys, name, pairs, done[site]) for keys in varying)]
    return unexplained[0] if unexplained else tied[0]


def _varying_keys(edge: str, pairs: Pairs, kinds: SiteKinds) -> Ints:
    """Row keys whose copies differ on a within edge."""
    part = pairs.slices[edge]
    return np.unique(pairs.key[part][kinds.differs[part]])


def _explains(varying: Ints, edge: str, pairs: Pairs, kinds: SiteKinds) -> bool:
    """Whether some copy of a varying row equals what this edge compares it with, or nothing says otherwise."""
    part = pairs.slices[edge]
    asked = kinds.present[part] & np.isin(pairs.key[part], varying)
    return not asked.any() or bool((asked & ~kinds.differs[part]).any())


def neighbours(
    pairs: Pairs, done: Sequence[SiteKinds], edge: str, first: EdgeFirst, by_row: bool
) -> tuple[int | None, list[int]]:
    """The last site before the first divergence that was compared and equal, and the sites between that were not.

    Args:
        pairs: all pairs.
        done: kinds of every site.
        edge: the edge of ``first``.
        first: the divergence.
        by_row: look at the row itself; otherwise (label rows) at any row of the edge.
    """
    part = pairs.slices[edge]
    between: list[int] = []
    for i in range(first.site - 1, -1, -1):
        present = done[i].kind[first.pair] != Kind.ABSENT if by_row else done[i].present[part].any()
        if present:
            return i, between[::-1]
        between.append(i)
    return None, between[::-1]
