"""Attention in which neither side reads all keys of a causal row: two masks, each fitted in every row recomputed."""

from __future__ import annotations

from zkl_debug.diff.explain.attention_math import Row, attend, distance
from zkl_debug.diff.explain.masks import Mask, hypotheses
from zkl_debug.diff.explain.model import Evidence, Finding, Strength
from zkl_debug.diff.explain.numeric import shown
from zkl_debug.diff.model import Bools
from zkl_debug.schema import Json

_REPLACES = ("reduction-order", "constant-ratio", "constant-offset", "scale-by-position", "equals-other-sample")


Fitted = tuple[Mask, list[Bools], float]


def two_masks(e: Evidence, rows: list[Row], scales: list[float], dtype: str, limit: float) -> Finding | None:
    """Both sides are the attention at one scale, over two different sets of keys; None where one of them fits none."""
    masks = list(hypotheses([row.keys[0] for row in rows]))
    for scale in scales:
        left = _fitting(masks, rows, 0, scale, dtype, limit)
        right = _fitting(masks, rows, 1, scale, dtype, limit) if left is not None else None
        if left is None or right is None or left[0].name == right[0].name:
            continue
        return _told(e, rows, (left, right), scale)
    return None


def _fitting(masks: list[Mask], rows: list[Row], side: int, scale: float, dtype: str, limit: float) -> Fitted | None:
    """The first mask under which a side fits in every row, with the keys it lets in and the error."""
    for mask in masks:
        uses, worst = [], 0.0
        for row in rows:
            use = mask.use(row.keys[side])
            worst = max(worst, distance(row.out[side], *attend(row.keys[side], use, scale), dtype))
            if worst > limit:
                break
            uses.append(use)
        if len(uses) == len(rows):
            return mask, uses, worst
    return None


def _told(
    e: Evidence,
    rows: list[Row],
    found: tuple[Fitted, Fitted],
    scale: float,
) -> Finding:
    (one, left, error), (two, right, other_error) = found
    counts = [[int(use.sum()) for use in uses] for uses in (left, right)]
    evidence: dict[str, Json] = {
        "left_mask": one.name,
        "right_mask": two.name,
        "left_keys": [min(counts[0]), max(counts[0])],
        "right_keys": [min(counts[1]), max(counts[1])],
        "rows_recomputed": len(rows),
        "scale": shown(scale),
        "error": shown(max(error, other_error)),
    }
    text = (
        f"recomputed in float64, {e.side(False)} is the attention over {one.words}, {e.side(True)} over {two.words} "
        f"(within {max(error, other_error):.2g} epsilons in all {len(rows)} rows recomputed)"
    )
    return Finding("mask-fit", text, evidence, Strength.FITTED, _REPLACES)
