"""The report as one screen of text (rich markup)."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape

from zkl_debug.logprobs.metrics import Metrics
from zkl_debug.logprobs.report import Report, first_row

_COLOUR = {"identical": "green", "diverged": "red", "refused": "yellow"}
_STEPS_SHOWN = 8


def lines(report: Report) -> Iterator[str]:
    """Lines of the report with rich markup."""
    a, b = report.sides
    colour = _COLOUR[report.verdict]
    total = report.total
    yield (
        f"[bold {colour}]{report.verdict.upper()}[/]  {a} vs {b}: {total.exact} of {total.tokens} valid tokens "
        f"bit-equal ({report.equality}), {total.sequences} sequences, {len(report.per_step)} step(s)"
    )
    if report.reason:
        yield f"  {escape(report.reason)}"
    yield from _coverage(report)
    yield ""
    yield from _metrics(report)
    if report.onset is not None:
        yield ""
        yield from _where(report)
    if report.findings or report.limits:
        yield ""
        yield "[bold]why[/]"
    for finding in report.findings:
        entry = finding.to_json(report.view.differs)["evidence"]
        share = f" \\[{entry['explains']}/{entry['of']} rows]" if entry["of"] else ""
        tag = " (benign)" if finding.is_benign else ""
        yield f"  [bold]{finding.name}[/]{tag}{share}: {escape(finding.text)}"
        if finding.proof:
            yield f"      to confirm: {escape(finding.proof)}"
    for limit in report.limits:
        yield f"  not shown by this table: {escape(limit)}"
    if report.next:
        yield ""
        yield "[bold]next[/]"
        yield from (f"  {escape(step)}" for step in report.next)


def _coverage(report: Report) -> Iterator[str]:
    if report.masked:
        yield f"  masked by the loss and not part of the verdict: {report.masked} rows ({report.masked_differ} differ)"
    for skip in report.skipped:
        mark = "[yellow]damaged[/]" if skip.damage else "not compared"
        yield f"  {mark}: {skip.count} {escape(skip.what)}: {escape(skip.reason)}"
    for note in (*report.notes, *report.total.notes):
        yield f"  note: {escape(note)}"


def _metrics(report: Report) -> Iterator[str]:
    total = report.total
    yield "[bold]metrics[/] (NeMo-RL's formulas, float32)"
    yield (
        f"  token_mult_prob_error {_g(total.token_mult_prob_error)}   gen_kl_error {_g(total.gen_kl_error)} (k1 "
        f"{_g(total.gen_kl_k1)}, k2 {_g(total.gen_kl_k2)})   policy_kl_error {_g(total.policy_kl_error)}"
    )
    ratio = "not in this file" if total.probs_ratio_min is None else _span(total.probs_ratio_min, total.probs_ratio_max)
    yield (
        f"  js_divergence_error {_g(total.js_divergence_error)}   sampling_importance_ratio "
        f"{_g(total.sampling_importance_ratio)}   probs_ratio min..max {ratio}"
    )
    yield (
        f"  max |d| {_g(total.max_abs)}   seq_mult_prob_error max {_g(total.max_seq_mult_prob_error)} mean "
        f"{_g(total.mean_seq_mult_prob_error)} min {_g(total.min_seq_mult_prob_error)}"
    )
    if len(report.per_step) > 1:
        yield "  step  tokens  bit-equal  token_mult_prob_error  gen_kl_error  max |d|"
        yield from (_step(step, metrics) for step, metrics in _shown(report))
        hidden = len(report.per_step) - len(_shown(report))
        if hidden:
            yield f"  ... {hidden} more steps (--json has all)"


def _shown(report: Report) -> list[tuple[int, Metrics]]:
    """The steps round the onset, then the worst ones, in order."""
    steps = list(report.per_step)
    if len(steps) <= _STEPS_SHOWN or report.onset is None:
        return steps[:_STEPS_SHOWN]
    at = next(i for i, (step, _) in enumerate(steps) if step == report.onset.step)
    keep = set(range(max(at - 2, 0), min(at + 3, len(steps))))
    worst = sorted(range(len(steps)), key=lambda i: (steps[i][1].exact - steps[i][1].tokens, i))
    for i in worst:
        if len(keep) >= _STEPS_SHOWN:
            break
        keep.add(i)
    return [steps[i] for i in sorted(keep)]


def _step(step: int, metrics: Metrics) -> str:
    equal = "all" if metrics.exact == metrics.tokens else f"{metrics.exact}"
    return (
        f"  {step:>4}  {metrics.tokens:>6}  {equal:>9}  {_g(metrics.token_mult_prob_error):>21}  "
        f"{_g(metrics.gen_kl_error):>12}  {_g(metrics.max_abs)}"
    )


def _where(report: Report) -> Iterator[str]:
    onset, affected = report.onset, report.affected
    assert onset is not None
    before = (
        f"the {onset.clean_before} step(s) before it are bit-exact" if onset.clean_before else "no clean step before it"
    )
    after = f"; clean again at {', '.join(map(str, onset.clean_after[:6]))}" if onset.clean_after else ""
    yield "[bold]where[/]"
    yield f"  onset: step {onset.step} ({before}){after}"
    first = first_row(report.view)
    a, b = report.sides
    yield (
        f"  first: step {first['step']}, sample {first['sample']}, position {first['position']}: {a} "
        f"{first[a]:.9g}, {b} {first[b]:.9g}"
    )
    low, high = affected.per_sequence
    count = str(low) if low == high else f"{low}..{high}"
    each = "exactly one position in each" if low == high == 1 else f"{count} positions in each"
    yield (
        f"  affected: {affected.rows} of {affected.of} rows in {affected.sequences} of {affected.of_sequences} "
        f"sequences, {each} (samples {_samples(affected.samples)})"
    )
    rule = affected.rule
    if rule is None:
        yield "  rule: none found"
        return
    grade = "exact" if rule.is_exact else f"precision {rule.precision:.2f}, recall {rule.recall:.2f}"
    also = f"; as exact: {'; '.join(rule.also)}" if rule.also else ""
    yield f"  rule: {escape(rule.text)} ({grade}){escape(also)}"


def _samples(samples: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, samples[:8]))
    return shown if len(samples) <= 8 else f"{shown} and {len(samples) - 8} more"


def _span(low: float, high: float | None) -> str:
    return f"{_g(low)}..{_g(high if high is not None else low)}"


def _g(value: float) -> str:
    return f"{value:.6g}"
