"""Expert counts: rows of padding that are routed like any others, and counted."""

from __future__ import annotations

import math

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.model import CallCounts, Evidence, Finding, Strength
from zkl_debug.diff.model import Bools
from zkl_debug.schema import Json

_CHANCE = 1e-4  # that all affected rows are in such calls by luck


def applies(e: Evidence) -> bool:
    """Sites of a mixture-of-experts layer behind its router."""
    return ".mlp" in e.site.owner and e.counts is not None


def padding_counted(e: Evidence) -> Finding | None:
    """The affected rows are those of calls in which experts were given more rows than chose them."""
    assert e.counts is not None
    (left, left_clean), (right, right_clean) = e.counts
    odd, odd_clean = (one.padded != two.padded for one, two in ((left, right), (left_clean, right_clean)))
    if not len(odd) or not odd.all():
        return None  # rows of which neither call, or both, count padding differ as well
    bad_right = bool(right.padded.mean() > 0.5)
    how = _taken(e, right if bad_right else left, bad_right)
    if not how and _by_luck(len(odd), len(odd_clean), int(odd_clean.sum())) > _CHANCE:
        return None
    return _told(e, left, right, odd_clean, how)


def _by_luck(affected: int, clean: int, like_affected: int) -> float:
    """Chance that so many affected rows all fall among the like ones, were they drawn from all."""
    total, like = affected + clean, affected + like_affected
    return math.exp(
        math.lgamma(like + 1)
        - math.lgamma(like - affected + 1)
        - math.lgamma(total + 1)
        + math.lgamma(total - affected + 1)
    )


def _taken(e: Evidence, affected: CallCounts, right: bool) -> str:
    """Whether the rows lost experts that the padding of their call had chosen."""
    pair = e.pair()
    if pair is None or "router" not in e.site.owner or len(affected) < len(pair.left):
        return ""
    own, other = (pair.right, pair.left) if right else (pair.left, pair.right)
    counted, picked = affected.counted[: len(own)], affected.chosen[: len(own)]  # those looked at come first
    if own.real.shape != counted.shape:
        return ""
    lost = (own.real == 0) & (other.real != 0)
    crowded = counted > picked
    if not lost.any(axis=1).all() or not bool((crowded | ~lost).all()):
        return ""
    return "in every affected row an expert was taken from it, one that padding of its call had been routed to"


def _told(e: Evidence, left: CallCounts, right: CallCounts, odd_clean: Bools, how: str) -> Finding:
    on_right = bool(right.padded.mean() > 0.5)
    worst = right if on_right else left
    at = int(np.argmax(np.where(worst.padded, worst.excess, 0)))
    like = int(odd_clean.sum())
    evidence: dict[str, Json] = {
        "site": worst.site,
        "side": e.side(on_right),
        "counted": _ints(worst.counted[at]),
        "chosen_by_rows": _ints(worst.chosen[at]),
        "rows": int(worst.rows[at]),
        "slots": int(worst.slots[at]),
        "affected": len(left),
        "clean": len(odd_clean),
        "clean_with_padding_on_one_side": like,
    }
    text = (
        f"expert counts: padding is routed and counted; e.g. a call of {int(worst.rows[at])} rows in "
        f"{int(worst.slots[at])} slots ({e.side(on_right)}) counts {_ints(worst.counted[at])} rows by expert where its "
        f"rows chose {_ints(worst.chosen[at])}; over all edges, {len(left)} of {len(left)} pairs that differ here have "
        f"such a call on exactly one side, and {like} of {len(odd_clean)} equal ones"
    )
    return Finding("padding-counted", f"{text}; {how}" if how else text, evidence, Strength.FITTED)


def _ints(values: F64) -> list[int]:
    return [int(value) for value in values]
