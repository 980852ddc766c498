"""Closed forms that map one side to the other: shift, offset, ratio, copy of another row, constant, extra rounding.

Every test takes a :class:`View` and returns a :class:`Finding` or None. It looks at bits (or at float32 rounding where
an operation had to round), needs enough different values that chance is out, and says no when one row does not fit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np

from zkl_debug.bits import round_to, to_float64
from zkl_debug.logprobs.finding import Finding, ulp32
from zkl_debug.logprobs.table import F32, I64, Bools, bits
from zkl_debug.logprobs.view import View, offset_rows, take
from zkl_debug.schema import Json

MIN_ROWS = 4  # fewer rows or different values than this prove no form
MAX_LAG = 8
#: Where kernels also differ a shift is accepted when what remains is this much smaller than the unshifted difference.
LAG_RESIDUAL = 0.1
_FORM_ULP = 4.0  # rounding a stored ratio or offset may leave, in float32 ulp of the larger value
_NAMED_RATIOS = {"log2 instead of ln": 1 / math.log(2), "log10 instead of ln": 1 / math.log(10)}
_SHARE = 0.9  # of the differing rows that must be copies
_ROWS_A_SEQUENCE = 256  # rows of one sequence that are looked up


def shift(view: View) -> Finding | None:
    """One side is the other moved by k positions within each sequence."""
    inside = np.isin(view.sequence, np.unique(view.sequence[view.differs]))
    # A real shift leaves no row of the affected sequences as it was: equal neighbours aside, all of them differ.
    if not inside.any() or float(view.differs[inside].mean()) < _SHARE:
        return None
    best = max((fit for fit in _lags(take(view, inside))), default=None)
    if best is None:
        return None
    exact, residual, lag = best[0], -best[1], best[2]
    if exact < 1.0 and not residual < LAG_RESIDUAL:
        return None
    name_a, name_b = view.sides
    return Finding(
        "shift",
        f"{name_a} at position p is {name_b} at position p{lag:+d}: the series is shifted by {lag:+d}",
        {"lag": lag, "formula": f"{name_a}[p] == {name_b}[p{lag:+d}]", "bitwise": exact, "residual_ratio": residual},
        inside,
        proof="shift one series back and compare again: it must then be equal to the last bit",
    )


def _lags(view: View) -> Iterator[tuple[float, float, int]]:
    """For each lag: share of rows equal to the shifted row, minus the remaining difference, and the lag."""
    for lag in sorted((k for k in range(-MAX_LAG, MAX_LAG + 1) if k), key=abs):
        source = offset_rows(view, lag)
        rows = (source >= 0) & view.differs
        if int(rows.sum()) < MIN_ROWS or np.unique(bits(view.a[rows])).shape[0] < MIN_ROWS:
            continue
        exact = float((bits(view.a[rows]) == bits(view.b[source[rows]])).mean())
        with np.errstate(invalid="ignore"):
            rest = np.abs(view.a[rows].astype(np.float64) - view.b[source[rows]])
        yield exact, -float(np.median(rest)) / max(float(np.median(view.gap[rows])), 1e-300), lag


def offset(view: View) -> Finding | None:
    """One side is the other plus a constant, to float32 rounding, on every differing row."""
    rows = _finite(view)
    if not _enough(view, rows):
        return None
    tolerance = _FORM_ULP * ulp32(view.a[rows], view.b[rows])
    constant = float(np.median(view.delta[rows]))
    if (np.abs(view.delta[rows] - constant) > tolerance).any() or abs(constant) <= 8 * float(tolerance.max()):
        return None
    return Finding(
        "constant-offset",
        f"{view.sides[0]} = {view.sides[1]} {constant:+.7g} on every differing row",
        {"offset": constant, "rows": int(rows.sum()), "worst_ulp": _worst(view.delta[rows] - constant, tolerance)},
        rows,
        proof="compare the logits: an offset of the log-prob alone is another normaliser (the log-sum-exp)",
        capture=("output_layer:out", "logprobs/*"),
    )


def ratio(view: View) -> Finding | None:
    """One side is the other times a constant, to float32 rounding, on every differing row."""
    rows = _finite(view) & (view.b != 0)
    if not _enough(view, rows) or not (rows == view.differs).all():
        return None
    a, b = view.a[rows].astype(np.float64), view.b[rows].astype(np.float64)
    factor = float(np.median(a / b))
    rest = np.abs(a - factor * b)
    tolerance = _FORM_ULP * ulp32(view.a[rows], view.b[rows])
    if (rest > tolerance).any() or abs(factor - 1.0) * float(np.abs(b).max()) <= 8 * float(tolerance.max()):
        return None
    known = [name for name, value in _NAMED_RATIOS.items() if abs(factor / value - 1) < 1e-5]
    known += [
        f"{name} on side {view.sides[1]}" for name, value in _NAMED_RATIOS.items() if abs(factor * value - 1) < 1e-5
    ]
    meaning = f" ({known[0]})" if known else ""
    return Finding(
        "constant-ratio",
        f"{view.sides[0]} = {factor:.7g} x {view.sides[1]} on every differing row{meaning}",
        {"ratio": factor, "rows": int(rows.sum()), "worst_ulp": _worst(rest, tolerance), "meaning": known},
        rows,
        proof="a temperature does not do this (it also changes the normaliser): look for a unit or a scale",
    )


def constant(view: View) -> Finding | None:
    """One side holds the same bits on every differing row: never filled, or a placeholder."""
    rows = view.differs
    for label, ours, theirs in _both(view):
        if int(rows.sum()) < MIN_ROWS or np.unique(bits(theirs[rows])).shape[0] < MIN_ROWS:
            continue
        values = np.unique(bits(ours[rows]))
        if values.shape[0] != 1:
            continue
        value = float(values.view(np.float32)[0])
        return Finding(
            "constant-value",
            f"{label} holds {value:g} on every differing row: never filled, or a placeholder",
            {"side": label, "value": str(value), "rows": int(rows.sum())},
            rows,
            proof="look at who writes this column at these positions; no kernel gives one value for many tokens",
        )
    return None


def copied(view: View) -> Finding | None:
    """One side's differing rows hold the value of another sequence at the same position (stale or unwritten buffer)."""
    if int(view.differs.sum()) < MIN_ROWS - 1:
        return None
    for label, ours, theirs in _both(view):
        found = _sources(view, ours, theirs)
        if found is not None:
            return _copied(view, label, *found)
    return None


def extra_rounding(view: View) -> Finding | None:
    """One side is the other rounded once more, to bfloat16 or float16, on every valid row."""
    finite = np.isfinite(view.a) & np.isfinite(view.b)
    if int(finite.sum()) < 2 * MIN_ROWS or not view.differs.any():
        return None
    for dtype in ("bfloat16", "float16"):
        for label, ours, theirs in _both(view):
            rounded = to_float64(round_to(theirs[finite].astype(np.float64), dtype), dtype).astype(np.float32)
            if (bits(rounded) != bits(ours[finite])).any():
                continue
            return Finding(
                "extra-rounding",
                f"{label} is the other side rounded once more, to {dtype}",
                {"side": label, "dtype": dtype, "rows": int(finite.sum())},
                view.differs,
                proof="keep the log-probs in float32 from log-softmax to the loss",
                capture=("logprobs/*",),
            )
    return None


def _finite(view: View) -> Bools:
    return np.asarray(view.differs & np.isfinite(view.delta))


def _enough(view: View, rows: Bools) -> bool:
    return int(rows.sum()) >= MIN_ROWS and np.unique(bits(view.b[rows])).shape[0] >= MIN_ROWS


def _worst(rest: np.ndarray, tolerance: np.ndarray) -> float:
    return float((np.abs(rest) / tolerance).max() * _FORM_ULP)


def _both(view: View) -> tuple[tuple[str, F32, F32], tuple[str, F32, F32]]:
    return (view.sides[0], view.a, view.b), (view.sides[1], view.b, view.a)


def _sources(view: View, ours: F32, theirs: F32) -> tuple[Bools, dict[int, int]] | None:
    """Rows of ``ours`` that are copies, and the source sequence of each affected sequence; None when too few are.

    A sequence must be explained by one and the same source. Sources with the same tokens up to there do not count (they
    are equal by right), nor do values that are 0 or not finite.
    """
    telling = view.differs & np.isfinite(ours) & (ours != 0)
    once = np.flatnonzero(np.isin(view.position, np.unique(view.position[telling])))
    row = np.concatenate([once, once])
    key = view.position[row].astype(np.uint64) << np.uint64(32) | bits(np.concatenate([ours[once], theirs[once]]))
    owner = view.sequence[row]
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    copies = np.zeros(len(view), np.bool_)
    origin: dict[int, int] = {}
    looked_at = 0
    candidates = np.flatnonzero(telling)
    if candidates.shape[0] == 0:
        return None
    sequences, starts = np.unique(view.sequence[candidates], return_index=True)
    for sequence, mine in zip(sequences.tolist(), np.split(candidates, starts[1:]), strict=True):
        mine = mine[:_ROWS_A_SEQUENCE]
        looked_at += mine.shape[0]
        mine_keys = view.position[mine].astype(np.uint64) << np.uint64(32) | bits(ours[mine])
        low, high = np.searchsorted(ordered, mine_keys), np.searchsorted(ordered, mine_keys, side="right")
        votes: Counter[int] = Counter()
        by_source: dict[int, list[int]] = {}
        for index, start, stop in zip(mine.tolist(), low.tolist(), high.tolist(), strict=True):
            at = order[start : min(stop, start + 64)]
            others = {int(owner[k]) for k in at if owner[k] != sequence and not _same_prefix(view, index, int(row[k]))}
            votes.update(others)
            for other in others:
                by_source.setdefault(other, []).append(index)
        if votes:
            source, _ = max(votes.items(), key=lambda item: (item[1], -item[0]))
            origin[sequence] = source
            copies[by_source[source]] = True
    if int(copies.sum()) < max(MIN_ROWS - 1, math.ceil(_SHARE * looked_at)):
        return None
    if np.unique(bits(ours[copies])).shape[0] < MIN_ROWS - 1:
        return None
    return copies, origin


def _same_prefix(view: View, one: int, other: int) -> bool:
    known = bool(view.prefix[one].any())
    same_step = view.step[one] == view.step[other]
    return known and bool(same_step) and bool((view.prefix[one] == view.prefix[other]).all())


def _copied(view: View, label: str, rows: Bools, origin: dict[int, int]) -> Finding:
    first: I64 = np.flatnonzero(np.diff(view.sequence, prepend=-1))
    pairs: list[Json] = []
    same_step = True
    for sequence, source in origin.items():
        here, there = int(first[sequence]), int(first[source])
        same_step &= bool(view.step[here] == view.step[there])
        pairs.append(
            {
                "step": int(view.step[here]),
                "sample": int(view.sample[here]),
                "equals_step": int(view.step[there]),
                "equals_sample": int(view.sample[there]),
            }
        )
    where = "another sample's value" if same_step else "a value of an earlier step"
    one = pairs[0]
    return Finding(
        "another-samples-rows" if same_step else "rows-of-another-step",
        f"{label} holds {where} at the same position (sample {one['sample']} holds that of sample "
        f"{one['equals_sample']}, {_positions(view, rows, next(iter(origin)))}): a buffer that was not written or is "
        "stale, not numerics",
        {"side": label, "sources": pairs[:16], "rows": int(rows.sum())},
        rows,
        proof="fill the buffer with NaN before use: the rows that stay NaN were never written",
    )


def _positions(view: View, rows: Bools, sequence: int) -> str:
    """``positions 1 to 16`` of the rows of one sequence."""
    at = view.position[rows & (view.sequence == sequence)]
    low, high = int(at.min()), int(at.max())
    return f"position {low}" if low == high else f"positions {low} to {high}"
