"""The first divergence of an edge, put into a record and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.edges import named_row
from zkl_debug.diff.first import EdgeFirst, neighbours
from zkl_debug.diff.kinds import Inputs
from zkl_debug.diff.model import Kind, Stats
from zkl_debug.diff.rules import rule_of
from zkl_debug.diff.stats import site_stats
from zkl_debug.schema import Json, Phase, SiteName

_LISTED = 20


@dataclass(frozen=True)
class First:
    """The first divergence of one edge.

    Attributes:
        site: canonical name; ``name`` holds its parts.
        phase: phase of the right row of the pair (the later one of a phase edge).
        step, sample, position, token: the row, as A names it where A has it.
        kind: what it says of the operator.
        inputs: ``equal``, ``differ``, ``partly captured`` or ``not captured``; ``port`` for an input port.
        stats: of this row alone.
        rows: the two rows of the pair: side, frame, sample, phase, row of the capture.
        last_equal: nearest site before it that was compared and is equal.
        between: sites between the two that were not compared, ``how`` they are there in brackets.
        differ: dtype or width, where they differ between the sides.
        made_of: for an input port, the sites that alone make its value, such as the two sides of an activation.
    """

    site: str
    name: SiteName
    phase: str
    step: int
    sample: int
    position: int
    token: int
    kind: Kind
    inputs: str
    stats: Stats
    rows: Mapping[str, Json]
    last_equal: str | None
    between: tuple[str, ...]
    differ: str
    made_of: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """The ``first`` object of the verdict document."""
        return {
            "site": self.site,
            "layer": self.name.layer,
            "module": self.name.module,
            "operator": self.name.operator,
            "port": self.name.port,
            "phase": self.phase,
            "step": self.step,
            "sample": self.sample,
            "position": self.position,
            "token": self.token,
            "kind": self.kind.label,
            "max_ulp": self.stats.max_ulp,
            "max_abs": self.stats.max_abs,
            "mismatched_elements": self.stats.mismatched_elements,
            "elements": self.stats.elements,
            "first_element": self.stats.first_element,
            "inputs": self.inputs,
            "differ": self.differ,
            "rows": dict(self.rows),
            "last_equal": self.last_equal,
            "between": list(self.between[:_LISTED]),
            "between_count": len(self.between),
            "made_of": list(self.made_of),
            "text": self.text,
        }

    @property
    def text(self) -> str:
        """What may be said of it, and no more."""
        subject = f"the input of {self.name.owner}" if self.inputs == "port" else self.site
        return f"{subject} differs at sample {self.sample} position {self.position} ({self.phase}): {self.reason}"

    @property
    def reason(self) -> str:
        """Why it is of its kind."""
        if self.differ:
            return self.differ
        if self.inputs == "port":
            return self._producer()
        if self.kind is Kind.UNCAPTURED_STATE:
            return "a replay from its captured inputs agrees, so something that was not captured feeds it"
        if self.kind is Kind.OWN and self.inputs == "equal" and self.made_of:
            return f"what it is made of is equal ({', '.join(self.made_of)}): the code between them differs"
        if self.kind is Kind.OWN and self.inputs == "equal":
            return "every captured input of it is equal"
        if self.kind is Kind.OWN:
            return f"its inputs are {self.inputs}, but everything before it is equal"
        if self.inputs == "differ":
            return "its inputs differ as well"
        return f"its inputs are {self.inputs}; {self._producer()}"

    def _producer(self) -> str:
        last = f"after {self.last_equal}, the last equal site" if self.last_equal else "before it"
        text = f"what produces it, {last}, was not captured on both sides"
        outputs = [name for name in self.between if ":out" in name] or list(self.between)
        return text + (f": {', '.join(outputs[:3])}" if outputs else "") + "; no operator is blamed"


def describe(comparison: Comparison, edge: str, first: EdgeFirst) -> First:
    """The record of an edge's first divergence."""
    made = comparison.flows.made_of(first.site)
    space, pairs, pair = comparison.space, comparison.pairs, comparison.sites[first.site]
    left, right = int(pairs.left[first.pair]), int(pairs.right[first.pair])
    row = int(named_row(space, pairs.left[[first.pair]], pairs.right[[first.pair]])[0])
    kinds = comparison.done[first.site]
    kind = Kind(int(kinds.kind[first.pair]))
    by_row = not bool(space.label[pairs.key[first.pair]])
    last, between = neighbours(pairs, comparison.done, edge, first, by_row)
    stats = site_stats(pair, comparison.where(first.site), space, pairs, np.array([first.pair], np.int64))
    return First(
        site=pair.name,
        name=pair.parsed,
        phase=Phase(int(space.phase[right])).name.lower(),
        step=int(space.step[row]),
        sample=int(space.sample[row]),
        position=int(space.position[row]),
        token=int(space.token[row]),
        kind=kind,
        inputs=_inputs(comparison, first, kind, bool(made)),
        made_of=tuple(comparison.sites[i].name for i in made),
        stats=stats,
        rows={"left": _row(comparison, left), "right": _row(comparison, right)},
        last_equal=None if last is None else comparison.sites[last].name,
        between=tuple(_absent(comparison, i) for i in between),
        differ=pair.differ if int(pairs.sides[first.pair]) == 2 else "",
    )


def _inputs(comparison: Comparison, first: EdgeFirst, kind: Kind, made: bool) -> str:
    if comparison.sites[first.site].parsed.is_input and not made:
        return "port"
    state = Inputs(int(comparison.done[first.site].inputs[first.pair]))
    if kind is Kind.PROPAGATED and state is Inputs.ALL:
        return "differ"
    return state.label


def _row(comparison: Comparison, row: int) -> dict[str, Json]:
    space = comparison.space
    return {
        "side": "ab"[int(space.side[row])],
        "row": int(space.row[row]),
        "frame": int(space.frame[row]),
        "sample": int(space.sample[row]),
        "phase": Phase(int(space.phase[row])).name.lower(),
    }


def _absent(comparison: Comparison, i: int) -> str:
    pair = comparison.sites[i]
    how = "not for this row" if pair.matched else f"{pair.on.upper()} only"
    return f"{pair.name} ({how})"


@dataclass(frozen=True)
class EdgeSummary:
    """One edge: distinct rows compared and differing at any site, and where first.

    ``up_to`` is the site behind which nothing was looked at: no ``first`` then says nothing of later sites. None when
    the diff went to the end.
    """

    compared: int
    mismatched: int
    first: First | None
    up_to: str | None = None

    def to_json(self) -> Json:
        """An entry of ``edges``."""
        first = None if self.first is None else self.first.to_json()
        return {"compared": self.compared, "mismatched": self.mismatched, "first": first, "up_to": self.up_to}


def edge_summaries(comparison: Comparison) -> dict[str, EdgeSummary]:
    """Every edge of the comparison."""
    up_to = None if comparison.stopped is None else comparison.sites[comparison.stopped].name
    return {
        edge: EdgeSummary(
            compared=int(np.count_nonzero(comparison.edge_compared[edge])),
            mismatched=int(np.count_nonzero(comparison.edge_mismatched[edge])),
            first=None if first is None else describe(comparison, edge, first),
            up_to=up_to,
        )
        for edge, first in comparison.firsts.items()
    }


@dataclass(frozen=True)
class Affected:
    """Rows that differ at the first site, on the edge of the verdict."""

    rows: int = 0
    of: int = 0
    samples: tuple[int, ...] = ()
    rule: Mapping[str, Any] | None = None

    def to_json(self) -> Json:
        """The ``affected`` object of the verdict document."""
        return {"rows": self.rows, "of": self.of, "samples": list(self.samples), "rule": self.rule}


def affected(comparison: Comparison) -> Affected:
    """Rows that differ at the first site of the named edge."""
    edge = comparison.edge
    first = comparison.firsts[edge] if edge is not None else None
    if edge is None or first is None:
        return Affected()
    kinds, pairs, space = comparison.done[first.site], comparison.pairs, comparison.space
    part = pairs.slices[edge]
    differing = part.start + np.flatnonzero(kinds.differs[part])
    named = named_row(space, pairs.left[differing], pairs.right[differing])
    rule = rule_of(comparison)
    return Affected(
        rows=pairs.n_rows(edge, kinds.differs, space.n_keys),
        of=pairs.n_rows(edge, kinds.present, space.n_keys),
        samples=tuple(int(sample) for sample in np.unique(space.sample[named])),
        rule=None if rule is None else rule.to_json(),
    )
