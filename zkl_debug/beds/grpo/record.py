"""What a step of the loop leaves behind: log-probs of both sides, metrics, and facts of every sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.beds.grpo.data import Batch
from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.logprobs.metrics import Metrics, compute_arrays

if TYPE_CHECKING:
    from zkl_debug.engines.megatron.generation import GenResult
    from zkl_debug.engines.megatron.rollout import BlockUse

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
    """

    sample: int
    tokens: tuple[int, ...]
    prompt_length: int
    gen: F32
    train: F32
    uses: tuple[BlockUse, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether both sides have the same bits everywhere."""
        return bool(np.array_equal(self.gen.view(np.uint32), self.train.view(np.uint32)))

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
    """

    step: int
    version: int
    batch: Batch
    sequences: tuple[Rollout, ...]
    metrics: Metrics
    loss: float
    grad_norm: float
    seconds: float

    @property
    def diverged(self) -> tuple[int, ...]:
        """Samples whose two sides are not bitwise equal."""
        return tuple(s.sample for s in self.sequences if not s.equal)


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
) -> StepRecord:
    """The record of a step."""
    del options
    sequences = sequences_of(results, scored, uses)
    return StepRecord(batch.step, version, batch, sequences, metrics_of(sequences), loss, grad_norm, seconds)


def write_table(records: Sequence[StepRecord], path: Path) -> None:
    """All log-probs as one table that ``zkl-debug logprobs`` reads (npz: step, sample, position, token, gen, train)."""
    columns: dict[str, list[Any]] = {n: [] for n in ("step", "sample", "position", "token", "gen", "train", "mask")}
    for record in records:
        for s in record.sequences:
            positions = np.arange(s.prompt_length, len(s.tokens))
            columns["step"].append(np.full(len(positions), record.step))
            columns["sample"].append(np.full(len(positions), s.sample))
            columns["position"].append(positions)
            columns["token"].append(np.asarray(s.tokens[s.prompt_length :]))
            columns["gen"].append(s.gen)
            columns["train"].append(s.train)
            columns["mask"].append(np.ones(len(positions), np.float32))
    np.savez(path, **{name: np.concatenate(parts) for name, parts in columns.items()})  # type: ignore[arg-type]
