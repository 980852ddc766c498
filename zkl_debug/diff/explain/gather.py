"""Evidence of a verdict: what the captures hold of the affected rows, in the form the explanations read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from zkl_debug.diff.compare import SiteRows, gather
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.edges import named_row
from zkl_debug.diff.explain import (
    gather_calls,
    gather_more,
    gather_quantised,
    gather_rows,
    gather_scan,
    gather_state,
)
from zkl_debug.diff.explain.model import Evidence, Port, Values
from zkl_debug.diff.facts import RowFacts, row_facts
from zkl_debug.diff.model import Ints, Kind, fact
from zkl_debug.diff.sites import SitePair
from zkl_debug.schema import Json, Phase

_ROWS = 512
_BYTES = 32 << 20
_CLEAN = 256
_SOURCES = 4096


@dataclass(frozen=True)
class Chosen:
    """The affected pairs of an edge at its first site.

    Attributes:
        comparison, edge, site: what they are of.
        affected: pairs that differ, on their own where any does; indices.
        present: pairs compared.
        read: those of ``affected`` whose raw bits are read, or none.
    """

    comparison: Comparison
    edge: str
    site: int
    affected: Ints
    present: Ints
    read: Ints

    @cached_property
    def where(self) -> SiteRows:
        """Rows of the site."""
        return self.comparison.where(self.site)

    @cached_property
    def facts(self) -> RowFacts:
        """Facts of all rows."""
        return row_facts(self.comparison)

    def rows(self, chosen: Ints) -> tuple[Ints, Ints]:
        """Left and right unified rows of pairs."""
        return self.comparison.pairs.left[chosen], self.comparison.pairs.right[chosen]


def choose(comparison: Comparison, edge: str) -> Chosen | None:
    """The affected pairs of an edge; None when nothing differs on it."""
    first = comparison.firsts.get(edge)
    if first is None:
        return None
    part = comparison.pairs.slices[edge]
    codes = comparison.done[first.site].kind[part]
    own = (codes == Kind.OWN) | (codes == Kind.UNCAPTURED_STATE)
    affected = part.start + np.flatnonzero(own if own.any() else codes >= Kind.PROPAGATED)
    present = part.start + np.flatnonzero(codes != Kind.ABSENT)
    where, pair = comparison.where(first.site), comparison.sites[first.site]
    have = affected[where.bits[comparison.pairs.left[affected]] & where.bits[comparison.pairs.right[affected]]]
    if pair.differ and len(have):
        sides = comparison.space.side[comparison.pairs.left[have]]
        have = have[(sides == sides[0]) & (comparison.pairs.sides[have] == 2)]
    width = max(1, int(np.prod(pair.meta.row_shape, dtype=np.int64)))
    most = _ROWS if width >= 4 else _SOURCES
    return Chosen(comparison, edge, first.site, affected, present, _spread(have, min(most, _BYTES // (8 * width))))


def _spread(chosen: Ints, most: int) -> Ints:
    """At most ``most`` of the pairs, evenly spaced."""
    if len(chosen) <= most:
        return chosen
    return chosen[np.linspace(0, len(chosen) - 1, max(1, most)).astype(np.int64)]


def evidence(comparison: Comparison, edge: str) -> Evidence | None:
    """Evidence of the first divergence of an edge; None when nothing differs on it."""
    chosen = choose(comparison, edge)
    if chosen is None:
        return None
    pair = comparison.sites[chosen.site]
    space = comparison.space
    looked = chosen.read if len(chosen.read) else _spread(chosen.affected, _SOURCES)
    named = named_row(space, *chosen.rows(looked))
    clean = _clean(chosen)
    clean_row = named_row(space, *chosen.rows(clean))
    sources = gather_rows.sources(chosen.comparison, chosen.edge, chosen.site, _spread(chosen.affected, _SOURCES))
    is_attention = pair.meta.semantic == "core_attention" or pair.parsed.operator.split("#")[0] == "core_attention"
    return Evidence(
        site=pair.parsed,
        semantic=pair.meta.semantic,
        names=_names(chosen, looked),
        out=port(chosen, chosen.site, chosen.read) if len(chosen.read) else None,
        sample=space.sample[named].astype(np.int64),
        position=space.position[named],
        token=space.token[named],
        inputs=_inputs(chosen, chosen.read),
        inputs_equal=bool((comparison.done[chosen.site].inputs[chosen.affected] == 0).all()),
        clean=port(chosen, chosen.site, clean) if len(clean) else None,
        clean_position=space.position[clean_row],
        clean_inputs=_clean_inputs(chosen, clean),
        rows=len(chosen.affected),
        of=len(chosen.present),
        differ=pair.differ,
        metas=_metas(pair),
        config=_config(comparison),
        sources=sources,
        attention=partial(gather_more.attention, comparison, chosen.read, pair, chosen.facts) if is_attention else None,
        routing=gather_more.routing(comparison, edge, chosen.site, chosen.facts),
        routes=any(pair.parsed.op.startswith("router.topk") for pair in comparison.sites),
        parents=gather_more.labels(comparison, chosen.site, looked, chosen.facts),
        call=_call(chosen, looked),
        quantised=gather_quantised.quantised(chosen),
        counts=gather_calls.expert_counts(comparison, chosen.site, *_on_all_edges(chosen, looked), chosen.facts),
        states=partial(gather_state.handovers, comparison, chosen.site, looked),
        scans=partial(gather_scan.scans, comparison, chosen.site, chosen.read, _config(comparison)),
    )


def port(chosen: Chosen, site: int, pairs: Ints) -> Port | None:
    """Values of a site in some pairs, None where raw bits are missing."""
    pair, where = chosen.comparison.sites[site], chosen.comparison.where(site)
    sides = [values_of(chosen.comparison, pair, where, rows) for rows in chosen.rows(pairs)]
    return None if sides[0] is None or sides[1] is None else Port(sides[0], sides[1])


def values_of(comparison: Comparison, pair: SitePair, where: SiteRows, rows: Ints) -> Values | None:
    """Values of a site at unified rows of one side; None where raw bits are missing."""
    if not len(rows) or not where.bits[rows].all():
        return None
    sides = np.unique(comparison.space.side[rows])
    if len(sides) > 1 and pair.differ:
        return None
    site = pair.b if int(sides[0]) and pair.b is not None else pair.a
    assert site is not None
    return Values(np.asarray(gather(pair, where, comparison.space, rows)), site.meta.torch_dtype, site.meta.row_shape)


def _inputs(chosen: Chosen, pairs: Ints) -> dict[str, Port]:
    """The operator's own input ports in some pairs."""
    found: dict[str, Port] = {}
    own = chosen.comparison.sites[chosen.site].parsed
    if not len(pairs):
        return found
    if own.is_input:
        # What an activation makes its value of goes by the names of what it is made of.
        made = {
            chosen.comparison.sites[i].parsed: port(chosen, i, pairs)
            for i in chosen.comparison.flows.made_of(chosen.site)
        }
        return {f"{name.operator}:{name.port}": values for name, values in made.items() if values is not None}
    for i, pair in enumerate(chosen.comparison.sites):
        if pair.parsed.owner == own.owner and pair.parsed.is_input and not pair.differ:
            values = port(chosen, i, pairs)
            if values is not None:
                found[pair.parsed.port] = values
    return found


def _clean_inputs(chosen: Chosen, clean: Ints) -> dict[str, Values]:
    found = _inputs(chosen, clean)
    return {name: values.left for name, values in found.items() if values.equal}


def _on_all_edges(chosen: Chosen, looked: Ints) -> tuple[Ints, Ints]:
    """Pairs of the site that differ on their own, those looked at first, and equal ones; of every edge."""
    codes = chosen.comparison.done[chosen.site].kind
    own = np.flatnonzero((codes == Kind.OWN) | (codes == Kind.UNCAPTURED_STATE))
    equal = np.flatnonzero((codes != Kind.ABSENT) & (codes < Kind.PROPAGATED))
    rest = np.setdiff1d(own, looked)
    return np.concatenate([looked, _spread(rest, _SOURCES)]), _spread(equal, _SOURCES)


def _clean(chosen: Chosen) -> Ints:
    """Equal pairs of the site whose raw bits are there."""
    codes = chosen.comparison.done[chosen.site].kind[chosen.present]
    equal = chosen.present[codes < Kind.PROPAGATED]
    left, right = chosen.rows(equal)
    return _spread(equal[chosen.where.bits[left] & chosen.where.bits[right]], _CLEAN)


def _names(chosen: Chosen, looked: Ints) -> tuple[str, str]:
    """``A (score)`` and ``B (prefill)``; where the pairs are of several kinds, only what all share."""
    space, edge = chosen.comparison.space, chosen.edge
    found = []
    for which, rows in enumerate(chosen.rows(looked)):
        phases = {Phase(int(code)).name.lower() for code in np.unique(space.phase[rows])}
        sides = {"AB"[int(side)] for side in np.unique(space.side[rows])}
        side = sides.pop() if len(sides) == 1 else ""
        copy = (" first copy", " other copy")[which] if edge.startswith("within") else ""
        phase = phases.pop() if len(phases) == 1 else ""
        found.append(
            f"{side}{copy} ({phase})".strip() if phase else f"{side}{copy}".strip() or ("left", "right")[which]
        )
    return found[0], found[1]


def _metas(pair: SitePair) -> Any:
    if pair.a is None or pair.b is None or not pair.differ:
        return None
    return tuple((site.meta.torch_dtype, site.meta.row_shape) for site in (pair.a, pair.b))


def _config(comparison: Comparison) -> dict[str, Json]:
    """Resolved configuration that both sides agree on, else that of A."""
    config = fact(comparison.a, "config")
    return dict(config) if isinstance(config, dict) else {}


def _call(chosen: Chosen, looked: Ints) -> dict[str, Ints]:
    padding = chosen.facts.ordinal["padding of its sequence"]
    left, right = (padding[rows] for rows in chosen.rows(looked))
    return {"padding": np.maximum(left, right)}
