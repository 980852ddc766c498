"""Debug dumps of slime and miles (``--save-debug-rollout-data``, ``--save-debug-train-data``): log-probs of responses.

A rollout dump is ``{"rollout_id", "samples": [...]}`` with ``tokens``, ``response_length``, ``rollout_log_probs`` and
``loss_mask`` of each sample: the generation side alone. A train dump is ``{"rollout_id", "rank", "rollout_data"}``, one
file a rank, with lists ``tokens``, ``response_lengths``, ``log_probs`` (training) and, where it was kept,
``rollout_log_probs``. Log-probs are those of the response: entry i belongs to token number ``len(tokens) -
response_length + i``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zkl_debug.digest import prefix_digests
from zkl_debug.errors import Refused
from zkl_debug.ingest import pickled
from zkl_debug.ingest.pickled import Other
from zkl_debug.ingest.raw import RawTensor
from zkl_debug.logprobs.table import F32, F64, I64, Bools, LogprobTable, Skip, bits, make_table
from zkl_debug.schema import U64

_MAX_TOKEN = 2**31 - 1
_EXPECTED = "a debug dump of slime or miles: samples, or rollout_data"


@dataclass(frozen=True)
class _Response:
    """One response: what is known of its tokens; columns of length n."""

    step: int
    sample: int
    position: I64
    token: I64
    prefix: U64
    mask: F32
    sides: Mapping[str, F32]

    @property
    def key(self) -> tuple[int, int]:
        return self.step, self.sample


def read(paths: Sequence[Path]) -> LogprobTable:
    """The table of one dump, or of the ranks and rollouts of several.

    Raises:
        Refused: when a file is not plain data, has no log-probs, or holds shards of them.
    """
    responses: dict[tuple[int, int], _Response] = {}
    skipped: list[Skip] = []
    replicas = 0
    notes: list[str] = []
    for loaded in pickled.load(paths):
        if loaded.error:
            raise Refused(f"{loaded.path} is not used: {loaded.error}", _EXPECTED, "nothing in it was run")
        for response in _responses(loaded.path, loaded.tree, skipped, notes):
            known = responses.setdefault(response.key, response)
            if known is not response:
                replicas += 1
                _refuse_unequal(loaded.path, known, response)
    if not responses:
        first = f" ({skipped[0].reason})" if skipped else ""
        raise Refused(f"{paths[0]} holds no response with log-probs{first}", _EXPECTED)
    if replicas:
        notes.append(f"{replicas} responses are in the dumps of several ranks, with equal bits")
    return _table(list(responses.values()), notes, skipped)


def _responses(path: Path, tree: Any, skipped: list[Skip], notes: list[str]) -> list[_Response]:
    if not isinstance(tree, dict):
        raise Refused(f"{path} holds a {type(tree).__name__}", _EXPECTED)
    step = tree.get("rollout_id", 0)
    if type(step) is not int or not 0 <= step < 2**31:
        raise Refused(f"{path}: rollout_id is {str(step)[:40]}", "a whole number")
    if isinstance(tree.get("samples"), list):
        entries = [_of_sample(sample) for sample in tree["samples"]]
    elif isinstance(tree.get("rollout_data"), dict):
        entries = _of_batch(path, tree["rollout_data"])
    else:
        raise Refused(f"{path} has the keys {', '.join(sorted(tree))[:120]}", _EXPECTED)
    named = [entry.get("index") for entry in entries]
    rank = tree.get("rank", 0)
    unique = len(set(map(str, named))) == len(named) and all(type(i) is int and 0 <= i < 2**40 for i in named)
    if not unique:
        notes.append("samples have no index of their own: they are numbered by place, and by rank")
    found = []
    for place, entry in enumerate(entries):
        number = int(entry["index"]) if unique else place + (int(rank) << 32 if type(rank) is int else 0)
        try:
            found.append(_response(step, number, entry))
        except ValueError as error:
            skipped.append(Skip("sample(s)", f"sample {number} of {path.name}: {error}", damage=True))
    return found


def _of_sample(sample: Any) -> dict[str, Any]:
    if not isinstance(sample, dict):
        return {}
    removed = sample.get("remove_sample") is True
    return {
        "index": sample.get("index"),
        "tokens": sample.get("tokens"),
        "length": sample.get("response_length"),
        "mask": 0.0 if removed else sample.get("loss_mask"),
        "gen": sample.get("rollout_log_probs"),
    }


def _of_batch(path: Path, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry a sequence; columns that are there must be as long as ``tokens``."""
    columns = {
        "index": data.get("sample_indices"),
        "tokens": data.get("tokens"),
        "length": data.get("response_lengths"),
        "mask": data.get("loss_masks"),
        "gen": data.get("rollout_log_probs"),
        "train": data.get("log_probs"),
    }
    columns = {name: _list(values) for name, values in columns.items()}
    count = len(columns["tokens"] or ())
    wrong = [name for name, values in columns.items() if values is not None and len(values) != count]
    if not count:
        raise Refused(f"{path}: rollout_data has no tokens", "a list of token ids for each sequence")
    if wrong:
        raise Refused(f"{path}: rollout_data has {count} sequences, other {', '.join(wrong)}", "lists of one length")
    return [{name: None if v is None else v[i] for name, v in columns.items()} for i in range(count)]


def _list(values: Any) -> Any:
    """A list, also where a tensor was kept instead of one."""
    if isinstance(values, RawTensor) and len(values.shape) == 1:
        return values.integers().tolist()
    return values if isinstance(values, list) else None


def _response(step: int, sample: int, entry: Mapping[str, Any]) -> _Response:
    tokens = _numbers(entry.get("tokens"), "tokens")
    if tokens is None or not len(tokens):
        raise ValueError("no tokens")
    if not ((tokens == np.floor(tokens)) & (tokens >= 0) & (tokens <= _MAX_TOKEN)).all():
        raise ValueError("a value of tokens is no token id")
    length = entry.get("length")
    if type(length) is not int or not 0 < length <= len(tokens):
        raise ValueError(f"a response of {str(length)[:20]} among {len(tokens)} tokens")
    ids = tokens.astype(np.int64)
    sides = {}
    for side in ("gen", "train"):
        values = _numbers(entry.get(side), side)
        if values is None:
            continue
        if len(values) != length:
            raise ValueError(
                f"{len(values)} log-probs ({side}) for a response of {length} tokens: a shard of context parallelism?"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            sides[side] = values.astype(np.float32)
    if not sides:
        raise ValueError("no log-probs")
    start = len(ids) - length
    return _Response(
        step,
        sample,
        np.arange(start, len(ids)),
        ids[start:],
        prefix_digests(ids.astype(np.int32))[start:],
        _mask(entry.get("mask"), length),
        sides,
    )


def _mask(value: Any, length: int) -> F32:
    if value is None:
        return np.ones(length, np.float32)
    if value == 0.0 and isinstance(value, float):
        return np.zeros(length, np.float32)
    mask = _numbers(value, "loss_mask")
    if mask is None or len(mask) != length or not np.isfinite(mask).all():
        raise ValueError("a loss mask that does not fit the response")
    return mask.astype(np.float32)


def _numbers(value: Any, what: str) -> F64 | None:
    if value is None:
        return None
    if isinstance(value, RawTensor):
        if len(value.shape) != 1:
            raise ValueError(f"{what} of shape {list(value.shape)}")
        try:
            return value.floats()
        except ValueError:
            return value.integers().astype(np.float64)
    if isinstance(value, Other):
        raise ValueError(f"{what} holds {value.kind}")
    try:
        array = np.array(value, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{what} is not a list of numbers") from None
    if array.ndim != 1:
        raise ValueError(f"{what} is not a flat list")
    return array


def _refuse_unequal(path: Path, one: _Response, two: _Response) -> None:
    """Replicas of a sequence on several ranks must agree in every bit."""
    same = np.array_equal(one.prefix, two.prefix) and one.sides.keys() == two.sides.keys()
    if same and all(np.array_equal(bits(one.sides[side]), bits(two.sides[side])) for side in one.sides):
        return
    raise Refused(
        f"{path}: sample {two.sample} of rollout {two.step} is in two dumps that do not agree",
        "ranks that hold the same sequence with equal bits, or other sequences",
        "read the ranks one by one, or the dumps of one run only",
    )


def _table(responses: Sequence[_Response], notes: Sequence[str], skipped: Sequence[Skip]) -> LogprobTable:
    sides = {side for response in responses for side in response.sides}
    whole = [response for response in responses if response.sides.keys() == sides]
    more = [Skip("sample(s)", f"sample {r.sample} has only {', '.join(r.sides)}") for r in responses if r not in whole]
    if not whole:
        raise Refused("some samples have log-probs of generation only, others of training only", "files of one kind")
    counts = [len(response.position) for response in whole]
    mask = np.concatenate([response.mask for response in whole])
    columns = {side: np.concatenate([r.sides[side] for r in whole]) for side in sides}
    only = next(iter(sides)) if len(sides) == 1 else ""
    generated: Bools = np.ones(sum(counts), np.bool_)
    return make_table(
        step=np.repeat(np.asarray([r.step for r in whole], np.int64), counts),
        sample=np.repeat(np.asarray([r.sample for r in whole], np.int64), counts),
        position=np.concatenate([r.position for r in whole]),
        token=np.concatenate([r.token for r in whole]),
        gen=columns[only] if only else columns["gen"],
        train=None if only else columns["train"],
        mask=mask,
        generated=generated,
        prefix=np.concatenate([r.prefix for r in whole]),
        meta={"format": "slime", "only": only},
        notes=[*dict.fromkeys(notes), *([f"the dump holds log-probs of the {only} side alone"] if only else [])],
        skipped=[*skipped, *more],
    )
