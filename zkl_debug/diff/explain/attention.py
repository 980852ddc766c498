"""Attention recomputed in float64 from the captured q, K and V: which keys entered, at which scale, in which precision.

Each side is held against the exact attention over the keys that a causal row may read. A side within rounding of it is
right; one that is not is held against other sets of keys, other scales and other precisions, each tested in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.attention_heads import head_grouping
from zkl_debug.diff.explain.attention_inner import inner_rounding
from zkl_debug.diff.explain.attention_masks import two_masks
from zkl_debug.diff.explain.attention_math import Row, attend, distance, merged, with_unknown_value
from zkl_debug.diff.explain.masks import Mask, hypotheses, solve_keys
from zkl_debug.diff.explain.model import Evidence, Finding, Keys, Strength
from zkl_debug.diff.explain.numeric import rounded, shown
from zkl_debug.diff.model import Bools
from zkl_debug.schema import Json

_FIT = {"float32": 48.0, "bfloat16": 6.0, "float16": 6.0}
_LEAST = 2
_PRECISIONS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_REPLACES = ("reduction-order", "constant-ratio", "constant-offset", "scale-by-position")


def _rows(e: Evidence) -> list[Row]:
    """Affected rows with everything there to recompute them."""
    pair = e.pair()
    if pair is None or e.attention is None:
        return []
    rows = []
    for index, left, right in e.attention():
        shape = left.query.shape
        if right.query.shape == shape and pair.left.bits.shape[1] == shape[0] * shape[1]:
            out = tuple(side.real[index].reshape(shape) for side in (pair.left, pair.right))
            rows.append(Row(index, (left, right), (out[0], out[1])))
    return rows


def _fits(rows: list[Row], side: int, dtype: str, replay: Callable[[Keys], tuple[F64, F64]]) -> float:
    """Largest distance of a side from a recomputation, over all rows."""
    return max(distance(row.out[side], *replay(row.keys[side]), dtype) for row in rows)


def _causal(scale: float) -> Callable[[Keys], tuple[F64, F64]]:
    """The attention over the keys a causal row may read."""
    return lambda keys: attend(keys, keys.own, scale)


def attention(e: Evidence) -> Finding | None:
    """What the recomputation says: another set of keys, another scale or precision, or only another order."""
    rows = _rows(e)
    if len(rows) < _LEAST:
        return None
    pair = e.pair()
    assert pair is not None
    dtype = pair.left.dtype
    limit = _FIT.get(dtype, 6.0)
    scale = _scale(e, rows, dtype, limit)
    if scale is None:
        return two_masks(e, rows, _usual_scales(e, rows), dtype, limit)
    worst = [_fits(rows, side, dtype, _causal(scale)) for side in (0, 1)]
    side = int(np.argmax(worst))
    if max(worst) <= limit:
        inner = inner_rounding(e, rows, scale, dtype, limit)
        return inner or _near_miss(e, rows, side, worst, scale, dtype) or _order(rows, worst, scale, dtype)
    if min(worst) > limit:
        return None
    for test in (_other_keys, _inner_rounding, _other_precision, _other_scale, head_grouping, _solved):
        found = test(e, rows, side, scale, dtype, limit)
        if found is not None:
            return found
    return None


def _near_miss(e: Evidence, rows: list[Row], side: int, worst: list[float], scale: float, dtype: str) -> Finding | None:
    """A form under which a side that is only just within rounding is as close as the other one.

    Rounding in another order has no such form. A scale or an operand that is a little off has: under it the error of
    the odd side falls to that of the sound one.
    """
    sound, odd = sorted(worst)
    if odd < _ODD * sound:
        return None
    limit = min(odd / 2, _AS_CLOSE * sound)
    for test in (_other_precision, _other_scale, _other_keys):
        found = test(e, rows, side, scale, dtype, limit)
        if found is not None:
            return found
    return None


_ODD = 2.5  # times the error of the other side
_AS_CLOSE = 1.5


def _scale(e: Evidence, rows: list[Row], dtype: str, limit: float) -> float | None:
    """The softmax scale under which one side, or both, are the exact attention over the row's own keys."""
    for scale in _usual_scales(e, rows):
        worst = [_fits(rows, side, dtype, _causal(scale)) for side in (0, 1)]
        if min(worst) <= limit:
            return scale
    for side in (0, 1):
        fitted = _fit_scale(rows, side, dtype)
        if fitted is not None and _fits(rows, side, dtype, _causal(fitted)) <= limit:
            return fitted
    return None


def _usual_scales(e: Evidence, rows: list[Row]) -> list[float]:
    """One over the root of the head's width, and what the configuration says."""
    configured = e.config.get("softmax_scale")
    width = rows[0].keys[0].query.shape[1]
    return [float(width) ** -0.5, *([float(configured)] if isinstance(configured, int | float) else [])]


def _fit_scale(rows: list[Row], side: int, dtype: str) -> float | None:
    """The scale that fits a side best, by golden-section search on a logarithmic axis."""
    low, high = np.log(1e-4), np.log(10.0)
    grid = np.linspace(low, high, 60)

    def cost(log_scale: float) -> float:
        return _fits(rows[:4], side, dtype, _causal(float(np.exp(log_scale))))

    costs = [cost(float(at)) for at in grid]
    best = int(np.argmin(costs))
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    ratio = (np.sqrt(5) - 1) / 2
    for _ in range(50):
        one, two = high - ratio * (high - low), low + ratio * (high - low)
        if cost(float(one)) < cost(float(two)):
            high = two
        else:
            low = one
    return float(np.exp((low + high) / 2))


def _order(rows: list[Row], worst: list[float], scale: float, dtype: str) -> Finding:
    evidence: dict[str, Json] = {
        "rows_recomputed": len(rows),
        "left_error": shown(worst[0]),
        "right_error": shown(worst[1]),
        "unit": f"epsilon of {dtype} times the summed magnitudes",
        "scale": shown(scale),
    }
    split = _split(rows, scale, dtype)
    text = (
        f"recomputed in float64 from the captured q, K and V, both sides are the attention over the same keys, within "
        f"{worst[0]:.2g} and {worst[1]:.2g} epsilons: only the order of the sums or a merge of parts differs"
    )
    if split is not None:
        evidence |= split
        text += f"; {split['words']}"
    return Finding("reduction-order", text, evidence, Strength.FITTED, ("constant-ratio", "constant-offset"))


def _split(rows: list[Row], scale: float, dtype: str) -> dict[str, Json] | None:
    """Whether the bits of one side are those of one pass, and of the other those of parts merged by log-sum-exp."""
    if dtype == "float32":
        return None  # rounding of the parts does not show
    share = {
        name: [
            float(np.mean([(merged(row.keys[side], scale, parts, dtype) == row.out[side]).mean() for row in rows]))
            for side in (0, 1)
        ]
        for name, parts in {"one pass": 1, **{f"{n} parts merged": n for n in (2, 4, 8)}}.items()
    }
    names = list(share)
    best = [names[int(np.argmax([share[name][side] for name in names]))] for side in (0, 1)]
    if best[0] == best[1] or any(share[best[s]][s] < 0.98 or share[best[1 - s]][s] > 0.95 for s in (0, 1)):
        return None
    return {"left_form": best[0], "right_form": best[1], "words": f"bit for bit {best[0]} against {best[1]}"}


def _other_keys(e: Evidence, rows: list[Row], side: int, scale: float, dtype: str, limit: float) -> Finding | None:
    """A set of keys under which the odd side fits in every row."""
    masks = list(hypotheses([row.keys[side] for row in rows]))
    for mask in masks:
        uses = [mask.use(row.keys[side]) for row in rows]
        if all(np.array_equal(use, row.keys[side].own) for use, row in zip(uses, rows, strict=True)):
            continue
        error = max(_error(row, side, use, scale, dtype) for row, use in zip(rows, uses, strict=True))
        if error <= limit:
            return _mask_told(e, rows, side, mask, uses, error)
    if len(rows) < _LEAST_UNKNOWN or not all(row.keys[side].uncaptured for row in rows):
        return None
    for mask in masks:
        if not mask.crosses:
            continue
        uses = [mask.use(row.keys[side]) for row in rows]
        error, share = with_unknown_value(rows, uses, side, scale, dtype)
        if error <= limit and share > 0:
            return _mask_told(e, rows, side, mask, uses, error, share)
    return None


_LEAST_UNKNOWN = 4


def _error(row: Row, side: int, use: Bools, scale: float, dtype: str) -> float:
    return distance(row.out[side], *attend(row.keys[side], use, scale), dtype)


def _mask_told(
    e: Evidence, rows: list[Row], side: int, mask: Mask, uses: list[Bools], error: float, unknown: float = 0.0
) -> Finding:
    extra = [int((use & ~row.keys[side].own).sum()) for use, row in zip(uses, rows, strict=True)]
    missing = [int((row.keys[side].own & ~use).sum()) for use, row in zip(uses, rows, strict=True)]
    first = rows[int(np.argmax(np.array(extra) + np.array(missing)))].keys[side]
    foreign = [row.keys[side].sample[use & ~row.keys[side].reach] for row, use in zip(rows, uses, strict=True)]
    others = sorted({int(sample) for samples in foreign for sample in samples})
    evidence: dict[str, Json] = {
        "side": e.side(bool(side)),
        "mask": mask.name,
        "rows_recomputed": len(rows),
        "extra_keys": [min(extra), max(extra)],
        "missing_keys": [min(missing), max(missing)],
        "extra_from_samples": others[:16],
        "error": shown(error),
        "share_of_uncaptured_keys": shown(unknown),
    }
    text = (
        f"recomputed in float64, {e.side(bool(side))} is the attention over {mask.words} (within {error:.2g} "
        f"epsilons in all {len(rows)} rows recomputed): {max(extra)} keys too many and {max(missing)} too few at most"
    )
    if others and others != [first.row_sample]:
        text += f"; keys of sample {', '.join(map(str, others[:6]))} entered"
    if unknown:
        text += f"; and keys that were not captured (padding slots), with up to {unknown:.1%} of the weight"
    return Finding("mask-fit", text, evidence, Strength.FITTED, (*_REPLACES, "equals-other-sample"))


def _inner_rounding(e: Evidence, rows: list[Row], side: int, scale: float, dtype: str, limit: float) -> Finding | None:  # noqa: ARG001
    return inner_rounding(e, rows, scale, dtype, limit)


def _other_precision(e: Evidence, rows: list[Row], side: int, scale: float, dtype: str, limit: float) -> Finding | None:
    """Keys and values, or the query too, rounded to a narrower format before they are used."""
    best: tuple[float, Finding] | None = None
    for name in _PRECISIONS:
        if name == dtype:
            continue
        for what in ("K and V", "q, K and V", "V", "K", "q"):

            def replay(keys: Keys, to: str = name, parts: str = what) -> tuple[F64, F64]:
                return attend(_rounded_keys(keys, to, parts), keys.own, scale)

            error = _fits(rows, side, dtype, replay)
            if error <= limit and (best is None or error < best[0]):
                text = (
                    f"recomputed in float64, {e.side(bool(side))} is the attention with {what} rounded to {name} first "
                    f"(within {error:.2g} epsilons in all {len(rows)} rows)"
                )
                evidence: dict[str, Json] = {"side": e.side(bool(side)), "dtype": name, "what": what, "exact": False}
                evidence |= {"error": shown(error), "rows_recomputed": len(rows)}
                best = error, Finding("extra-rounding", text, evidence, Strength.FITTED, _REPLACES)
    return None if best is None else best[1]


def _rounded_keys(keys: Keys, name: str, parts: str) -> Keys:
    return replace(
        keys,
        query=rounded(keys.query, name) if "q" in parts else keys.query,
        key=rounded(keys.key, name) if "K" in parts else keys.key,
        value=rounded(keys.value, name) if "V" in parts else keys.value,
    )


def _other_scale(e: Evidence, rows: list[Row], side: int, scale: float, dtype: str, limit: float) -> Finding | None:
    fitted = _fit_scale(rows, side, dtype)
    if fitted is None:
        return None
    error = _fits(rows, side, dtype, _causal(fitted))
    if error > limit:
        return None
    evidence: dict[str, Json] = {"side": e.side(bool(side)), "scale": shown(fitted), "other_scale": shown(scale)}
    evidence |= {"ratio": shown(fitted / scale), "error": shown(error), "rows_recomputed": len(rows)}
    text = (
        f"recomputed in float64, {e.side(bool(side))} is the attention at softmax scale {fitted:.5g}, the other "
        f"side at {scale:.5g} (within {error:.2g} epsilons in all {len(rows)} rows)"
    )
    return Finding("softmax-scale", text, evidence, Strength.FITTED, _REPLACES)


def _solved(e: Evidence, rows: list[Row], side: int, scale: float, dtype: str, limit: float) -> Finding | None:
    """No named set fits: solve for the keys that entered, row by row, and check by recomputing."""
    told: list[tuple[Row, Bools, float]] = []
    for row in rows:
        use = solve_keys(row.keys[side], row.out[side], scale)
        error = float("inf") if use is None else distance(row.out[side], *attend(row.keys[side], use, scale), dtype)
        if use is None or error > limit:
            return None
        told.append((row, use, error))
    examples = list(_examples(told, side))
    evidence: dict[str, Json] = {"side": e.side(bool(side)), "mask": "solved", "rows_recomputed": len(told)}
    evidence |= {"error": shown(max(error for _, _, error in told)), "examples": examples}
    first = examples[0]
    text = (
        f"solving for the keys that entered, {e.side(bool(side))} left out or added keys in {len(told)} rows: at "
        f"sample {first['sample']} position {first['position']} missing {first['missing']}, added {first['added']}"
    )
    return Finding("mask-fit", text, evidence, Strength.FITTED, _REPLACES)


def _examples(told: list[tuple[Row, Bools, float]], side: int) -> Iterator[dict[str, Json]]:
    for row, use, _ in told[:8]:
        keys = row.keys[side]
        missing, added = keys.own & ~use, use & ~keys.own
        yield {
            "sample": keys.row_sample,
            "position": keys.row_position,
            "missing": keys.position[missing].tolist()[:16],
            "added": [[int(keys.sample[i]), int(keys.position[i])] for i in np.flatnonzero(added)[:16]],
        }
