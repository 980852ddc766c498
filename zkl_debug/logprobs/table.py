"""The table of log-probs: one row a token, both sides as float32 whose bits are kept.

``position`` is the position of the token whose log-prob the row holds; the logits that produced it are those of
position - 1. One side may be missing (a golden file holds one run only); :mod:`zkl_debug.logprobs.pair` joins two such
tables into one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zkl_debug.digest import prefix_digests
from zkl_debug.errors import Refused
from zkl_debug.schema import U64, Json

Bools = NDArray[np.bool_]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]

#: Token id of a row whose token is not known.
UNKNOWN_TOKEN = -1
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Skip:
    """Something that was not read or not compared.

    Attributes:
        what: what was left out.
        reason: why.
        count: how many of them (rows, lines ...).
        damage: whether the file is at fault, so that "identical" must not be said of it.
    """

    what: str
    reason: str
    count: int = 1
    damage: bool = False

    def to_json(self) -> Json:
        """An entry of ``coverage.skipped``."""
        return {"what": self.what, "reason": self.reason, "count": self.count, "damage": self.damage}


@dataclass(frozen=True)
class LogprobTable:
    """Log-probs of tokens, sorted by (step, sample, position), no key twice. All columns have shape [N].

    Attributes:
        step, sample, position: int64 keys.
        token: int64 token id, :data:`UNKNOWN_TOKEN` where the file has none.
        gen: float32 log-probs of side ``sides[0]``.
        train: the same of ``sides[1]``, or None for a table of one side.
        mask: float32 loss mask (token mask x sample mask); a row is valid where it is not 0.
        generated: whether the token was generated rather than part of the prompt.
        curr: float32 log-probs of the policy being trained, where the file has them.
        prefix: digest of tokens[0..position], shape [N, 2]; zero where the tokens before are not all known.
        sides: labels of the two columns.
        meta: facts of the file that findings may use as evidence.
        notes: what the reader assumed.
        skipped: what the reader left out.
    """

    step: I64
    sample: I64
    position: I64
    token: I64
    gen: F32
    train: F32 | None
    mask: F32
    generated: Bools
    curr: F32 | None = None
    prefix: U64 = field(default_factory=lambda: np.zeros((0, 2), np.uint64))
    sides: tuple[str, str] = ("gen", "train")
    meta: Mapping[str, Json] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skipped: tuple[Skip, ...] = ()

    def __len__(self) -> int:
        return int(self.position.shape[0])

    @property
    def valid(self) -> Bools:
        """Rows the loss counts."""
        return np.asarray(self.mask != 0)

    @property
    def sequence(self) -> I64:
        """Index of each row's (step, sample), counting from 0 in table order."""
        return sequence_index(self.step, self.sample)

    @property
    def is_damaged(self) -> bool:
        """Whether part of the file could not be read."""
        return any(skip.damage for skip in self.skipped)

    def select(self, rows: Bools) -> LogprobTable:
        """The rows where ``rows`` is true."""
        return replace(
            self,
            step=self.step[rows],
            sample=self.sample[rows],
            position=self.position[rows],
            token=self.token[rows],
            gen=self.gen[rows],
            train=None if self.train is None else self.train[rows],
            mask=self.mask[rows],
            generated=self.generated[rows],
            curr=None if self.curr is None else self.curr[rows],
            prefix=self.prefix[rows],
        )

    def with_notes(self, *notes: str, skipped: Sequence[Skip] = ()) -> LogprobTable:
        """The same table with more notes and skips."""
        return replace(self, notes=(*self.notes, *notes), skipped=(*self.skipped, *skipped))


def bits(values: F32) -> U32:
    """Raw bits of float32 values."""
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def sequence_index(step: I64, sample: I64) -> I64:
    """Index of each row's (step, sample) for rows sorted by them; shape [N]."""
    if step.shape[0] == 0:
        return np.zeros(0, np.int64)
    new = np.ones(step.shape[0], np.bool_)
    new[1:] = (step[1:] != step[:-1]) | (sample[1:] != sample[:-1])
    return np.cumsum(new, dtype=np.int64) - 1


def make_table(
    *,
    sample: ArrayLike,
    position: ArrayLike,
    gen: ArrayLike,
    train: ArrayLike | None = None,
    step: ArrayLike | int = 0,
    token: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    generated: ArrayLike | None = None,
    curr: ArrayLike | None = None,
    prefix: U64 | None = None,
    sides: tuple[str, str] = ("gen", "train"),
    meta: Mapping[str, Json] | None = None,
    notes: Sequence[str] = (),
    skipped: Sequence[Skip] = (),
) -> LogprobTable:
    """Build a sorted table from columns of equal length.

    Args:
        prefix: digests of tokens[0..position]; computed where a sequence starts at position 0 with known tokens.
        generated: default: the valid rows.
        mask: default: every row counts.

    Raises:
        Refused: when lengths differ, a key occurs twice, or a position or token does not fit.
    """
    where = _ints("position", position)
    n = where.shape[0]
    columns = {
        "step": np.full(n, int(step), np.int64) if isinstance(step, int) else _ints("step", step),
        "sample": _ints("sample", sample),
        "token": np.full(n, UNKNOWN_TOKEN, np.int64) if token is None else _ints("token", token),
        "gen": _floats(gen),
        "mask": np.ones(n, np.float32) if mask is None else _floats(mask),
    }
    optional = {"train": train, "curr": curr}
    columns |= {name: _floats(values) for name, values in optional.items() if values is not None}
    if generated is not None:
        columns["generated"] = np.asarray(generated, np.bool_)
    for name, values in columns.items():
        if values.shape != (n,):
            raise Refused(f"column {name} has {values.shape[0]} rows, position has {n}", "columns of equal length")
    if not np.isfinite(columns["mask"]).all():
        raise Refused("the mask holds a value that is not finite", "0 or 1 for every row")
    order = np.lexsort((where, columns["sample"], columns["step"]))
    columns = {name: values[order] for name, values in columns.items()}
    where = where[order]
    _refuse_bad_keys(columns["step"], columns["sample"], where, columns["token"])
    known = _prefixes(columns["step"], columns["sample"], where, columns["token"]) if prefix is None else prefix[order]
    return LogprobTable(
        step=columns["step"],
        sample=columns["sample"],
        position=where,
        token=columns["token"],
        gen=columns["gen"],
        train=columns.get("train"),
        mask=columns["mask"],
        generated=columns.get("generated", columns["mask"] != 0),
        curr=columns.get("curr"),
        prefix=known,
        sides=sides,
        meta=dict(meta or {}),
        notes=tuple(notes),
        skipped=tuple(skipped),
    )


def concat(tables: Sequence[LogprobTable]) -> LogprobTable:
    """One table of several that share no (step, sample, position).

    Raises:
        Refused: when they overlap, or only some have a train column.
    """
    first = tables[0]
    if len(tables) == 1:
        return first
    if len({table.train is None for table in tables}) > 1:
        raise Refused("some of the files hold both sides, others only one", "files of one kind")
    has_train, has_curr = first.train is not None, all(table.curr is not None for table in tables)
    return make_table(
        step=np.concatenate([table.step for table in tables]),
        sample=np.concatenate([table.sample for table in tables]),
        position=np.concatenate([table.position for table in tables]),
        token=np.concatenate([table.token for table in tables]),
        gen=np.concatenate([table.gen for table in tables]),
        train=np.concatenate([t.train for t in tables if t.train is not None]) if has_train else None,
        mask=np.concatenate([table.mask for table in tables]),
        generated=np.concatenate([table.generated for table in tables]),
        curr=np.concatenate([t.curr for t in tables if t.curr is not None]) if has_curr else None,
        prefix=np.concatenate([table.prefix for table in tables]),
        sides=first.sides,
        meta=first.meta,
        notes=list(dict.fromkeys(note for table in tables for note in table.notes)),
        skipped=[skip for table in tables for skip in table.skipped],
    )


def _ints(name: str, values: ArrayLike) -> I64:
    array = np.asarray(values)
    if array.dtype.kind not in "iub" and array.size:
        as_float = np.asarray(array, np.float64)
        bad = ~np.isfinite(as_float) | (as_float != np.floor(as_float)) | (np.abs(as_float) > 2.0**53)
        if bad.any():
            raise Refused(f"column {name} holds {as_float[bad][0]!r}", "whole numbers")
        return as_float.astype(np.int64)
    if array.dtype.kind == "u" and array.size and int(array.max()) > 2**63 - 1:
        raise Refused(f"column {name} holds {int(array.max())}", "numbers below 2**63")
    return array.astype(np.int64)


def _floats(values: ArrayLike) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values).astype(np.float32)


def _refuse_bad_keys(step: I64, sample: I64, position: I64, token: I64) -> None:
    if position.shape[0] == 0:
        return
    if int(position.min()) < 0 or int(position.max()) > _INT32_MAX:
        raise Refused(f"positions run from {int(position.min())} to {int(position.max())}", "0 .. 2**31 - 1")
    if int(token.max()) > _INT32_MAX:
        raise Refused(f"a token id of {int(token.max())}", "token ids below 2**31")
    same = (step[1:] == step[:-1]) & (sample[1:] == sample[:-1]) & (position[1:] == position[:-1])
    if same.any():
        at = int(np.flatnonzero(same)[0])
        raise Refused(
            f"step {int(step[at])}, sample {int(sample[at])}, position {int(position[at])} occurs more than once",
            "one row for each token",
            "number the samples of a step from 0 (column sample), and the steps (column step)",
        )


def _prefixes(step: I64, sample: I64, position: I64, token: I64) -> U64:
    """Prefix digests of sequences whose rows are positions 0, 1, 2 ... with known tokens; zero elsewhere."""
    out = np.zeros((position.shape[0], 2), np.uint64)
    if position.shape[0] == 0:
        return out
    starts = np.flatnonzero(np.diff(sequence_index(step, sample), prepend=-1))
    stops = np.append(starts[1:], position.shape[0])
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        whole = position[start] == 0 and position[stop - 1] == stop - start - 1
        if whole and int(token[start:stop].min()) >= 0:
            out[start:stop] = prefix_digests(token[start:stop])
    return out
