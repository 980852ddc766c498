"""A constant factor or a constant added: one for all, one a row, or one a column. Columns in another order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.model import Evidence, Finding, Port, Strength
from zkl_debug.diff.explain.numeric import common, epsilon, finite_rows, half_widths, ratio_bounds, shortest, shown
from zkl_debug.diff.model import Bools, Ints
from zkl_debug.schema import Json

_LEAST = 8  # elements that must agree on one constant
_LEAST_COLUMN = 4  # rows that must agree on a column's constant

_LEAST_POSITIONS = 8
_MOVED = 0.8  # of the elements a constant must change


@dataclass(frozen=True)
class Fit:
    """Constants that fit: one, one a row or one a column (``by``); the middle of the allowed interval of each."""

    by: str
    value: F64
    width: F64


def _fit(low: F64, high: F64, neutral: float, noise: float, distinct: int) -> Fit | None:
    """Constants in the intersection of the intervals, if they are not all neutral.

    ``distinct`` rows differ from each other: rows that are the same on both sides agree on anything.
    """
    for by, axis, least in (("all", None, low.size), ("row", 1, low.shape[1]), ("column", 0, distinct)):
        if least < (_LEAST_COLUMN if by == "column" else _LEAST):
            continue
        if by == "row" and low.shape[0] < 2:
            continue
        lowest, highest = common(low, high, axis)
        if (lowest > highest).any():
            continue
        told = np.isfinite(lowest) & np.isfinite(highest)
        if not told.any():
            continue
        off = told & ((lowest > neutral + noise) | (highest < neutral - noise))
        if not off.any() or (by == "row" and off.mean() < 0.5):
            continue
        middle = np.where(told, (np.where(told, lowest, 0) + np.where(told, highest, 0)) / 2, neutral)
        return Fit(by, np.atleast_1d(middle), np.atleast_1d(np.where(told, highest - lowest, 0.0)))
    return None


def _distinct(pair: Port, good: Bools) -> int:
    """Rows that differ from each other on the left side."""
    return len(np.unique(np.ascontiguousarray(pair.left.bits[good]), axis=0))


def fit_ratio(pair: Port, slack: float = 2.0) -> Fit | None:
    """Factors c with right = c * left, within the rounding of both."""
    x, y = pair.left.real, pair.right.real
    good = finite_rows(x, y)
    if not good.any():
        return None
    x, y = x[good], y[good]
    low, high = ratio_bounds(x, half_widths(pair.left, slack)[good], y, half_widths(pair.right, slack)[good])
    if (np.abs(x) <= half_widths(pair.left, slack)[good]).mean() > 0.5:
        return None
    zero = (x == 0) != (y == 0)
    if zero.any():
        return None
    fit = _fit(low, high, 1.0, _noise(pair), _distinct(pair, good))
    return fit if fit is not None and _moves_all(pair, good, x * (_spread(fit) - 1.0)) else None


def fit_offset(pair: Port, slack: float = 2.0) -> Fit | None:
    """Constants c with right = left + c, within the rounding of both."""
    x, y = pair.left.real, pair.right.real
    good = finite_rows(x, y)
    if not good.any():
        return None
    width = (half_widths(pair.left, slack) + half_widths(pair.right, slack))[good]
    middle = (y - x)[good]
    typical = float(np.median(np.maximum(np.abs(x[good]).max(axis=1), np.abs(y[good]).max(axis=1))))
    fit = _fit(middle - width, middle + width, 0.0, _noise(pair) * typical, _distinct(pair, good))
    return fit if fit is not None and _moves_all(pair, good, np.broadcast_to(_spread(fit), x.shape)) else None


def _spread(fit: Fit) -> F64:
    """The constants, shaped to meet elements [rows, columns]."""
    return fit.value[:, None] if fit.by == "row" else fit.value


def _moves_all(pair: Port, good: Bools, shift: F64) -> bool:
    """Whether the elements that such a shift must change did change: a constant does not leave most of them alone.

    Within rounding, a constant near the neutral one also "fits" sides that differ in an element or two.
    """
    must = np.abs(shift) > half_widths(pair.right, 2.0)[good]
    moved = (pair.left.real != pair.right.real)[good]
    return not must.any() or float(moved[must].mean()) >= _MOVED


def _noise(pair: Port) -> float:
    """Relative size of a constant that may be rounding: of a float32 reduction, or of a narrow dtype itself."""
    return max(6 * 2.0**-23, epsilon(pair.left.dtype) / 2 if pair.left.dtype != "float32" else 0.0)


def constant_ratio(e: Evidence) -> Finding | None:
    """Right = c * left: one factor for all, one a row, or one a column."""
    pair = e.pair()
    if pair is None:
        return None
    fit = fit_ratio(pair)
    if fit is None:
        return None
    if fit.by == "row":
        position = e.position[finite_rows(pair.left.real, pair.right.real)]
        return _by_position(e, fit, position) or _constant(e, fit, "constant-ratio", "factor")
    return _constant(e, fit, "constant-ratio", "factor")


def constant_offset(e: Evidence) -> Finding | None:
    """Right = left + c: one constant for all, one a row, or one a column (a bias)."""
    pair = e.pair()
    fit = None if pair is None else fit_offset(pair)
    return None if fit is None else _constant(e, fit, "constant-offset", "offset")


_WHERE = {"all": "of every element", "row": "of its row", "column": "of its column, the same in every row"}


def _constant(e: Evidence, fit: Fit, name: str, what: str) -> Finding:
    low, high = float(fit.value.min()), float(fit.value.max())
    evidence: dict[str, Json] = {
        "by": fit.by,
        "constants": len(fit.value),
        "lowest": shown(low),
        "highest": shown(high),
    }
    sign = "times" if what == "factor" else "plus"
    if fit.by == "all":
        middle, half = float(fit.value[0]), float(fit.width[0]) / 2
        value = shortest(middle - half, middle + half)
        evidence["value"], evidence["uncertainty"] = shown(value), shown(2 * half)
        text = f"{e.side(True)} is {e.side(False)} {sign} {value:.7g} in every element, within rounding"
    else:
        text = f"{e.side(True)} is {e.side(False)} {sign} a constant {_WHERE[fit.by]}, {low:.6g} to {high:.6g}"
    if fit.by == "column":
        evidence["values"] = [shown(float(value)) for value in fit.value[:64]]
        text += "; as a bias that one side lacks" if what == "offset" else "; as another weight of a norm"
    return Finding(name, text, evidence, Strength.FITTED, ("reduction-order", "constant-offset", "other-weights"))


def _by_position(e: Evidence, fit: Fit, position: Ints) -> Finding | None:
    """One factor a row that depends on the row's position alone."""
    positions, group = np.unique(position, return_inverse=True)
    if len(positions) < _LEAST_POSITIONS:
        return None
    half = fit.width / 2
    low, high = fit.value - half, fit.value + half
    lowest, highest = np.full(len(positions), -np.inf), np.full(len(positions), np.inf)
    np.maximum.at(lowest, group, low)
    np.minimum.at(highest, group, high)
    if (lowest > highest).any():
        return None
    value = (lowest + highest) / 2
    repeated = int((np.bincount(group) > 1).sum())
    correlation = _rank_correlation(positions.astype(np.float64), value)
    if repeated < 3 and abs(correlation) < 0.99:
        return None
    if float(value.max() - value.min()) <= float(fit.width.max()):
        return None
    evidence: dict[str, Json] = {
        "positions": len(positions),
        "at": {str(int(p)): shown(float(v)) for p, v in list(zip(positions, value, strict=True))[:16]},
        "rank_correlation": shown(correlation),
    }
    text = (
        f"{e.side(True)} is {e.side(False)} times a factor that depends on the position alone: "
        f"{value[0]:.6g} at position {positions[0]}, {value[-1]:.6g} at position {positions[-1]}"
    )
    replaces = ("constant-ratio", "constant-offset", "reduction-order", "eps")
    return Finding("scale-by-position", text, evidence, Strength.FITTED, replaces)


def _rank_correlation(x: F64, y: F64) -> float:
    ranks = [np.argsort(np.argsort(values)).astype(np.float64) for values in (x, y)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def column_permutation(e: Evidence) -> Finding | None:
    """The columns of one side are those of the other in another order, in every row, bit for bit."""
    pair = e.pair()
    if pair is None or len(pair.left) < 2 or pair.left.bits.shape[1] < 4:
        return None
    left, right = np.ascontiguousarray(pair.left.bits.T), np.ascontiguousarray(pair.right.bits.T)
    where: dict[bytes, list[int]] = {}
    for j, column in enumerate(left):
        where.setdefault(column.tobytes(), []).append(j)
    moved = np.full(len(right), -1)
    for j, column in enumerate(right):
        found = where.get(column.tobytes())
        if found is None:
            return None
        moved[j] = j if j in found else found[0]
    known = len(where)
    if known < len(right) // 2 + 1 or bool((moved == np.arange(len(moved))).all()):
        return None
    is_bijection = len(set(moved.tolist())) == len(moved)
    pattern = _pattern(moved, (e.out.left.shape if e.out is not None else ()))
    evidence: dict[str, Json] = {
        "from": moved.tolist()[:256],
        "moved": int((moved != np.arange(len(moved))).sum()),
        "columns": len(moved),
        "pattern": pattern,
        "each_once": is_bijection,
    }
    how = pattern or "no simple pattern"
    kind = "in another order" if is_bijection else "some of them repeated and others left out"
    text = (
        f"{e.side(True)} holds the columns of {e.side(False)} {kind}, bit for bit in all {len(pair.left)} rows: "
        f"{evidence['moved']} of {len(moved)} moved ({how})"
    )
    return Finding(
        "column-permutation", text, evidence, Strength.EXACT, ("reduction-order", "constant-ratio", "other-weights")
    )


def _pattern(moved: Ints, shape: tuple[int, ...]) -> str:
    """A name for a permutation of columns, where it has one."""
    n = len(moved)
    own = np.arange(n)
    if bool((moved == own[::-1]).all()):
        return "reversed"
    for shift in range(1, n):
        if moved[0] == shift and bool((moved == np.roll(own, -shift)).all()):
            return f"rotated by {shift}"
    for size in _divisors(n):
        table = own.reshape(size, n // size)
        if bool((moved == table.T.ravel()).all()):
            return f"[{size}, {n // size}] read as [{n // size}, {size}]"
    for size in [shape[-1]] if len(shape) > 1 else _divisors(n)[::-1]:
        blocks = moved.reshape(-1, size)
        if size > 1 and _whole_blocks(blocks, size):
            return f"blocks of {size} in the order {(blocks[:, 0] // size).tolist()[:16]}"
        inside = moved.reshape(-1, size) - own.reshape(-1, size)[:, :1]
        if 2 < size < n and inside.min() >= 0 and inside.max() < size and bool((inside == inside[0]).all()):
            return f"the same order inside each block of {size}: {inside[0].tolist()[:16]}"
    return ""


def _whole_blocks(blocks: Ints, size: int) -> Bools | bool:
    steps = bool((np.diff(blocks, axis=1) == 1).all())
    return steps and bool((blocks[:, 0] % size == 0).all())


def _divisors(n: int) -> list[int]:
    return [size for size in range(2, n) if n % size == 0]
