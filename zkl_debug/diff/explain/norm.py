"""Norms: the eps of each side, fitted; and where the rounding happens, before or after the weight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.model import Evidence, Finding, Port, Strength, Values
from zkl_debug.diff.explain.numeric import (
    common,
    finite_rows,
    half_widths,
    ratio_bounds,
    rounded,
    shown,
    spacing,
)
from zkl_debug.schema import Json

#: Values of eps that are in use. A fit must contain one of them for the left side.
GRID = (0.0, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 1e-3)
_LEAST_ROWS = 4
_LEAST_WIDTH = 8
_CONFIG = ("layernorm_epsilon", "norm_epsilon", "rms_norm_eps")


def _is_norm(e: Evidence) -> bool:
    return e.semantic == "norm" or "norm" in e.site.operator


def _ready(e: Evidence) -> tuple[Port, Values] | None:
    pair, x = e.pair(), e.equal_input()
    if pair is None or x is None or not _is_norm(e) or not x.is_float:
        return None
    if x.bits.shape != pair.left.bits.shape or pair.left.bits.shape[1] < _LEAST_WIDTH:
        return None
    if len(pair.left) < _LEAST_ROWS or not finite_rows(x.real, pair.left.real, pair.right.real).all():
        return None
    return pair, x


def _centred(x: F64, kind: str) -> F64:
    return x - x.mean(axis=1, keepdims=True) if kind == "layer" else x


def eps(e: Evidence) -> Finding | None:
    """right / left is sqrt((ms + eps_left) / (ms + eps_right)) in every row, ms the mean square of the input row."""
    ready = _ready(e)
    if ready is None:
        return None
    pair, x = ready
    bounds = _row_ratio(pair)
    if bounds is None:
        return None
    low, high = bounds
    for kind in ("rms", "layer"):
        mean_square = (_centred(x.real, kind) ** 2).mean(axis=1)
        best = _best_pair(low, high, mean_square, _configured(e))
        if best is not None:
            return _told(e, pair, mean_square, best, low, high)
    return None


def _row_ratio(pair: Port) -> tuple[F64, F64] | None:
    """Bounds of right/left of each row; None when some row has no single ratio."""
    slack = 2.0
    low, high = ratio_bounds(
        pair.left.real, half_widths(pair.left, slack), pair.right.real, half_widths(pair.right, slack)
    )
    lowest, highest = common(low, high, 1)
    if (lowest > highest).any() or not (np.isfinite(lowest) & np.isfinite(highest)).all():
        return None
    return lowest, highest


def _configured(e: Evidence) -> float | None:
    found = [e.config[name] for name in _CONFIG if isinstance(e.config.get(name), int | float)]
    return float(found[0]) if found else None


@dataclass(frozen=True)
class _Pair:
    left: float
    right: float
    low: float
    high: float


def _best_pair(low: F64, high: F64, mean_square: F64, configured: float | None) -> _Pair | None:
    """The pair whose fit is possible in every row. Several may be: the configured eps on one side settles it."""
    known = sorted({*GRID, *([configured] if configured is not None else [])})
    found: list[_Pair] = []
    for right in known:
        # (right / left)^2 (ms + eps_right) - ms = eps_left
        lowest = float((low**2 * (mean_square + right) - mean_square).max())
        highest = float((high**2 * (mean_square + right) - mean_square).min())
        if lowest > highest:
            continue
        found += [_Pair(left, right, lowest, highest) for left in known if lowest <= left <= highest and left != right]
    if not found:
        return None
    # Without a difference between the sides that the rows can show, nothing is claimed.
    if (low <= 1).all() and (high >= 1).all():
        return None
    if configured is not None:
        found.sort(key=lambda pair: configured not in (pair.left, pair.right))
    chosen = found[0]
    same = [p for p in found if (configured in (p.left, p.right)) == (configured in (chosen.left, chosen.right))]
    return min(same, key=lambda p: _roundness(p.left) + _roundness(p.right))


def _roundness(value: float) -> int:
    """0 for a power of ten, 1 for anything else, 2 for none: which of several possible values to name."""
    if value == 0:
        return 2
    return int(not f"{value:e}".startswith("1.000000"))


def _told(e: Evidence, pair: Port, mean_square: F64, best: _Pair, low: F64, high: F64) -> Finding:
    predicted = np.sqrt((mean_square + best.left) / (mean_square + best.right))
    inside = int(((predicted >= low) & (predicted <= high)).sum())
    evidence: dict[str, Json] = {
        "left": best.left,
        "right": best.right,
        "left_allowed": [shown(best.low), shown(best.high)],
        "rows": inside,
        "of": len(mean_square),
        "mean_square": [shown(float(mean_square.min())), shown(float(mean_square.max()))],
    }
    text = (
        f"as if eps were {best.left:g} on {e.side(False)} and {best.right:g} on {e.side(True)}: "
        f"right/left = sqrt((ms + {best.left:g}) / (ms + {best.right:g})) in {inside} of {len(pair.left)} rows"
    )
    replaces = ("constant-ratio", "reduction-order", "scale-by-position", "constant-offset", "other-weights")
    return Finding("eps", text, evidence, Strength.FITTED, replaces)


def norm_rounding_order(e: Evidence) -> Finding | None:
    """One side rounds before the weight, the other only after it. The weight is recovered from the rows."""
    ready = _ready(e)
    if ready is None or ready[0].left.dtype not in ("bfloat16", "float16"):
        return None
    pair, x = ready
    configured = _configured(e)
    best: tuple[float, Finding] | None = None
    for kind in ("rms", "layer"):
        for value in dict.fromkeys([configured if configured is not None else 1e-5, 1e-5, 1e-6, 1e-8]):
            centred = _centred(x.real, kind)
            unit = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + value)
            found = _order(e, pair, unit.astype(np.float32).astype(np.float64), value)
            if found is not None and (best is None or found[0] > best[0]):
                best = found
    return None if best is None else best[1]


_MOST = 0.995  # of the elements; a formula computed in float32 may fall on the other side of a tie


def _order(e: Evidence, pair: Port, unit: F64, value: float) -> tuple[float, Finding] | None:
    dtype = pair.left.dtype
    early_input = rounded(unit, dtype)
    match: dict[tuple[bool, str], float] = {}
    for right in (False, True):
        values = pair.right if right else pair.left
        match[right, "after"] = _matches(unit, values)
        match[right, "before"] = _matches(early_input, values)
    for right in (False, True):
        early, late = match[right, "before"], match[not right, "after"]
        if early < _MOST or late < _MOST or match[right, "after"] > early - 0.01:
            continue
        evidence: dict[str, Json] = {
            "rounds_before_weight": e.side(right),
            "rounds_after_weight": e.side(not right),
            "dtype": dtype,
            "eps": value,
            "matched": {f"{e.side(r)}, rounded {how} the weight": shown(share) for (r, how), share in match.items()},
        }
        text = (
            f"{e.side(right)} rounds to {dtype} before the multiplication by the weight ({early:.2%} of the elements "
            f"match that formula, {match[right, 'after']:.2%} the other), {e.side(not right)} after it ({late:.2%})"
        )
        replaces = ("reduction-order", "constant-ratio", "other-weights", "eps")
        return early + late, Finding("norm-rounding-order", text, evidence, Strength.FITTED, replaces)
    return None


def _matches(unit: F64, values: Values) -> float:
    """Share of elements that equal round(unit * weight) for the best weight of each column, of the same dtype."""
    low, high = ratio_bounds(unit, np.zeros_like(unit), values.real, half_widths(values))
    middle = (
        np.median(np.where(np.isfinite(low), low, 0), axis=0) + np.median(np.where(np.isfinite(high), high, 0), axis=0)
    ) / 2
    start = rounded(middle, values.dtype)
    best = np.zeros(unit.shape[1])
    for step in (-2, -1, 0, 1, 2):
        weight = start + step * spacing(start, values.dtype)
        equal = rounded(unit * weight, values.dtype) == values.real
        best = np.maximum(best, equal.mean(axis=0))
    return float(best.mean())
