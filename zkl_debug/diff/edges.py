"""Which rows are compared with which: the pairs of every edge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zkl_debug.diff.model import PHASE_EDGES, SAME_PHASE_EDGES, WITHIN_EDGES, Bools, Ints
from zkl_debug.diff.rows import RowSpace
from zkl_debug.schema import Phase

_PHASES = (Phase.SCORE, Phase.PREFILL, Phase.DECODE)


@dataclass(frozen=True)
class Pairs:
    """All pairs of all edges, one edge after the other; inside an edge the earliest row comes first.

    Earliest means the lowest (step, position, sample): of the rows of one forward a causal model computes the lower
    position from less.

    Attributes:
        left, right: unified rows, int64 [P].
        key: their common row key, int64 [P].
        sides: 0 both of A, 1 both of B, 2 across, uint8 [P].
        slices: place of each edge in the arrays.
    """

    left: Ints
    right: Ints
    key: Ints
    sides: Ints
    slices: dict[str, slice]

    def __len__(self) -> int:
        return len(self.left)

    def n_rows(self, edge: str, selected: Bools, n_keys: int) -> int:
        """Distinct row keys among the selected pairs (bool [P]) of an edge."""
        part = self.slices[edge]
        seen = np.zeros(n_keys, np.bool_)
        seen[self.key[part][selected[part]]] = True
        return int(np.count_nonzero(seen))


def _first_of(space: RowSpace, members: Ints) -> Ints:
    """First member of each key, -1 for none, int64 [K]: of the lowest sample, so that no order of batches matters."""
    first = np.full(space.n_keys, -1, np.int64)
    ordered = members[np.lexsort((members, space.sample[members]))]
    first[space.key[ordered[::-1]]] = ordered[::-1]
    return first


class _Groups:
    """Members and first member per key of each (side, phase)."""

    def __init__(self, space: RowSpace) -> None:
        self.space = space
        self.members = {
            (side, phase): np.flatnonzero((space.side == side) & (space.phase == phase))
            for side in (0, 1)
            for phase in _PHASES
        }
        self.first = {group: _first_of(space, rows) for group, rows in self.members.items()}

    def within(self, side: int) -> tuple[Ints, Ints]:
        """Every duplicate of a key in one phase of a side, against the first."""
        left, right = [], []
        for phase in _PHASES:
            rows = self.members[side, phase]
            first = self.first[side, phase][self.space.key[rows]]
            extra = first != rows
            left.append(first[extra])
            right.append(rows[extra])
        return np.concatenate(left), np.concatenate(right)

    def across(self, g: tuple[int, Phase], h: tuple[int, Phase], allowed: Bools | None = None) -> tuple[Ints, Ints]:
        """A star: the first of g with every row of h, and every other row of g with the first of h.

        With equal stars all rows of both groups are equal, and the number of pairs stays linear.
        """
        key = self.space.key
        rows_h, rows_g = self.members[h], self.members[g]
        first_g, first_h = self.first[g][key[rows_h]], self.first[h][key[rows_g]]
        take_h = first_g >= 0
        take_g = (first_h >= 0) & (self.first[g][key[rows_g]] != rows_g)
        if allowed is not None:
            take_h &= allowed[key[rows_h]]
            take_g &= allowed[key[rows_g]]
        left = np.concatenate([first_g[take_h], rows_g[take_g]])
        right = np.concatenate([rows_h[take_h], first_h[take_g]])
        return left, right

    def between(self, p: Phase, q: Phase) -> tuple[Ints, Ints]:
        """Pairs of two phases: inside each capture, and across where no capture has both phases of the key.

        Comparing one capture's prefill with the other's decode would mix two questions when one capture can answer
        the prefill-decode one by itself.
        """
        both = [(self.first[side, p] >= 0) & (self.first[side, q] >= 0) for side in (0, 1)]
        alone = ~(both[0] | both[1])
        parts = [
            self.across((0, p), (0, q)),
            self.across((1, p), (1, q)),
            self.across((0, p), (1, q), alone),
            self.across((1, p), (0, q), alone),
        ]
        return np.concatenate([left for left, _ in parts]), np.concatenate([right for _, right in parts])


def build_pairs(space: RowSpace) -> Pairs:
    """All pairs of all edges. Edges between equal phases of A and B exist only where there are such rows."""
    groups = _Groups(space)
    edges = {name: groups.between(p, q) for name, (p, q) in PHASE_EDGES.items()}
    for side, name in enumerate(WITHIN_EDGES):
        edges[name] = groups.within(side)
    for name, phase in SAME_PHASE_EDGES.items():
        left, right = groups.across((0, phase), (1, phase))
        if len(left):
            edges[name] = (left, right)
    slices, lefts, rights, start = {}, [], [], 0
    for name, (left, right) in edges.items():
        order = _earliest_first(space, left, right)
        lefts.append(left[order])
        rights.append(right[order])
        slices[name] = slice(start, start + len(left))
        start += len(left)
    left, right = np.concatenate(lefts), np.concatenate(rights)
    same = space.side[left] == space.side[right]
    sides = np.where(same, space.side[left], 2).astype(np.int64)
    return Pairs(left, right, space.key[left], sides, slices)


def named_row(space: RowSpace, left: Ints, right: Ints) -> Ints:
    """The row that names the sample of each pair: A's own, else A's row that stands for the key, else the left one."""
    key_row = space.key_row[space.key[left]]
    of_a = np.where(space.side[right] == 0, right, np.where(space.side[key_row] == 0, key_row, left))
    return np.where(space.side[left] == 0, left, of_a)


def _earliest_first(space: RowSpace, left: Ints, right: Ints) -> Ints:
    named = named_row(space, left, right)
    key = space.key[left]
    order: Ints = np.lexsort((right, left, key, space.sample[named], space.position[named], space.step[named]))
    return order
