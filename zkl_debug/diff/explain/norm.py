"""Norms: the eps of each side, from the ratio of the rows; and where they round, before or after the weight."""

from __future__ import annotations

from collections.abc import Iterator
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
    shortest,
    shown,
    spacing,
)
from zkl_debug.schema import Json

#: Values of eps that are in use. A fit must contain one of them for the left side.
GRID = (0.0, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 1e-3)
_LEAST_ROWS = 4
_MOST = 0.995  # of the elements; a formula computed in float32 may fall on the other side of a tie
_LEAST_WIDTH = 8
_ROOM = 0.1  # relative width of the interval of an eps that is not in the grid
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


#: Relative error of the factor of a row, which each side computes in float32: mean, sum and root.
_FACTOR_ERROR = 4 * 2.0**-23


def _row_ratio(pair: Port) -> tuple[F64, F64] | None:
    """Bounds of right/left of each row; None when some row has no single ratio."""
    # Two roundings on the way; the first may be of a value in the binade below, with twice the weight.
    slack = 3.0 if pair.left.dtype == "float32" else 2.0
    low, high = ratio_bounds(
        pair.left.real, half_widths(pair.left, slack), pair.right.real, half_widths(pair.right, slack)
    )
    lowest, highest = common(low, high, 1)
    if (lowest > highest).any() or not (np.isfinite(lowest) & np.isfinite(highest)).all():
        return None
    return lowest * (1 - _FACTOR_ERROR), highest * (1 + _FACTOR_ERROR)


def _configured(e: Evidence) -> float | None:
    found = [e.config[name] for name in _CONFIG if isinstance(e.config.get(name), int | float)]
    return float(found[0]) if found else None


@dataclass(frozen=True)
class _Pair:
    left: float
    right: float
    low: float
    high: float
    of: str = "left"  # whose interval it is


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
    found = found or list(_off_grid(low, high, mean_square, configured))
    if not found:
        return None
    # Without a difference between the sides that the rows can show, nothing is claimed.
    if (low <= 1).all() and (high >= 1).all():
        return None
    if configured is not None:
        found.sort(key=lambda pair: configured not in (pair.left, pair.right))
    chosen = found[0]
    same = [p for p in found if (configured in (p.left, p.right)) == (configured in (chosen.left, chosen.right))]
    # Below what the rows can show every eps fits: the largest is the least that has to be assumed.
    return min(same, key=lambda p: (_roundness(p.left) + _roundness(p.right), -p.left - p.right))


def _off_grid(low: F64, high: F64, mean_square: F64, configured: float | None) -> Iterator[_Pair]:
    """Pairs with the usual eps on one side and an unusual one on the other, where the rows leave it little room."""
    for usual in dict.fromkeys([configured if configured is not None else 1e-5, 1e-5, 1e-6]):
        of_left = low**2 * (mean_square + usual) - mean_square, high**2 * (mean_square + usual) - mean_square
        of_right = (mean_square + usual) / high**2 - mean_square, (mean_square + usual) / low**2 - mean_square
        for is_left, (lowest, highest) in ((True, of_left), (False, of_right)):
            start, stop = max(float(lowest.max()), 0.0), float(highest.min())
            if not start <= stop or stop - start > _ROOM * (start + stop) or start <= usual <= stop:
                continue
            value = shortest(start, stop)
            pair = (value, usual, start, stop, "left") if is_left else (usual, value, start, stop, "right")
            yield _Pair(*pair)


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
        f"{best.of}_allowed": [shown(best.low), shown(best.high)],
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


def eps_by_bits(e: Evidence) -> Finding | None:
    """In a narrow dtype: the eps under which every element of the side comes out, the weight taken from equal rows.

    A change of eps is far below the spacing of bf16; it only moves the few values that lie next to a tie. Recomputing
    those is a sharp test: one eps gives all elements of one side, another one all of the other.
    """
    pair, x, clean = e.pair(), e.equal_input(), e.clean
    if pair is None or x is None or clean is None or not _is_norm(e) or pair.left.dtype not in ("bfloat16", "float16"):
        return None
    clean_x = e.clean_inputs.get("in", e.clean_inputs.get("in.0"))
    if clean_x is None or clean_x.bits.shape != clean.left.bits.shape or len(clean_x) < _CLEAN_ROWS:
        return None
    if x.bits.shape != pair.left.bits.shape or x.dtype != clean_x.dtype:
        return None
    if not finite_rows(x.real, pair.left.real, pair.right.real).all() or not finite_rows(clean_x.real).all():
        return None
    for kind in ("rms", "layer"):
        wrong = _wrong_by_eps(kind, (x.real, clean_x.real), (pair.left, pair.right), clean.left)
        found = None if wrong is None else _told_by_bits(e, pair, wrong)
        if found is not None:
            return found
    return None


_CLEAN_ROWS = 32
#: Values of eps tried in a narrow dtype: one digit each.
_FINE = tuple(sorted({*GRID, *(float(f"{digit}e{power}") for power in range(-9, -2) for digit in range(1, 10))}))


def _wrong_by_eps(
    kind: str, inputs: tuple[F64, F64], sides: tuple[Values, Values], clean: Values
) -> dict[float, tuple[int, int]] | None:
    """For each eps the elements of each side that it does not give; None where the formula is not this one."""
    weight = None
    wrong: dict[float, tuple[int, int]] = {}
    for value in _FINE:
        unit, clean_unit = (_unit(_centred(rows, kind), value) for rows in inputs)
        if weight is None:
            weight = fit_weight(clean_unit, clean)
            if (rounded(clean_unit * weight, clean.dtype) == clean.real).mean() < _MOST:
                return None
        wrong[value] = (_missed(unit * weight, sides[0]), _missed(unit * weight, sides[1]))
    return wrong


def _missed(exact: F64, side: Values) -> int:
    """Elements that the exact value does not round to, even with the error of a float32 computation."""
    return int((np.abs(exact - side.real) > half_widths(side) + _FACTOR_ERROR / 2 * np.abs(exact)).sum())


def _unit(centred: F64, value: float) -> F64:
    mean_square = (centred**2).mean(axis=1, keepdims=True)
    return np.asarray((centred / np.sqrt(mean_square + value)).astype(np.float32).astype(np.float64))


def _told_by_bits(e: Evidence, pair: Port, wrong: dict[float, tuple[int, int]]) -> Finding | None:
    fits = [[value for value, count in wrong.items() if count[side] == 0] for side in (0, 1)]
    moved = int((pair.left.bits != pair.right.bits).sum())
    if not fits[0] or not fits[1] or set(fits[0]) & set(fits[1]) or moved < 3:
        return None
    configured = _configured(e)
    left, right = (min(values, key=lambda value: (value != configured, _roundness(value), -value)) for values in fits)
    evidence: dict[str, Json] = {
        "left": left,
        "right": right,
        "left_allowed": fits[0],
        "right_allowed": fits[1],
        "rows": len(pair.left),
        "elements_that_differ": moved,
    }
    text = (
        f"eps {left:g}{_range(fits[0])} gives every element of {e.side(False)}, eps {right:g}{_range(fits[1])} every "
        f"element of {e.side(True)}; the {moved} elements that differ lie next to a tie"
    )
    replaces = ("constant-ratio", "reduction-order", "scale-by-position", "constant-offset", "other-weights")
    return Finding("eps", text, evidence, Strength.FITTED, replaces)


def _range(values: list[float]) -> str:
    return f" (or another from {values[0]:g} to {values[-1]:g})" if len(values) > 1 else ""


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
            found = _order(e, pair, _unit(centred, value), value)
            if found is not None and (best is None or found[0] > best[0]):
                best = found
    return None if best is None else best[1]


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
    weight = fit_weight(unit, values)
    return float((rounded(unit * weight, values.dtype) == values.real).mean())


def fit_weight(unit: F64, values: Values) -> F64:
    """The weight of each column, of the values' dtype, that gives most elements as round(unit * weight)."""
    low, high = ratio_bounds(unit, np.zeros_like(unit), values.real, half_widths(values))
    known = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore"):  # open bounds on both sides; they are not among the known ones
        centre = (low + high) / 2
    middle = np.array(
        [np.median(column[at]) if at.any() else 0.0 for column, at in zip(centre.T, known.T, strict=True)]
    )
    start = rounded(middle, values.dtype)
    best, weight = np.full(unit.shape[1], -1.0), start
    for step in (0, -1, 1, -2, 2):
        candidate = start + step * spacing(start, values.dtype)
        share = (rounded(unit * candidate, values.dtype) == values.real).mean(axis=0)
        weight = np.where(share > best, candidate, weight)
        best = np.maximum(best, share)
    return weight
