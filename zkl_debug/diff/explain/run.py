"""All explanations of a verdict: run, ranked, the weaker ones dropped that a stronger one includes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.explain import (
    activation,
    affine,
    attention,
    collective,
    counts,
    elementwise,
    gated,
    logprob,
    moe,
    norm,
    order,
    quantised,
    recurrent,
    rope,
    rounding,
    routing_moves,
    rows,
    scan,
    weights,
)
from zkl_debug.diff.explain.buffers import buffer_differs
from zkl_debug.diff.explain.gather import evidence
from zkl_debug.diff.explain.model import Evidence, Explanation, Finding, Strength
from zkl_debug.errors import CaptureInvalid
from zkl_debug.schema import Json


@dataclass(frozen=True)
class Test:
    """One explanation.

    Attributes:
        name: of the finding it may give.
        run: the test.
        missing: evidence it cannot do without: empty when it is there.
        applies: whether it says anything about such a site.
        excludes: whether a "no" rules the mechanism out; else the values merely do not show it.
    """

    name: str
    run: Explanation
    missing: Callable[[Evidence], str]
    applies: Callable[[Evidence], bool] = lambda _e: True
    excludes: Callable[[Evidence], bool] = lambda _e: True


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
    if missing or (e.attention is not None and e.attention()):
        return missing
    return f"raw bits of its q, K and V inputs ({e.site.owner}:in, :in.1, :in.2) in every row of the sequence"


def _routing(e: Evidence) -> str:
    return "" if e.routing is not None else "raw bits of router.topk:out.1 on both sides"


def _labels(e: Evidence) -> str:
    return "" if e.parents is not None and e.parents.used is not None else "raw bits of logprobs/label:out.0"


def _scans(e: Evidence) -> str:
    missing = _bits(e)
    if missing or (e.scans is not None and e.scans()):
        return missing
    return f"raw bits of {e.site.owner}:in.0 to :in.3 of every row of the sequence"


def _states(e: Evidence) -> str:
    return "" if e.states is not None and e.states() else "the states that calls started from"


def _operator(*names: str) -> Callable[[Evidence], bool]:
    """Sites of these operators."""

    def applies(e: Evidence) -> bool:
        return any(name in (e.semantic or e.site.operator) or name in e.site.operator for name in names)

    return applies


def _is_router(e: Evidence) -> bool:
    return "router" in e.site.owner


def _fine_format(e: Evidence) -> bool:
    """Whether the site is in a format where a slightly different constant moves every element."""
    pair = e.pair()
    return pair is None or pair.left.dtype in ("float32", "float64")


def _wide(e: Evidence) -> bool:
    """More than one value a row: forms over a row mean something."""
    pair = e.pair()
    return pair is None or pair.left.bits.shape[1] > 1


#: Every explanation, the more specific first: of equal strength the earlier one is told first.
TESTS = (
    Test("quantisation-differs", quantised.quantisation, _nothing, lambda e: e.quantised is not None),
    Test("shape-change", rounding.shape_change, _nothing, lambda e: bool(e.differ)),
    Test("dtype-change", rounding.dtype_change, _nothing, lambda e: bool(e.differ)),
    Test("label-fault", logprob.label_fault, _labels, _operator("label", "selected")),
    Test("state-replaced", recurrent.handed_over, _states, _operator("scan", "conv", "state")),
    Test("stale-derived-value", recurrent.derived_value, _bits, _operator("ssm_weights")),
    Test("row-shift", rows.row_shift, _sources),
    Test("equals-other-sample", rows.equals_other_sample, _sources),
    Test("row-permutation", rows.row_permutation, _sources),
    Test("row-permutation", moe.routing_permutation, _routing, _is_router),
    Test("row-shift", routing_moves.routing_shift, _routing, _is_router),
    Test("equals-other-sample", routing_moves.routing_of_another_sample, _routing, _is_router),
    Test("not-applied", elementwise.not_applied, _input, _wide),
    Test("uninitialised", rows.uninitialised, _bits, _wide),
    Test("activation", activation.activation, activation.missing, activation.applies),
    Test("extra-rounding", rounding.extra_rounding, _bits),
    Test("signed-zero", elementwise.signed_zero, _bits, _wide),
    Test("flushed-to-zero", elementwise.flushed_to_zero, _bits, _wide),
    Test("clamped", elementwise.clamped, _bits, _wide),
    Test("soft-cap", elementwise.soft_cap, _bits, _wide),
    Test("gate-rounding-order", gated.gate_rounding_order, _input, lambda e: e.semantic == "gated"),
    Test("norm-rounding-order", norm.norm_rounding_order, _input, _operator("norm")),
    Test("eps", norm.eps_by_bits, _input, _operator("norm"), _fine_format),
    Test("eps", norm.eps, _input, _operator("norm"), _fine_format),
    Test("rope-pairing", rope.rope_pairing, _input, _operator("rope")),
    Test("position-shift", rope.position_shift, _input, _operator("rope")),
    Test("rope-frequency", rope.rope_frequency, _input, _operator("rope")),
    Test("mask-fit", attention.attention, _attention, _operator("core_attention")),
    Test("state-dropped", scan.scan_fit, _scans, _operator("scan")),
    Test("temperature", logprob.temperature, _input, _operator("log_softmax")),
    Test("softmax-support", logprob.softmax_support, _input, _operator("log_softmax")),
    Test("log-softmax-formula", logprob.log_softmax_formula, _input, _operator("log_softmax")),
    Test("routing-weights", moe.routing_weights, _input, _operator("router.topk")),
    Test("collective-order", collective.collective_order, _bits, collective.applies),
    Test("reduction-order", moe.combine_order, _input, _operator("unpermute", "combine")),
    Test("other-weights", weights.other_weights, _bits, weights.applies),
    Test("column-permutation", affine.column_permutation, _bits, _wide),
    Test("constant-ratio", affine.constant_ratio, _bits, _wide),
    Test("constant-offset", affine.constant_offset, _bits, _wide),
    Test("padding-counted", counts.padding_counted, _nothing, counts.applies),
    Test("reduction-order", order.reduction_order, _bits, order.reduces),
    Test("routing-flip", moe.routing_flip, _routing, lambda e: e.routes),
)


def explain(comparison: Comparison) -> tuple[dict[str, Json], ...]:
    """The ``explanations`` of the verdict document: what holds, strongest first; never empty when something differs."""
    if comparison.edge is None:
        return ()
    found = evidence(comparison, comparison.edge)
    if found is None:
        return ()
    findings = explain_evidence(found)
    other = buffer_differs(comparison, found)
    if other is not None:
        findings = [other, *(finding for finding in findings if finding.strength is not Strength.NOTHING)]
    return tuple(finding.to_json() for finding in findings)


def explain_evidence(e: Evidence) -> list[Finding]:
    """Findings from evidence, strongest first; an honest "not localised" where nothing says what happened."""
    findings: list[Finding] = []
    said_no: list[str] = []
    untested: dict[str, str] = {}
    failed: dict[str, Json] = {}
    for test in TESTS:
        if not test.applies(e):
            continue
        missing = test.missing(e)
        if missing:
            untested[test.name] = missing
            continue
        try:
            found = test.run(e)
        except CaptureInvalid:  # damage that a test comes upon is no matter of the test
            raise
        except Exception as error:  # a broken explanation must not cost the verdict; it is told, not hidden
            failed[test.name] = f"{type(error).__name__}: {error}"
            continue
        if found is None:
            said_no += [test.name] if test.excludes(e) else []
        else:
            findings.append(found)
    findings = _kept(findings)
    if not findings or findings[0].strength < Strength.CLASS:
        findings.insert(0, not_localised(e, said_no, untested))
    if failed:
        text = f"these tests failed themselves and say nothing: {', '.join(failed)}"
        findings.append(Finding("explanation-failed", text, failed, Strength.NOTHING))
    return findings


def _kept(findings: list[Finding]) -> list[Finding]:
    """Findings without those that a stronger, or equally strong and more specific, one says better."""
    kept = [
        finding
        for i, finding in enumerate(findings)
        if not any(
            (finding.name in other.replaces or finding.name == other.name)
            and (other.strength, -j) > (finding.strength, -i)
            for j, other in enumerate(findings)
        )
    ]
    return sorted(kept, key=lambda finding: -finding.strength)


def not_localised(e: Evidence, said_no: list[str], untested: dict[str, str]) -> Finding:
    """Nothing fits: what was ruled out, and which evidence is missing."""
    ruled_out = sorted(set(said_no))
    missing = sorted(set(untested.values()))
    evidence_: dict[str, Json] = {"ruled_out": ruled_out, "missing": missing, "rows": e.rows, "of": e.of}
    if e.out is None and not e.differ:
        # What a recurrent operator reads beside its inputs, states and weights, has sites of its own.
        wanted = f"{e.site.path}/*" if e.site.op in ("conv", "scan") else f"{e.site.owner}:*"
        text = (
            f"why is not known: no raw bits of {e.site.owner}:{e.site.port} on both sides; capture again with "
            f"--level payload --sites '{wanted}'"
        )
        if ruled_out:
            text += f"; ruled out by digest: {', '.join(ruled_out)}"
        return Finding("not-localised", text, evidence_, Strength.NOTHING)
    text = f"no mechanism fits; ruled out: {', '.join(ruled_out) or 'nothing'}"
    if missing:
        text += f"; not tested for want of {', '.join(missing[:2])}"
    return Finding("not-localised", text, evidence_, Strength.NOTHING)
