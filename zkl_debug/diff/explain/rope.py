"""Rotary embedding: which channels are paired, at which frequencies, at which positions. From inputs and outputs alone.

A pair of channels is rotated by an angle. With the input equal on both sides, the angle of each row, head and pair is
known up to rounding, so pairing, frequency and position can each be read off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bits import F64
from zkl_debug.diff.explain.model import Evidence, Finding, Strength, Values
from zkl_debug.diff.explain.numeric import epsilon, rounded, shown
from zkl_debug.diff.model import Bools, Ints
from zkl_debug.schema import Json

PAIRINGS = ("halves", "neighbours")
_REPLACES = ("reduction-order", "constant-ratio", "constant-offset", "column-permutation")
_LEAST_ROWS = 4


@dataclass(frozen=True)
class Rotation:
    """A side's rotation under one pairing.

    Attributes:
        pairing: ``halves`` (i with i + d/2) or ``neighbours`` (2i with 2i + 1).
        angle: rotation of each row and pair, radians in (-pi, pi], [m, pairs].
        error: uncertainty of the angle from rounding, [m, pairs].
        is_rotation: norms are kept and all heads turn by the same angle, within rounding.
    """

    pairing: str
    angle: F64
    error: F64
    is_rotation: bool


def _is_rope(e: Evidence) -> bool:
    return e.semantic == "rope" or e.site.operator.split(".")[0].split("#")[0] == "rope"


def _complex(values: F64, pairing: str) -> NDArray[np.complex128]:
    """[m, heads, d] -> complex [m, heads, d/2]."""
    half = values.shape[-1] // 2
    if pairing == "halves":
        return np.asarray(values[..., :half] + 1j * values[..., half:])
    return np.asarray(values[..., 0::2] + 1j * values[..., 1::2])


def rotation(x: Values, y: Values, pairing: str) -> Rotation | None:
    """How ``y`` is turned against ``x`` under a pairing; None when the rows cannot be paired."""
    inside, outside = x.heads(), y.heads()
    if inside.ndim == 2:
        inside, outside = inside[:, None], outside[:, None]
    if inside.ndim != 3 or inside.shape != outside.shape or inside.shape[-1] % 2:
        return None
    one, two = _complex(inside, pairing), _complex(outside, pairing)
    size = np.abs(one)
    noise = 3 * epsilon(y.dtype) * np.maximum(np.abs(outside).max(axis=-1, keepdims=True), size)
    turned = (two * one.conj()).sum(axis=1)  # heads weigh by their size
    angle = np.angle(turned)
    weight = (size**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(weight > 0, (noise * size).sum(axis=1) / np.maximum(weight, 1e-300), np.pi)
    residue = np.abs(two - one * np.exp(1j * angle)[:, None, :])
    return Rotation(pairing, angle, np.asarray(error), bool((residue <= 2 * noise).all()))


def _rotations(e: Evidence) -> tuple[list[Rotation], list[Rotation]] | None:
    pair, x = e.pair(), e.equal_input()
    if pair is None or x is None or not _is_rope(e) or x.bits.shape != pair.left.bits.shape:
        return None
    if len(x) < _LEAST_ROWS or not np.isfinite(np.stack([x.real, pair.left.real, pair.right.real])).all():
        return None
    sides = []
    for values in (pair.left, pair.right):
        found = [rotation(x, values, pairing) for pairing in PAIRINGS]
        sides.append([r for r in found if r is not None and r.is_rotation])
    return sides[0], sides[1]


def rope_pairing(e: Evidence) -> Finding | None:
    """The sides rotate other pairs of channels: each is a rotation under one pairing only, another one."""
    found = _rotations(e)
    if found is None or len(found[0]) != 1 or len(found[1]) != 1 or found[0][0].pairing == found[1][0].pairing:
        return None
    left, right = found[0][0], found[1][0]
    equal_at_zero = _equal_at_zero(e)
    difference = np.abs(_wrap(right.angle - left.angle))
    same_angles = bool((difference <= 4 * (left.error + right.error) + 1e-6).mean() > 0.95)
    evidence: dict[str, Json] = {
        "left": left.pairing,
        "right": right.pairing,
        "norm_kept": True,
        "same_angles": same_angles,
        "equal_at_position_0": equal_at_zero,
        "rows": len(e.position),
    }
    names = {"halves": "channel i with i + d/2", "neighbours": "channel 2i with 2i + 1"}
    text = (
        f"{e.side(False)} rotates {names[left.pairing]}, {e.side(True)} rotates {names[right.pairing]}; the norm of "
        f"every pair is kept on both" + ("; equal at position 0, where nothing is rotated" if equal_at_zero else "")
    )
    return Finding("rope-pairing", text, evidence, Strength.FITTED, (*_REPLACES, "position-shift", "rope-frequency"))


def _equal_at_zero(e: Evidence) -> bool:
    return bool((e.clean_position == 0).any()) and not bool((e.position == 0).any())


def _wrap(angle: F64) -> F64:
    return np.asarray((angle + np.pi) % (2 * np.pi) - np.pi)


def _common_pairing(e: Evidence) -> tuple[Rotation, Rotation] | None:
    found = _rotations(e)
    if found is None:
        return None
    for one in found[0]:
        for two in found[1]:
            if one.pairing == two.pairing:
                return one, two
    return None


@dataclass(frozen=True)
class Slopes:
    """Radians per position of each pair, fitted through 0; ``error`` is a standard error; ``good``: it is a line."""

    value: F64
    error: F64
    good: Bools


def slopes(angle: F64, error: F64, position: Ints) -> Slopes:
    """Fit angles in proportion to the position, counting whole turns.

    Unwrapped from the lowest positions on: each further position must lie where the slope so far says. The angles that
    are then known in full give the slope by least squares.
    """
    order = np.argsort(position, kind="stable")
    where = position[order].astype(np.float64)
    fits = [_slope(angle[order, j], error[order, j], where) for j in range(angle.shape[1])]
    value, spread, good = (np.array(column) for column in zip(*fits, strict=True))
    return Slopes(value, spread, good)


def _slope(angle: F64, error: F64, position: F64) -> tuple[float, float, bool]:
    first = np.flatnonzero(position > 0)
    if len(first) < 2 or position[first[0]] > 8:
        return 0.0, np.inf, False
    start = first[0]
    low = (angle[start] - 4 * error[start]) / position[start]
    high = (angle[start] + 4 * error[start]) / position[start]
    full, used = [angle[start]], [start]
    for i in first[1:]:
        p, middle = position[i], (low + high) / 2
        if (high - low) * p > np.pi:
            continue  # not known well enough yet to count turns
        whole = angle[i] + 2 * np.pi * np.round((middle * p - angle[i]) / (2 * np.pi))
        low, high = max(low, (whole - 4 * error[i]) / p), min(high, (whole + 4 * error[i]) / p)
        if low > high:
            return float(middle), np.inf, False
        full.append(whole)
        used.append(i)
    x, y = position[used], np.array(full)
    weight = 1 / np.maximum(error[used], 1e-12) ** 2
    value = float((weight * x * y).sum() / (weight * x * x).sum())
    scatter = float(np.sqrt((weight * (y - value * x) ** 2).sum() / max(1, len(x) - 1)))
    return value, scatter / float(np.sqrt((weight * x * x).sum())), True


_SIGMAS = 8.0


def rope_frequency(e: Evidence) -> Finding | None:
    """The angles of the sides drift apart in proportion to the position: other frequencies."""
    both = _common_pairing(e)
    if both is None:
        return None
    left, right = both
    error = left.error + right.error
    drift = slopes(_wrap(right.angle - left.angle), error, e.position)
    if not drift.good.all():
        return None
    moved = np.abs(drift.value) > _SIGMAS * drift.error
    if not moved.any():
        return None
    own = slopes(left.angle, left.error, e.position)
    zero = _equal_at_zero(e) or not bool((e.position == 0).any())
    evidence: dict[str, Json] = {
        "pairs_that_differ": int(moved.sum()),
        "pairs": len(moved),
        "radians_per_position": [shown(float(value)) for value in drift.value[:64]],
        "standard_error": [shown(float(value)) for value in drift.error[:64]],
        "zero_at_position_0": zero,
        "highest_position": int(e.position.max()),
    }
    text = (
        f"the angle between the sides grows in proportion to the position in {int(moved.sum())} of {len(moved)} "
        f"pairs, by up to {float(np.abs(drift.value).max()):.3g} radians a position"
        + (", zero at position 0" if zero else "")
    )
    if own.good.all():
        evidence["frequencies_left"] = [shown(float(value)) for value in own.value[:64]]
        tolerance = _SIGMAS * (drift.error + own.error)
        text += _frequency_form(e, own.value, own.value + drift.value, tolerance, evidence)
    return Finding("rope-frequency", text, evidence, Strength.FITTED, (*_REPLACES, "scale-by-position"))


def _frequency_form(e: Evidence, left: F64, right: F64, tolerance: F64, evidence: dict[str, Json]) -> str:
    """Which closed form the frequencies take: rounded to a dtype, all scaled, or another base."""
    tolerance = tolerance + 1e-6 * np.abs(left)
    pairs = len(left)
    exponent = np.arange(pairs) / pairs
    for right_side, (frequencies, other) in ((True, (right, left)), (False, (left, right))):
        ideal = _ideal(other, exponent, tolerance)
        plain = other if ideal is None else ideal
        for name in ("bfloat16", "float16"):
            if bool((np.abs(rounded(plain, name) - frequencies) <= tolerance).all()):
                evidence |= {"form": "rounded", "dtype": name, "side": e.side(right_side)}
                return f": the frequencies of {e.side(right_side)} are those of the other side rounded to {name}"
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = right / left
    told = np.abs(left) > 20 * tolerance
    if told.sum() >= 2 and bool((np.abs(right - left * np.median(ratio[told])) <= 2 * tolerance).all()):
        evidence |= {"form": "scaled", "factor": shown(float(np.median(ratio[told])))}
        return f": all by the factor {float(np.median(ratio[told])):.6g} (positions scaled)"
    bases = [_base(values, exponent, tolerance) for values in (left, right)]
    if bases[0] is not None and bases[1] is not None:
        evidence |= {"form": "base", "base_left": shown(bases[0]), "base_right": shown(bases[1])}
        return f": base {bases[0]:.6g} on {e.side(False)}, {bases[1]:.6g} on {e.side(True)}"
    return ""


def _base(frequencies: F64, exponent: F64, tolerance: F64) -> float | None:
    told = (frequencies > 20 * tolerance) & (exponent > 0)
    if not told.any():
        return None
    bases = np.exp(-np.log(frequencies[told]) / exponent[told])
    base = float(np.median(bases))
    near = float(f"{base:.3g}")
    for value in (near, base):
        if bool((np.abs(value**-exponent - frequencies) <= 2 * tolerance).all()):
            return value
    return None


def _ideal(frequencies: F64, exponent: F64, tolerance: F64) -> F64 | None:
    """The exact frequencies base**(-i/pairs) where the fitted ones are those of a base."""
    base = _base(frequencies, exponent, tolerance)
    return None if base is None else np.asarray(base**-exponent)


def position_shift(e: Evidence) -> Finding | None:
    """One side rotates as if the row were at another position, the same number of positions away for a sequence."""
    both = _common_pairing(e)
    if both is None:
        return None
    left, right = both
    line = slopes(left.angle, left.error, e.position)
    side = True
    if not line.good.all():
        line, side = slopes(right.angle, right.error, e.position), False
    if not line.good.all():
        known = _configured_line(e, left, right)
        if known is None:
            return None
        line, side = known
    turned = _wrap(right.angle - left.angle) if side else _wrap(left.angle - right.angle)
    shift = _shifts(turned, left.error + right.error, line.value)
    if shift is None or not shift.any():
        return None
    by_sample = {int(s): sorted(set(shift[e.sample == s].tolist())) for s in np.unique(e.sample)}
    if any(len(values) > 1 for values in by_sample.values()):
        return None
    each = {str(sample): values[0] for sample, values in by_sample.items()}
    evidence: dict[str, Json] = {"shift": each, "side": e.side(side), "on_right": side, "rows": len(shift)}
    padding = e.call.get("padding")
    if padding is not None and bool((np.abs(shift) == padding).all()):
        evidence["equals_padding"] = True
    told = ", ".join(f"{count:+d} in sample {sample}" for sample, count in list(each.items())[:4])
    text = f"{e.side(side)} rotates as if the rows were at other positions: {told}" + (
        "; that is the padding of each sequence" if evidence.get("equals_padding") else ""
    )
    return Finding("position-shift", text, evidence, Strength.FITTED, (*_REPLACES, "rope-frequency"))


def _configured_line(e: Evidence, left: Rotation, right: Rotation) -> tuple[Slopes, bool] | None:
    """The frequencies of the configured base, where one side turns by them: rows far from position 0 fit no line.

    Returns (frequencies, whether the right side is the odd one).
    """
    pairs = left.angle.shape[1]
    for base in dict.fromkeys((e.config.get("rotary_base"), *_BASES)):
        if not isinstance(base, int | float) or base <= 1:
            continue
        frequency = float(base) ** -(np.arange(pairs) / pairs)
        for odd_right, side in ((True, left), (False, right)):
            off = np.abs(_wrap(side.angle - e.position[:, None] * frequency))
            if bool((off <= 4 * side.error + 1e-6 * (1 + e.position[:, None])).all()):
                return Slopes(frequency, np.zeros(pairs), np.ones(pairs, np.bool_)), odd_right
    return None


_BASES = (10_000, 500_000, 1_000_000)
_FURTHEST = 4096


def _shifts(turned: F64, error: F64, frequency: F64) -> Ints | None:
    """Whole positions that each row is turned by, from the slow pairs to the fast ones; None where none fits."""
    candidates = np.arange(-_FURTHEST, _FURTHEST + 1)
    result = np.zeros(len(turned), np.int64)
    for i in range(len(turned)):
        wrong = np.abs(_wrap(turned[i][None, :] - candidates[:, None] * frequency[None, :]))
        fits = candidates[(wrong <= 4 * error[i][None, :] + 1e-6 * np.abs(candidates)[:, None]).all(axis=1)]
        if not len(fits):
            return None
        result[i] = fits[np.argmin(np.abs(fits))]
    return result
