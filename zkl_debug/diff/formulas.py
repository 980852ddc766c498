"""Operators with a known formula, in float64: what the output is, and what its rounding is measured by.

Every formula returns (exact, size): ``size`` is the sum of the magnitudes that were added for an element, so that an
implementation in a format with spacing ``eps`` errs by a few ``eps * size`` whatever its order of summation is.
"""

from __future__ import annotations

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.model import Ints

Exact = tuple[F64, F64]


def linear(x: F64, weight: F64, bias: F64 | None = None) -> Exact:
    """x [m, k], weight [n, k], bias [n] -> [m, n]."""
    exact, size = x @ weight.T, np.abs(x) @ np.abs(weight).T
    return (exact, size) if bias is None else (exact + bias, size + np.abs(bias))


def linear_walk(x: F64, weight: F64) -> F64:
    """Root of the sum of the squared addends of a linear layer [m, n]: how large random addends make a sum."""
    return np.sqrt((x**2) @ (weight**2).T)


def rmsnorm(x: F64, weight: F64, eps: float) -> Exact:
    """x [m, n] / sqrt(mean(x^2) + eps) * weight [n]."""
    exact = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight
    return exact, np.abs(exact)


def layernorm(x: F64, weight: F64, bias: F64 | None, eps: float) -> Exact:
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last axis of [m, n]."""
    mean = x.mean(axis=-1, keepdims=True)
    root = np.sqrt(x.var(axis=-1, keepdims=True) + eps)
    shift = np.zeros_like(weight) if bias is None else bias
    size = (np.abs(x) + np.abs(mean)) / root * np.abs(weight) + np.abs(shift)
    return (x - mean) / root * weight + shift, size


def attention(query: F64, key: F64, value: F64, scale: float) -> Exact:
    """Softmax attention of one row over the keys it may read.

    Args:
        query: [heads, d].
        key, value: [n, groups, d]; heads // groups query heads share a group.
        scale: factor of the scores.
    """
    share = np.arange(len(query)) // (len(query) // key.shape[1])
    k, v = key[:, share], value[:, share]
    score = np.einsum("hd,nhd->hn", query, k) * scale
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    weight /= weight.sum(axis=1, keepdims=True)
    # An error of a score of size s moves the weight by s * eps: that counts as well.
    spread = 1.0 + np.einsum("hd,nhd->hn", np.abs(query), np.abs(k)).max(axis=1, keepdims=True) * abs(scale)
    return np.einsum("hn,nhd->hd", weight, v), np.einsum("hn,nhd->hd", weight, np.abs(v)) * spread


def log_softmax(x: F64) -> Exact:
    """log-softmax over the last axis of [m, n]."""
    top = x.max(axis=-1, keepdims=True)
    total = np.log(np.exp(x - top).sum(axis=-1, keepdims=True))
    return x - top - total, np.abs(x) + np.abs(top) + np.abs(total) + 1.0


def combine(parts: F64) -> Exact:
    """Sum of the k expert outputs of a token: [m, k, n] -> [m, n]."""
    return parts.sum(axis=1), np.abs(parts).sum(axis=1)


def swiglu(x: F64) -> Exact:
    """silu(a) * b of the halves a, b of the last axis: [m, 2 n] -> [m, n]."""
    a, b = np.split(x, 2, axis=-1)
    with np.errstate(over="ignore"):
        exact = a / (1.0 + np.exp(-a)) * b
    return exact, np.abs(exact) * (1.0 + np.abs(a))


def rope(x: F64, position: Ints, frequencies: F64, interleaved: bool = False, angle_room: float = 1.0) -> Exact:
    """Rotate pairs of channels by position * frequency.

    Args:
        x: [m, heads, d]; the first 2 * len(frequencies) channels of a head turn, the others pass.
        position: [m].
        frequencies: [d / 2] or fewer, radians a position.
        interleaved: pairs are neighbouring channels instead of the two halves.
        angle_room: epsilon of the angles over epsilon of the output: angles are float32 whatever the output is.
    """
    half = len(frequencies)
    angle = position[:, None, None] * frequencies
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    one = turned[..., 0::2] if interleaved else turned[..., :half]
    two = turned[..., 1::2] if interleaved else turned[..., half:]
    parts = (one * np.cos(angle) - two * np.sin(angle), two * np.cos(angle) + one * np.sin(angle))
    length = np.hypot(one, two) * (1.0 + np.abs(angle) * angle_room)
    if interleaved:
        exact = np.stack(parts, axis=-1).reshape(turned.shape)
        size = np.repeat(length, 2, axis=-1)
    else:
        exact, size = np.concatenate(parts, axis=-1), np.concatenate([length, length], axis=-1)
    return np.concatenate([exact, rest], axis=-1), np.concatenate([size, np.abs(rest)], axis=-1)
