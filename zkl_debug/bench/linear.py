"""How a cost grows: the straight line through measured sizes, and how far the measurements are from it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from zkl_debug.schema import Json

_MILLION = 1e6


def growth(digests: Sequence[int], costs: Sequence[float]) -> dict[str, Json] | None:
    """Fit ``cost = fixed + per_million * digests / 1e6``, where a second off counts by its share of the cost.

    Args:
        digests: sizes, increasing.
        costs: of each size, seconds, above zero.

    Returns:
        ``fixed`` and ``per_million`` in seconds; ``off_line``, the largest factor between a measurement and the line
        (1 with two sizes, which always are on one); ``marginal``, seconds a million more from each size to the next;
        ``marginal_ratio``, the last of them over the first, where there are three sizes; ``over_proportional``, the
        worst growth of the cost over growth of the size. None for a single size.
    """
    if len(digests) < 2:
        return None
    size, cost = np.array(digests, np.float64) / _MILLION, np.array(costs, np.float64)
    line = np.column_stack([np.ones(len(size)), size])
    fixed, per_million = np.linalg.lstsq(line / cost[:, None], np.ones(len(size)), rcond=None)[0]
    fitted = line @ (fixed, per_million)
    marginal = np.diff(cost) / np.diff(size)
    pairs = itertools.combinations(range(len(size)), 2)
    off = np.maximum(cost / fitted, fitted / cost) if (fitted > 0).all() else np.array([np.inf])
    return {
        "fixed": float(fixed),
        "per_million": float(per_million),
        "off_line": float(off.max()),
        "marginal": [float(value) for value in marginal],
        "marginal_ratio": float(marginal[-1] / marginal[0]) if len(marginal) > 1 and marginal[0] > 0 else None,
        "over_proportional": max(float(cost[b] / cost[a] * size[a] / size[b]) for a, b in pairs),
    }


def is_judged(line: dict[str, Json] | None) -> bool:
    """Whether a result of :func:`growth` says anything about straightness: it takes three sizes."""
    return line is not None and len(line["marginal"]) > 1


def describe(line: dict[str, Json]) -> str:
    """A result of :func:`growth` in words."""
    first, last = line["marginal"][0], line["marginal"][-1]
    text = f"{line['fixed']:.2f} s + {line['per_million']:.3f} s a million"
    if not is_judged(line):
        return f"{text}; not judged: any two sizes are on a line"
    text = f"{text}, {line['off_line']:.2f} x off the line at most"
    if line["marginal_ratio"] is None:
        return text
    ratio = f"{line['marginal_ratio']:.2f} x"
    return f"{text}; a million more: {first:.3f} s at the smallest sizes, {last:.3f} s at the largest ({ratio})"
