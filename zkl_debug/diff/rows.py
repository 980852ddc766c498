"""The rows of both captures in one numbering, joined by row key. No Python loop runs over rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.model import Bools, CaptureLike, Ints
from zkl_debug.digest import parent_prefix
from zkl_debug.schema import RowFlag, row_phase


class Memo:
    """The last few results that depend on nothing but some objects; the same objects are known by their identity."""

    _KEPT = 12

    def __init__(self) -> None:
        self._kept: dict[tuple[int | str, ...], tuple[tuple[Any, ...], Any]] = {}

    def get[T](self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The result for these objects (strings count by value), made when it is not there. Treat it as read-only."""
        short = tuple(part if isinstance(part, str) else id(part) for part in key)
        # The entry holds the objects, so that no other one can have their identity.
        entry = self._kept[short] = self._kept.pop(short) if short in self._kept else (key, make())
        if len(self._kept) > self._KEPT:
            del self._kept[next(iter(self._kept))]
        made: T = entry[1]
        return made


@dataclass(frozen=True)
class RowSpace:
    """Unified rows 0..U-1 (those of A, then those of B) and the row keys 0..K-1 they fall into.

    A key is (step, weight epoch within the step, position, label or not, prefix digest); keys are numbered in that
    order. Index K stands for "no key".

    Attributes:
        n_a: rows of A.
        side: 0 for A, 1 for B, uint8 [U].
        row: index into the own capture's rows, int64 [U].
        key: row key, int64 [U].
        phase: phase code, uint8 [U].
        sample, position, token, flags, step, frame: columns of the rows, [U].
        when: number of the (step, weight epoch) of each row, as in its key, int64 [U].
        key_row: the row that stands for each key, int64 [K]: of A if it has one, of the lowest sample, then the first.
        parent: key of the same prefix one token shorter, K where there is none, int64 [K].
        orphan: the parent should exist but no row of it was captured, bool [K].
        label: the key belongs to label rows, bool [K].
        has: which side has rows of the key, bool [2, K].
        memo: what was worked out for the rows of one site and holds for all sites with the same rows.
    """

    n_a: int
    side: NDArray[np.uint8]
    row: Ints
    key: Ints
    phase: NDArray[np.uint8]
    sample: NDArray[np.uint64]
    position: Ints
    token: Ints
    flags: NDArray[np.uint32]
    step: Ints
    frame: Ints
    when: Ints
    key_row: Ints
    parent: Ints
    orphan: Bools
    label: Bools
    has: Bools
    memo: Memo = field(default_factory=Memo, repr=False, compare=False)

    @property
    def n_rows(self) -> int:
        """Rows of both captures."""
        return len(self.key)

    @property
    def n_keys(self) -> int:
        """Distinct row keys."""
        return len(self.key_row)

    @property
    def matched(self) -> Bools:
        """Keys that both sides have, bool [K]."""
        return np.asarray(self.has[0] & self.has[1])

    @cached_property
    def generated(self) -> Bools:
        """Keys whose token was generated, as far as either side knows, and those that follow one, bool [K].

        A side that scores need not know where a prompt ends.
        """
        found = np.zeros(self.n_keys + 1, np.bool_)
        found[self.key[(self.flags & np.uint32(RowFlag.GENERATED)) != 0]] = True
        return np.asarray(found[:-1] | found[self.parent])


def group_ids(columns: Sequence[NDArray[Any]]) -> tuple[Ints, Ints]:
    """Number the distinct tuples of some columns in their sort order.

    Args:
        columns: arrays of equal length n, the most significant first.

    Returns:
        ids, int64 [n], and the first index of each id, int64 [ids].
    """
    n = len(columns[0])
    if n == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    key, values = np.zeros(n, np.int64), 1  # all columns so far as one number below ``values``
    for column in columns:
        code, more = _coded(column)
        if values * more > _LARGEST:
            key, values, _ = _ranks(key)
        if more > 1:
            key = key * more + code
            values *= more
    ids, _, first = _ranks(key)
    return ids, first


#: Bound of a number that stands for several columns.
_LARGEST = 1 << 62


def _coded(column: NDArray[Any]) -> tuple[Ints, int]:
    """A column as numbers 0 .. k-1 that sort alike, and k."""
    low, high = int(column.min()), int(column.max())
    if high - low >= 1 << 31:
        code, values, _ = _ranks(column)
        return code, values
    small = column - column.dtype.type(low) if column.dtype.kind == "u" else column.astype(np.int64) - low
    return small.astype(np.int64), high - low + 1


def _ranks(column: NDArray[Any]) -> tuple[Ints, int, Ints]:
    """Number of each value among the distinct values, how many these are, and the first index of each."""
    order = np.argsort(column)
    ordered = column[order]
    new = np.empty(len(order), np.bool_)
    new[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.cumsum(new) - 1
    starts = np.flatnonzero(new)
    return ranks, len(starts), np.minimum.reduceat(order, starts)


def _epochs(capture: CaptureLike) -> tuple[Ints, Ints]:
    """Step of each row and the rank of its weight version among those its capture has at that step, int64 [N]."""
    frames, frame = capture.frames, capture.rows["frame"]
    if len(frames) == 0:
        return np.zeros(len(frame), np.int64), np.zeros(len(frame), np.int64)
    step = frames["step"].astype(np.int64)
    both, first = group_ids([step, frames["weight_version"]])
    steps_of_pair = step[first]
    rank_of_pair = np.arange(len(first)) - np.searchsorted(steps_of_pair, steps_of_pair, side="left")
    return step[frame], rank_of_pair[both][frame]


def _same_step(a: Ints, b: Ints) -> bool:
    """Whether each side has a single step, so that their numbers need not agree."""
    return all(len(np.unique(side)) <= 1 for side in (a, b))


def build_rows(a: CaptureLike, b: CaptureLike) -> RowSpace:
    """Join the rows of two captures.

    Rows of one prefix are expected to be equal only under the same weights. Weight versions of two systems need not
    be numbered alike, so within a training step they are matched by rank: the first version a side used at the step
    belongs to the first of the other side. When each side has one step only, its number does not matter.
    """
    both = [a.rows, b.rows]
    n_a = len(a.rows)
    epochs = [_epochs(a), _epochs(b)]
    step = np.concatenate([epochs[0][0], epochs[1][0]])
    keyed_step = np.zeros_like(step) if _same_step(epochs[0][0], epochs[1][0]) else step
    epoch = np.concatenate([epochs[0][1], epochs[1][1]])
    position = np.concatenate([rows["position"] for rows in both]).astype(np.int64)
    token = np.concatenate([rows["token"] for rows in both]).astype(np.int64)
    flags = np.concatenate([rows["flags"] for rows in both]).astype(np.uint32)
    prefix = np.concatenate([rows["prefix"] for rows in both]).astype(np.uint64).reshape(-1, 2)
    label = (flags & np.uint32(RowFlag.LABEL)) != 0
    key, _ = group_ids([keyed_step, epoch, position, label, prefix[:, 0], prefix[:, 1]])
    side = (np.arange(len(key)) >= n_a).astype(np.uint8)
    sample = np.concatenate([rows["sample"] for rows in both]).astype(np.uint64)
    _, by_key = group_ids([key, side, sample])
    key_row = by_key[np.flatnonzero(np.diff(key[by_key], prepend=-1))]
    has = np.zeros((2, len(key_row)), np.bool_)
    has[side, key] = True
    columns = [keyed_step[key_row], epoch[key_row], position[key_row]]
    parent, orphan = _parents(columns, label[key_row], prefix[key_row], token[key_row])
    return RowSpace(
        n_a=n_a,
        side=side,
        row=np.concatenate([np.arange(len(rows)) for rows in both]).astype(np.int64),
        key=key,
        phase=row_phase(flags).astype(np.uint8),
        sample=sample,
        position=position,
        token=token,
        flags=flags,
        step=step,
        frame=np.concatenate([rows["frame"] for rows in both]).astype(np.int64),
        when=group_ids([keyed_step, epoch])[0],
        key_row=key_row,
        parent=parent,
        orphan=orphan,
        label=label[key_row],
        has=has,
    )


def _parents(columns: list[Ints], label: Bools, prefix: NDArray[np.uint64], token: Ints) -> tuple[Ints, Bools]:
    """Parent key of each key (K for none) and whether a parent is missing."""
    n = len(label)
    if n == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    step, epoch, position = columns
    above = parent_prefix(prefix, token, position)
    table = [
        np.concatenate([step, step]),
        np.concatenate([epoch, epoch]),
        np.concatenate([position, position - 1]),
        np.concatenate([prefix[:, 0], above[:, 0]]),
        np.concatenate([prefix[:, 1], above[:, 1]]),
    ]
    ids, _ = group_ids(table)
    owner = np.full(int(ids.max()) + 1, n, np.int64)
    normal = np.flatnonzero(~label)
    owner[ids[:n][normal]] = normal
    parent = owner[ids[n:]]
    return parent, (parent == n) & (position > 0)


def ancestor_tables(parent: Ints) -> list[Ints]:
    """Tables for :func:`any_ancestor`: the 1st, 2nd, 4th, 8th ... ancestor of each key, K where there is none."""
    n = len(parent)
    hop = np.append(parent, n)
    tables = []
    while bool((hop[:n] != n).any()):
        tables.append(hop)
        hop = hop[hop]
    return tables


def any_ancestor(flag: Bools, tables: list[Ints]) -> Bools:
    """Whether the flag is set at a key or at any of its ancestors, bool [K]."""
    found = np.append(flag, False)
    for hop in tables:
        found = found | found[hop]
    return found[:-1]


def ancestor_at(key: Ints, steps: Ints, tables: list[Ints]) -> Ints:
    """The ancestor of each key so many tokens back; K where there is none.

    Args:
        key: [n].
        steps: [n], not negative.
        tables: of :func:`ancestor_tables`.
    """
    at = key.copy()
    if not tables:
        alone: Ints = np.where(steps > 0, -1, at)
        return alone
    for bit, hop in enumerate(tables):
        at = np.where((steps >> bit) & 1 == 1, hop[at], at)
    beyond = steps >> len(tables) > 0
    found: Ints = np.where(beyond, len(tables[0]) - 1, at)
    return found


def call_starts(space: RowSpace) -> Ints:
    """The first position of its sequence in the call of each unified row, int64 [U]: where a chunk begins."""
    plain = ~space.label[space.key]
    group, first = group_ids([space.side, space.frame, space.sample])
    start = np.full(len(first), np.iinfo(np.int64).max)
    at = np.flatnonzero(plain)
    np.minimum.at(start, group[at], space.position[at])
    found: Ints = np.minimum(start[group], space.position)
    return found
