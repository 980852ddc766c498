"""What findings look at: the valid rows of a table, with their differences worked out once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from zkl_debug.logprobs.table import F32, F64, I64, Bools, LogprobTable, bits, sequence_index
from zkl_debug.schema import U64, Json


@dataclass(frozen=True)
class View:
    """Rows of a table that were compared, sorted by (step, sample, position); every column has shape [N].

    Attributes:
        a, b: float32 log-probs of the two sides.
        differs: whether their bits differ.
        delta: a - b in float64, 0 where the bits are equal.
        sequence: index of (step, sample).
        rank: index of the row among its sequence's rows, from 0.
        from_end: the same counted from the sequence's last row.
        generated: not part of the prompt.
        sides: labels of a and b.
    """

    step: I64
    sample: I64
    position: I64
    token: I64
    a: F32
    b: F32
    differs: Bools
    delta: F64
    sequence: I64
    rank: I64
    from_end: I64
    generated: Bools
    prefix: U64
    sides: tuple[str, str]
    meta: Mapping[str, Json] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.position.shape[0])

    @property
    def gap(self) -> F64:
        """|delta|, infinity where one side is NaN or infinite and the other is not equal to it."""
        return np.asarray(np.where(np.isfinite(self.delta), np.abs(self.delta), np.inf))


def view_of(table: LogprobTable, rows: Bools | None = None) -> View:
    """The given rows (default: the valid ones) of a table that holds both sides."""
    assert table.train is not None
    part = table.select(table.valid if rows is None else rows)
    assert part.train is not None
    differs = bits(part.gen) != bits(part.train)
    with np.errstate(invalid="ignore"):
        delta = part.gen.astype(np.float64) - part.train.astype(np.float64)
    sequence = sequence_index(part.step, part.sample)
    rank, from_end = _ranks(sequence)
    return View(
        step=part.step,
        sample=part.sample,
        position=part.position,
        token=part.token,
        a=part.gen,
        b=part.train,
        differs=np.asarray(differs),
        delta=np.asarray(np.where(differs, delta, 0.0)),
        sequence=sequence,
        rank=rank,
        from_end=from_end,
        generated=part.generated,
        prefix=part.prefix,
        sides=part.sides,
        meta=part.meta,
    )


def take(view: View, rows: Bools) -> View:
    """The rows where ``rows`` is true; sequences, ranks and lengths are those of what is left."""
    sequence = sequence_index(view.step[rows], view.sample[rows])
    rank, from_end = _ranks(sequence)
    return View(
        step=view.step[rows],
        sample=view.sample[rows],
        position=view.position[rows],
        token=view.token[rows],
        a=view.a[rows],
        b=view.b[rows],
        differs=view.differs[rows],
        delta=view.delta[rows],
        sequence=sequence,
        rank=rank,
        from_end=from_end,
        generated=view.generated[rows],
        prefix=view.prefix[rows],
        sides=view.sides,
        meta=view.meta,
    )


def _ranks(sequence: I64) -> tuple[I64, I64]:
    n = sequence.shape[0]
    if n == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    starts = np.flatnonzero(np.diff(sequence, prepend=-1))
    length = np.diff(np.append(starts, n))
    rank = np.arange(n) - np.repeat(starts, length)
    return rank.astype(np.int64), (np.repeat(length, length) - 1 - rank).astype(np.int64)


def offset_rows(view: View, shift: int) -> I64:
    """Index of the row at position + shift of the same sequence, or -1; shape [N]."""
    width = int(view.position.max()) + 1 if len(view) else 1
    room = width + 2 * abs(shift) + 1
    key = view.sequence * room + view.position
    wanted = key + shift
    at = np.searchsorted(key, wanted)
    at = np.minimum(at, max(len(view) - 1, 0))
    inside = (view.position + shift >= 0) & (key[at] == wanted)
    return np.asarray(np.where(inside, at, -1), np.int64)
