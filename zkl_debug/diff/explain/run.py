"""All explanations of a verdict: run, ranked, the weaker ones dropped that a stronger one includes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.explain import affine, attention, logprob, moe, norm, order, rope, rounding, rows, weights
from zkl_debug.diff.explain.gather import evidence
from zkl_debug.diff.explain.model import Evidence, Explanation, Finding, Strength
from zkl_debug.schema import Json


@dataclass(frozen=True)
class Test:
    """One explanation: its name, the test, and what evidence it cannot do without (empty when it is there)."""

    name: str
    run: Explanation
    missing: Callable[[Evidence], str]


def _nothing(_e: Evidence) -> str:
    return ""


def _bits(e: Evidence) -> str:
    return "" if e.pair() is not None else f"raw bits of {e.site.owner}:{e.site.port} on both sides"


def _input(e: Evidence) -> str:
    missing = _bits(e)
    if missing or e.equal_input() is not None:
        return missing
    return f"raw bits of {e.site.owner}:in, equal on both sides"


def _sources(e: Evidence) -> str:
    return "" if e.sources is not None else "digests of the site"


def _attention(e: Evidence) -> str:
    missing = _bits(e)
    if missing or e.attention is None:
        return missing or "not an attention"
    return "" if e.attention() else f"raw bits of {e.site.owner}:in, :in.1 and :in.2 of every row of the sequence"


def _routing(e: Evidence) -> str:
    return "" if e.routing is not None else "raw bits of router.topk:out.1 on both sides"


def _labels(e: Evidence) -> str:
    return "" if e.parents is not None and e.parents.used is not None else "raw bits of logprobs/label:out.0"


#: Every explanation, the more specific first: of equal strength the earlier one is told first.
TESTS = (
    Test("shape-change", rounding.shape_change, _nothing),
    Test("dtype-change", rounding.dtype_change, _nothing),
    Test("label-fault", logprob.label_fault, _labels),
    Test("row-shift", rows.row_shift, _sources),
    Test("equals-other-sample", rows.equals_other_sample, _sources),
    Test("row-permutation", rows.row_permutation, _sources),
    Test("row-permutation", moe.routing_permutation, _routing),
    Test("uninitialised", rows.uninitialised, _bits),
    Test("extra-rounding", rounding.extra_rounding, _bits),
    Test("norm-rounding-order", norm.norm_rounding_order, _input),
    Test("eps", norm.eps, _input),
    Test("rope-pairing", rope.rope_pairing, _input),
    Test("position-shift", rope.position_shift, _input),
    Test("rope-frequency", rope.rope_frequency, _input),
    Test("mask-fit", attention.attention, _attention),
    Test("temperature", logprob.temperature, _input),
    Test("softmax-support", logprob.softmax_support, _input),
    Test("log-softmax-formula", logprob.log_softmax_formula, _input),
    Test("routing-weights", moe.routing_weights, _input),
    Test("combine-order", moe.combine_order, _input),
    Test("other-weights", weights.other_weights, _bits),
    Test("column-permutation", affine.column_permutation, _bits),
    Test("constant-ratio", affine.constant_ratio, _bits),
    Test("constant-offset", affine.constant_offset, _bits),
    Test("reduction-order", order.reduction_order, _bits),
    Test("routing-flip", moe.routing_flip, _routing),
)


def explain(comparison: Comparison) -> tuple[dict[str, Json], ...]:
    """The ``explanations`` of the verdict document: what holds, strongest first; never empty when something differs."""
    if comparison.edge is None:
        return ()
    found = evidence(comparison, comparison.edge)
    return () if found is None else tuple(finding.to_json() for finding in explain_evidence(found))


def explain_evidence(e: Evidence) -> list[Finding]:
    """Findings from evidence, strongest first; an honest "not localised" where nothing says what happened."""
    findings: list[Finding] = []
    said_no: list[str] = []
    untested: dict[str, str] = {}
    for test in TESTS:
        missing = test.missing(e)
        if missing:
            untested[test.name] = missing
            continue
        found = test.run(e)
        if found is None:
            said_no.append(test.name)
        else:
            findings.append(found)
    findings = _kept(findings)
    if not findings or findings[0].strength < Strength.CLASS:
        findings.insert(0, not_localised(e, said_no, untested))
    return findings


def _kept(findings: list[Finding]) -> list[Finding]:
    """Findings without those that a stronger, or equally strong and more specific, one says better."""
    kept = [
        finding
        for i, finding in enumerate(findings)
        if not any(
            finding.name in other.replaces and (other.strength, -j) > (finding.strength, -i)
            for j, other in enumerate(findings)
        )
    ]
    return sorted(kept, key=lambda finding: -finding.strength)


def not_localised(e: Evidence, said_no: list[str], untested: dict[str, str]) -> Finding:
    """Nothing fits: what was ruled out, and which evidence is missing."""
    ruled_out = sorted(set(said_no))
    missing = sorted({text for text in untested.values() if text != "not an attention"})
    evidence_: dict[str, Json] = {"ruled_out": ruled_out, "missing": missing, "rows": e.rows, "of": e.of}
    if e.out is None and not e.differ:
        text = (
            f"why is not known: no raw bits of {e.site.owner}:{e.site.port} on both sides; capture again with "
            f"--level payload --sites '{e.site.owner}:*'"
        )
        if ruled_out:
            text += f"; ruled out by digest: {', '.join(ruled_out)}"
        return Finding("not-localised", text, evidence_, Strength.NOTHING)
    text = f"no mechanism fits; ruled out: {', '.join(ruled_out) or 'nothing'}"
    if missing:
        text += f"; not tested for want of {', '.join(missing[:2])}"
    return Finding("not-localised", text, evidence_, Strength.NOTHING)
