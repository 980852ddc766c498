"""A scan recomputed in float64 from its captured inputs: which tokens entered, or whether only the order differs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.model import Evidence, Finding, ScanRow, Strength
from zkl_debug.diff.explain.numeric import epsilon, shown
from zkl_debug.schema import Json

_FIT = {"float32": 48.0, "bfloat16": 6.0, "float16": 6.0}
_LEAST = 2
_REPLACES = ("reduction-order", "extra-rounding", "constant-ratio", "constant-offset")


def replay(row: ScanRow, start: int) -> tuple[F64, F64]:
    """The row's output if the scan began with zero at token ``start``, and the summed magnitudes of its terms.

    Returns:
        y [h, p] and the magnitudes [h, p].
    """
    repeats = len(row.a) // row.b.shape[1]
    step = np.logaddexp(0.0, row.dt + row.dt_bias)  # softplus
    state = np.zeros((*row.x.shape[1:], row.b.shape[2]))
    size = np.zeros_like(state)
    for t in range(start, len(row.x)):
        kept = np.exp(step[t] * row.a)[:, None, None]
        term = (step[t][:, None] * row.x[t])[..., None] * np.repeat(row.b[t], repeats, 0)[:, None, :]
        state, size = state * kept + term, size * kept + np.abs(term)
    last = np.repeat(row.c[-1], repeats, 0)[:, None, :]
    skip = row.d[:, None] * row.x[-1]
    return (state * last).sum(-1) + skip, (size * np.abs(last)).sum(-1) + np.abs(skip)


def distance(row: ScanRow, start: int, dtype: str) -> float:
    """Largest distance of what the row has from :func:`replay`, in epsilons of the summed magnitudes."""
    exact, size = replay(row, start)
    gap = np.abs(row.out - exact) / (epsilon(dtype) * np.maximum(size, np.finfo(np.float64).tiny))
    return float(gap.max()) if np.isfinite(gap).all() else float("inf")


def scan_fit(e: Evidence) -> Finding | None:
    """Both sides are the scan over the whole sequence, or one of them began in the middle of it."""
    pair = e.pair()
    rows = e.scans() if e.scans is not None and pair is not None else []
    if pair is None or len(rows) < _LEAST:
        return None
    dtype = pair.left.dtype
    limit = _FIT.get(dtype, 6.0)
    fits = [[_fit(row, dtype, limit) for row in both] for both in rows]
    if any(fit is None for both in fits for fit in both):
        return None
    found = [[fit for fit in both if fit is not None] for both in fits]
    if all(fit.start == 0 for both in found for fit in both):
        return _order(found, dtype)
    # Far behind the edge what was dropped has decayed: such rows fit both ways, and tell nothing by themselves.
    clear = [both for both in found if any(fit.start for fit in both)]
    unclear = [both for both in found if not any(fit.start for fit in both)]
    if len(clear) < _LEAST or not all(any(fit.late for fit in both) for both in unclear):
        return None
    return _dropped(e, clear, limit, dtype)


@dataclass(frozen=True)
class Fit:
    """Where a row's scan began, and how far from it the row is.

    ``whole``: how far from the whole sequence. ``late``: a start in the middle of the sequence fits as well.
    """

    start: int
    error: float
    whole: float
    late: bool


def _fit(row: ScanRow, dtype: str, limit: float) -> Fit | None:
    """The first of all starts that may have been which the row fits; None when it fits none."""
    errors = {start: distance(row, start, dtype) for start in (0, *row.starts)}
    fitting = [start for start, error in errors.items() if error <= limit]
    if not fitting:
        return None
    return Fit(fitting[0], errors[fitting[0]], errors[0], any(start > 0 for start in fitting))


def _order(found: list[list[Fit]], dtype: str) -> Finding:
    worst = [max(both[side].error for both in found) for side in (0, 1)]
    evidence: dict[str, Json] = {
        "rows_recomputed": len(found),
        "left_error": shown(worst[0]),
        "right_error": shown(worst[1]),
        "unit": f"epsilon of {dtype} times the summed magnitudes",
    }
    text = (
        f"recomputed in float64 from the captured inputs, both sides are the scan over the same tokens, within "
        f"{worst[0]:.2g} and {worst[1]:.2g} epsilons: only the order of the sums, or how the state is kept, differs"
    )
    return Finding("reduction-order", text, evidence, Strength.FITTED, ("constant-ratio", "constant-offset"))


def _dropped(e: Evidence, found: list[list[Fit]], limit: float, dtype: str) -> Finding:
    sides = [e.side(bool(side)) for side in (0, 1) if any(both[side].start for both in found)]
    late = [fit for both in found for fit in both if fit.start]
    starts = sorted({fit.start for fit in late})
    evidence: dict[str, Json] = {
        "rows_recomputed": len(found),
        "began_at": starts,
        "error_from_there": shown(max(fit.error for fit in late)),
        "error_of_the_whole_sequence": shown(min(fit.whole for fit in late)),
        "limit": limit,
        "unit": f"epsilon of {dtype} times the summed magnitudes",
    }
    whole = [e.side(bool(side)) for side in (0, 1) if not any(both[side].start for both in found)]
    text = (
        f"recomputed in float64 from the captured inputs, {' and '.join(sides)} scanned from zero at the first token "
        f"of a later chunk (position {', '.join(map(str, starts[:6]))}): the state in front of it was dropped"
    )
    if whole:
        text += f"; {whole[0]} is the scan over the whole sequence"
    return Finding("state-dropped", text, evidence, Strength.FITTED, _REPLACES)
