"""One side is the other with something done, or not done, to single elements: passed through, cut off, flushed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.model import Evidence, Finding, Strength, Values
from zkl_debug.diff.explain.numeric import epsilon, shortest, shown
from zkl_debug.diff.model import Bools
from zkl_debug.schema import Json

_LEAST_ROWS = 2
_LEAST = 8  # elements that must agree on a limit
_WEAK = ("reduction-order", "constant-ratio", "constant-offset", "other-weights", "scale-by-position")


def not_applied(e: Evidence) -> Finding | None:
    """One side returns one of its inputs as it came in, and the other does not."""
    pair = e.pair()
    if pair is None or len(pair.left) < _LEAST_ROWS:
        return None
    for name, port in sorted(e.inputs.items()):
        if not port.equal or not port.left.is_float:
            continue
        same = [_passes(side, port.left) for side in (pair.left, pair.right)]
        if same[0] == same[1]:
            continue
        side = e.side(same[1])
        evidence: dict[str, Json] = {"side": side, "input": name, "rows": len(pair.left)}
        text = (
            f"{side} returns its input {name} unchanged, bit for bit in all {len(pair.left)} rows: "
            f"what {e.site.owner} does was left out there"
        )
        return Finding("not-applied", text, evidence, Strength.EXACT, _WEAK)
    return None


def _passes(out: Values, given: Values) -> bool:
    same = out.dtype == given.dtype and out.bits.shape == given.bits.shape
    return same and bool((out.bits == given.bits).all())


def signed_zero(e: Evidence) -> Finding | None:
    """All elements that differ are zeros of different sign."""
    pair = e.pair()
    if pair is None:
        return None
    differ = pair.left.bits != pair.right.bits
    if not bool(((pair.left.real == 0) & (pair.right.real == 0))[differ].all()):
        return None
    minus = [int(np.signbit(side.real[differ]).sum()) for side in (pair.left, pair.right)]
    evidence: dict[str, Json] = {"elements": int(differ.sum()), "minus_left": minus[0], "minus_right": minus[1]}
    text = (
        f"all {int(differ.sum())} elements that differ are zeros of different sign: -0 in {minus[0]} of them on "
        f"{e.side(False)}, in {minus[1]} on {e.side(True)}"
    )
    return Finding("signed-zero", text, evidence, Strength.EXACT, (*_WEAK, "extra-rounding", "flushed-to-zero"))


def flushed_to_zero(e: Evidence) -> Finding | None:
    """One side has zeros where the other has small values, and no small value of its own."""
    for right, odd, other, differ in _each_side(e):
        if not bool((odd[differ] == 0).all()):
            continue
        size = np.abs(other[differ])
        kept = np.abs(odd[odd != 0])
        if len(size) < _LEAST or not np.isfinite(size).all() or bool((size == 0).any()) or not len(kept):
            continue
        low, high = float(size.max()), float(kept.min())
        # Something must be kept near the limit, or these are zeros for another reason: a mask, a dropped part.
        if low > high or high > 4 * low:
            continue
        evidence: dict[str, Json] = {"side": e.side(right), "largest_flushed": low, "smallest_kept": high}
        evidence["elements"] = int(differ.sum())
        text = (
            f"{e.side(right)} is {e.side(not right)} with everything up to {low:.4g} made zero (its smallest other "
            f"value is {high:.4g}), in all {int(differ.sum())} elements that differ: an underflow or a threshold"
        )
        return Finding("flushed-to-zero", text, evidence, Strength.EXACT, _WEAK)
    return None


def clamped(e: Evidence) -> Finding | None:
    """One side is the other cut off at an upper limit, a lower one, or both."""
    for right, odd, other, differ in _each_side(e):
        if not np.isfinite(odd).all() or np.isnan(other).any():
            continue
        at = np.unique(odd[differ])
        if len(at) > 2 or int(differ.sum()) < _LEAST:
            continue
        limits = _limits(odd, other, differ, at)
        if limits is None:
            continue
        low, high = limits
        evidence: dict[str, Json] = {"side": e.side(right), "low": low, "high": high, "elements": int(differ.sum())}
        ends = [f"from {way} at {end:.6g}" for way, end in (("below", low), ("above", high)) if end is not None]
        text = (
            f"{e.side(right)} is {e.side(not right)} cut off {' and '.join(ends)}, "
            f"in all {int(differ.sum())} elements that differ; every other element lies within"
        )
        return Finding("clamped", text, evidence, Strength.EXACT, _WEAK)
    return None


def _limits(odd: F64, other: F64, differ: Bools, at: F64) -> tuple[float | None, float | None] | None:
    """(low, high) limit, None where there is none; None when cutting off does not give the odd side everywhere."""
    low: float | None = None
    high: float | None = None
    for value in at.tolist():
        beyond = other[differ & (odd == value)]
        if bool((beyond > value).all()):
            high = value
        elif bool((beyond < value).all()):
            low = value
        else:
            return None
    if low == high or not bool((odd == np.clip(other, low, high)).all()):
        return None
    return low, high


def soft_cap(e: Evidence) -> Finding | None:
    """One side is c * tanh(x / c) of the other: logits or scores capped softly."""
    pair = e.pair()
    if pair is None:
        return None
    for right, odd, other, _ in _each_side(e):
        if not np.isfinite(odd).all() or not np.isfinite(other).all():
            continue
        if bool((np.abs(odd) > np.abs(other)).any()) or bool((odd * other < 0).any()):
            continue
        cap = _cap(odd, other)
        if cap is None:
            continue
        tolerance = 4 * epsilon(pair.left.dtype) * np.maximum(np.abs(other), float(np.finfo(np.float32).tiny))
        told = np.abs(other - odd) > 8 * tolerance
        near = shortest(cap * (1 - 1e-3), cap * (1 + 1e-3))
        for value in (near, cap):
            if int(told.sum()) < _LEAST or bool((np.abs(value * np.tanh(other / value) - odd) > tolerance).any()):
                continue
            evidence: dict[str, Json] = {"side": e.side(right), "cap": shown(value), "elements": int(odd.size)}
            text = (
                f"{e.side(right)} is {value:g} * tanh(x / {value:g}) of {e.side(not right)}, within rounding in all "
                f"{odd.size} elements: a soft cap on one side"
            )
            return Finding("soft-cap", text, evidence, Strength.FITTED, _WEAK)
    return None


def _cap(odd: F64, other: F64) -> float | None:
    """The c of c * tanh(x / c) that the element of the largest size allows; None where there is none."""
    at = int(np.abs(other).argmax())
    x, y = float(np.abs(other.flat[at])), float(np.abs(odd.flat[at]))
    if not 0 < y < x:
        return None
    low, high = y, 1e4 * x
    for _ in range(200):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if middle * np.tanh(x / middle) < y else (low, middle)
    return (low + high) / 2


def _each_side(e: Evidence) -> Iterator[tuple[bool, F64, F64, Bools]]:
    """(is it the right one, its values, those of the other, which elements differ) for either side, all [m, W]."""
    pair = e.pair()
    if pair is not None:
        differ = pair.left.bits != pair.right.bits
        yield True, pair.right.real, pair.left.real, differ
        yield False, pair.left.real, pair.right.real, differ
