"""Differences without a place: fp32 rounding, numerics on every row, values that are no log-probs, a side that does not
agree with itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.logprobs.finding import Finding, ulp32
from zkl_debug.logprobs.table import F32, I64, Bools, LogprobTable, bits
from zkl_debug.logprobs.view import View
from zkl_debug.schema import Json

#: Rounding class: at most this many fp32 ulp ...
ROUNDING_ULP = 4.0
#: ... of the log-prob, or of a logit this large: log_softmax subtracts two numbers of the size of the logits.
LOGIT_SCALE = np.float32(16.0)
_MIN_ROWS = 16
_THROUGHOUT = 0.9  # share of rows that differ
_SMALL = 0.5  # nats: numerics do not move a log-prob further on average
_CORRELATED = 0.98
_TREND_SIGMA = 4.0  # numerics do not depend on the log-prob itself; a temperature does
_TEMPERATURE_TREND = 0.8
_ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))


def is_rounding(view: View) -> Bools:
    """Rows that differ by at most :data:`ROUNDING_ULP` fp32 ulp at the scale of the logits; equal rows too."""
    scale = ulp32(view.a, view.b, np.full(len(view), LOGIT_SCALE, np.float32))
    return np.asarray(view.gap <= ROUNDING_ULP * scale)


def rounding(view: View) -> Finding | None:
    """All differences are a few fp32 ulp: another log-softmax formula, or another order of an fp32 reduction."""
    if not view.differs.any() or not is_rounding(view).all():
        return None
    rows = view.differs
    own = view.gap[rows] / ulp32(view.a[rows], view.b[rows])
    return Finding(
        "fp32-rounding",
        f"every difference is within {ROUNDING_ULP:g} fp32 ulp at the scale of the logits (largest "
        f"{float(view.gap.max()):.2g}): what another log-softmax formula or fp32 reduction order gives; benign if the "
        "logits are equal",
        {"max_abs": float(view.gap.max()), "max_ulp_of_value": float(own.max()), "share": float(rows.mean())},
        rows,
        is_benign=True,
        proof="compare output_layer:out: equal logits leave only the log-softmax formula",
        capture=("output_layer:out", "logprobs/*"),
    )


def throughout(view: View, gross: Bools) -> Finding | None:
    """Nearly all rows differ: small, two-sided and correlated (numerics), or not (different inputs or weights)."""
    rows = ~gross & np.isfinite(view.delta)
    delta = view.delta[rows & view.differs]
    if delta.shape[0] < _MIN_ROWS or is_rounding(view)[rows].all():
        return None
    is_everywhere = float(view.differs[rows].mean()) >= _THROUGHOUT
    balance = float((delta > 0).mean())
    is_balanced = abs(balance - 0.5) <= 2.0 / np.sqrt(delta.shape[0])
    correlation = _correlation(view.a[rows], view.b[rows])
    level = (view.a[rows & view.differs].astype(np.float64) + view.b[rows & view.differs]) / 2
    trend = _correlation(delta, level)
    has_trend = abs(trend) > _TREND_SIGMA / np.sqrt(delta.shape[0])
    evidence: dict[str, Json] = {
        "share": float(view.differs[rows].mean()),
        "median_abs": float(np.median(np.abs(delta))),
        "max_abs": float(np.abs(delta).max()),
        "positive_share": balance,
        "correlation": correlation,
        "trend": trend,
    }
    explained = np.asarray(rows & view.differs)
    if is_balanced and not has_trend and float(np.abs(delta).mean()) < _SMALL and correlation > _CORRELATED:
        if not is_everywhere:
            return _scattered(evidence, explained)
        text = (
            f"numerics on every row: median |d| {evidence['median_abs']:.2g}, both signs "
            f"({100 * balance:.0f} % positive), no place stands out: other kernels, precision or reduction order"
        )
        proof = (
            "run each side twice first (dropout left on or a kernel that does not repeat looks the same), then capture "
            "both sides: layer and operator cannot be read off log-probs"
        )
        return Finding("numerics-throughout", text, evidence, explained, proof=proof)
    if not is_everywhere:
        return None
    if abs(trend) >= _TEMPERATURE_TREND:
        return _temperature_like(view, trend, evidence, explained)
    text = (
        f"all rows differ (median |d| {evidence['median_abs']:.2g}, {100 * balance:.0f} % positive, correlation "
        f"{correlation:.3f}): other weights, other inputs, dropout, or a mixture of causes"
    )
    proof = "digest the weights and the inputs on both sides, and run each side twice, before any layer is blamed"
    return Finding("all-rows-differ", text, evidence, explained, proof=proof)


def _scattered(evidence: dict[str, Json], rows: Bools) -> Finding:
    """Numerics that leave many rows bit-equal, so that the rows themselves are the clue."""
    return Finding(
        "numerics-scattered",
        f"{100 * float(evidence['share']):.0f} % of the rows differ, by little (median |d| "
        f"{evidence['median_abs']:.2g}) and in both directions, the rest is bit-equal: a reduction whose order depends "
        "on the call (batch shape, chunk, padding), or an extra rounding",
        evidence,
        rows,
        proof="capture both sides at digest level: the first operator that differs on these rows and not on the others",
    )


def _temperature_like(view: View, trend: float, evidence: dict[str, Json], rows: Bools) -> Finding:
    """The difference is a function of the log-prob itself: unlikely tokens move one way, likely ones the other."""
    sharper = view.sides[1] if trend < 0 else view.sides[0]
    return Finding(
        "temperature-like",
        f"all rows differ and the difference follows the log-prob itself (correlation {trend:+.2f}): the distribution "
        f"of {sharper} is sharper, as with a lower temperature or scaled logits; the value needs logits",
        {**evidence, "sharper": sharper},
        rows,
        proof="fit one T to output_layer:out of both sides: it must explain every row",
        capture=("output_layer:out", "logprobs/*"),
    )


def not_finite(view: View) -> list[Finding]:
    """NaN, infinities and positive values, which are no log-probs of a token that was sampled."""
    found = []
    for name, text, test in (
        ("not-a-number", "NaN", np.isnan),
        (
            "minus-infinity",
            "-inf (probability 0: the token is outside this side's top-k / top-p or vocabulary)",
            np.isneginf,
        ),
        ("above-zero", "a log-prob above 0, which no probability has", _above_zero),
    ):
        at = [np.asarray(test(values), np.bool_) for values in (view.a, view.b)]
        if not (at[0].any() or at[1].any()):
            continue
        counts = {side: int(rows.sum()) for side, rows in zip(view.sides, at, strict=True)}
        where = " and ".join(f"{count} row(s) of {side}" for side, count in counts.items() if count)
        found.append(Finding(name, f"{where} hold {text}", {"rows": counts}, at[0] | at[1], proof=_PROOF[name]))
    return found


_PROOF = {
    "not-a-number": "equal NaN bits are still no log-prob: find where the NaN comes from before comparing",
    "minus-infinity": "score raw log-probs: temperature 1, top_p 1, top_k off, logprobs_mode raw_logprobs",
    "above-zero": "a log-prob is at most 0: this column holds something else, or a sentinel",
}


@dataclass(frozen=True)
class SelfCheck:
    """Whether each side gives equal values to tokens with equal prefixes (step by step, since weights change).

    Attributes:
        groups: prefixes that occur in more than one sequence.
        differing: per side, how many of those hold more than one value.
        first: per side, the first such group as (step, sample, other sample, position).
    """

    groups: int
    differing: tuple[int, int]
    first: tuple[tuple[int, int, int, int] | None, tuple[int, int, int, int] | None]


def self_check(table: LogprobTable) -> SelfCheck:
    """Compare rows of one side whose token prefixes are equal; masked prompt rows count, padding behind does not."""
    assert table.train is not None
    known = table.prefix.any(axis=1) & (table.position <= _last_valid(table))
    part = table.select(known)
    assert part.train is not None
    # Sorted by a mix of the key; rows are one group only if the whole key is equal. The position belongs to the key,
    # because token 0 adds nothing to a digest.
    mix = part.prefix[:, 0] + part.step.astype(np.uint64) * _ODD[0] + part.position.astype(np.uint64) * _ODD[1]
    order = np.argsort(mix, kind="stable")
    step, position, prefix = part.step[order], part.position[order], part.prefix[order]
    new = np.ones(order.shape[0], np.bool_)
    new[1:] = (step[1:] != step[:-1]) | (position[1:] != position[:-1]) | (prefix[1:] != prefix[:-1]).any(axis=1)
    group = np.cumsum(new, dtype=np.int64) - 1
    shared = np.bincount(group, minlength=1)[group] > 1 if group.shape[0] else np.zeros(0, np.bool_)
    groups = int(np.unique(group[shared]).shape[0])
    results = [_disagreement(part, order, group, new, side) for side in (part.gen, part.train)]
    return SelfCheck(groups, (results[0][0], results[1][0]), (results[0][1], results[1][1]))


def self_finding(check: SelfCheck, sides: tuple[str, str]) -> Finding | None:
    """The finding of :func:`self_check`, None when no side disagrees with itself."""
    bad = [i for i in (0, 1) if check.differing[i]]
    if not bad:
        return None
    named = " and ".join(sides[i] for i in bad)
    first = check.first[bad[0]]
    assert first is not None
    step, one, other, position = first
    return Finding(
        "disagrees-with-itself",
        f"{named} gives different log-probs to equal token prefixes (step {step}, samples {one} and {other}, position "
        f"{position}): batch variance, dropout or stale state on that side alone, whatever the other side does",
        {"shared_prefixes": check.groups, "differing": dict(zip(sides, check.differing, strict=True))},
        proof=f"repeat {named} alone, with the same batch and with other neighbours",
    )


def _disagreement(
    part: LogprobTable, order: I64, group: I64, new: Bools, values: F32
) -> tuple[int, tuple[int, int, int, int] | None]:
    raw = bits(values)[order]
    head = raw[np.flatnonzero(new)][group] if group.shape[0] else raw
    other = np.flatnonzero(raw != head)
    if other.shape[0] == 0:
        return 0, None
    at = other[np.lexsort((part.position[order][other], part.step[order][other]))[0]]
    start = int(np.flatnonzero(group == group[at])[0])
    row, mate = int(order[at]), int(order[start])
    where = (int(part.step[row]), int(part.sample[mate]), int(part.sample[row]), int(part.position[row]))
    return int(np.unique(group[other]).shape[0]), where


def _last_valid(table: LogprobTable) -> I64:
    """Position of the last valid row of each row's sequence, -1 where there is none."""
    if len(table) == 0:
        return np.zeros(0, np.int64)
    sequence = table.sequence
    last = np.full(int(sequence[-1]) + 1, -1, np.int64)
    np.maximum.at(last, sequence[table.valid], table.position[table.valid])
    return np.asarray(last[sequence], np.int64)


def _above_zero(values: F32) -> Bools:
    with np.errstate(invalid="ignore"):
        return np.asarray(values > 0)


def _correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    x, y = a.astype(np.float64) - a.mean(dtype=np.float64), b.astype(np.float64) - b.mean(dtype=np.float64)
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / scale) if scale > 0 else 0.0
