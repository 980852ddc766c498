"""Evidence of whole calls: how many rows each expert was given, and how many rows of the call chose it."""

from __future__ import annotations

import numpy as np

from zkl_debug.bits import F64, to_float64
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.explain.gather_more import site_at, values
from zkl_debug.diff.explain.model import CallCounts
from zkl_debug.diff.facts import RowFacts
from zkl_debug.diff.model import CaptureLike, Ints
from zkl_debug.diff.sound import sound_bits
from zkl_debug.schema import Phase

_COUNTS, _CHOSEN = "router.counts", "router.topk"


def expert_counts(
    comparison: Comparison, site: int, affected: Ints, clean: Ints, facts: RowFacts
) -> tuple[tuple[CallCounts, CallCounts], tuple[CallCounts, CallCounts]] | None:
    """Counts of the calls of affected and of clean pairs, for the left and the right row; None where not captured.

    Args:
        comparison: the finished comparison.
        site: the site in question; its layer's router is looked at.
        affected, clean: indices of pairs.
        facts: of all rows.
    """
    layer = comparison.sites[site].parsed.layer
    name = next(
        (
            pair.name
            for pair in comparison.sites
            if pair.parsed.layer == layer and pair.parsed.op == _CHOSEN and pair.parsed.port == "out.1"
        ),
        None,
    )
    if name is None or not len(affected):
        return None
    counts_site = name.replace(f"/{_CHOSEN}:out.1", f"/{_COUNTS}:out.0")
    chosen_at = site_at(comparison, name)
    assert chosen_at is not None
    tables = [_by_call(capture, counts_site) for capture in (comparison.a, comparison.b)]
    if all(not table for table in tables):
        return None
    looked = _Calls(comparison, chosen_at, counts_site, tables, facts)
    found = []
    for rows in (comparison.pairs.left, comparison.pairs.right):
        one, two = looked.of(rows[affected]), looked.of(rows[clean])
        if one is None or two is None:
            return None
        found.append((one, two))
    return found[0], found[1]


def _by_call(capture: CaptureLike, name: str) -> dict[int, F64]:
    """Counts of a capture by frame."""
    site = capture.sites.get(name)
    if site is None or not site.has_payload:
        return {}
    index = site.payload_index
    bits = to_float64(sound_bits(site, index), site.meta.torch_dtype)
    frames = capture.rows["frame"][np.asarray(site.rows)[index]]
    return dict(zip(frames.tolist(), bits, strict=True))


class _Calls:
    """Counts by row; what rows of one call share is added up once."""

    def __init__(
        self, comparison: Comparison, chosen: int, site: str, tables: list[dict[int, F64]], facts: RowFacts
    ) -> None:
        self.comparison, self.site, self.tables, self.facts = comparison, site, tables, facts
        space = comparison.space
        bits = comparison.where(chosen).bits
        self.rows = np.flatnonzero(bits & ~space.label[space.key])
        self.chosen_site = chosen
        self.known: dict[int, F64] = {}

    def of(self, rows: Ints) -> CallCounts | None:
        """Counts of the calls of some rows; None where a call's are not there."""
        space, ordinal = self.comparison.space, self.facts.ordinal
        engine = np.isin(space.phase[rows], (Phase.PREFILL, Phase.DECODE))
        width = max((len(v) for table in self.tables for v in table.values()), default=0)
        counted, chosen = np.zeros((len(rows), width)), np.zeros((len(rows), width))
        for i in np.flatnonzero(engine).tolist():
            row = int(rows[i])
            total = self.tables[int(space.side[row])].get(int(space.frame[row]))
            own = self._chosen(row)
            if total is None or own is None:
                return None
            counted[i], chosen[i] = total, own
        padding = ordinal["padding rows in call"][rows]
        slots = ordinal["rows in call"][rows]
        return CallCounts(self.site, counted, chosen, slots - padding, slots, engine)

    def _chosen(self, row: int) -> F64 | None:
        call = int(self.facts.call[row])
        if call not in self.known:
            mine = self.rows[self.facts.call[self.rows] == call]
            found = values(self.comparison, self.chosen_site, mine)
            if found is None:
                return None
            self.known[call] = np.asarray((found != 0).sum(axis=0), np.float64)
        return self.known[call]
