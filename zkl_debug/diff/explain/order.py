"""Differences of the size that another order of addition makes. Says so only where nothing contradicts it."""

from __future__ import annotations

import re

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.affine import fit_offset, fit_ratio
from zkl_debug.diff.explain.model import Evidence, Finding, Port, Strength
from zkl_debug.diff.explain.numeric import epsilon, finite_rows, half_widths, ratio_bounds, shown
from zkl_debug.schema import Json

# Operators that add up many numbers; elsewhere there is no order to change.
_REDUCES = re.compile(
    r"linear|norm|proj|fc\d|output_layer|attention|softmax|gating|router|expert|unpermute|combine|scan|conv|mixer|^mlp$"
)
_LIMIT = {"float32": 64.0, "float64": 64.0}
_LIMIT_NARROW = 8.0
_SIGMAS = 3.5


def reduces(e: Evidence) -> bool:
    """Whether the operator adds up many numbers."""
    return bool(_REDUCES.search(e.semantic) or _REDUCES.search(e.site.operator))


def reduction_order(e: Evidence) -> Finding | None:
    """The difference is as small as another order of addition makes it, has no sign of its own and no form."""
    pair = e.pair()
    if pair is None or not reduces(e) or not e.inputs_equal:
        return None
    x, y = pair.left.real, pair.right.real
    good = finite_rows(x, y)
    if not good.all():
        return None
    scale = np.maximum(np.abs(x).max(axis=1), np.abs(y).max(axis=1))
    unit = epsilon(pair.left.dtype) * np.maximum(scale, np.finfo(np.float64).tiny)
    size = np.abs(y - x).max(axis=1) / unit
    limit = _LIMIT.get(pair.left.dtype, _LIMIT_NARROW)
    if size.max() > limit:
        return None
    _, different = np.unique(pair.left.bits, axis=0, return_index=True)
    lean = _lean(x[different], y[different])
    if abs(lean) > _SIGMAS:
        return None
    one_number = _one_number(e, pair)
    fit = None if one_number else (fit_ratio(pair) or fit_offset(pair))
    if fit is not None:
        return None
    evidence: dict[str, Json] = {
        "largest": shown(float(size.max())),
        "median": shown(float(np.median(size))),
        "unit": f"epsilon of {pair.left.dtype} times the row's largest value",
        "limit": limit,
        "lean_sigmas": shown(lean),
        "rows": len(x),
        "inputs": "equal" if e.inputs else "not captured as raw bits",
    }
    text = (
        f"the sides differ by at most {size.max():.2g} epsilons of {pair.left.dtype} (of the row's largest value) and "
        f"lean to no side ({abs(lean):.1f} sigma): the size of another order of addition; no other form fits"
    )
    if one_number:
        evidence["one_number_a_row"] = one_number
        text += f"; in each row {one_number}"
    strength = Strength.FITTED if one_number else Strength.CLASS
    return Finding("reduction-order", text, evidence, strength)


def _lean(x: F64, y: F64) -> float:
    """By how many sigmas the larger value is on one side more often, rows counted once: a truncation would lean."""
    gap = np.sign(np.abs(y) - np.abs(x)).sum(axis=1)
    votes = np.sign(gap)
    count = int((votes != 0).sum())
    return float(votes.sum() / np.sqrt(count)) if count >= 8 else 0.0


def _one_number(e: Evidence, pair: Port) -> str:
    """For a norm: one factor a row, within a few epsilons of 1, as from another sum of squares."""
    if "norm" not in (e.semantic or e.site.operator) or pair.left.dtype not in ("float32", "float64"):
        return ""
    low, high = ratio_bounds(pair.left.real, half_widths(pair.left, 2.0), pair.right.real, half_widths(pair.right, 2.0))
    lowest, highest = low.max(axis=1), high.min(axis=1)
    if (lowest > highest).any():
        return ""
    away = np.maximum(np.maximum(lowest - 1, 1 - highest), 0.0) / epsilon(pair.left.dtype)
    if away.max() > 8:
        return ""
    far = f"all elements differ by one factor, at most {away.max():.2g} epsilons from 1"
    return f"{far}: the row's mean square was added up in another order"
