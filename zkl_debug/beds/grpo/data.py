"""Prompts, rollout lengths, rewards and advantages: fixed rules of seed, step and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zkl_debug.beds.grpo.options import GrpoOptions

if TYPE_CHECKING:
    from zkl_debug.engines.megatron.generation import Request

_SPREAD = 6
_GENERATE = 5  # shortest rollout, tokens
_GENERATE_SPREAD = 4


@dataclass(frozen=True)
class Batch:
    """The data of one step.

    Attributes:
        step: the step it belongs to.
        seed: of the sampling.
        prompts: tokens of each group's prompt.
        origin: step in which each group's prompt was first used.
        generate: tokens to generate, by sample; samples ``group * group_size + i`` share a prompt.
        arrive: engine step before which each sample is submitted.
        group_size: rollouts of a prompt.
    """

    step: int
    seed: int
    prompts: tuple[tuple[int, ...], ...]
    origin: tuple[int, ...]
    generate: tuple[int, ...]
    arrive: tuple[int, ...]
    group_size: int

    def group(self, sample: int) -> int:
        """Group of a sample."""
        return sample // self.group_size

    def requests(self) -> list[Request]:
        """What is submitted to the engine, in order."""
        from zkl_debug.engines.megatron.generation import Request

        return [
            Request(s, self.prompts[self.group(s)], count, arrive)
            for s, (count, arrive) in enumerate(zip(self.generate, self.arrive, strict=True))
        ]


def batch(options: GrpoOptions, step: int, vocab: int) -> Batch:
    """The data of step ``step`` (1, 2 ...)."""
    again = step >= options.returns_at > 1
    earlier = 1 + (step - 1) % (options.returns_at - 1) if again else step
    origin = [earlier if g in options.returning else step for g in range(options.groups)]
    prompts = tuple(_prompt(options, made_in, group, vocab) for group, made_in in enumerate(origin))
    generate = tuple(_GENERATE + (s + s // options.group_size) % _GENERATE_SPREAD for s in range(options.sequences))
    count, late = options.sequences, options.late
    arrive = tuple(options.nap + 1 if late and s >= count - late else 0 for s in range(count))
    seed = options.seed * 100_003 + step
    return Batch(step, seed, prompts, tuple(origin), generate, arrive, options.group_size)


def _prompt(options: GrpoOptions, step: int, group: int, vocab: int) -> tuple[int, ...]:
    generator = np.random.default_rng([options.seed, 7, step, group])
    length = options.prompt_tokens + int(generator.integers(_SPREAD))
    if options.long_from and step >= options.long_from and group in options.long_groups:
        length = options.long_length
    return tuple(generator.integers(0, vocab, length).tolist())


def rewards(sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> NDArray[np.float32]:
    """Share of generated tokens that are even, by sequence; float32 [n]."""
    shares = [
        float(np.mean(np.asarray(tokens[start:]) % 2 == 0)) if len(tokens) > start else 0.0
        for tokens, start in zip(sequences, prompt_lengths, strict=True)
    ]
    return np.asarray(shares, np.float32)


def advantages(reward: NDArray[np.float32], group_size: int) -> NDArray[np.float32]:
    """GRPO: reward minus the group's mean, over the group's standard deviation; float32 [n]."""
    grouped = reward.astype(np.float64).reshape(-1, group_size)
    centred = grouped - grouped.mean(1, keepdims=True)
    scale = grouped.std(1, ddof=1, keepdims=True) if group_size > 1 else np.ones((len(grouped), 1))
    return np.asarray((centred / (scale + 1e-6)).reshape(-1), np.float32)
