"""Another weight: both sides are linear in the same input, and so is their difference."""

from __future__ import annotations

import re

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.affine import fit_ratio
from zkl_debug.diff.explain.model import Evidence, Finding, Strength
from zkl_debug.diff.explain.numeric import epsilon, finite_rows, shown
from zkl_debug.schema import Json

_LINEAR = re.compile(r"linear|proj|fc\d|output_layer|gating|lm_head")
_EMBEDDING = re.compile(r"embedding")
_SPARE = 8  # rows more than unknowns
_REPLACES = ("reduction-order", "constant-ratio", "constant-offset")


def applies(e: Evidence) -> bool:
    """Whether the operator has a weight that rows are multiplied by, or looked up in."""
    return e.semantic == "linear" or bool(_LINEAR.search(e.site.operator) or _EMBEDDING.search(e.site.owner))


def other_weights(e: Evidence) -> Finding | None:
    """The difference is the equal input times one matrix: a weight that is older, was cloned or was changed."""
    if _EMBEDDING.search(e.site.owner) and not e.inputs:
        return _table(e)
    pair, x = e.pair(), e.equal_input()
    if pair is None or x is None or not x.is_float:
        return None
    if not applies(e):
        return None
    if not finite_rows(x.real, pair.left.real, pair.right.real).all():
        return None
    fit = fit_ratio(pair)
    if fit is not None and fit.by == "all":  # one factor for all elements says more than "another weight"
        return None
    return _linear(x.real, pair.left.real, pair.right.real, pair.left.dtype)


def _linear(x: F64, left: F64, right: F64, dtype: str) -> Finding | None:
    _, first = np.unique(x, axis=0, return_index=True)
    x, left, right = x[first], left[first], right[first]
    basis, singular, _ = np.linalg.svd(x, full_matrices=False)
    rank = int((singular > 1e-6 * singular[0]).sum()) if len(singular) else 0
    if len(x) < rank + _SPARE or rank == 0:
        return None
    gap = right - left
    basis = basis[:, :rank]
    noise = epsilon(dtype) * np.sqrt((np.maximum(np.abs(left), np.abs(right)) ** 2).mean())
    spare = (len(x) - rank) / len(x)

    def residue(values: F64) -> float:
        return float(np.sqrt(((values - basis @ (basis.T @ values)) ** 2).mean() / spare))

    size = float(np.sqrt((gap**2).mean()))
    # A difference that is rounding is not in the span of the input: its residue is as large as itself.
    if residue(gap) > 0.25 * size or residue(gap) > 4 * noise or residue(left) > 4 * noise:
        return None
    columns = np.sqrt((gap**2).mean(axis=0))
    changed = int((columns > 0.05 * columns.max()).sum())
    effective = int((np.linalg.svd(basis.T @ gap, compute_uv=False) > 4 * noise * np.sqrt(max(gap.shape))).sum())
    evidence: dict[str, Json] = {
        "rows": len(x),
        "rank_of_input": rank,
        "difference_rms": shown(size),
        "residue_rms": shown(residue(gap)),
        "rounding_rms": shown(float(noise)),
        "columns_changed": changed,
        "columns": gap.shape[1],
        "rank_of_change": max(1, effective),
        "relative_change": shown(size / max(float(np.sqrt((left**2).mean())), 1e-300)),
    }
    text = (
        f"both sides are linear in the same input, and their difference is too (rms {size:.3g}, of which "
        f"{residue(gap):.2g} is not explained): two different matrices, e.g. a stale copy of the weight on "
        "one side, or an input in another order; "
        f"{changed} of {gap.shape[1]} output columns change, by {evidence['relative_change']:.3g} relative"
    )
    return Finding("other-weights", text, evidence, Strength.FITTED, _REPLACES)


def _table(e: Evidence) -> Finding | None:
    """An embedding: every row of a token is the same on each side, another one on the other."""
    pair = e.pair()
    if pair is None or len(e.token) != len(pair.left):
        return None
    tokens, group = np.unique(e.token, return_inverse=True)
    first = np.full(len(tokens), len(group))
    np.minimum.at(first, group, np.arange(len(group)))
    fit = fit_ratio(pair)
    if fit is not None and fit.by == "all":  # one factor for all elements says more than "another table"
        return None
    for side in (pair.left, pair.right):
        if not bool((side.bits == side.bits[first[group]]).all()):
            return None
    repeated = int((np.bincount(group) > 1).sum())
    if repeated < 1 and len(tokens) > 1:
        return None
    evidence: dict[str, Json] = {"tokens": tokens[:32].tolist(), "count": len(tokens), "repeated": repeated}
    text = (
        f"the row of a token is always the same on each side, and another one on the other side, for {len(tokens)} "
        f"tokens (first {int(tokens[0])}): two different embedding tables, e.g. a stale copy on one side"
    )
    return Finding("other-weights", text, evidence, Strength.FITTED, _REPLACES)
