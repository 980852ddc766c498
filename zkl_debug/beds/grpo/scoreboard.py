"""Faults of the loop against their known answers: found, at the right step, with the right event and mechanism."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from zkl_debug.beds.grpo.faults_loop import LOOP_FAULTS, LoopAnswer, loop_fault
from zkl_debug.beds.grpo.options import LAYOUTS, GrpoOptions
from zkl_debug.schema import Json

COLUMNS = ("detected", "step", "kind", "event", "explanation")
_STEPS = 5

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One loop and what was said of it.

    Attributes:
        fault, layout, seed: the case; fault ``Z0`` is a clean loop.
        right: by column of :data:`COLUMNS`; a clean loop has ``detected`` only, true when nobody was blamed.
        told: step, kind, event and explanation as they were given.
        seconds: of loop and investigation.
    """

    fault: str
    layout: str
    seed: int
    right: Mapping[str, bool]
    told: Mapping[str, Json] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def all_right(self) -> bool:
        """Whether nothing was wrong."""
        return all(self.right.values())

    def to_json(self) -> dict[str, Json]:
        """All fields."""
        return {**vars(self), "right": dict(self.right), "told": dict(self.told), "seconds": round(self.seconds, 1)}


def rows(
    seeds: Sequence[int] = (0,), faults: Sequence[str] = (), say: Callable[[str], None] | None = None
) -> Iterator[Row]:
    """Run every fault in the first layout that it fits, and a clean loop in every layout.

    Args:
        seeds: of weights, prompts and sampling.
        faults: only these; all when empty.
        say: told what is being done.

    Raises:
        UsageError: a fault that does not exist.
    """
    chosen = [loop_fault(name) for name in faults] or list(LOOP_FAULTS.values())
    for seed in seeds:
        for fault in chosen:
            for layout in LAYOUTS if fault.id == "Z0" else fault.layouts[:1]:
                if say is not None:
                    say(f"{fault.id}, {layout}, seed {seed}")
                yield _row(fault.id, layout, seed)


def _row(fault: str, layout: str, seed: int) -> Row:
    from zkl_debug.beds.grpo.answer import document
    from zkl_debug.beds.grpo.drift import find_drift

    started = time.perf_counter()
    found = document(find_drift(GrpoOptions(layout=layout, fault=fault, seed=seed, steps=_STEPS)))
    answer = loop_fault(fault).answer
    return Row(fault, layout, seed, judge(answer, found), told(found), time.perf_counter() - started)


def told(found: Document) -> dict[str, Json]:
    """What a ``zkl-steps`` document says, reduced to what is judged."""
    why = found["explanations"] or (found["table"] if found["kind"] == "table" else [])
    return {
        "verdict": found["verdict"],
        "step": found["onset"]["step"],
        "kind": found["kind"],
        "event": found["event"]["name"] if found["event"] else "",
        "sequences": len(found["affected"]["sequences"]),
        "explanation": f"{why[0]['name']}: {why[0]['text']}" if why else "",
    }


def judge(answer: LoopAnswer, found: Document) -> dict[str, bool]:
    """By column whether a ``zkl-steps`` document says what it must; nothing is right of a fault that was not found."""
    if not answer.swap:
        return {"detected": found["verdict"] == "clean"}
    detected = found["verdict"] == "found"
    event = found["event"]["name"] if found["event"] else ""
    right = {
        "detected": True,
        "step": found["onset"]["step"] == answer.step,
        "kind": found["kind"] == answer.swap,
        "event": event == answer.event,
        "explanation": _explained(answer, found),
    }
    return {name: detected and value for name, value in right.items()}


def _explained(answer: LoopAnswer, found: Document) -> bool:
    """Whether the first explanation blames the right tensors, all of them, in the right way; data has none."""
    if answer.swap == "table":
        return any(finding["name"] in answer.names for finding in found["table"])
    groups = found["explanations"]
    if answer.swap == "data":
        return not groups
    if not groups:
        return False
    tensors = groups[0]["tensors"]
    named = all(any(fnmatchcase(t["path"], pattern) for pattern in answer.names) for t in tensors)
    return named and all(answer.match in t["text"] for t in tensors)


def document_of(done: Sequence[Row], seconds: float) -> dict[str, Json]:
    """The document of ``zkl-debug bench faults --loop --json``."""
    faults = [row for row in done if row.fault != "Z0"]
    clean = [row for row in done if row.fault == "Z0"]
    return {
        "format": "zkl-scoreboard-loop",
        "version": 1,
        "passed": all(row.all_right for row in done),
        "totals": {name: {"right": sum(r.right[name] for r in faults), "of": len(faults)} for name in COLUMNS},
        "clean": {"runs": len(clean), "false_blame": sum(not row.all_right for row in clean)},
        "cases": [row.to_json() for row in done],
        "seconds": round(seconds, 1),
    }
