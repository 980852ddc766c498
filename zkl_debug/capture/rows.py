"""Row keys of a frame: which token slot of a forward belongs to which (sample, position, token, prefix)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from zkl_debug.digest import prefix_digests
from zkl_debug.errors import ProbeError
from zkl_debug.schema import FRAME_DTYPE, ROW_DTYPE, Phase, RowFlag

I64 = NDArray[np.int64]


RowTable = NDArray[np.void]


def late(make: Callable[[], RowTable]) -> RowTable:
    """A row table that is made when :attr:`FrameRows.rows` is read first."""
    return cast("RowTable", make)


class _Late:
    """A field that may be set to what :func:`late` returns."""

    def __get__(self, instance: Any, owner: type | None = None) -> RowTable:
        value = instance.__dict__["rows"]
        if callable(value):
            value = instance.__dict__["rows"] = value()
        found: RowTable = value
        return found

    def __set__(self, instance: Any, value: RowTable) -> None:
        instance.__dict__["rows"] = value


@dataclass
class FrameRows:
    """The rows of one model forward.

    Attributes:
        grid: token slots of the call as (s, b); packed and engine frames have b = 1.
        rows: row table, shape [n], :data:`~zkl_debug.schema.ROW_DTYPE`; ``frame`` is filled in by the session. May be
            given as :func:`late`: keys are then worked out when the frame is filed, not before the forward.
        slot: flat slot of each row in s-major order (``s_i * b + b_i``), shape [n].
        phase: what the frame is (``MIXED`` when its rows differ).
        n_seqs: sequences in the call.
        max_seqlen_q: longest query in the call, tokens.
        last: indices into ``rows`` of the last row of each sequence, for engines that compute only last logits.
        step: training step, or -1.
        graph: CUDA-graph bucket, or -1.
        micro_batch: index of the micro-batch or engine step, or -1.
        warmup: a call that prepares others (a graph is being recorded): its rows mean nothing and are not written.
        split: (rank, size) of the sequence-parallel group: tensors of 1 / size of the slots are this rank's share of s.
        following: the token behind each row in its sample, -1 behind the last, where rows of a sample are not all here.
        following_flags: ``GENERATED`` where that token was generated, uint32 [n]; with ``following``.
        cache: what :func:`zkl_debug.capture.layout.resolve` found for shapes seen before with these slots.
        geometry: once the frame is open, what it has in common with those whose rows lie in the same slots.
    """

    grid: tuple[int, int]
    rows: RowTable
    slot: I64
    phase: Phase
    n_seqs: int
    max_seqlen_q: int
    last: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    step: int = -1
    graph: int = -1
    micro_batch: int = -1
    weight_version: int = 0
    warmup: bool = False
    split: tuple[int, int] = (0, 1)
    following: I64 | None = None
    following_flags: NDArray[np.uint32] | None = None
    cache: dict[object, Any] = field(default_factory=dict)
    geometry: Geometry | None = None

    @property
    def n_rows(self) -> int:
        """Rows of the forward, without label rows."""
        return len(self.slot)

    @property
    def n_slots(self) -> int:
        """Token slots the model ran, padding included."""
        return self.grid[0] * self.grid[1]

    @property
    def leading(self) -> bool:
        """Whether the rows are the first token slots, in order; what follows is padding."""
        found = self.cache.get("leading")
        if found is None:
            n = len(self.slot)
            found = self.cache["leading"] = n > 0 and bool((self.slot == np.arange(n)).all())
        return bool(found)

    def frame_record(self, frame: int, event_seq: int, n_rows: int) -> NDArray[np.void]:
        """The 0-d :data:`~zkl_debug.schema.FRAME_DTYPE` record of this frame."""
        record = np.zeros((), FRAME_DTYPE)
        record["frame"] = frame
        record["phase"] = int(self.phase)
        record["step"] = self.step
        record["event_seq"] = event_seq
        record["weight_version"] = self.weight_version
        record["n_rows"] = n_rows
        record["n_padded"] = self.n_slots
        record["graph"] = self.graph
        record["n_seqs"] = self.n_seqs
        record["max_seqlen_q"] = self.max_seqlen_q
        record["micro_batch"] = self.micro_batch
        return record


FrameRows.rows = _Late()  # type: ignore[assignment]


@dataclass
class Sketch:
    """What is known of a forward at once; its rows are worked out when they are asked for, while a device works.

    Attributes:
        phase, graph: as those of :class:`FrameRows`; a phase that is not mixed.
        n_rows: how many rows it has, 0 only when it has none.
        make: works them out; called once, at the latest when the model has issued all it will.
        step, weight_version: what the rows are given, but a step of their own.
        places: rows of two sketches for which this is equal lie in the same slots; None where nothing tells.
    """

    phase: Phase
    graph: int
    n_rows: int
    make: Callable[[], FrameRows]
    step: int = -1
    weight_version: int = 0
    places: Hashable | None = None
    warmup: ClassVar[bool] = False

    def then(self, change: Callable[[FrameRows], FrameRows]) -> Sketch:
        """The sketch of what becomes of the rows."""
        make = self.make
        kept = self.step, self.weight_version, self.places
        return Sketch(self.phase, self.graph, self.n_rows, lambda: change(make()), *kept)

    def rows(self) -> FrameRows:
        """The rows."""
        made = self.make()
        if made.step < 0:
            made.step = self.step
        made.weight_version = self.weight_version
        return made


class Places(Protocol):
    """Where the rows of a forward lie among its token slots; attributes as those of :class:`FrameRows`."""

    @property
    def grid(self) -> tuple[int, int]: ...
    @property
    def split(self) -> tuple[int, int]: ...
    @property
    def slot(self) -> I64: ...
    @property
    def last(self) -> I64: ...
    @property
    def cache(self) -> dict[object, Any]: ...


@dataclass(frozen=True, eq=False)
class Geometry:
    """:class:`Places` that frames have in common."""

    grid: tuple[int, int]
    split: tuple[int, int]
    slot: I64
    last: I64
    cache: dict[object, Any]

    @classmethod
    def of(cls, rows: FrameRows) -> Geometry:
        """That of a frame."""
        return cls(rows.grid, rows.split, rows.slot, rows.last, rows.cache)

    def fits(self, rows: FrameRows) -> bool:
        """Whether the rows of a frame lie in the same slots."""
        if (self.grid, self.split, len(self.slot)) != (rows.grid, rows.split, len(rows.slot)):
            return False
        same = self.slot is rows.slot or np.array_equal(self.slot, rows.slot)
        return same and (self.last is rows.last or np.array_equal(self.last, rows.last))


class Geometries:
    """Geometries of the last frames: what was found for one frame serves those like it."""

    def __init__(self, most: int = 8) -> None:
        self._known: list[Geometry] = []
        self._most = most
        self._of_places: dict[Hashable, Geometry] = {}

    def of(self, rows: FrameRows | Sketch) -> Geometry | None:
        """The geometry of the rows of a frame, where that is known without them."""
        return self._of_places.get(rows.places) if isinstance(rows, Sketch) and rows.places is not None else None

    def share(self, rows: FrameRows, places: Hashable | None = None) -> None:
        """Give a frame its geometry, and with it the cache of earlier frames of the same.

        Args:
            rows: of the frame.
            places: as those of its :class:`Sketch`.

        Raises:
            ProbeError: the rows lie elsewhere than ``places`` told, by which some may have been read already.
        """
        told = None if places is None else self._of_places.get(places)
        if told is not None and not told.fits(rows):
            raise ProbeError(f"rows of a forward are not where they were told to be: {places}")
        found = told or next((known for known in self._known if known.fits(rows)), None)
        if found is None:
            found = Geometry.of(rows)
            self._known = [found, *self._known[: self._most - 1]]
        if places is not None and told is None:
            if len(self._of_places) >= self._most:
                self._of_places.clear()
            self._of_places[places] = found
        rows.geometry, rows.cache = found, found.cache


def make_rows(
    sample: NDArray[np.integer] | Sequence[int],
    position: NDArray[np.integer] | Sequence[int],
    token: NDArray[np.integer] | Sequence[int],
    prefix: NDArray[np.uint64],
    flags: NDArray[np.integer] | int,
) -> NDArray[np.void]:
    """Assemble a row table from its columns; ``frame`` is left 0."""
    rows = np.zeros(len(position), ROW_DTYPE)
    rows["sample"] = sample
    rows["position"] = position
    rows["token"] = token
    rows["prefix"] = prefix
    rows["flags"] = flags
    return rows


def sequence_rows(
    sample: int, tokens: NDArray[np.integer], phase: Phase, prompt_len: int | None = None, start: int = 0
) -> NDArray[np.void]:
    """Rows of positions ``start`` .. end of one sequence.

    Args:
        sample: sample id.
        tokens: all tokens of the sequence from position 0, shape [n].
        phase: the rows' phase.
        prompt_len: tokens from here on carry ``GENERATED``; None when unknown.
        start: first position to return.
    """
    ids = np.ascontiguousarray(tokens, dtype=np.int32)
    position = np.arange(start, len(ids))
    flags = np.full(len(position), int(phase), np.uint32)
    if prompt_len is not None:
        flags |= np.where(position >= prompt_len, np.uint32(RowFlag.GENERATED), np.uint32(0))
    return make_rows(np.full(len(position), sample), position, ids[start:], prefix_digests(ids)[start:], flags)


def padded_rows(
    tokens: NDArray[np.integer],
    *,
    samples: Sequence[int],
    lengths: Sequence[int],
    prompt_lens: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    phase: Phase = Phase.SCORE,
) -> FrameRows:
    """Rows of a padded [b, s] batch.

    Args:
        tokens: token ids, shape [b, s].
        samples: sample id of each batch row.
        lengths: valid tokens of each batch row.
        prompt_lens: prompt length of each batch row, if known.
        offsets: column of the first valid token of each batch row (left padding); default 0.
        phase: the rows' phase.
    """
    batch, seq = tokens.shape
    first = [offsets[i] if offsets is not None else 0 for i in range(batch)]
    ids = [tokens[i, at : at + lengths[i]].copy() for i, at in enumerate(first)]
    starts = tuple(int(at) * batch + i for i, at in enumerate(first))
    return _assemble((seq, batch), ids, samples, prompt_lens, _slots(starts, tuple(map(int, lengths)), batch), phase)


def packed_rows(
    tokens: NDArray[np.integer],
    *,
    samples: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    prompt_lens: Sequence[int] | None = None,
    phase: Phase = Phase.SCORE,
) -> FrameRows:
    """Rows of a packed [1, T] batch (thd layout).

    Args:
        tokens: token ids, shape [T].
        samples: sample id of each packed sequence.
        starts: first slot of each packed sequence.
        lengths: valid tokens of each packed sequence (padding behind them has no rows).
        prompt_lens: prompt length of each sequence, if known.
        phase: the rows' phase.
    """
    spans = list(zip(starts, lengths, strict=True))
    ids = [tokens[start : start + length].copy() for start, length in spans]
    slots = _slots(tuple(map(int, starts)), tuple(map(int, lengths)), 1)
    return _assemble((len(tokens), 1), ids, samples, prompt_lens, slots, phase)


def spread_rows(whole: FrameRows, columns: I64) -> FrameRows:
    """The rows of a padded frame that lie in some columns of its sequences, for a rank that is given only those.

    Args:
        whole: rows of the whole sequences.
        columns: the rank's columns of s, in its order, shape [s / size].
    """
    length, batch = whole.grid
    place = np.full(length, -1, np.int64)
    place[columns] = np.arange(len(columns))
    column = whole.slot // batch
    keep = np.flatnonzero(place[column] >= 0)
    after = np.full(len(whole.rows), -1, np.int64)
    rows = whole.rows
    same = (rows["sample"][1:] == rows["sample"][:-1]) & (rows["position"][1:] == rows["position"][:-1] + 1)
    after[:-1] = np.where(same, rows["token"][1:], -1)
    made = np.zeros(len(rows), np.uint32)
    made[:-1] = np.where(same, rows["flags"][1:] & np.uint32(RowFlag.GENERATED), 0)
    keep = keep[np.lexsort((place[column[keep]], whole.slot[keep] % batch))]
    return FrameRows(
        (len(columns), batch),
        rows[keep],
        place[column[keep]] * batch + whole.slot[keep] % batch,
        whole.phase,
        whole.n_seqs,
        whole.max_seqlen_q,
        micro_batch=whole.micro_batch,
        following=after[keep],
        following_flags=made[keep],
    )


@functools.lru_cache(maxsize=64)
def warmup_rows(grid: tuple[int, int]) -> FrameRows:
    """Every token slot of a call as a row without a key; shared, so not to be changed."""
    count = grid[0] * grid[1]
    slot = np.arange(count, dtype=np.int64)
    return FrameRows(grid, np.zeros(count, ROW_DTYPE), slot, Phase.MIXED, 0, 0, warmup=True)


def label_rows(rows: NDArray[np.void], label: NDArray[np.integer], extra_flags: int = 0) -> NDArray[np.void]:
    """Label rows of ``rows``: position + 1, the label as token and the prefix with the label included.

    Args:
        rows: parent rows, shape [n].
        label: the token each parent row is scored against, shape [n].
        extra_flags: flags to add, e.g. ``GENERATED``.
    """
    from zkl_debug.digest import extend_prefix

    out = rows.copy()
    out["position"] += 1
    out["token"] = label
    out["prefix"] = extend_prefix(rows["prefix"], label.astype(np.int32), out["position"].astype(np.int64))
    keep = np.uint32(RowFlag.PHASE_MASK | RowFlag.MASKED | RowFlag.GENERATED)
    out["flags"] = (rows["flags"] & keep) | np.uint32(RowFlag.LABEL | extra_flags)
    return out


def _assemble(
    grid: tuple[int, int],
    ids: list[NDArray[np.integer]],
    samples: Sequence[int],
    prompt_lens: Sequence[int] | None,
    slots: tuple[I64, I64],
    phase: Phase,
) -> FrameRows:
    """A frame of whole sequences, whose keys are worked out when they are asked for; ``slots``: :func:`_slots`."""
    slot, last = slots
    samples, prompt_lens = list(samples), None if prompt_lens is None else list(prompt_lens)  # as they are now

    def rows() -> RowTable:
        prompts = prompt_lens if prompt_lens is not None else [None] * len(ids)
        parts = [sequence_rows(s, t, phase, p) for s, t, p in zip(samples, ids, prompts, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0, ROW_DTYPE)

    longest = max((len(tokens) for tokens in ids), default=0)
    return FrameRows(grid, late(rows), slot, phase, len(ids), longest, last)


@functools.lru_cache(maxsize=64)
def _slots(starts: tuple[int, ...], lengths: tuple[int, ...], stride: int) -> tuple[I64, I64]:
    """Slots of the rows of sequences, and of each sequence its last row; shared, so not to be changed.

    Args:
        starts, lengths: first slot of each sequence, and its rows.
        stride: slots from one row of a sequence to the next.
    """
    slots = [start + stride * np.arange(length, dtype=np.int64) for start, length in zip(starts, lengths, strict=True)]
    slot = np.concatenate(slots) if slots else np.zeros(0, np.int64)
    # Where a sequence has no row there is no telling which one of a tensor of last rows is whose.
    last = np.cumsum(np.asarray(lengths, np.int64)) - 1 if lengths and all(lengths) else np.zeros(0, np.int64)
    return slot, last
