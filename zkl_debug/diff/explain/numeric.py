"""Spacing of floats, intervals of reals that round to a value, and constants that fit many intervals at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bits import DTYPES, F64, dtype_info, round_to
from zkl_debug.diff.explain.model import Values
from zkl_debug.diff.model import Bools

#: float32 with 10 bits of mantissa, what tensor cores read of a float32 operand. Not a storage dtype.
TF32 = "tf32"
_NARROWER = ("float32", "float16", TF32, "bfloat16", "float8_e4m3fn", "float8_e5m2")


def narrower(dtype: str) -> tuple[str, ...]:
    """Float formats with fewer bits of mantissa than ``dtype``, the widest first."""
    bits = mantissa(dtype)
    return tuple(name for name in _NARROWER if mantissa(name) < bits)


def mantissa(dtype: str) -> int:
    """Stored mantissa bits."""
    return 10 if dtype == TF32 else dtype_info(dtype).mantissa_bits


def epsilon(dtype: str) -> float:
    """Distance from 1 to the next larger value."""
    return 2.0 ** -mantissa(dtype)


def rounded(values: F64, name: str) -> F64:
    """Values rounded once to a format, as float64."""
    if name == TF32:
        return _tf32(values)
    info = DTYPES[name]
    if info.name == "float32":
        with np.errstate(over="ignore"):
            return values.astype(np.float32).astype(np.float64)
    from zkl_debug.bits import to_float64

    return to_float64(round_to(values, name), name)


def _tf32(values: F64) -> F64:
    with np.errstate(over="ignore"):
        raw = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = (raw + np.uint64(0xFFF) + ((raw >> np.uint64(13)) & np.uint64(1))) & np.uint64(0xFFFFE000)
    wide = kept.astype(np.uint32).view(np.float32).astype(np.float64)
    return np.where(np.isfinite(values), wide, values)


def same_values(a: F64, b: F64) -> Bools:
    """Elementwise equality; NaN equals NaN."""
    return np.asarray((a == b) | (np.isnan(a) & np.isnan(b)))


def spacing(values: F64, dtype: str) -> F64:
    """Distance between neighbouring floats at each value."""
    info = dtype_info(dtype)
    lowest = 1 - info.bias
    exponent = np.frexp(np.abs(values))[1].astype(np.int64) - 1
    exponent = np.where(values == 0, lowest, np.maximum(exponent, lowest))
    return np.asarray(np.ldexp(1.0, exponent - info.mantissa_bits))


def half_widths(values: Values, slack: float = 1.0) -> F64:
    """Half the width of the interval of reals that round to each value; ``slack`` widens it."""
    return 0.5 * slack * spacing(values.real, values.dtype)


def ratio_bounds(x: F64, hx: F64, y: F64, hy: F64) -> tuple[F64, F64]:
    """Bounds of y/x over the intervals; where x may be 0 nothing is known (-inf, inf)."""
    unknown = np.abs(x) <= hx
    safe = np.where(unknown, 1.0, x)
    width = np.where(unknown, 0.0, hx)
    with np.errstate(all="ignore"):
        corners = np.stack([(y + s * hy) / (safe + t * width) for s in (-1, 1) for t in (-1, 1)])
    low, high = corners.min(axis=0), corners.max(axis=0)
    return np.where(unknown, -np.inf, low), np.where(unknown, np.inf, high)


def common(low: NDArray[Any], high: NDArray[Any], axis: int | None) -> tuple[F64, F64]:
    """The interval that all intervals share, along an axis or over everything; empty where low > high."""
    return np.asarray(low.max(axis=axis)), np.asarray(high.min(axis=axis))


def finite_rows(*arrays: F64) -> Bools:
    """Rows without NaN or infinity in any of the arrays."""
    good = np.ones(len(arrays[0]), np.bool_)
    for array in arrays:
        good &= np.isfinite(array).all(axis=1)
    return good


def shown(value: float) -> float:
    """A number as it is put into evidence: seven digits."""
    return float(f"{value:.7g}")


def shortest(low: float, high: float) -> float:
    """The number with the fewest digits in an interval."""
    for digits in range(1, 12):
        value = float(f"{(low + high) / 2:.{digits}g}")
        if low <= value <= high:
            return value
    return (low + high) / 2
