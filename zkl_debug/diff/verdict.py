"""The answer of a diff: one record, its JSON document and its exit code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.answer import Affected, EdgeSummary, First
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.coverage import Coverage
from zkl_debug.diff.masked import Masked, masked
from zkl_debug.diff.model import MAIN_EDGES, Outcome, Refusal
from zkl_debug.diff.tables import row_table, site_table
from zkl_debug.errors import ExitCode, UsageError
from zkl_debug.schema import Json

_EXIT = {
    Outcome.IDENTICAL: ExitCode.OK,
    Outcome.DIVERGED: ExitCode.DIVERGED,
    Outcome.REFUSED: ExitCode.REFUSED,
    Outcome.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
}


@dataclass(frozen=True)
class Claim:
    """How strong the verdict is.

    Attributes:
        equality: ``digest`` or ``bytes`` (raw bytes were compared for every compared row of every site).
        scope: ``all-sites`` when every site of both sides was compared, ``up-to-first`` when what lies behind the first
            site that differs was not looked at, else ``captured-sites``.
        repeats: runs of each side known to agree (1 when a side was not run twice).
    """

    equality: str = "digest"
    scope: str = "captured-sites"
    repeats: int = 1

    def to_json(self) -> Json:
        """The ``claim`` object of the verdict document."""
        return {"equality": self.equality, "scope": self.scope, "repeats": self.repeats}


@dataclass(frozen=True)
class Verdict:
    """What a diff found.

    Attributes:
        outcome: identical, diverged, refused or inconclusive.
        claim, coverage: how much that says.
        edge, first: the edge to name and its first divergence; None unless diverged.
        affected: rows that differ at the first site.
        edges: every edge of the comparison.
        explanations: closed forms; none yet.
        next: commands to run next.
        refusal: why nothing was compared, for refused and inconclusive.
        checks: what was checked before comparing, and the result.
        certification: self-repeat and probe tests of each side (``a``, ``b``).
        partial: incomplete captures were allowed.
        replay: what calling the first operator again said; None when it was not called.
        referee: which side of the first operator is wrong by a float64 replay; None when it was not asked.
        comparison: the details; None when refused before comparing.
    """

    outcome: Outcome
    claim: Claim = Claim()
    coverage: Coverage = field(default_factory=Coverage)
    edge: str | None = None
    first: First | None = None
    affected: Affected = field(default_factory=Affected)
    edges: Mapping[str, EdgeSummary] = field(default_factory=dict)
    explanations: tuple[Mapping[str, Json], ...] = ()
    next: tuple[str, ...] = ()
    refusal: Refusal | None = None
    checks: Mapping[str, Json] = field(default_factory=dict)
    certification: Mapping[str, Mapping[str, bool | None]] = field(default_factory=dict)
    partial: bool = False
    replay: Json | None = None
    referee: Json | None = None
    comparison: Comparison | None = field(default=None, repr=False, compare=False)

    @property
    def verdict(self) -> str:
        """The outcome as a word."""
        return str(self.outcome)

    @property
    def exit_code(self) -> ExitCode:
        """Process exit code: 0 identical, 1 diverged, 3 refused, 4 inconclusive, 5 identical over a part alone."""
        part = self.outcome is Outcome.IDENTICAL and self.incomplete
        return ExitCode.BUDGET if part else _EXIT[self.outcome]

    @property
    def incomplete(self) -> bool:
        """Whether an incomplete capture was compared: what it lost may differ."""
        return self.partial and any(skip.what.startswith("lost") for skip in self.coverage.skipped)

    @property
    def by_rows(self) -> bool:
        """Whether the first divergence is one of rows at a site, so that an operator can be looked into."""
        return self.first is not None and self.comparison is not None and self.comparison.edge is not None

    @cached_property
    def site_table(self) -> NDArray[Any]:
        """One row per site and edge: see :func:`zkl_debug.diff.tables.site_table`. Empty when refused."""
        return site_table(self._details())

    @cached_property
    def site_counts(self) -> NDArray[Any]:
        """The site table without statistics of elements: cheap, reads no payload."""
        return site_table(self._details(), stats=False)

    @cached_property
    def masked(self) -> Masked:
        """What became of the divergence in later rounding."""
        return masked(self.site_counts, self.edge)

    def row_table(self, site: str, edge: str | None = None, limit: int | None = None) -> NDArray[Any]:
        """One row per compared pair of a site: see :func:`zkl_debug.diff.tables.row_table`."""
        return row_table(self._details(), site, edge, limit)

    def _details(self) -> Comparison:
        if self.comparison is None:
            reason = self.refusal.text if self.refusal is not None else "nothing was compared"
            raise UsageError(f"the captures were not compared: {reason}", "a verdict with a comparison")
        return self.comparison

    def to_json(self) -> Json:
        """The verdict document (format ``zkl-verdict``, version 1)."""
        return {
            "format": "zkl-verdict",
            "version": 1,
            "verdict": str(self.outcome),
            "claim": self.claim.to_json(),
            "coverage": self.coverage.to_json(),
            "edge": self.edge,
            "first": None if self.first is None else self.first.to_json(),
            "affected": self.affected.to_json(),
            "explanations": [dict(entry) for entry in self.explanations],
            "next": list(self.next),
            "refusal": None if self.refusal is None else self.refusal.to_json(),
            "edges": {name: edge.to_json() for name, edge in self.edges.items()},
            "sites": [] if self.comparison is None else divergent_sites(self.site_table),
            "checks": dict(self.checks),
            "certification": {side: dict(tests) for side, tests in self.certification.items()},
            "partial": self.partial,
            "masked": None if self.comparison is None else self.masked.to_json(),
            "replay": self.replay,
            "referee": self.referee,
        }


def divergent_sites(table: NDArray[Any]) -> list[Json]:
    """Rows of a site table where something differs or is masked, as JSON objects in execution order."""
    chosen = table[(table["mismatched"] > 0) | (table["masked"] > 0)]
    names = table.dtype.names or ()
    records = []
    for row in chosen:
        record = {name: row[name].item() for name in names}
        for name in ("max_ulp", "mismatched_elements", "elements"):
            record[name] = None if record[name] < 0 else record[name]
        record["max_abs"] = None if np.isnan(record["max_abs"]) else record["max_abs"]
        records.append(record)
    return records


def refused(refusal: Refusal, **known: Any) -> Verdict:
    """The verdict of a refusal."""
    outcome = Outcome.INCONCLUSIVE if refusal.inconclusive else Outcome.REFUSED
    empty = {name: EdgeSummary(0, 0, None) for name in MAIN_EDGES}
    hints = (refusal.next,) if refusal.next else ()
    return Verdict(outcome, edges=empty, next=hints, refusal=refusal, **known)
