"""The rule of a verdict: what the rows that differ at the first site have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import log2

import numpy as np

from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.facts import build_facts
from zkl_debug.diff.model import EDGE_PRIORITY, Kind
from zkl_debug.diff.rules_learn import GUARD, Rule, learn, saved_bits


def rule_of(comparison: Comparison) -> Rule | None:
    """The rule of the verdict; None when nothing differs.

    Where its edge gives none, another edge that first differs at the same site may.
    """
    edge = comparison.edge
    first = comparison.firsts[edge] if edge is not None else None
    if edge is None or first is None:
        return None
    others: dict[str, Rule] = {}
    for name in EDGE_PRIORITY:
        other = comparison.firsts.get(name)
        if name != edge and other is not None and other.site == first.site:
            found = rule_of_edge(comparison, name)
            if found is not None and found.found and found.atoms:
                others[name] = found
    rule = rule_of_edge(comparison, edge, Counter(fact for other in others.values() for fact in other.facts))
    if rule is None or rule.found:
        return rule
    strong = {name: other for name, other in others.items() if other.saved >= GUARD + log2(len(EDGE_PRIORITY))}
    return next((replace(other, text=f"on {name}: {other.text}") for name, other in strong.items()), rule)


def rule_of_edge(comparison: Comparison, edge: str, likely: Mapping[str, int] | None = None) -> Rule | None:
    """The rule of the first divergence of an edge; None when nothing differs.

    Only pairs compared at that site on that edge count, and of the differing ones those that differ on their own.

    Args:
        comparison: the finished comparison.
        edge: the edge.
        likely: facts that separate the rows of so many other edges too; told first where the data allow several.
    """
    first = comparison.firsts.get(edge)
    if first is None:
        return None
    part = comparison.pairs.slices[edge]
    codes = comparison.done[first.site].kind[part]
    own = (codes == Kind.OWN) | (codes == Kind.UNCAPTURED_STATE)
    affected = own if own.any() else codes >= Kind.PROPAGATED
    counted = (codes != Kind.ABSENT) & (affected | (codes < Kind.PROPAGATED))
    chosen = part.start + np.flatnonzero(counted)
    name = comparison.sites[first.site].parsed
    semantic = comparison.sites[first.site].meta.semantic
    table = build_facts(comparison, first.site, chosen)
    rule = learn(table, affected[counted], semantic or name.operator, likely)
    return _with_phase(comparison, edge, first.site, rule)


def _with_phase(comparison: Comparison, edge: str, site: int, rule: Rule) -> Rule:
    """Say that it is the phase, where the edge between the other two phases is equal at the same site."""
    other = {"prefill-decode": ("decode", "score-prefill"), "score-decode": ("decode", "score-prefill")}.get(edge)
    if other is None:
        return rule
    phase, edge_without = other
    kinds, pairs = comparison.done[site], comparison.pairs
    part, clean = pairs.slices[edge], pairs.slices[edge_without]
    rows = len(np.unique(pairs.key[clean][kinds.present[clean]]))
    if not rows or kinds.differs[clean].any():
        return rule
    note = f"phase {phase} ({edge_without} is equal at this site in all {rows} rows)"
    if rule.found and rule.atoms:
        return replace(rule, text=f"{note}, and there {rule.text}")
    present, differs = kinds.present[part], kinds.differs[part]
    hits, of = (len(np.unique(pairs.key[part][at])) for at in (differs, present))
    saved = saved_bits(hits, of, 0, rows) - 1 - log2(12)
    if saved < GUARD:
        return rule
    precision = float(differs.sum() / present.sum())
    return Rule(True, note, (), "", precision, 1.0, saved)
