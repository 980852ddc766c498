"""Evidence of recurrent operators: which state every call started from, and whether it is the one that was written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.explain.gather_chain import Chains
from zkl_debug.diff.explain.gather_more import site_at, values
from zkl_debug.diff.explain.model import Handover
from zkl_debug.diff.model import Bools, CaptureLike, Ints
from zkl_debug.diff.rows import call_starts, group_ids

_CARRIES = {"scan": "ssm_state", "conv": "conv_state", "ssm_state.read": "ssm_state", "conv_state.read": "conv_state"}
_Digest = tuple[int, int]


def handovers(comparison: Comparison, site: int, chosen: Ints) -> list[Handover]:
    """States that the calls of some pairs started from.

    Args:
        comparison: the finished comparison.
        site: a recurrent operator, or a state that it read.
        chosen: indices of the pairs.
    """
    state = _CARRIES.get(comparison.sites[site].parsed.op)
    if state is None or not len(chosen):
        return []
    path = comparison.sites[site].parsed.path
    names = [f"{path}/{state}.{end}:out.0" for end in ("read", "write")]
    places = [site_at(comparison, name) for name in names]
    if places[0] is None:
        return []
    inputs = site_at(comparison, f"{path}/conv:in.0") if state == "conv_state" else None
    window = None if inputs is None else _Window(comparison, places[0], inputs)
    return list(_Reader(comparison, names[0], places[0], places[1], window).found(chosen))


class _Window:
    """Whether convolution states hold the inputs of the tokens in front of them."""

    def __init__(self, comparison: Comparison, state: int, inputs: int) -> None:
        self.comparison, self.state, self.inputs = comparison, state, inputs
        self.chains = Chains(comparison.space, np.flatnonzero(comparison.where(inputs).bits))

    def lacking(self, row: int) -> tuple[int, ...]:
        """Positions whose inputs are zeros in the state that ``row`` begins with; none unless all others are in it."""
        chain = self.chains.of(row)
        state = values(self.comparison, self.state, np.array([row]))
        own = None if chain is None else values(self.comparison, self.inputs, chain[-1:])
        if chain is None or state is None or own is None or state.shape[1] % own.shape[1]:
            return ()
        columns = state.reshape(own.shape[1], -1).T
        first = len(chain) - 1 - len(columns)  # position of the oldest input, below 0 in front of the sequence
        there = chain[max(0, first) : -1]
        held = values(self.comparison, self.inputs, there) if len(there) else np.zeros((0, own.shape[1]))
        if held is None:
            return ()
        expected = np.concatenate([np.zeros((len(columns) - len(held), own.shape[1])), held])
        other = (expected != columns).any(1)
        if columns[other].any():
            return ()
        return tuple((first + np.flatnonzero(other)).tolist())


class _Reader:
    def __init__(
        self, comparison: Comparison, name: str, read: int, written: int | None, window: _Window | None
    ) -> None:
        self.comparison, self.name, self.window = comparison, name, window
        self.space = comparison.space
        self.read = self._digests(read)
        self.written = {} if written is None else self._digests(written)
        self.starts = call_starts(self.space)
        self.slots = [_slots(capture) for capture in (comparison.a, comparison.b)]
        self.of_key: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.by_bits: dict[tuple[int, _Digest], list[int]] = defaultdict(list)
        for row, digest in self.written.items():
            side = int(self.space.side[row])
            self.of_key[side, int(self.space.key[row])].append(row)
            self.by_bits[side, digest].append(row)

    def _digests(self, site: int) -> dict[int, _Digest]:
        """Digest of the site by unified row."""
        where = self.comparison.where(site)
        rows = np.flatnonzero(where.at >= 0)
        digest = where.digest[where.index(self.space, rows)]
        return {int(row): (int(d[0]), int(d[1])) for row, d in zip(rows, digest, strict=True)}

    def found(self, chosen: Ints) -> Iterator[Handover]:
        pairs = self.comparison.pairs
        for right, rows in ((False, pairs.left[chosen]), (True, pairs.right[chosen])):
            first = self._first_rows(rows)
            calls: dict[int, list[int]] = defaultdict(list)
            for index, row in enumerate(first.tolist()):
                if row >= 0:
                    calls[row].append(index)
            for row, members in calls.items():
                yield self._handover(row, right, tuple(members))

    def _first_rows(self, rows: Ints) -> Ints:
        """The row of each row's call and sequence that a state was read for, -1 where there is none, int64 [n]."""
        space, reads = self.space, np.array(sorted(self.read), np.int64)
        ids, first = group_ids(
            [
                np.concatenate([column[reads], wanted])
                for column, wanted in (
                    (space.side.astype(np.int64), space.side[rows].astype(np.int64)),
                    (space.frame, space.frame[rows]),
                    (space.sample.astype(np.int64), space.sample[rows].astype(np.int64)),
                    (space.position, self.starts[rows]),
                )
            ]
        )
        of_id = np.full(len(first), -1, np.int64)
        of_id[ids[: len(reads)]] = reads
        return of_id[ids[len(reads) :]]

    def _handover(self, row: int, right: bool, members: tuple[int, ...]) -> Handover:
        space = self.space
        digest, side = self.read[row], int(space.side[row])
        sample, position = int(space.sample[row]), int(space.position[row])
        before = self._before(row)
        written = None if before is None else self.written[before] == digest
        source = None
        if digest != (0, 0) and not written:
            source = self._source(row, digest, side, sample)
        slot, previous = self.slots[side].get(sample, (-1, -1))
        lacking = () if self.window is None else self.window.lacking(row)
        return Handover(
            self.name, right, members, sample, position, digest == (0, 0), written, source, slot, previous, lacking
        )

    def _before(self, row: int) -> int | None:
        """The row that wrote last, one token before, in the same sequence and an earlier call."""
        space = self.space
        parent = int(space.parent[space.key[row]])
        rows = [r for r in self.of_key.get((int(space.side[row]), parent), ()) if space.sample[r] == space.sample[row]]
        earlier = [r for r in rows if space.frame[r] < space.frame[row]]
        return max(earlier, key=lambda r: int(space.frame[r]), default=None)

    def _source(self, row: int, digest: _Digest, side: int, sample: int) -> tuple[int, int] | None:
        space = self.space
        rows = [
            r
            for r in self.by_bits.get((side, digest), ())
            if int(space.sample[r]) != sample and space.frame[r] < space.frame[row]
        ]
        last = max(rows, key=lambda r: int(space.frame[r]), default=None)
        return None if last is None else (int(space.sample[last]), int(space.position[last]))


def _slots(capture: CaptureLike) -> dict[int, tuple[int, int]]:
    """(slot, previous owner) by request, from the events of a capture."""
    found = {}
    events: Any = getattr(capture, "events", ())
    for event in events:
        if event.name == "recurrent_slot":
            detail = event.detail
            found[int(detail["request"])] = int(detail["slot"]), int(detail["previous"])
    return found


def belongs_to(handovers_: list[Handover], pairs: int) -> Bools:
    """Pairs that one of the states belongs to, bool [pairs]."""
    found = np.zeros(pairs, np.bool_)
    for one in handovers_:
        found[list(one.pairs)] = True
    return found
