"""Which KV head each query head read, fitted head by head against the exact attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.attention_math import Row, attend, groups_of
from zkl_debug.diff.explain.model import Evidence, Finding, Strength
from zkl_debug.diff.explain.numeric import epsilon, shown
from zkl_debug.schema import Json

_REPLACES = ("reduction-order", "constant-ratio", "constant-offset", "scale-by-position", "column-permutation")


def head_grouping(e: Evidence, rows: list[Row], side: int, scale: float, dtype: str, limit: float) -> Finding | None:
    """Another KV head for some query heads, the same in every row."""
    first = rows[0].keys[side]
    heads, groups = len(first.query), first.key.shape[1]
    if groups == 1:
        return None
    errors = _errors(rows, side, groups, scale, dtype)
    read = errors.argmin(axis=1)
    own = groups_of(first)
    if not bool((errors[np.arange(heads), read] <= limit).all()) or bool((read == own).all()):
        return None
    moved = np.flatnonzero(read != own)
    if bool((errors[moved, own[moved]] <= limit).any()):  # a head that fits its own KV head as well tells nothing
        return None
    error = float(errors[np.arange(heads), read].max())
    evidence: dict[str, Json] = {"side": e.side(bool(side)), "heads": heads, "groups": groups}
    evidence |= {"kv_head": read.tolist()[:256], "error": shown(error), "rows_recomputed": len(rows)}
    each = heads // groups
    rule = f"h // {each}" if each > 1 else "h"
    if bool((read == np.arange(heads) % groups).all()):
        words = f"lets query head h read KV head h mod {groups}"
    else:
        shown_heads = ", ".join(f"{h} reads {read[h]}" for h in moved[:6].tolist())
        words = f"lets query heads read other KV heads ({shown_heads}{' ...' if len(moved) > 6 else ''})"
    text = (
        f"recomputed in float64, {e.side(bool(side))} {words}, the other side {rule} "
        f"(within {error:.2g} epsilons in all {len(rows)} rows)"
    )
    return Finding("head-grouping", text, evidence, Strength.FITTED, _REPLACES)


def _errors(rows: list[Row], side: int, groups: int, scale: float, dtype: str) -> F64:
    """Largest error of each query head under each KV head over the rows, in epsilons, [heads, groups]."""
    worst = []
    for group in range(groups):
        one = slice(group, group + 1)
        each = []
        for row in rows:
            keys = row.keys[side]
            exact, size = attend(replace(keys, key=keys.key[:, one], value=keys.value[:, one]), keys.own, scale)
            error = np.abs(row.out[side] - exact) / (epsilon(dtype) * np.maximum(size, 1e-30))
            each.append(np.where(np.isfinite(error), error, np.inf).max(axis=1))
        worst.append(np.max(each, axis=0))
    return np.stack(worst, axis=1)
