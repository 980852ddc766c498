"""Row keys of dumped forwards: which token slot of a call is which token of which sequence.

A row is worth something only when every token before it is known: its key is the digest of them. Where a dump goes on
from tokens that it does not hold (a prefix cache, a request that began before it) its rows are left out and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from zkl_debug.digest import prefix_digests
from zkl_debug.ingest.raw import I64
from zkl_debug.schema import ROW_DTYPE, Phase, RowFlag

_MAX_TOKEN = 2**31 - 1


class BadCallError(ValueError):
    """What a dump says of a call does not fit together."""


@dataclass(frozen=True)
class Call:
    """The keyed rows of one forward.

    Attributes:
        rows: :data:`~zkl_debug.schema.ROW_DTYPE`, [n].
        slot: flat token slot of each row in (batch, length) order, [n].
        grid: (batch, length) of the token slots; packed and engine calls have batch 1.
        last: indices into ``rows`` of the last row of each sequence; -1 where that row has no key.
        phase: of the call.
        longest: longest query in the call, tokens.
        positions: position of each row's token as the dump has it, [n].
    """

    rows: NDArray[np.void]
    slot: I64
    grid: tuple[int, int]
    last: I64
    phase: Phase
    longest: int
    positions: I64

    @property
    def slots(self) -> int:
        """Token slots, padding included."""
        return self.grid[0] * self.grid[1]


@dataclass
class Keys:
    """Numbers samples, and remembers the tokens of those that later calls go on with.

    Attributes:
        known: request -> (sample number, its tokens so far).
        unkeyed: reason -> rows left out.
    """

    known: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    unkeyed: dict[str, int] = field(default_factory=dict)
    next_sample: int = 0

    def sample(self) -> int:
        """The next free sample number."""
        self.next_sample += 1
        return self.next_sample - 1

    def leave_out(self, reason: str, rows: int) -> None:
        """Count rows without a key."""
        self.unkeyed[reason] = self.unkeyed.get(reason, 0) + rows

    # ---- whole sequences ------------------------------------------------------------------------------------------
    def scored(
        self, ids: I64, positions: I64 | None, bounds: Sequence[tuple[int, int]], phase: Phase = Phase.SCORE
    ) -> Call:
        """A call that holds whole sequences.

        Args:
            ids: token ids, [b, s] or [t].
            positions: position ids of the same shape, or None for 0, 1, 2 ... in each sequence.
            bounds: first slot and end of each sequence in the flattened ids; empty for one sequence a line.
            phase: of the rows.

        Raises:
            BadCallError: when shapes, positions or bounds do not fit together.
        """
        check_tokens(ids)
        grid = (1, ids.shape[0]) if ids.ndim == 1 else (ids.shape[0], ids.shape[1])
        flat = ids.reshape(-1)
        if positions is not None and positions.size != flat.size:
            if grid[0] < 2 or positions.size != grid[1]:
                raise BadCallError(f"positions of shape {list(positions.shape)} for ids of {list(ids.shape)}")
            positions = np.broadcast_to(positions.reshape(1, -1), grid)
        where = None if positions is None else positions.reshape(-1)
        lines = [(i * grid[1], (i + 1) * grid[1]) for i in range(grid[0])]
        parts, slots = [], []
        for begin, end in bounds or lines:
            if not 0 <= begin < end <= flat.size:
                raise BadCallError(f"a sequence of slots {begin} to {end} among {flat.size}")
            parts.append(_rows(self.sample(), flat[begin:end], 0, int(phase)))
            slots.append(np.arange(begin, end, dtype=np.int64))
        return _call(parts, slots, grid, phase, where)

    # ---- engine steps ---------------------------------------------------------------------------------------------
    def engine_step(self, ids: I64, positions: I64, totals: I64, requests: Sequence[str], named: bool) -> Call:
        """A step of an engine: for each request its new tokens, one run after the other.

        Args:
            ids: token ids, [t]; slots behind the last request are padding.
            positions: position of each, [t].
            totals: tokens of each request after this step, [r].
            requests: what identifies each request, [r].
            named: whether that name is the request's own; a slot number may pass to another request.

        Raises:
            BadCallError: when positions and lengths do not fit together.
        """
        check_tokens(ids)
        if ids.ndim != 1 or positions.shape != ids.shape or len(requests) != len(totals):
            raise BadCallError(f"ids {list(ids.shape)}, positions {list(positions.shape)}, {len(totals)} lengths")
        parts: list[NDArray[np.void]] = []
        slots: list[I64] = []
        at, decoding, longest = 0, True, 0
        ends: list[int] = []
        for request, total in zip(requests, totals.tolist(), strict=True):
            if at >= len(ids):
                raise BadCallError(f"no tokens left for request {request[:40]}")
            start = int(positions[at])
            count = total - start
            run = positions[at : at + count]
            if count < 1 or len(run) < count or not np.array_equal(run, np.arange(start, total)):
                raise BadCallError(f"positions from {start} do not run up to {total - 1}")
            new = ids[at : at + count]
            decode = start > 0 and count == 1
            decoding, longest = decoding and decode, max(longest, count)
            part = self._continued(request, new, start, decode, named)
            if part is not None:
                parts.append(part)
                slots.append(np.arange(at, at + count, dtype=np.int64))
            ends.append(-1 if part is None else sum(map(len, parts)) - 1)
            at += count
        call = _call(parts, slots, (1, len(ids)), Phase.DECODE if decoding else Phase.PREFILL, positions)
        return Call(call.rows, call.slot, call.grid, np.asarray(ends, np.int64), call.phase, longest, call.positions)

    def _continued(self, request: str, new: I64, start: int, decode: bool, named: bool) -> NDArray[np.void] | None:
        sample, tokens = self.known.get(request, (-1, []))
        if start == 0:
            sample, tokens = self.sample(), []
        elif len(tokens) != start or not (named or decode):
            self.known.pop(request, None)
            self.leave_out("goes on from tokens that are not in the dump (prefix cache, or an earlier start)", len(new))
            return None
        first = decode and not self._decoding.get(request, False)
        self._decoding[request] = decode
        tokens = [*tokens, *new.tolist()]
        self.known[request] = (sample, tokens)
        flags = int(Phase.DECODE if decode else Phase.PREFILL)
        flags |= int(RowFlag.GENERATED) if decode else 0
        flags |= int(RowFlag.FIRST_DECODE) if first else 0
        return _rows(sample, np.asarray(tokens, np.int64), start, flags)

    _decoding: dict[str, bool] = field(default_factory=dict)


def check_tokens(ids: I64) -> None:
    """Token ids fit the row table.

    Raises:
        BadCallError: otherwise.
    """
    if ids.ndim not in (1, 2) or not ids.size:
        raise BadCallError(f"token ids of shape {list(ids.shape)}")
    if int(ids.min()) < 0 or int(ids.max()) > _MAX_TOKEN:
        raise BadCallError(f"token ids from {int(ids.min())} to {int(ids.max())}")


def padded_bounds(mask: I64) -> list[tuple[int, int]]:
    """Slots of each line's tokens under an attention mask [b, s] that is nonzero where there is a token.

    Raises:
        BadCallError: when a line's tokens are not one run.
    """
    bounds = []
    batch, length = mask.shape
    for line in range(batch):
        there = np.flatnonzero(mask[line])
        if not len(there) or int(there[-1]) - int(there[0]) + 1 != len(there):
            raise BadCallError("a mask whose tokens are not one run")
        bounds.append((line * length + int(there[0]), line * length + int(there[-1]) + 1))
    return bounds


def packed_bounds(cumulative: I64) -> list[tuple[int, int]]:
    """Slots of packed sequences from their cumulative lengths [n + 1]; empty ones are left out.

    Raises:
        BadCallError: when they do not ascend from 0.
    """
    flat = cumulative.reshape(-1)
    if len(flat) < 2 or int(flat[0]) != 0 or bool((np.diff(flat) < 0).any()):
        raise BadCallError("cumulative lengths that do not ascend from 0")
    return [(int(a), int(b)) for a, b in pairwise(flat.tolist()) if b > a]


def align(call: Call, shape: tuple[int, ...]) -> tuple[I64, tuple[int, ...], int] | str:
    """How a tensor's leading dimensions are the token slots of a call.

    Returns:
        (index of each row in the flattened leading dimensions, shape of one row, leading dimensions), or why not.
    """
    batch, length = call.grid
    lead = shape[:2]
    if batch > 1 and lead == (batch, length) and batch == length:
        return "batch and length are equal: its layout cannot be told"
    if len(shape) >= 2 and lead == (batch, length):
        return call.slot, shape[2:], 2
    if len(shape) >= 2 and lead == (length, batch) and length > 1:
        return (call.slot % length) * batch + call.slot // length, shape[2:], 2
    if shape and shape[0] == call.slots:
        return call.slot, shape[1:], 1
    return f"shape {list(shape)} has no token dimension of {list(call.grid)}"


def _rows(sample: int, tokens: I64, start: int, flags: int) -> NDArray[np.void]:
    """Rows of positions ``start`` to the end of one sequence; ``tokens`` are all of it, [n]."""
    rows = np.zeros(len(tokens) - start, ROW_DTYPE)
    rows["sample"], rows["flags"] = sample, flags
    rows["position"] = np.arange(start, len(tokens))
    rows["token"] = tokens[start:]
    rows["prefix"] = prefix_digests(tokens.astype(np.int32))[start:]
    if flags & RowFlag.FIRST_DECODE:
        rows["flags"][1:] &= ~np.uint32(RowFlag.FIRST_DECODE)
    return rows


def _call(
    parts: Sequence[NDArray[np.void]],
    slots: Sequence[I64],
    grid: tuple[int, int],
    phase: Phase,
    positions: I64 | None,
) -> Call:
    rows = np.concatenate(parts) if parts else np.zeros(0, ROW_DTYPE)
    slot = np.concatenate(slots) if slots else np.zeros(0, np.int64)
    last = np.cumsum([len(part) for part in parts], dtype=np.int64) - 1
    where = rows["position"].astype(np.int64) if positions is None else positions[slot]
    return Call(rows, slot, grid, last, phase, max(map(len, parts), default=0), where)
