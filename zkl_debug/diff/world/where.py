"""On which ranks the first difference lies, where it does not lie on all of them alike."""

from __future__ import annotations

import numpy as np

from zkl_debug.diff.compare import comparable_blocks, gather
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.model import Bools, Ints, SiteLike
from zkl_debug.diff.world.site import JoinedSite
from zkl_debug.schema import Json

_MOST_PAIRS = 2048
_NAMES = ("A", "B")


def first_on_ranks(comparison: Comparison) -> dict[str, Json]:
    """Ranks that hold every element, or every row, in which the first site differs; empty where that says nothing.

    Of shards the elements decide, which needs raw bits; of rows that are shared out (sequence, context and expert
    parallel) the rows.
    """
    edge = comparison.edge
    first = comparison.firsts.get(edge) if edge is not None else None
    if edge is None or first is None:
        return {}
    pair = comparison.sites[first.site]
    part = comparison.pairs.slices[edge]
    differs = part.start + np.flatnonzero(comparison.done[first.site].differs[part])
    for side in (1, 0):
        site = _joined(pair.b if side else pair.a)
        if site is None or len({p.rank for p in site.parts}) < 2:
            continue
        ranks = _by_element(comparison, first.site, site, differs) if site.added else None
        what = "element"
        if not site.added:
            ranks, what = _by_row(comparison, first.site, site, differs, part, side), "row"
        if not ranks or len(ranks) == len({p.rank for p in site.parts}):
            continue
        who = ", ".join(map(str, ranks))
        text = f"every {what} that differs is on rank {who} of {_NAMES[side]}"
        return {"side": _NAMES[side], "by": what, "ranks": ranks, "text": text}
    return {}


def _joined(site: SiteLike | None) -> JoinedSite | None:
    inner: object = site
    for _ in range(4):
        if inner is None or isinstance(inner, JoinedSite):
            return inner
        inner = getattr(inner, "_site", None)
    return None


def _by_element(comparison: Comparison, number: int, site: JoinedSite, differs: Ints) -> list[int]:
    """Ranks whose pieces hold the elements that differ; none without raw bits."""
    pair, where = comparison.sites[number], comparison.where(number)
    columns: Bools | None = None
    for block in comparable_blocks(pair, where, comparison.pairs, differs[:_MOST_PAIRS]):
        left = gather(pair, where, comparison.space, comparison.pairs.left[block])
        right = gather(pair, where, comparison.space, comparison.pairs.right[block])
        unequal = (left != right).any(axis=0)
        columns = unequal if columns is None else columns | unequal
    if columns is None:
        return []
    found: set[int] = set()
    for part in site.parts:
        shard = part.site.meta.shard
        pieces = shard.pieces if shard is not None else ()
        if any(bool(columns[first : first + count].any()) for first, count in pieces):
            found.add(part.rank)
    return sorted(found)


def _by_row(
    comparison: Comparison, number: int, site: JoinedSite, differs: Ints, part: slice, side: int
) -> list[int] | None:
    """Ranks whose rows differ, if rows of the others were compared and are equal."""
    where, pairs, space = comparison.where(number), comparison.pairs, comparison.space
    owner = np.full(len(site.rows), -1, np.int64)
    for one in site.parts:
        owner[one.place] = one.rank
    compared = part.start + np.flatnonzero(comparison.done[number].present[part])
    ranks: list[set[int]] = []
    for chosen in (differs, compared):
        rows = np.concatenate([pairs.left[chosen], pairs.right[chosen]])
        rows = rows[space.side[rows] == side]
        ranks.append(set(np.unique(owner[where.at[rows]]).tolist()) - {-1})
    return sorted(ranks[0]) if ranks[0] < ranks[1] else None
