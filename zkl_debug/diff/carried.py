"""Recurrent operators: whether the state that a row's call started from was another one already.

A scan over a whole prompt, a scan over its second chunk and a decode step give the same row by different calls. Each
call computes rows from the state it was given, so what an earlier call did wrong reaches it as an input. That holds for
the rows between the two calls' first ones: some other call of one of the sides ran these.
"""

from __future__ import annotations

import numpy as np

from zkl_debug.diff.compare import compare_digests, locate
from zkl_debug.diff.edges import Pairs
from zkl_debug.diff.flow import FlowMap
from zkl_debug.diff.keyed import KeyFlags, key_flags
from zkl_debug.diff.model import Bools, Ints
from zkl_debug.diff.rows import RowSpace, ancestor_at, any_ancestor, call_starts


class CarriedState:
    """What reached the rows of a recurrent operator through its state."""

    def __init__(self, flows: FlowMap, space: RowSpace, pairs: Pairs, tables: list[Ints]) -> None:
        self.flows, self.space, self.pairs, self.tables = flows, space, pairs, tables
        self._flags: dict[int, KeyFlags] = {}
        self._before: Ints | None = None

    def flags(self, site: int) -> KeyFlags:
        """Flags of a site by key, whatever its place in the order."""
        if site not in self._flags:
            where = locate(self.flows.sites[site], self.space)
            present, differs = compare_digests(self.flows.sites[site], where, self.space, self.pairs)
            self._flags[site] = key_flags(self.space, self.pairs, present, differs, where)
        return self._flags[site]

    def dirty(self, site: int, read_differs: Bools | None) -> Bools:
        """Pairs whose calls started from different states, bool [P].

        Args:
            site: output of the operator.
            read_differs: pairs whose states, as read, differ; None where none were captured.
        """
        found = np.zeros(len(self.pairs), np.bool_) if read_differs is None else read_differs.copy()
        before = self._key_before()
        some = np.flatnonzero(before < self.space.n_keys)
        if not len(some):
            return found
        sides, key = self.pairs.sides[some], before[some]
        dirty, _ = self.flags(site)
        earlier = np.stack([any_ancestor(flag, self.tables) for flag in dirty])[sides, key]
        _, written = self.flows.state_sites(site)
        if written is not None:  # the state itself, where both of its copies were captured, tells better
            differs, unknown = self.flags(written)
            earlier = np.where(unknown[sides, key], earlier, differs[sides, key])
        found[some] |= earlier
        return found

    def _key_before(self) -> Ints:
        """Key of the last row that some call before the later of the pair's two ran, K where none, int64 [P]."""
        if self._before is None:
            starts = call_starts(self.space)
            start = np.maximum(starts[self.pairs.left], starts[self.pairs.right])
            steps = self.space.position[self.pairs.left] - start + 1
            at = ancestor_at(self.pairs.key, np.maximum(steps, 0), self.tables)
            self._before = np.where((start > 0) & (at >= 0), at, self.space.n_keys)
        return self._before
