"""What a step of the loop leaves behind: log-probs of both sides, metrics, and facts of every sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.beds.grpo.data import Batch
from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.digest import prefix_digests
from zkl_debug.logprobs.metrics import Metrics, compute_arrays
from zkl_debug.logprobs.table import LogprobTable, make_table

if TYPE_CHECKING:
    from zkl_debug.engines.megatron.generation import GenResult
    from zkl_debug.engines.megatron.rollout import BlockUse, Traffic

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Rollout:
    """One rollout of a step.

    Attributes:
        sample: its number in the step.
        tokens: prompt and generated tokens.
        prompt_length: tokens of the prompt.
        gen, train: float32 log-probs of the generated tokens, [n].
        uses: KV blocks it was given, chunk by chunk.
        prompt_gen, prompt_train: float32 log-probs of prompt tokens 1..n-1, NaN where the engine returned none.
    """

    sample: int
    tokens: tuple[int, ...]
    prompt_length: int
    gen: F32
    train: F32
    uses: tuple[BlockUse, ...] = ()
    prompt_gen: F32 = field(default_factory=lambda: np.zeros(0, np.float32))
    prompt_train: F32 = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def equal(self) -> bool:
        """Whether both sides have the same bits in every row that both have."""
        told = ~np.isnan(self.prompt_gen)
        return _same(self.gen, self.train) and _same(self.prompt_gen[told], self.prompt_train[told])

    @property
    def cached_blocks(self) -> tuple[int, ...]:
        """KV blocks it took from the prefix cache."""
        return tuple(block for use in self.uses for block in use.hit)


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        step, version: the step and the weight version it generated and scored with.
        batch: its data.
        sequences: its rollouts, by sample.
        metrics: NeMo-RL's metrics over the generated tokens.
        loss, grad_norm: of the update.
        seconds: wall time.
        traffic: what the engine steps of its generation were made of.
    """

    step: int
    version: int
    batch: Batch
    sequences: tuple[Rollout, ...]
    metrics: Metrics
    loss: float
    grad_norm: float
    seconds: float
    traffic: Traffic

    @property
    def diverged(self) -> tuple[int, ...]:
        """Samples whose two sides are not bitwise equal."""
        return tuple(s.sample for s in self.sequences if not s.equal)

    def only_cached_rows(self, block: int) -> str:
        """Remark where just those prompt rows differ whose KV came from the prefix cache; ``block`` is its tokens."""
        apart = [s for s in self.sequences if not s.equal]
        cached = {s.sample: sum(use.cached for use in s.uses) * block for s in apart}
        for s in apart:
            rows = np.flatnonzero(
                ~np.isnan(s.prompt_gen) & (s.prompt_gen.view(np.uint32) != s.prompt_train.view(np.uint32))
            )
            generated = s.gen.shape != s.train.shape or (s.gen.view(np.uint32) != s.train.view(np.uint32)).any()
            if generated or len(rows) == 0 or int(rows[-1]) >= cached[s.sample]:
                return ""
        if not apart:
            return ""
        one = apart[0].sample
        return (
            "; only rows [0, cached) of a prompt differ, those that came from the prefix cache and were not computed "
            f"(sample {one}: [0, {cached[one]}))"
        )


def sequences_of(
    results: Sequence[GenResult], scored: Mapping[int, F32], uses: Sequence[BlockUse] = ()
) -> tuple[Rollout, ...]:
    """Both sides of every rollout."""
    return tuple(
        Rollout(
            r.sample,
            r.tokens,
            r.prompt_length,
            r.generated_log_probs,
            scored[r.sample][r.prompt_length - 1 :],
            tuple(u for u in uses if u.request == r.request_id),
            r.prompt_log_probs,
            scored[r.sample][: r.prompt_length - 1],
        )
        for r in results
    )


def metrics_of(sequences: Sequence[Rollout]) -> Metrics:
    """NeMo-RL's metrics of one step; every row is a generated token."""
    gen = np.concatenate([s.gen for s in sequences])
    train = np.concatenate([s.train for s in sequences])
    index = np.repeat(np.arange(len(sequences)), [len(s.gen) for s in sequences])
    return compute_arrays(gen, train, np.ones(len(gen), np.float32), index.astype(np.int64))


def make_record(
    options: GrpoOptions,
    batch: Batch,
    version: int,
    results: Sequence[GenResult],
    scored: Mapping[int, F32],
    uses: Sequence[BlockUse],
    loss: float,
    grad_norm: float,
    seconds: float,
    traffic: Traffic,
) -> StepRecord:
    """The record of a step."""
    del options
    sequences = sequences_of(results, scored, uses)
    return StepRecord(batch.step, version, batch, sequences, metrics_of(sequences), loss, grad_norm, seconds, traffic)


def table_of(records: Sequence[StepRecord], mask_prompts: bool = True) -> LogprobTable:
    """All log-probs as one table; rows of prompts, where the engine returned any, are masked unless asked otherwise."""
    parts = [_rows(record, s, mask_prompts) for record in records for s in record.sequences]
    columns: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return make_table(**columns)


def _rows(record: StepRecord, s: Rollout, mask_prompts: bool) -> dict[str, Any]:
    position = np.arange(1, len(s.tokens))
    gen, train = (np.concatenate(pair) for pair in ((s.prompt_gen, s.gen), (s.prompt_train, s.train)))
    told = ~np.isnan(gen) | (position >= s.prompt_length)
    generated = position >= s.prompt_length
    columns = {
        "step": np.full(len(position), record.step),
        "sample": np.full(len(position), s.sample),
        "position": position,
        "token": np.asarray(s.tokens[1:]),
        "gen": gen,
        "train": train,
        "mask": np.where(generated | (not mask_prompts), 1.0, 0.0).astype(np.float32),
        "generated": generated,
        "prefix": prefix_digests(np.asarray(s.tokens))[1:],
    }
    return {name: column[told] for name, column in columns.items()}


def write_table(records: Sequence[StepRecord], path: Path) -> None:
    """All log-probs as one table that ``zkl-debug logprobs`` reads (npz: step, sample, position, token, gen, train)."""
    table = table_of(records)
    assert table.train is not None
    names = ("step", "sample", "position", "token", "gen", "train", "mask", "generated")
    np.savez(path, **{name: getattr(table, name) for name in names})


def _same(a: F32, b: F32) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))
