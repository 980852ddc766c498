"""Tables of a comparison for notebooks, reports and figures: one row per site and edge, one row per pair."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.compare import SiteRows
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.edges import named_row
from zkl_debug.diff.kinds import count_kinds
from zkl_debug.diff.model import Ints, Kind, Stats
from zkl_debug.diff.stats import pair_bits, site_stats
from zkl_debug.errors import UsageError
from zkl_debug.schema import Phase

#: Columns of the site table. Counts are of distinct rows; ``max_ulp`` -1 and ``max_abs`` NaN mean unknown.
SITE_COLUMNS: list[tuple[str, str]] = [
    ("order", "i4"),
    ("layer", "i4"),
    ("on", "U4"),
    ("edge", "U16"),
    ("compared", "i8"),
    ("mismatched", "i8"),
    ("own", "i8"),
    ("propagated", "i8"),
    ("masked", "i8"),
    ("uncaptured_state", "i8"),
    ("kind", "U16"),
    ("max_ulp", "i8"),
    ("max_abs", "f8"),
    ("mismatched_elements", "i8"),
    ("elements", "i8"),
    ("stat_rows", "i8"),
]

ROW_COLUMNS: list[tuple[str, str]] = [
    ("edge", "U16"),
    ("step", "i8"),
    ("sample", "u8"),
    ("position", "i8"),
    ("token", "i8"),
    ("phase_a", "U8"),
    ("phase_b", "U8"),
    ("frame_a", "i8"),
    ("frame_b", "i8"),
    ("mismatch", "?"),
    ("kind", "U16"),
    ("ulp", "i8"),
]


def site_table(comparison: Comparison, stats: bool = True) -> NDArray[Any]:
    """One row per site and edge with anything compared, in execution order; a structured array.

    The columns are ``site`` and :data:`SITE_COLUMNS`. A site without any comparison has one row with an empty edge.

    Args:
        comparison: a finished comparison.
        stats: look at the elements of mismatching rows; without, the last five columns say "unknown".
    """
    width = max((len(pair.name) for pair in comparison.sites), default=1)
    records = []
    for i in range(len(comparison.sites)):
        rows = _site_edges(comparison, i, stats)
        records += rows or [_uncompared(comparison, i)]
    return np.array(records, dtype=[("site", f"U{width}"), *SITE_COLUMNS])


def _uncompared(comparison: Comparison, i: int) -> tuple[Any, ...]:
    pair = comparison.sites[i]
    return (pair.name, i, pair.parsed.layer, pair.on, "", 0, 0, 0, 0, 0, 0, "absent", -1, np.nan, -1, -1, 0)


def _site_edges(comparison: Comparison, i: int, stats: bool) -> list[tuple[Any, ...]]:
    pair, pairs = comparison.sites[i], comparison.pairs
    kinds = comparison.done[i].kind
    where = comparison.where(i) if stats and bool((kinds >= Kind.PROPAGATED).any()) else None
    rows = []
    for edge, part in pairs.slices.items():
        codes = kinds[part]
        top = int(codes.max(initial=0))
        if top == Kind.ABSENT:
            continue
        counts = count_kinds(codes, comparison.space.n_keys, pairs.key[part])
        mismatched = counts[Kind.OWN] + counts[Kind.PROPAGATED] + counts[Kind.UNCAPTURED_STATE]
        head = (pair.name, i, pair.parsed.layer, pair.on, edge, sum(counts.values()), mismatched)
        by_kind = (counts[Kind.OWN], counts[Kind.PROPAGATED], counts[Kind.MASKED], counts[Kind.UNCAPTURED_STATE])
        chosen = part.start + np.flatnonzero(codes >= Kind.PROPAGATED)
        rows.append((*head, *by_kind, Kind(top).label, *_sizes(comparison, i, where, chosen)))
    return rows


def _sizes(comparison: Comparison, i: int, where: SiteRows | None, chosen: Ints) -> tuple[Any, ...]:
    """max_ulp, max_abs, mismatched_elements, elements, stat_rows of the chosen pairs."""
    if not len(chosen):
        return (0, 0.0, 0, 0, 0)
    if where is None:
        return (-1, np.nan, -1, -1, 0)
    stats = site_stats(comparison.sites[i], where, comparison.space, comparison.pairs, chosen)
    return (
        -1 if stats.max_ulp is None else stats.max_ulp,
        np.nan if stats.max_abs is None else stats.max_abs,
        -1 if stats.mismatched_elements is None else stats.mismatched_elements,
        -1 if stats.elements is None else stats.elements,
        stats.rows,
    )


def edge_stats(comparison: Comparison, site: int, edge: str) -> Stats:
    """Statistics of the mismatching rows of one site (by its place in the order) on one edge."""
    part = comparison.pairs.slices[edge]
    chosen = part.start + np.flatnonzero(comparison.done[site].differs[part])
    return site_stats(comparison.sites[site], comparison.where(site), comparison.space, comparison.pairs, chosen)


def row_table(comparison: Comparison, site: str, edge: str | None = None, limit: int | None = None) -> NDArray[Any]:
    """One row per compared pair of a site; a structured array with :data:`ROW_COLUMNS`.

    ``phase_a`` and ``frame_a`` belong to the left row of the pair, ``phase_b`` and ``frame_b`` to the right one (on
    ``within-b`` both are of B). ``ulp`` is 0 for equal rows and -1 where it is not known.

    Args:
        comparison: a finished comparison.
        site: canonical site name.
        edge: one edge; default all.
        limit: differing pairs of an edge whose elements are looked at; default all. With that of the site table
            (:data:`zkl_debug.diff.stats.ROW_LIMIT`) no raw bits are read that the verdict does not rest on already.

    Raises:
        UsageError: when there is no such site or edge.
    """
    names = [pair.name for pair in comparison.sites]
    if site not in names:
        raise UsageError(f"no site {site!r}", "a site of the comparison", "see the site column of site_table")
    if edge is not None and edge not in comparison.pairs.slices:
        raise UsageError(f"no edge {edge!r}", ", ".join(comparison.pairs.slices))
    i = names.index(site)
    pairs, space = comparison.pairs, comparison.space
    codes = comparison.done[i].kind
    edges = [edge] if edge is not None else list(pairs.slices)
    chosen = [pairs.slices[e].start + np.flatnonzero(codes[pairs.slices[e]] != Kind.ABSENT) for e in edges]
    index = np.concatenate(chosen)
    named = named_row(space, pairs.left, pairs.right)[index]
    table = np.zeros(len(index), dtype=ROW_COLUMNS)
    table["edge"] = np.repeat(np.array(edges), [len(part) for part in chosen])
    for column in ("step", "sample", "position", "token"):
        table[column] = getattr(space, column)[named]
    phases = np.array([phase.name.lower() for phase in Phase])
    for suffix, rows in (("a", pairs.left[index]), ("b", pairs.right[index])):
        table[f"phase_{suffix}"] = phases[space.phase[rows]]
        table[f"frame_{suffix}"] = space.frame[rows]
    table["mismatch"] = codes[index] >= Kind.PROPAGATED
    table["kind"] = np.array([kind.label for kind in Kind])[codes[index]]
    looked = [part[comparison.done[i].differs[part]][:limit] for part in chosen]
    table["ulp"] = _ulps(comparison, i, index, np.concatenate(looked))
    return table


def _ulps(comparison: Comparison, i: int, index: Ints, looked: Ints) -> Ints:
    """Largest ULP distance of each pair: 0 for equal pairs, -1 where it is not known; ``looked``: those looked at."""
    differs = comparison.done[i].differs[index]
    ulps = np.where(differs, -1, 0).astype(np.int64)
    pair = comparison.sites[i]
    bits = pair_bits(pair, comparison.where(i), comparison.space, comparison.pairs, looked)
    if bits is not None:
        order = np.argsort(index)
        ulps[order[np.searchsorted(index[order], bits.pairs)]] = bits.max_ulp
    return ulps
