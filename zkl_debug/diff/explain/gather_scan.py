"""Evidence of a scan: inputs of every token of a row's sequence, and what the scan was given of its weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.explain.gather_chain import Chains, spread_by_position
from zkl_debug.diff.explain.gather_more import site_at, values
from zkl_debug.diff.explain.model import ScanRow
from zkl_debug.diff.model import Ints
from zkl_debug.diff.rows import call_starts
from zkl_debug.schema import Json, Phase

_INPUTS = ("x", "dt", "b", "c")
_WEIGHTS = ("a", "d", "dt_bias")


def scans(comparison: Comparison, site: int, chosen: Ints, config: Mapping[str, Json]) -> list[tuple[ScanRow, ScanRow]]:
    """Both sides of some of the chosen pairs, spread over the positions; empty where anything is missing.

    Args:
        comparison: the finished comparison.
        site: output of the scan.
        chosen: indices of the pairs.
        config: tells the number of groups.
    """
    parsed = comparison.sites[site].parsed
    names = [f"{parsed.path}/scan:in.{i}" for i in range(4)]
    names += [f"{parsed.path}/ssm_weights:out.{i}" for i in range(3)]
    found = [site_at(comparison, name) for name in names]
    places = [place for place in found if place is not None]
    if parsed.op != "scan" or len(places) != len(names) or not len(chosen):
        return []
    builder = _Builder(comparison, site, places, int(config.get("mamba_num_groups") or 1))
    pairs = [
        (builder.row(int(comparison.pairs.left[i])), builder.row(int(comparison.pairs.right[i])))
        for i in chosen[spread_by_position(comparison, chosen)].tolist()
    ]
    return [(left, right) for left, right in pairs if left is not None and right is not None]


class _Builder:
    def __init__(self, comparison: Comparison, site: int, places: list[int], groups: int) -> None:
        self.comparison, self.site, self.groups = comparison, site, groups
        self.inputs, self.weights = places[:4], places[4:]
        self.starts = call_starts(comparison.space)
        self.chains = Chains(comparison.space, np.flatnonzero(comparison.where(self.inputs[0]).bits))

    def row(self, row: int) -> ScanRow | None:
        """What one row was made of; None where something is missing."""
        chain = self.chains.of(row)
        if chain is None:
            return None
        own = np.array([row])
        parts = [values(self.comparison, place, chain) for place in self.inputs]
        weights = [values(self.comparison, place, own) for place in self.weights]
        out = values(self.comparison, self.site, own)
        if out is None or any(part is None for part in (*parts, *weights)):
            return None
        named: dict[str, F64] = {name: part for name, part in zip(_INPUTS, parts, strict=True) if part is not None}
        flat: dict[str, F64] = {name: part[0] for name, part in zip(_WEIGHTS, weights, strict=True) if part is not None}
        count, heads = len(chain), len(flat["a"])
        if named["x"].shape[1] % heads or named["b"].shape[1] % self.groups or heads % self.groups:
            return None
        return ScanRow(
            x=named["x"].reshape(count, heads, -1),
            dt=named["dt"].reshape(count, heads),
            b=named["b"].reshape(count, self.groups, -1),
            c=named["c"].reshape(count, self.groups, -1),
            a=flat["a"],
            d=flat["d"],
            dt_bias=flat["dt_bias"],
            out=out[0].reshape(heads, -1),
            starts=self._calls(row),
        )

    def _calls(self, row: int) -> tuple[int, ...]:
        """First positions of the row's call and of those before it that ran the same sequence, the latest first."""
        space = self.comparison.space
        same = (space.side == space.side[row]) & (space.sample == space.sample[row])
        same &= (space.frame <= space.frame[row]) & (space.phase == Phase.PREFILL)
        found = {int(self.starts[row]), *self.starts[same].tolist()}
        return tuple(sorted((start for start in found if 0 < start <= space.position[row]), reverse=True))
