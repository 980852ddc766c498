"""The mixer's norm: is what the scan gave gated before it is rounded to the model's dtype, or after."""

from __future__ import annotations

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.model import Evidence, Finding, Strength
from zkl_debug.diff.explain.numeric import rounded, shown, spacing
from zkl_debug.diff.model import Ints
from zkl_debug.schema import Json

_EPS = 1e-5
_LEAST = 16
_EXACT, _NOT = 0.98, 0.9
_WITHIN = 6.0  # units in the last place that a rounding of y may move the result


def gate_rounding_order(e: Evidence) -> Finding | None:
    """One side has the bits of ``norm(y, z)`` of the captured y; the other is off by as much as y was rounded."""
    pair, y, z = e.pair(), e.equal_input("in"), e.equal_input("in.1")
    if pair is None or y is None or z is None or pair.left.dtype not in ("bfloat16", "float16"):
        return None
    if len(y) < _LEAST:
        return None
    normed = _normed(y.real, z.real, int(e.config.get("mamba_num_groups") or 1))
    if normed is None:
        return None
    sides = (pair.left.real, pair.right.real)
    for right in (1, 0):
        weight = _weight(sides[right], normed, pair.left.dtype)
        expected = rounded(normed * weight, pair.left.dtype)
        share = [float((side == expected).mean()) for side in sides]
        off = np.abs(sides[1 - right] - expected) / spacing(expected, pair.left.dtype)
        if share[right] < _EXACT or share[1 - right] > _NOT or off.max() > _WITHIN:
            continue
        evidence: dict[str, Json] = {
            "bits_equal_to_norm_of_rounded_y": {e.side(False): shown(share[0]), e.side(True): shown(share[1])},
            "largest_distance_in_ulp": shown(float(off.max())),
            "rows": len(y),
        }
        text = (
            f"{e.side(bool(right))} gates what the scan gave after it was rounded to {pair.left.dtype}: "
            f"{100 * share[right]:.1f} % of its bits are those of norm(y, z) of the captured y and z. "
            f"{e.side(not right)} gates before it rounds ({100 * share[1 - right]:.1f} %)"
        )
        return Finding("gate-rounding-order", text, evidence, Strength.FITTED, ("reduction-order", "extra-rounding"))
    return None


def _normed(y: F64, z: F64, groups: int) -> F64 | None:
    """``y * silu(z)`` over the root of its mean square, in groups, [m, W]."""
    if y.shape != z.shape or y.shape[1] % groups:
        return None
    value = (y * z / (1.0 + np.exp(-z))).reshape(len(y), groups, -1)
    scale = 1.0 / np.sqrt((value**2).mean(axis=2, keepdims=True) + _EPS)
    normed: F64 = (value * scale).reshape(y.shape)
    return normed


def _weight(out: F64, normed: F64, dtype: str) -> F64:
    """The norm's weight: per channel what the larger values say, rounded to the model's dtype."""
    with np.errstate(all="ignore"):
        ratio = np.where(np.abs(normed) > 0, out / normed, np.nan)
    largest: Ints = np.argsort(-np.abs(normed), axis=0)[:_LEAST]
    median: F64 = np.nanmedian(np.take_along_axis(ratio, largest, axis=0), axis=0)
    return rounded(median, dtype)
