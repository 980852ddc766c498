"""Which edge to name, and the first site and row on it.

Every edge has its own first site. The edge of the verdict is the one whose first site comes earliest in execution
order: later sites of any edge may be consequences of it. Several edges can first diverge at the same site; then the
most specific true statement wins:

1. ``within-a``, ``within-b``: one side does not even agree with itself, in one phase, on the same prefix. No second
   system is needed to show it, so the other side is not to blame. It is named only if it explains every other edge
   that diverges at this site. A side explains an edge when, of the rows that differ there, at least a quarter have
   copies on the side (else it cannot be told), and for at least half of those the copies differ and one of them
   equals what it is compared with. A row permuted or masked wrongly in every batch has copies that differ, but none
   that is right; and one chance duplicate says nothing of sixty rows without one.
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
from zkl_debug.diff.model import EDGE_PRIORITY, WITHIN_EDGES, Kind

# Shares of the rule for within edges.
_ENOUGH, _MOST = 0.25, 0.5


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
    within = [name for name in tied if name in WITHIN_EDGES]
    crossing = [name for name in tied if name not in WITHIN_EDGES]
    explained = {edge: [side for side in within if _explains(side, edge, pairs, done[site])] for edge in crossing}
    unexplained = [edge for edge in crossing if not explained[edge]]
    if unexplained:
        return unexplained[0]
    return explained[crossing[0]][0] if crossing else within[0]


def _explains(side: str, edge: str, pairs: Pairs, kinds: SiteKinds) -> bool:
    """Whether the variance inside one side accounts for what differs on another edge; see the rule above."""
    own, other = pairs.slices[side], pairs.slices[edge]
    present, differs = kinds.present, kinds.differs
    asked = np.unique(pairs.key[other][differs[other]])
    can_tell = np.intersect1d(asked, pairs.key[own][present[own]])
    varying = np.intersect1d(asked, pairs.key[own][differs[own]])
    right = np.intersect1d(varying, pairs.key[other][present[other] & ~differs[other]])
    return len(can_tell) >= _ENOUGH * len(asked) and len(right) >= _MOST * len(can_tell) > 0


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
