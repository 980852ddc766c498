"""What a bisection over switches answers, as records and as one JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from zkl_debug.bisect.outcome import Outcome
from zkl_debug.errors import ExitCode

RESULT_FORMAT = "zkl-bisect"
RESULT_VERSION = 1


class Status(StrEnum):
    """How a search ended."""

    FOUND = "found"
    NOTHING = "nothing-to-explain"  # all-off is already zero
    INSUFFICIENT = "stack-insufficient"  # all-on still mismatches
    UNTESTABLE = "untestable"  # an endpoint cannot be judged
    ERROR = "error"  # an endpoint fails to run
    INCOMPLETE = "incomplete"  # a budget was reached, or a journal alone cannot answer


class Role(StrEnum):
    """What a switch turned out to be."""

    CORE = "core"  # in the minimal set, and nothing in the stack replaces it
    REPLACEABLE = "replaceable"  # one of several that do the job
    REMOVABLE = "removable"  # zero without it
    UNTESTED = "untested"  # could not be varied or judged here


@dataclass(frozen=True)
class Evidence:
    """One configuration and what it gave."""

    config: tuple[str, ...]
    outcome: Outcome
    signature: str = ""
    reason: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Witness:
    """Runs that prove an interaction between switches.

    Attributes:
        kind: ``or`` (either does the job) or ``harm`` (re-breaks unless another is on).
        switches: for ``or`` the member of the minimal set, for ``harm`` the switch that re-breaks.
        others: for ``or`` what replaces it, for ``harm`` what heals it (empty when nothing does).
    """

    kind: str
    switches: tuple[str, ...]
    others: tuple[str, ...]
    text: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class Finding:
    """The verdict on one switch.

    Attributes:
        in_minimal: whether it is in the minimal sufficient set.
        replaced_by: sets of switches each of which does the same job.
        reason: why it is untested, or what limits the claim.
        fixes: signature of the mismatch seen when it alone is taken out of the minimal set.
    """

    name: str
    role: Role
    in_minimal: bool = False
    replaced_by: tuple[tuple[str, ...], ...] = ()
    reason: str = ""
    fixes: str = ""


@dataclass(frozen=True)
class SearchResult:
    """The answer of a search.

    Attributes:
        status: how it ended; only ``found`` carries a minimal set.
        minimal: the minimal sufficient set in ladder order (held-on switches left out).
        confirmed: the minimal set passed the wider probe.
        unproven: members whose removal could not be judged, so that minimality is not proven for them.
        repeats: runs behind every "zero" (1 when the visibility is 1).
        visibility: the visibility the repeats were sized for.
        runs: runs by purpose, those the answer rests on.
        slippage: mismatches with another signature than all-off's, one per signature.
        reason: for a refusal what was seen; for an incomplete search what it needs next.
    """

    status: Status
    minimal: tuple[str, ...] = ()
    confirmed: bool = False
    findings: tuple[Finding, ...] = ()
    witnesses: tuple[Witness, ...] = ()
    slippage: tuple[Evidence, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    unproven: tuple[str, ...] = ()
    repeats: int = 1
    visibility: float = 1.0
    runs: Mapping[str, int] = field(default_factory=dict)
    signature: str = ""
    reason: str = ""
    next_steps: tuple[str, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the command that prints this result."""
        if self.status is Status.FOUND:
            return ExitCode.OK if self.confirmed else ExitCode.INCONCLUSIVE
        return ExitCode.BUDGET if self.status is Status.INCOMPLETE else ExitCode.REFUSED

    def with_role(self, role: Role) -> tuple[str, ...]:
        """Names of the switches with ``role``, in ladder order."""
        return tuple(f.name for f in self.findings if f.role is role)

    def finding(self, name: str) -> Finding:
        """The finding on switch ``name``."""
        return next(f for f in self.findings if f.name == name)

    def to_json(self) -> dict[str, Any]:
        """The document ``bisect switches --json`` prints."""
        return {
            "format": RESULT_FORMAT,
            "version": RESULT_VERSION,
            "axis": "switches",
            "status": self.status.value,
            "minimal": list(self.minimal),
            "confirmed": self.confirmed,
            "claim": {
                "sufficient": self.status is Status.FOUND,
                "one_minimal": self.status is Status.FOUND and not self.unproven,
                "repeats": self.repeats,
                "visibility": self.visibility,
            },
            "unproven": list(self.unproven),
            "switches": [_finding_json(f) for f in self.findings],
            "witnesses": [
                {
                    "kind": w.kind,
                    "switches": list(w.switches),
                    "others": list(w.others),
                    "text": w.text,
                    "evidence": [evidence_json(e) for e in w.evidence],
                }
                for w in self.witnesses
            ],
            "signature": self.signature,
            "slippage": [evidence_json(e) for e in self.slippage],
            "evidence": [evidence_json(e) for e in self.evidence],
            "runs": {**self.runs, "total": sum(self.runs.values())},
            "reason": self.reason,
            "next": list(self.next_steps),
        }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.name,
        "role": finding.role.value,
        "in_minimal": finding.in_minimal,
        "replaced_by": [list(a) for a in finding.replaced_by],
        "fixes": finding.fixes,
        "reason": finding.reason,
    }


def evidence_json(evidence: Evidence) -> dict[str, Any]:
    """One piece of evidence as a JSON object."""
    return {
        "on": list(evidence.config),
        "outcome": evidence.outcome.value,
        "signature": evidence.signature,
        "reason": evidence.reason,
        "wide": evidence.wide,
    }
