"""What an explanation is, and the evidence it may look at. numpy only; nothing here reads a capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bits import DTYPES, F64, to_float64
from zkl_debug.diff.model import Bools, Ints
from zkl_debug.schema import Json, SiteName


class Strength(IntEnum):
    """How much an explanation explains; findings are listed strongest first."""

    NOTHING = 0  # an honest "not localised"
    FOLLOWS = 1  # something that follows from the difference
    CLASS = 2  # the difference is of a kind; nothing contradicts it
    FITTED = 3  # a closed form fits every element within rounding
    EXACT = 4  # a closed form gives every element bit for bit


@dataclass(frozen=True)
class Finding:
    """One explanation that holds.

    Attributes:
        name: stable id, e.g. ``extra-rounding``.
        text: one sentence with the numbers.
        evidence: the numbers.
        strength: how much it explains.
        replaces: weaker names that say the same with less.
    """

    name: str
    text: str
    evidence: Mapping[str, Json]
    strength: Strength
    replaces: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """An entry of ``explanations`` of the verdict document."""
        return {
            "name": self.name,
            "text": self.text,
            "strength": self.strength.name.lower(),
            "evidence": dict(self.evidence),
        }


@dataclass(frozen=True)
class Values:
    """Raw bits of some rows of a site on one side: [m, W], with their torch dtype and row shape."""

    bits: NDArray[Any]
    dtype: str
    shape: tuple[int, ...] = ()

    @cached_property
    def real(self) -> F64:
        """The values as float64, [m, W]."""
        return to_float64(self.bits, self.dtype)

    @property
    def is_float(self) -> bool:
        """Whether they are plain floats: one value per stored element."""
        info = DTYPES.get(self.dtype)
        return info is not None and info.is_float and not info.is_packed

    def heads(self) -> F64:
        """The values in their row shape, float64 [m, *shape]."""
        return self.real.reshape(len(self.real), *(self.shape or self.real.shape[1:]))

    def __len__(self) -> int:
        return len(self.bits)


@dataclass(frozen=True)
class Port:
    """The same rows on both sides of the pairs."""

    left: Values
    right: Values

    @cached_property
    def equal(self) -> bool:
        """Whether the bits are the same in every row."""
        same_form = self.left.dtype == self.right.dtype and self.left.bits.shape == self.right.bits.shape
        return same_form and bool((self.left.bits == self.right.bits).all())

    @property
    def like(self) -> bool:
        """Whether both are floats of one dtype and width."""
        same = self.left.dtype == self.right.dtype and self.left.bits.shape == self.right.bits.shape
        return same and self.left.is_float


@dataclass(frozen=True)
class Keys:
    """Keys and values an attention row may have read, float64.

    Attributes:
        query: [heads, d] of the row.
        key, value: [n, groups, d] of the candidates.
        position: [n], positions of the candidates; ``own``: of the same prefix chain, at or before the row, bool [n].
        sample: [n]; ``place``: place of the candidate's sequence in the call, -1 where it is not in the call.
        row_position, row_sample: of the row; ``row_place``: place of its sequence in the call.
        uncaptured: slots of the call that no row was captured of: padding, whose keys are not known.
        chain: with a sliding window, ``own`` without it, bool [n]; None where there is no window.
    """

    query: F64
    key: F64
    value: F64
    position: Ints
    own: Bools
    sample: Ints
    place: Ints
    row_position: int
    row_sample: int
    row_place: int
    uncaptured: int = 0
    chain: Bools | None = None

    @property
    def reach(self) -> Bools:
        """Every key of the prefix chain, whatever the window, bool [n]."""
        return self.own if self.chain is None else self.chain


@dataclass(frozen=True)
class Source:
    """Where a row's digest is found among the rows of the other side.

    Attributes:
        found: another row of the other side has exactly these bits, and no third one has, bool [m].
        at: (captured, equal) for a shift: is the row so many positions away there, and has it these bits, bool [m].
        sample, position: of the found row, int64 [m].
        same_chain: it belongs to the same sequence of tokens, bool [m].
        same_call: it was in the same call, bool [m].
        shift: its position minus the row's own, int64 [m].
        row_sample, row_position: of the rows themselves, int64 [m].
    """

    found: Bools
    sample: Ints
    position: Ints
    same_chain: Bools
    same_call: Bools
    shift: Ints
    at: Callable[[int], tuple[Bools, Bools]]
    row_sample: Ints
    row_position: Ints


@dataclass(frozen=True)
class Grid:
    """Where rows lie in calls that run a [sequences, width] batch: all int64 [m]; width 0 where a call does not.

    Attributes:
        call: number of the call.
        place: which sequence of the call; ``position``: which position in it.
        sequences, width: size of the batch.
    """

    call: Ints
    place: Ints
    position: Ints
    sequences: Ints
    width: Ints


@dataclass(frozen=True)
class Routing:
    """What the router chose for pairs of one layer, and from which logits.

    Attributes:
        site: name of the routing map.
        chosen: bool [m, E] of each side.
        logits: [m, E] of each side, or None.
        sample, position: [m].
        grid: where the rows lie in the calls of each side.
    """

    site: str
    chosen: tuple[Bools, Bools]
    logits: tuple[F64, F64] | None
    sample: Ints
    position: Ints
    grid: tuple[Grid | None, Grid | None] = (None, None)


@dataclass(frozen=True)
class Operand:
    """Rows as one side hands them to a product: in a block format, or as they are. Raw bits where they were captured.

    Attributes:
        dtypes: dtype of each part, by name (``data``, ``scale``, ``overall``); ``data`` alone: not quantised.
        data, scale, overall: the parts, [m, *]; None without raw bits.
    """

    dtypes: Mapping[str, str]
    data: Values | None = None
    scale: Values | None = None
    overall: Values | None = None

    @property
    def is_quantised(self) -> bool:
        """Whether there are scales."""
        return "scale" in self.dtypes


@dataclass(frozen=True)
class Quantised:
    """Evidence of an operator that puts rows into a block format.

    Attributes:
        left, right: what became of the rows on each side.
        source: what was quantised, equal on both sides in all pairs; None where it is not, or not captured.
        weight: parts of the layer's weight (``data``, ``scale`` ...) that differ between the sides, where the
            parameter itself is equal; ``one-side`` where one side alone quantises it.
        is_operand: the site is the operand itself, not the product.
    """

    left: Operand
    right: Operand
    source: Values | None = None
    weight: tuple[str, ...] = ()
    is_operand: bool = True


@dataclass(frozen=True)
class CallCounts:
    """Experts of the calls of some rows.

    Attributes:
        site: where the counts were taken.
        counted: rows that each expert was given in the row's call, padding included, float64 [m, E].
        chosen: rows of the call that chose it, [m, E].
        rows, slots: of the call, int64 [m].
        engine: it is a step of an engine; elsewhere padding belongs to the batch and counts say nothing, bool [m].
    """

    site: str
    counted: F64
    chosen: F64
    rows: Ints
    slots: Ints
    engine: Bools

    @property
    def excess(self) -> F64:
        """Rows counted beyond those of the call, [m]."""
        return np.asarray((self.counted - self.chosen).sum(axis=1))

    @property
    def padded(self) -> Bools:
        """Rows of engine steps that count more than their rows, bool [m]."""
        return np.asarray(self.engine & (self.excess > 0))

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Handover:
    """The state that one call of a recurrent operator started a sequence from, and where it came from.

    Attributes:
        site: name of the state that was read.
        right: of the right row of the pairs; ``pairs``: the affected pairs it belongs to.
        sample, position: sequence, and its first position in the call.
        zero: every bit of the state is 0.
        written: what was written behind the position before has the same bits; None where that was not captured, or
            where the sequence starts (a state must then be zero).
        source: (sample, position) of another sequence whose state, as written, has these bits.
        slot, previous: recurrent slot of the request and who had it before, -1 where not known.
        lacking: of a convolution state, positions whose inputs are not in it: zeros stand there. Known from raw bits.
    """

    site: str
    right: bool
    pairs: tuple[int, ...]
    sample: int
    position: int
    zero: bool
    written: bool | None
    source: tuple[int, int] | None
    slot: int = -1
    previous: int = -1
    lacking: tuple[int, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether it is not the state that the sequence was in."""
        return not self.zero if self.position == 0 else self.written is False or bool(self.lacking)


@dataclass(frozen=True)
class ScanRow:
    """What a scan's row at one side was made of, float64; n tokens of its sequence, its own the last.

    Attributes:
        x: [n, h, p]; ``dt``: [n, h], bias not in; ``b``, ``c``: [n, g, states].
        a, d, dt_bias: [h] each, as the row's call was given them.
        out: [h, p], what the row has.
        starts: first positions, behind 0, of the calls that ran the sequence up to the row, the row's own first.
    """

    x: F64
    dt: F64
    b: F64
    c: F64
    a: F64
    d: F64
    dt_bias: F64
    out: F64
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """Everything known of the affected rows at the site in question.

    Attributes:
        site, semantic: the site.
        names: what to call the two rows of a pair, e.g. ``A (score)`` and ``B (prefill)``.
        out: the site's values in affected pairs, [m, W]; None without raw bits on both sides.
        sample, position, token: of the pairs, int64 [m].
        inputs: the operator's input ports in the same pairs, those that are there as raw bits on both sides.
        inputs_equal: every captured input is equal in every affected pair (digests).
        clean: the same site in pairs that are equal, or None.
        clean_position: positions of the clean pairs.
        clean_inputs: the operator's inputs in the clean pairs, where equal on both sides.
        rows, of: affected and compared pairs.
        differ: dtype or shape, where they differ between the sides.
        metas: (dtype, row shape) of each side.
        config: resolved configuration of A, where captured.
        sources: for the right row among left rows, and for the left row among right rows.
        attention: what some affected rows may have read: (index into the pairs, left, right), built when asked for.
        routing: router choices.
        routes: there is a router behind the site whose choices may follow from the difference.
        parents: for a label row: the label that was used and the log-probs it was taken from.
        call: other facts of the pairs, by name, int64 [m].
        quantised: parts of an operand in a block format, at its own sites and at those of the product.
        counts: expert counts of the calls of (affected, clean) pairs of all edges, for the left and the right rows;
            those of this edge come first.
        scans: for a scan what some affected rows were made of on each side, built when asked for.
        states: for a recurrent operator the states that the affected rows' calls started from, built when asked for.
    """

    site: SiteName
    semantic: str = ""
    names: tuple[str, str] = ("A", "B")
    out: Port | None = None
    sample: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    position: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    token: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    inputs: Mapping[str, Port] = field(default_factory=dict)
    inputs_equal: bool = True
    clean: Port | None = None
    clean_position: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    clean_inputs: Mapping[str, Values] = field(default_factory=dict)
    rows: int = 0
    of: int = 0
    differ: str = ""
    metas: tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]] | None = None
    config: Mapping[str, Json] = field(default_factory=dict)
    sources: tuple[Source, Source] | None = None
    attention: Callable[[], list[tuple[int, Keys, Keys]]] | None = None
    routing: Routing | None = None
    routes: bool = True
    parents: Labels | None = None
    call: Mapping[str, Ints] = field(default_factory=dict)
    quantised: Quantised | None = None
    counts: tuple[tuple[CallCounts, CallCounts], tuple[CallCounts, CallCounts]] | None = None
    states: Callable[[], list[Handover]] | None = None
    scans: Callable[[], list[tuple[ScanRow, ScanRow]]] | None = None

    def pair(self) -> Port | None:
        """The values, where both sides are floats of one dtype and width."""
        return self.out if self.out is not None and self.out.like and len(self.out.left) else None

    def equal_input(self, port: str = "in") -> Values | None:
        """An input that is there and equal on both sides in all pairs."""
        found = self.inputs.get(port, self.inputs.get(f"{port}.0"))
        return found.left if found is not None and found.equal else None

    def side(self, right: bool) -> str:
        """Name of a side."""
        return self.names[int(right)]


@dataclass(frozen=True)
class Labels:
    """Evidence of label rows.

    Attributes:
        used: label each side used, int64 [m] each.
        intended: the token the row is for, int64 [m].
        table: log-probs of the predicting row on the right side, float64 [m, V], or None.
        table_left: the same of the left side.
        following: first tokens of the other sequences in the left and the right row's call.
        last: the row is the last label of its sequence in the call, bool [m].
        shifted: the token k positions on in the same sequence, -1 where it is not known, by k, int64 [m] each.
    """

    used: tuple[Ints, Ints] | None
    intended: Ints
    table: F64 | None = None
    table_left: F64 | None = None
    following: tuple[list[set[int]], list[set[int]]] | None = None
    last: Bools | None = None
    shifted: Mapping[int, Ints] = field(default_factory=dict)


Explanation = Callable[[Evidence], Finding | None]
