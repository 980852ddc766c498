"""What the finished runs of a journal prove by themselves, whether or not the search came to its end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zkl_debug.errors import UsageError

_OUTCOMES = {0: "zero", 1: "mismatch", 125: "untestable"}


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        on: switches that were on.
        outcome: ``zero``, ``mismatch``, ``untestable`` or ``error``.
        wide: whether it ran the wider probe.
        purpose: what the search wanted it for.
        site: first site that differs, or empty.
        edge: edge on which it does, or empty.
        seconds: wall time.
    """

    on: frozenset[str]
    outcome: str
    wide: bool
    purpose: str
    site: str
    edge: str
    seconds: float


@dataclass(frozen=True)
class Proof:
    """What the runs say of one switch.

    Attributes:
        zero_without: some run was zero with the switch off: it is not needed in every solution.
        needed: the run with everything but this switch mismatched, while the one with everything was zero.
        site_alone: first site that differs with the switch on alone (or with fewest others), or empty.
    """

    zero_without: bool
    needed: bool
    site_alone: str


def read_runs(journal: Path) -> list[Run]:
    """The runs of a journal, in order; a last line that was cut off is left out.

    Raises:
        UsageError: the file is not a journal of ``bisect switches``.
    """
    try:
        lines = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
        if lines[0]["body"]["format"] != "zkl-bisect-journal":
            raise KeyError("format")
        return [_run(line["body"]) for line in lines[1:]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{journal} cannot be read: {error!r}", "a journal written by bisect switches") from error


def _run(body: dict[str, Any]) -> Run:
    raw = body["raw"]
    document = raw["document"] or {}
    first = document.get("first") or {}
    failed = raw["signal"] or raw["timed_out"] or raw["out_of_memory"]
    outcome = "error" if failed else _OUTCOMES.get(raw["exit_code"], "error")
    return Run(
        frozenset(body["on"]),
        outcome,
        bool(body["wide"]),
        body["purpose"],
        first.get("site") or "",
        document.get("edge") or "",
        float(raw["seconds"]),
    )


def smallest_zero(runs: Iterable[Run]) -> frozenset[str] | None:
    """The smallest configuration that was zero, or None; of several, the first in alphabetical order."""
    zero = [run.on for run in runs if run.outcome == "zero"]
    return min(zero, key=lambda on: (len(on), sorted(on)), default=None)


def proofs(runs: Iterable[Run]) -> dict[str, Proof]:
    """What the runs prove of every switch that was on in any of them, by name."""
    every = list(runs)
    zero = [run.on for run in every if run.outcome == "zero"]
    mismatch = [run for run in every if run.outcome == "mismatch"]
    top = frozenset().union(*(run.on for run in every))
    found = {}
    for name in sorted(top):
        needed = top in zero and any(run.on == top - {name} for run in mismatch)
        alone = [run for run in mismatch if name in run.on and run.site]
        site = min(alone, key=lambda run: len(run.on)).site if alone else ""
        found[name] = Proof(any(name not in on for on in zero), needed, site)
    return found
