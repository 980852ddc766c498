"""Scores of diagnoses against known answers: pure functions from a verdict document to right or wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from zkl_debug.beds.faults import Answer
from zkl_debug.schema import Json

#: What is scored, and the share that must be right.
GOALS: dict[str, float] = {"detected": 1.0, "site": 0.97, "kind": 0.97, "rule": 0.90, "explanation": 0.85}

Document = Mapping[str, Json]


@dataclass(frozen=True)
class Told:
    """What a verdict document says, reduced to what is scored."""

    verdict: str
    site: str = ""
    edge: str = ""
    kind: str = ""
    rule: str = ""
    explanation: str = ""
    text: str = ""


@dataclass(frozen=True)
class Score:
    """One diagnosis of one fault.

    Attributes:
        fault, bed, dtype, seed: the case.
        told: what was said; None when the case did not run to its end.
        right: by column of :data:`GOALS`; None where the answer has nothing to compare with.
        edge_right: whether the edge is the answer's; shown, without a goal of its own.
        seconds: of the case.
        failure: why it did not run to its end.
    """

    fault: str
    bed: str
    dtype: str
    seed: int
    told: Told | None
    right: Mapping[str, bool | None] = field(default_factory=dict)
    edge_right: bool | None = None
    seconds: float = 0.0
    failure: str = ""

    def to_json(self) -> dict[str, Json]:
        """An entry of ``cases``."""
        told = {} if self.told is None else vars(self.told)
        return {**vars(self), "told": told, "right": dict(self.right), "seconds": round(self.seconds, 2)}


def told(document: Document) -> Told:
    """What a ``zkl-verdict`` document says.

    A refusal's explanation is its code. An identical verdict's text names what no compared row came across.
    """
    verdict, refusal, first = document["verdict"], document.get("refusal"), document.get("first")
    if refusal:
        site = str(refusal["detail"].get("first_stochastic") or "")
        return Told(verdict, site, explanation=refusal["code"], text=refusal["text"])
    if not first:
        crossed = document["coverage"]["rows"].get("crossed", {})
        never = [name for name, count in crossed.items() if not count]
        return Told(verdict, text=f"never crossed: {', '.join(never)}" if never else "")
    rule = (document["affected"].get("rule") or {}).get("text", "")
    why = document["explanations"][0] if document["explanations"] else {"name": "", "text": ""}
    return Told(verdict, first["site"], document["edge"], first["kind"], rule, why["name"], why["text"])


def judge(answer: Answer, said: Told) -> tuple[dict[str, bool | None], bool | None]:
    """(columns of :data:`GOALS`, edge): right, wrong, or None where the answer says nothing of it.

    A site is right only when the edge's first site is one of the answer's; nothing else is right of an undetected
    fault.
    """
    detected = said.verdict == answer.verdict
    right: dict[str, bool | None] = {
        "detected": detected,
        "site": any(fnmatchcase(said.site, pattern) for pattern in answer.sites) if answer.sites else None,
        "kind": said.kind in answer.kind.split("|") if answer.kind else None,
        "rule": any(re.search(p, head(said.rule)) for p in answer.rule_says) if answer.rule_says else None,
        "explanation": _explained(answer, said) if answer.names or answer.says else None,
    }
    edge = said.edge in answer.edge.split("|") if answer.edge else None
    if not detected:
        right = {name: None if value is None else False for name, value in right.items()}
        edge = None if edge is None else False
    return right, edge


def head(rule: str) -> str:
    """A rule without the other wordings that the data cannot tell from it."""
    return rule.split("; the same rows: ")[0]


def _explained(answer: Answer, said: Told) -> bool:
    named = said.explanation in answer.names if answer.names else True
    return named and all(re.search(pattern, said.text) for pattern in answer.says)


@dataclass(frozen=True)
class Clean:
    """A run with nothing broken: what was said of it."""

    bed: str
    dtype: str
    seed: int
    verdict: str
    blamed: str = ""

    @property
    def false_blame(self) -> bool:
        """Whether anything else than *identical* was said."""
        return self.verdict != "identical"


def totals(scores: Sequence[Score]) -> dict[str, tuple[int, int]]:
    """(right, judged) by column; a case that failed counts as wrong in every column."""
    result = {}
    for name in GOALS:
        values = [False if s.told is None else s.right.get(name) for s in scores]
        judged = [value for value in values if value is not None]
        result[name] = (sum(judged), len(judged))
    return result


def within_goals(scores: Sequence[Score], clean: Iterable[Clean]) -> bool:
    """Every column at its goal, and nobody blamed on a clean run."""
    shares = {name: (right / of if of else 1.0) for name, (right, of) in totals(scores).items()}
    return all(shares[name] >= goal for name, goal in GOALS.items()) and not any(run.false_blame for run in clean)


def document(scores: Sequence[Score], clean: Sequence[Clean], seconds: float) -> dict[str, Json]:
    """The document of ``zkl-debug bench faults --json``."""
    summed = {
        name: {"right": right, "of": of, "share": round(right / of, 4) if of else None, "goal": GOALS[name]}
        for name, (right, of) in totals(scores).items()
    }
    return {
        "format": "zkl-scoreboard",
        "version": 1,
        "passed": within_goals(scores, clean),
        "totals": summed,
        "clean": {
            "runs": len(clean),
            "false_blame": sum(run.false_blame for run in clean),
            "blamed": [vars(run) for run in clean if run.false_blame],
        },
        "cases": [score.to_json() for score in scores],
        "seconds": round(seconds, 1),
    }
