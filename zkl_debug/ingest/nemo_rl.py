"""NeMo-RL's step dumps, ``train_data_stepN.jsonl``: one line a sequence.

Keys (NeMo-RL wraps each value in a list of length one): ``token_ids``, ``token_loss_mask``, ``sample_loss_mask``,
``advantages``, ``generation_logprobs``, ``prev_logprobs``, ``input_lengths``, ``idx``. Entry t of a log-prob list
belongs to token t, entry 0 is a filler and is dropped here as NeMo-RL drops it (``[:, 1:]``). Python writes float32
values as doubles, so their bits survive; ``NaN`` and ``Infinity`` are JSON extensions that Python reads back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zkl_debug.digest import prefix_digests
from zkl_debug.errors import Refused
from zkl_debug.logprobs.table import F32, F64, I64, UNKNOWN_TOKEN, LogprobTable, Skip, concat, make_table
from zkl_debug.schema import U64, Json

PATTERN = "train_data_step*.jsonl"
_STEP = re.compile(r"train_data_step(\d+)\.jsonl$")
#: Hard limits, so that a hostile or broken file cannot take the machine.
MAX_LINE_BYTES = 256 << 20
MAX_ROWS = 100_000_000
GEN, TRAIN = "generation_logprobs", "prev_logprobs"
_NO_MASK = (
    "the file has no token_loss_mask (an older dump): rows whose generation_logprobs is exactly 0 were taken for "
    "prompt or padding and left out"
)


@dataclass(frozen=True)
class Limits:
    """Size limits of one read."""

    line_bytes: int = MAX_LINE_BYTES
    rows: int = MAX_ROWS


@dataclass(frozen=True)
class _Sequence:
    """One line, checked: vectors of equal length over positions 1 .. S-1."""

    index: int | None
    token: I64
    prefix: U64
    gen: F32
    train: F32
    token_mask: F32
    sample_mask: float
    notes: tuple[str, ...]


@dataclass
class _File:
    """What was read of one file so far."""

    sequences: list[_Sequence] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    rows: int = 0


class _BadLineError(Exception):
    """A line that is not a usable sequence."""


def step_of(path: Path) -> int | None:
    """The N of ``train_data_stepN.jsonl``, None for another name."""
    match = _STEP.search(path.name)
    return int(match.group(1)) if match and len(match.group(1)) < 10 else None


def files_in(folder: Path) -> list[Path]:
    """The step dumps of a folder in step order; links that lead out of the folder are not followed."""
    root = folder.resolve()
    found = [
        p for p in folder.glob(PATTERN) if p.is_file() and p.resolve().is_relative_to(root) and step_of(p) is not None
    ]
    return sorted(found, key=lambda p: (step_of(p) or 0, p.name))


def read(paths: Sequence[Path], limits: Limits = Limits()) -> LogprobTable:
    """One table of several step dumps; a file whose name has no step gets its place in the list.

    Raises:
        Refused: when a file holds no usable sequence, two files are of the same step, or a limit is passed.
    """
    tables: dict[int, LogprobTable] = {}
    room = limits.rows
    for place, path in enumerate(paths):
        named = step_of(path)
        step = place if named is None else named
        if step in tables:
            raise Refused(f"two files of step {step}, the second is {path}", "one file for each step")
        tables[step] = _read_file(path, step, Limits(limits.line_bytes, room))
        room -= len(tables[step])
    return concat([tables[step] for step in sorted(tables)])


def looks_like(line: bytes) -> bool:
    """Whether a first line is one of these dumps."""
    return GEN.encode() in line or TRAIN.encode() in line


def _read_file(path: Path, step: int, limits: Limits) -> LogprobTable:
    state = _File()
    for number, line in _lines(path, limits, state):
        try:
            sequence = _parse(line, state)
        except _BadLineError as error:
            state.skipped.append(Skip(f"line(s) of {path.name}", f"line {number}: {error}", damage=True))
            continue
        if sequence is None:
            state.skipped.append(Skip(f"line(s) of {path.name}", "sequence of less than two tokens"))
            continue
        state.rows += sequence.gen.shape[0]
        if state.rows > limits.rows:
            raise Refused(f"{path.name} takes the table beyond {limits.rows} rows", "fewer files, or --step N")
        state.sequences.append(sequence)
        state.lines.append(number - 1)
    if not state.sequences:
        _refuse_nothing(path, state)
    return _table(step, state)


def _lines(path: Path, limits: Limits, state: _File) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank; one that is too long ends the file."""
    try:
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(limits.line_bytes + 1):
                number += 1
                if len(line) > limits.line_bytes:
                    reason = f"line {number} is longer than {limits.line_bytes} bytes; nothing after it was read"
                    state.skipped.append(Skip(f"line(s) of {path.name}", reason, damage=True))
                    return
                if line.strip():
                    yield number, line
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}", "a readable file") from None


def _parse(line: bytes, state: _File) -> _Sequence | None:
    row = _json(line)
    if not isinstance(row, dict):
        raise _BadLineError(f"a JSON {type(row).__name__}, not an object")
    state.keys |= {str(key)[:60] for key in list(row)[:40]}
    absent = [key for key in (GEN, TRAIN) if key not in row]
    if absent:
        raise _BadLineError(f"no {' and no '.join(absent)}")
    vectors = {key: _vector(row, key) for key in (GEN, TRAIN)}
    vectors |= {key: _vector(row, key) for key in ("token_ids", "token_loss_mask") if row.get(key) is not None}
    lengths = {key: values.shape[0] for key, values in vectors.items()}
    if len(set(lengths.values())) > 1:
        raise _BadLineError("lengths differ: " + ", ".join(f"{key} {n}" for key, n in lengths.items()))
    if lengths[GEN] < 2:
        return None
    token, prefix = _tokens(vectors.get("token_ids"), lengths[GEN])
    mask, notes = _mask(vectors)
    nulls = sum(_inner(row[key]).count(None) for key in (GEN, TRAIN))
    if nulls:
        notes = (*notes, "null log-probs were read as NaN")
    with np.errstate(over="ignore", invalid="ignore"):
        gen, train = (vectors[key][1:].astype(np.float32) for key in (GEN, TRAIN))
    return _Sequence(_index(row), token, prefix, gen, train, mask, _sample_mask(row), notes)


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except RecursionError:
        raise _BadLineError("nested too deeply") from None
    except ValueError as error:
        raise _BadLineError(f"not JSON, or cut off ({str(error)[:60]})") from None


def _inner(value: Any) -> list[Any]:
    """The list itself, without the outer list of length one that NeMo-RL writes."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list):
        raise _BadLineError(f"a {type(value).__name__} where a list belongs")
    return value


def _vector(row: Mapping[str, Any], key: str) -> F64:
    try:
        values = np.array(_inner(row[key]), dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise _BadLineError(f"{key} is not a list of numbers") from None
    if values.ndim != 1:
        raise _BadLineError(f"{key} is not a flat list")
    return values


def _tokens(values: F64 | None, length: int) -> tuple[I64, U64]:
    """Token ids and prefix digests of positions 1 .. S-1."""
    if values is None:
        return np.full(length - 1, UNKNOWN_TOKEN, np.int64), np.zeros((length - 1, 2), np.uint64)
    if not (np.isfinite(values) & (values == np.floor(values)) & (values >= 0) & (values < 2**31)).all():
        raise _BadLineError("token_ids holds a value that is no token id")
    token = values.astype(np.int64)
    return token[1:], prefix_digests(token)[1:]


def _mask(vectors: Mapping[str, F64]) -> tuple[F32, tuple[str, ...]]:
    mask = vectors.get("token_loss_mask")
    if mask is None:
        return np.asarray(vectors[GEN][1:] != 0, np.float32), (_NO_MASK,)
    if not np.isfinite(mask).all():
        raise _BadLineError("token_loss_mask holds a value that is not finite")
    dropped = ("token 0 is in the loss mask; it has no log-prob and NeMo-RL drops it",) if mask[0] else ()
    return mask[1:].astype(np.float32), dropped


def _sample_mask(row: Mapping[str, Any]) -> float:
    value = row.get("sample_loss_mask", 1.0)
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    value = 1.0 if value is None else value
    if isinstance(value, bool | int | float) and abs(value) < 1e30:
        return float(value)
    raise _BadLineError("sample_loss_mask is not a number")


def _index(row: Mapping[str, Any]) -> int | None:
    value = row.get("idx")
    return value if type(value) is int and 0 <= value < 2**40 else None


def _refuse_nothing(path: Path, state: _File) -> None:
    first = state.skipped[0].reason if state.skipped else "it is empty"
    have = f"; keys found: {', '.join(sorted(state.keys)[:20])}" if state.keys else ""
    raise Refused(
        f"{path} holds no sequence with both log-probs ({first}{have})",
        f"lines with {GEN} and {TRAIN} (and token_ids, token_loss_mask, sample_loss_mask)",
        "NeMo-RL writes them in its log folder, except when it logs NeMo-Gym responses instead",
    )


def _table(step: int, state: _File) -> LogprobTable:
    named = [sequence.index for sequence in state.sequences]
    unique = None not in named and len(set(named)) == len(named)
    samples = [int(i or 0) for i in named] if unique else state.lines
    counts = [sequence.gen.shape[0] for sequence in state.sequences]
    notes = list(dict.fromkeys(note for sequence in state.sequences for note in sequence.notes))
    if not unique and any(index is not None for index in named):
        notes.append("idx is missing or occurs twice: samples are numbered by line")
    token_mask = np.concatenate([s.token_mask for s in state.sequences])
    meta: dict[str, Json] = {"format": "nemo-rl"}
    return make_table(
        step=step,
        sample=np.repeat(np.asarray(samples, np.int64), counts),
        position=np.concatenate([np.arange(1, n + 1) for n in counts]),
        token=np.concatenate([s.token for s in state.sequences]),
        gen=np.concatenate([s.gen for s in state.sequences]),
        train=np.concatenate([s.train for s in state.sequences]),
        mask=token_mask * np.repeat(np.asarray([s.sample_mask for s in state.sequences], np.float32), counts),
        generated=token_mask != 0,
        prefix=np.concatenate([s.prefix for s in state.sequences]),
        meta=meta,
        notes=notes,
        skipped=_merge(state.skipped),
    )


def _merge(skips: Sequence[Skip]) -> list[Skip]:
    """The first reasons by themselves, the rest as a count."""
    shown, rest = list(skips[:5]), list(skips[5:])
    if rest:
        damage = any(skip.damage for skip in rest)
        shown.append(Skip(rest[0].what, "for reasons like those above", len(rest), damage))
    return shown
