"""Rows of a prefix: what a recomputation of one row reads of the rows before it, and which rows are recomputed."""

from __future__ import annotations

import numpy as np

from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.model import Ints
from zkl_debug.diff.rows import RowSpace

_RECOMPUTED = 12
_MOST_TOKENS = 2048


def spread_by_position(comparison: Comparison, chosen: Ints) -> Ints:
    """Places in ``chosen`` (pairs) of some of them, evenly spread over the positions; long prefixes are left out."""
    position = comparison.space.position[comparison.pairs.left[chosen]]
    order = np.argsort(position, kind="stable")
    order = order[position[order] < _MOST_TOKENS]
    if not len(order):
        return order
    return np.unique(order[np.linspace(0, len(order) - 1, min(_RECOMPUTED, len(order))).astype(np.int64)])


class Chains:
    """Rows along prefixes, among the usable ones: of the own side where it has one, else of the other side.

    Args:
        space: all rows.
        usable: rows whose values are there, int64 [n].
    """

    def __init__(self, space: RowSpace, usable: Ints) -> None:
        self._space = space
        self._row_of = np.full((2, space.n_keys), -1, np.int64)
        for side in (1, 0):
            rows = usable[space.side[usable] == side]
            self._row_of[1 - side, space.key[rows]] = rows  # the other side's row where there is no own one
        for side in (0, 1):
            rows = usable[space.side[usable] == side]
            self._row_of[side, space.key[rows]] = rows

    def of(self, row: int) -> Ints | None:
        """Rows of the row's whole prefix, earliest first, itself last; None where one is missing."""
        space = self._space
        key, side = int(space.key[row]), int(space.side[row])
        found: list[int] = []
        while key < space.n_keys:
            at = int(self._row_of[side, key])
            if at < 0:
                return None
            found.append(at)
            key = int(space.parent[key])
        return np.array(found[::-1], np.int64) if len(found) == int(space.position[row]) + 1 else None
