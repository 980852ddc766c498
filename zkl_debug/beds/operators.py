"""All operators of a bed that diverge on their own: generation, teacher-forced with what scoring captured."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zkl_debug.beds.attribution import Attribution, attribute
from zkl_debug.beds.bed import BedOptions
from zkl_debug.beds.record import compare_outputs, gen_outputs, train_outputs
from zkl_debug.beds.run import open_bed
from zkl_debug.errors import Refused
from zkl_debug.schema import Json, parse_site


@dataclass(frozen=True)
class Operator:
    """One site that differs although everything before it was made equal.

    Attributes:
        site: canonical name of the output.
        rows, of: differing rows and rows compared.
        sample, position, token: the first of them.
        inputs_equal: every captured input of the operator was equal in the whole pass.
    """

    site: str
    rows: int
    of: int
    sample: int
    position: int
    token: int
    inputs_equal: bool


@dataclass(frozen=True)
class OperatorScan:
    """Result of one forced pass; ``attribution`` where it was asked for and something diverges."""

    operators: tuple[Operator, ...]
    sites: int
    rows: int
    unmatched: tuple[str, ...]
    not_forced: tuple[str, ...]
    attribution: Attribution | None = None

    def to_json(self) -> Json:
        """The document of ``bisect operators --json`` without its heading."""
        return {
            "verdict": "diverged" if self.operators else "identical",
            "operators": [vars(o) | {"layer": parse_site(o.site).layer} for o in self.operators],
            "coverage": {
                "sites": self.sites,
                "rows": self.rows,
                "unmatched": list(self.unmatched),
                "not_forced": list(self.not_forced),
            },
            "attribution": None if self.attribution is None else self.attribution.to_json(),
        }


def scan_operators(
    options: BedOptions, progress: Callable[[str], None] | None = None, *, attribution: bool = False
) -> OperatorScan:
    """Capture scoring with payload, then run generation with every operator's output replaced by scoring's.

    Args:
        options: the run.
        progress: told what happens.
        attribution: also say how much of the log-prob gap each operator accounts for.

    Raises:
        Refused: when a side does not repeat, or no site could be compared.
    """
    from zkl_debug.capture.api import Capture
    from zkl_debug.capture.forcing import Forcing
    from zkl_debug.store.reader import open_capture

    say = progress or (lambda _text: None)
    with tempfile.TemporaryDirectory(prefix="zkl-operators-") as folder, open_bed(options) as context:
        say("gen: plain run (makes the tokens)")
        with context.side("gen"):
            plain = gen_outputs(context.run_gen())
            say("gen: capture")
            gen = Path(folder) / "gen"
            with Capture(context.model, gen, "gen", strict=True):
                captured = gen_outputs(context.run_gen())
            _must_repeat("gen", plain, captured)
        train = Path(folder) / "train"
        with context.side("train"):
            say("train: plain run")
            plain = train_outputs(context.run_train())
            say("train: capture with payload")
            with Capture(context.model, train, "train", level="payload", strict=True):
                scored = train_outputs(context.run_train())
            _must_repeat("train", plain, scored)
        _must_be_comparable(train, gen)
        say("gen: forced run")
        with open_capture(train) as reference:
            forcing = Forcing(reference)
            with context.side("gen"), Capture(context.model, None, "gen", strict=True, forcing=forcing):
                context.run_gen()
            scan = _summary(forcing)
            sites = [o.site for o in scan.operators if o.inputs_equal]
            if attribution and sites:
                scan = replace(scan, attribution=attribute(context, reference, sites, say))
    return scan


def _must_repeat(side: str, first: dict[str, Any], again: dict[str, Any]) -> None:
    """Refuse when two runs of a side end in other values: every operator after the random one would be blamed."""
    found = compare_outputs(first, again)
    if not found["equal"]:
        raise Refused(
            f"{side} does not repeat: {found['mismatched']} of {found['values']} final values differ between two runs",
            "two runs of the same inputs with equal outputs (no dropout, no sampling, deterministic kernels)",
            "`zkl-debug capture` and `zkl-debug diff` with the same options name the first operator that varies",
        )


def _must_be_comparable(train: Path, gen: Path) -> None:
    """Refuse what a diff of the two refuses: other tokens, positions or weights, sites that read one buffer."""
    from zkl_debug.diff import diff_captures

    refusal = diff_captures(train, gen).refusal
    if refusal is not None:
        raise Refused(refusal.text, refusal.expected, refusal.next)


def _summary(forcing: object) -> OperatorScan:
    from zkl_debug.capture.forcing import Forcing

    assert isinstance(forcing, Forcing)
    results = forcing.results
    if not results:
        raise Refused("no site of generation could be compared with scoring", "sites and rows in common")
    dirty = {parse_site(n).owner for n, r in results.items() if parse_site(n).is_input and r.mismatched}
    label = results.get("logprobs/label:out.0")
    if label is not None and label.mismatched:
        dirty.add("logprobs/selected")  # another label was looked up: its log-prob inherits that
    found = []
    for name, result in sorted(results.items(), key=lambda item: item[1].order):
        site = parse_site(name)
        if site.is_input or not result.mismatched or result.first is None:
            continue
        sample, position, token = result.first
        equal = site.owner not in dirty
        found.append(Operator(name, result.mismatched, result.compared, sample, position, token, equal))
    return OperatorScan(
        tuple(found),
        len(results),
        sum(r.compared for r in results.values()),
        tuple(sorted(forcing.unmatched)),
        tuple(sorted(n for n, r in results.items() if r.missed)),
    )
