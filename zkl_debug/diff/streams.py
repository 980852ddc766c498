"""Two streams of operators aligned by equal values: the anchors, and the first operator behind them on each side.

An operator is *explained* when the other side has its value somewhere, or comes back to a common value further down.
The first operator that is neither is where the streams part: what it read was still common to both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from zkl_debug.bits import DTYPES, F64
from zkl_debug.diff.explain.numeric import narrower, rounded
from zkl_debug.schema import Json

_CLOSE = 0.05  # relative to the largest value: how near a counterpart must be
_LEAST = 4  # values that a relation is told of


Inputs = Sequence[frozenset[str]]
Results = tuple[Sequence[str], Sequence[str]]
#: Partner of an operator whose value is an input of both sides.
INPUT = -1


#: Operators that move values and compute none.
MOVES = frozenset(
    f"aten.{name}"
    for name in (
        *("clone", "copy_", "cat", "stack", "index", "index_select", "index_put", "index_put_", "gather", "zeros_like"),
        *("new_zeros", "zeros", "empty", "empty_like", "full", "fill_", "constant_pad_nd", "flip", "roll", "repeat"),
    )
)


@dataclass(frozen=True)
class Op:
    """One operator of a stream.

    Attributes:
        index, name, dtype, shape: what ran and what it gave.
        file, line, function: where in the traced library.
        inputs: operators of the stream whose results it read.
        slices: per row looked at, digests of what may be that row's part of its result.
        values: values of those slices, ascending, by digest, of the first row.
        related: it has to do with the first row.
    """

    index: int
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    file: str = ""
    line: int = 0
    function: str = ""
    inputs: tuple[int, ...] = ()
    slices: tuple[frozenset[str], ...] = ()
    values: Mapping[str, F64] = field(default_factory=dict)
    related: bool = True

    @property
    def source(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def text(self) -> str:
        """In one line."""
        at = f" at {self.source}" if self.file else ""
        return f"{self.name} -> {self.dtype} {list(self.shape)}{at}"

    def to_json(self) -> dict[str, Json]:
        """An entry of a stream."""
        return {
            "index": self.index,
            "operator": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "source": self.source,
            "function": self.function,
        }


@dataclass(frozen=True)
class Relation:
    """How a result of one side stands to the nearest result of the other.

    Attributes:
        left, right: the operators.
        text: in words.
        equal_after: dtype after one rounding to which they are equal, or empty.
        largest: largest distance, relative to the largest value.
        elements: values compared.
    """

    left: Op
    right: Op
    text: str
    equal_after: str
    largest: float
    elements: int


@dataclass(frozen=True)
class Aligned:
    """Both streams, aligned.

    Attributes:
        left, right: operators that have to do with the rows looked at.
        anchors: (left, right) operators with equal values, before the left side's first that differs and not behind the
            right side's.
        matched: partner of each operator by its index, per side; the nearest in order where there are several.
        first: the first differing operator of each side; None where every operator of it is explained.
        relation: of the first differing operators to the nearest results of the other side.
        results: see :func:`align`.
    """

    left: tuple[Op, ...]
    right: tuple[Op, ...]
    anchors: tuple[tuple[Op, Op], ...]
    matched: tuple[dict[int, int], dict[int, int]]
    first: tuple[Op | None, Op | None]
    relation: Relation | None
    results: Results = ((), ())


def align(
    left: Sequence[Op],
    right: Sequence[Op],
    inputs: tuple[Inputs, Inputs] = ((), ()),
    results: Results = ((), ()),
) -> Aligned:
    """Align two streams of the same rows.

    Args:
        left, right: the streams.
        inputs: per side and row looked at, digests of the values that the operator was given.
        results: per side and row looked at, digest of what the whole comes to, where that is known to differ between
            the sides; empty where it is not. What holds it on one side is not what holds it on the other.
    """
    known = [frozenset(one) & frozenset(two) for one, two in zip(*inputs, strict=False)]
    streams = tuple(op for op in left if op.related), tuple(op for op in right if op.related)
    matched = (
        _matches(streams[0], streams[1], known, results),
        _matches(streams[1], streams[0], known, (results[1], results[0])),
    )
    first = tuple(_first(ops, found) for ops, found in zip(streams, matched, strict=True))
    by_index = {op.index: op for op in streams[1]}
    end = first[0].index if first[0] is not None else len(left)
    behind = _behind(streams[1], first[1])
    anchors = tuple(
        (op, by_index[matched[0][op.index]])
        for op in streams[0]
        if op.index < end and matched[0].get(op.index, INPUT) not in (INPUT, *behind)
    )
    relation = _relation(streams, matched, (first[0], first[1]))
    return Aligned(streams[0], streams[1], anchors, matched, (first[0], first[1]), relation, results)


def _behind(ops: Sequence[Op], first: Op | None) -> frozenset[int]:
    """The first differing operator and what comes of it, by index: equal values there are luck, not common ground."""
    if first is None:
        return frozenset()
    found = {first.index}
    for op in ops:
        if not found.isdisjoint(op.inputs):
            found.add(op.index)
    return frozenset(found)


def _matches(
    ops: Sequence[Op],
    others: Sequence[Op],
    known: Sequence[frozenset[str]],
    results: Results,
) -> dict[int, int]:
    """An operator of the other side with an equal value in every row, by index; those in order preferred.

    :data:`INPUT` where the value is one that both operators were given.
    """
    owners: dict[str, list[Op]] = {}
    for other in others:
        for digest in other.slices[0] if other.slices else ():
            owners.setdefault(digest, []).append(other)
    found: dict[int, int] = {}
    last = -1
    for op in ops:
        candidates = {
            other.index: other
            for digest in (op.slices[0] if op.slices else ())
            for other in owners.get(digest, ())
            if _equal(op, other) and not _differing_results(op, other, results)
        }
        if candidates:
            ahead = [index for index in candidates if index > last]
            found[op.index] = last = min(ahead) if ahead else min(candidates)
        elif (
            op.slices and op.slices[0] and known and all(one & two for one, two in zip(op.slices, known, strict=False))
        ):
            found[op.index] = INPUT
    return found


def _equal(op: Op, other: Op) -> bool:
    """Equal in every row in which both have one; in the first one both do."""
    pairs = zip(op.slices, other.slices, strict=False)
    return all(one & two for one, two in pairs if one and two)


def _differing_results(op: Op, other: Op, results: Results) -> bool:
    """Whether both hold what their side comes to, in a row in which that differs."""
    rows = zip(op.slices, other.slices, *results, strict=False)
    return any(bool(mine and theirs) and mine in one and theirs in two for one, two, mine, theirs in rows)


def _first(ops: Sequence[Op], matched: Mapping[int, int]) -> Op | None:
    """The first operator with a value that the other side has not, and that leads to no common value either."""
    rejoins: set[int] = set()
    for op in reversed(ops):
        if op.index in matched or op.index in rejoins:
            rejoins.update(op.inputs)
    common: dict[int, Op] = {}  # operators whose values are the other side's too, moved at most
    for op in ops:
        has_value = bool(op.slices and op.slices[0])
        if op.index in matched or (op.name in MOVES and has_value and _moved(op, common)):
            common[op.index] = op
        elif has_value and op.index not in rejoins:
            return op
    return None


def _moved(op: Op, common: Mapping[int, Op]) -> bool:
    """Whether an operator only holds values that the row has in what it read, and those are common."""
    read = [values for index in op.inputs if index in common for values in common[index].values.values()]
    if not read:
        return False
    known = np.concatenate(read)
    return any(bool(np.isin(values, known).all()) for values in op.values.values())


def _relation(
    streams: tuple[tuple[Op, ...], tuple[Op, ...]],
    matched: tuple[dict[int, int], dict[int, int]],
    first: tuple[Op | None, Op | None],
) -> Relation | None:
    """The nearest result of the other side to the first differing one: of the left side's first, else the right's."""
    best: Relation | None = None
    for side in (0, 1):
        op, others = first[side], streams[1 - side]
        start = first[1 - side]
        if op is None or start is None:
            continue
        for other in others:
            if other.index < start.index or other.index in matched[1 - side]:
                continue
            found = _compare(op, other) if side == 0 else _compare(other, op)
            if found is not None and (best is None or _rank(found) < _rank(best)):
                best = found
    return best


def _rank(relation: Relation) -> tuple[bool, float]:
    return not relation.equal_after, relation.largest


def _compare(left: Op, right: Op) -> Relation | None:
    """How near two results are; None when no slice of one is anywhere near a slice of the other."""
    best: tuple[float, F64, F64] | None = None
    for one in left.values.values():
        for two in right.values.values():
            if len(one) != len(two) or len(one) < _LEAST:
                continue
            apart = _apart(one, two)
            # A longer slice is the likelier to be the whole of the row.
            if apart <= _CLOSE and (best is None or (-len(one), apart) < (-len(best[1]), best[0])):
                best = apart, one, two
    if best is None:
        return None
    apart, one, two = best
    name, words = _rounding(one, two, left.dtype, right.dtype)
    if not name:
        words = (
            f"they differ by at most {apart:.2g} of the largest value, {int((one != two).sum())} of {len(one)} values"
        )
    return Relation(left, right, words, name, apart, len(one))


def _apart(one: F64, two: F64) -> float:
    finite = np.isfinite(one) & np.isfinite(two)
    if not finite.any():
        return float("inf")
    size = max(float(np.abs(one[finite]).max()), float(np.abs(two[finite]).max()))
    return float(np.abs(one[finite] - two[finite]).max()) / size if size else 0.0


def _rounding(one: F64, two: F64, left: str, right: str) -> tuple[str, str]:
    """(dtype, words) when one side is the other after one more rounding."""
    for plain, odd, dtype, words in ((two, one, right, "left is right"), (one, two, left, "right is left")):
        info = DTYPES.get(dtype)
        for name in narrower(dtype) if info is not None and info.is_float else ():
            if bool((np.sort(rounded(plain, name)) == odd).all()):
                return name, f"the {words} rounded once to {name}, in all {len(odd)} values"
    return "", ""


def roundings(ops: Sequence[Op], matched: Mapping[int, int], results: Sequence[str] = ()) -> tuple[Op, ...]:
    """Results kept in a dtype narrower than float32 that the other side does not have; what both come to is none."""
    return tuple(
        op
        for op in ops
        if op.index not in matched
        and op.name not in MOVES
        and op.slices
        and "float32" in wider(op.dtype)
        and not (results and results[0] in op.slices[0])
    )


def wider(dtype: str) -> tuple[str, ...]:
    """Float formats with more bits of mantissa than ``dtype``; none for what is no float."""
    info = DTYPES.get(dtype)
    if info is None or not info.is_float:
        return ()
    return tuple(name for name in ("float32", "float64") if dtype in narrower(name))


def rows_of(aligned: Aligned) -> list[tuple[Op | None, Op | None, str]]:
    """Both streams side by side, results with a value of the row only.

    Each entry is (left, right, mark): ``=`` where the value is on both sides, ``!`` for the first that differ.
    """
    left, right = ([op for op in ops if op.slices and op.slices[0]] for ops in (aligned.left, aligned.right))
    table: list[tuple[Op | None, Op | None, str]] = []
    one = two = 0
    for i, j in [*_in_order(left, right, aligned.results), (len(left), len(right))]:
        table += [(op, None, _mark(aligned, 0, op)) for op in left[one:i]]
        table += [(None, op, _mark(aligned, 1, op)) for op in right[two:j]]
        if i < len(left):
            table.append((left[i], right[j], "="))
        one, two = i + 1, j + 1
    return table


def _mark(aligned: Aligned, side: int, op: Op) -> str:
    if op is aligned.first[side]:
        return "!"
    return "=" if op.index in aligned.matched[side] else ""


_MOST_CELLS = 250_000


def _in_order(left: Sequence[Op], right: Sequence[Op], results: Results) -> list[tuple[int, int]]:
    """The longest sequence of pairs with equal values in the order of both streams: places in them."""
    n, m = len(left), len(right)
    if n * m > _MOST_CELLS:
        return []
    equal = [
        [
            bool(one.slices[0] & two.slices[0]) and _equal(one, two) and not _differing_results(one, two, results)
            for two in right
        ]
        for one in left
    ]
    longest = [[0] * (m + 1) for _ in range(n + 1)]
    for i in range(n - 1, -1, -1):
        for j in range(m - 1, -1, -1):
            here = longest[i + 1][j + 1] + 1 if equal[i][j] else 0
            longest[i][j] = max(here, longest[i + 1][j], longest[i][j + 1])
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < n and j < m:
        if equal[i][j] and longest[i][j] == longest[i + 1][j + 1] + 1:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif longest[i + 1][j] >= longest[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs
