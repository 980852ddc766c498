"""Exact attention over a set of keys, how far a side is from it, and parts merged by their log-sum-exp. float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.model import Keys
from zkl_debug.diff.explain.numeric import epsilon, rounded
from zkl_debug.diff.model import Bools, Ints


@dataclass(frozen=True)
class Row:
    """One affected row: what it may have read on each side, and what each side gave, [heads, d]."""

    index: int
    keys: tuple[Keys, Keys]
    out: tuple[F64, F64]


def groups_of(keys: Keys, interleaved: bool = False) -> Ints:
    """KV head that each query head reads, [heads]."""
    heads, groups = len(keys.query), keys.key.shape[1]
    return np.asarray(np.arange(heads) % groups if interleaved else np.arange(heads) // (heads // groups))


def weights(keys: Keys, use: Bools | Ints, scale: float, interleaved: bool = False) -> tuple[F64, F64, F64]:
    """exp(score - max) [heads, n] of the used keys, their values [n, heads, d], and the max [heads]."""
    group = groups_of(keys, interleaved)
    k, v = keys.key[use][:, group], keys.value[use][:, group]
    score = np.einsum("hd,nhd->hn", keys.query, k) * scale
    top = score.max(axis=1, keepdims=True)
    return np.exp(score - top), v, top[:, 0]


def attend(keys: Keys, use: Bools, scale: float, interleaved: bool = False) -> tuple[F64, F64]:
    """Attention over the keys in ``use``, and the size its rounding is measured by; [heads, d] each."""
    if not np.any(use):
        return np.full_like(keys.query, np.nan), np.ones_like(keys.query)
    weight, v, _ = weights(keys, use, scale, interleaved)
    weight = weight / weight.sum(axis=1, keepdims=True)
    return np.einsum("hn,nhd->hd", weight, v), np.einsum("hn,nhd->hd", weight, np.abs(v))


def distance(out: F64, exact: F64, size: F64, dtype: str) -> float:
    """Largest error in units of the dtype's epsilon, relative to the summed magnitudes; infinite for NaN."""
    error = np.abs(out - exact) / (epsilon(dtype) * np.maximum(size, 1e-30))
    return float(error.max()) if np.isfinite(error).all() else float("inf")


def merged(keys: Keys, scale: float, parts: int, dtype: str) -> F64:
    """Attention over equal parts of the keys, each rounded to the dtype, merged by their log-sum-exp."""
    own = np.flatnonzero(keys.own)
    own = own[np.argsort(keys.position[own], kind="stable")]
    outs, sums = [], []
    size = max(1, len(own) // parts)
    for start, stop in pairwise([0, *(size * i for i in range(1, parts)), len(own)]):
        at = own[start:stop]
        if not len(at):
            continue
        weight, v, top = weights(keys, at, scale)
        total = weight.sum(axis=1, keepdims=True)
        outs.append(rounded(np.einsum("hn,nhd->hd", weight / total, v), dtype))
        sums.append(top + np.log(total[:, 0]))
    share = np.exp(np.stack(sums) - np.logaddexp.reduce(np.stack(sums), axis=0))
    return rounded(np.einsum("ph,phd->hd", share, np.stack(outs)), dtype)


def with_unknown_value(rows: list[Row], uses: list[Bools], side: int, scale: float, dtype: str) -> tuple[float, float]:
    """Distance when keys of one further value entered whose K and V were not captured (padding slots).

    Each row and head then says that the unknown value lies on a ray from its output; where all rays of a KV head meet
    is that value. Returns the largest distance that is left, and the largest share of the weight those keys have.
    """
    groups = rows[0].keys[side].key.shape[1]
    rays = [_ray(row, use, side, scale) for row, use in zip(rows, uses, strict=True)]
    group = groups_of(rows[0].keys[side])
    unknown = [_meeting_point(rays, group == g) for g in range(groups)]
    worst, share = 0.0, 0.0
    for row, (numerator, total, residue, size) in zip(rows, rays, strict=True):
        value = np.stack([unknown[g] for g in group])
        away = value - row.out[side]
        weight = np.maximum(-(residue * away).sum(axis=1) / np.maximum((away**2).sum(axis=1), 1e-300), 0.0)
        exact = (numerator + weight[:, None] * value) / (total + weight)[:, None]
        magnitude = (size + weight[:, None] * np.abs(value)) / (total + weight)[:, None]
        worst = max(worst, distance(row.out[side], exact, magnitude, dtype))
        share = max(share, float((weight / (total + weight)).max()))
    return worst, share


Ray = tuple[F64, F64, F64, F64]


def _ray(row: Row, use: Bools, side: int, scale: float) -> Ray:
    """Sum of weight * v [heads, d], sum of weights [heads], what is left of it for the output, sum of magnitudes."""
    weight, v, _ = weights(row.keys[side], use, scale)
    total = weight.sum(axis=1)
    numerator = np.einsum("hn,nhd->hd", weight, v)
    return numerator, total, numerator - total[:, None] * row.out[side], np.einsum("hn,nhd->hd", weight, np.abs(v))


def _meeting_point(rays: list[Ray], heads: Bools) -> F64:
    """The point closest to all rays out - t * residue of some heads, the surer rays counting more."""
    size = rays[0][0].shape[1]
    left, right = np.zeros((size, size)), np.zeros(size)
    for numerator, total, residue, _ in rays:
        out = (numerator - residue) / total[:, None]
        for h in np.flatnonzero(heads):
            length = float(np.linalg.norm(residue[h]))
            if length == 0:
                continue
            direction = residue[h] / length
            across = (length / total[h]) ** 2 * (np.eye(size) - np.outer(direction, direction))
            left += across
            right += across @ out[h]
    return np.asarray(np.linalg.lstsq(left, right, rcond=1e-12)[0])
