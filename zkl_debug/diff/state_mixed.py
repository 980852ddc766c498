"""A tensor that is two versions at once: some of it not updated, or both blended. numpy only, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bits import dtype_info
from zkl_debug.schema import Json

Bits = NDArray[Any]
F64 = NDArray[np.float64]

_LEAST = 8  # elements that a blend is told from


def mixed(found: Bits, new: Bits, old: Bits) -> dict[str, Json] | None:
    """Every element is that of ``new`` or of ``old`` (raw bits, same shape), and neither alone: where the old ones lie.

    Returns:
        ``elements`` of the old version that the new one has otherwise, ``of`` so many; ``part`` in words.
    """
    if not found.shape == new.shape == old.shape:
        return None
    is_new, is_old = found == new, found == old
    stale, fresh = ~is_new, ~is_old
    if not (is_new | is_old).all() or not stale.any() or not fresh.any():
        return None
    return {"elements": int(stale.sum()), "of": int(found.size), "part": _part(stale, fresh)}


def _part(stale: NDArray[np.bool_], fresh: NDArray[np.bool_]) -> str:
    """``rows 120 to 127 of 128``: the smallest plain description of where the stale elements are."""
    for axis, word in ((0, "rows"), (1, "columns")):
        if stale.ndim <= axis:
            continue
        rest = tuple(i for i in range(stale.ndim) if i != axis)
        old, new = stale.any(axis=rest), fresh.any(axis=rest)
        span = _span(old)
        if span is not None and not new[span[0] : span[1] + 1].any():
            return f"{word} {span[0]} to {span[1]} of {len(old)}"
    span = _span(stale.ravel())
    if span is not None and not fresh.ravel()[span[0] : span[1] + 1].any():
        return f"elements {span[0]} to {span[1]} of {stale.size}"
    return f"{int(stale.sum())} scattered elements of {stale.size}"


def _span(flags: NDArray[np.bool_]) -> tuple[int, int] | None:
    at = np.flatnonzero(flags)
    return (int(at[0]), int(at[-1])) if len(at) else None


def blended(found: F64, new: F64, old: F64, dtype: str) -> dict[str, Json] | None:
    """``share * new + (1 - share) * old`` in every element within rounding, with a share that is neither 0 nor 1."""
    if not found.shape == new.shape == old.shape or not dtype_info(dtype).is_float:
        return None
    if not (np.isfinite(found).all() and np.isfinite(new).all() and np.isfinite(old).all()):
        return None
    unit = 2.0 ** -dtype_info(dtype).mantissa_bits
    step, size = new - old, np.maximum(np.abs(new), np.abs(old))
    told = np.abs(step) > 4 * unit * size
    square = float((step * step).sum())
    if int(told.sum()) < _LEAST or not square:
        return None
    share = float(((found - old) * step).sum()) / square
    # Three roundings: of each product and of the sum.
    room = 2 * unit * size + np.finfo(np.float64).tiny
    if (np.abs(found - old - share * step) > room).any():
        return None
    if (np.abs(found - new) <= room)[told].all() or (np.abs(found - old) <= room)[told].all():
        return None
    return {"share": round(share, 3)}
