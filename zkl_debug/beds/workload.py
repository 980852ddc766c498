"""The requests of a bed and how their sequences are scored."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from zkl_debug.beds.bed import BedOptions
    from zkl_debug.engines.megatron.generation import Request
    from zkl_debug.engines.megatron.scoring import MicroBatch

#: Sample ids of neighbours start here: they share batches with the others, nothing more.
NEIGHBOUR = 100
#: Sample ids of the crowd start here.
CROWD = 500
#: Total length of the one sequence that is scored alone, without padding.
ALONE_LENGTH = 33


@dataclass(frozen=True)
class Plan:
    """One request: prompt length, tokens to generate, engine step of arrival, shared prefix (sample, length)."""

    prompt: int
    generate: int
    arrive: int = 0
    prefix: tuple[int, int] | None = None


# 3 is longer than a chunk; 5 joins while others decode and shares two KV blocks with 1; 2 has total length 33.
PLANS: dict[int, Plan] = {
    0: Plan(5, 6),
    1: Plan(37, 9),
    2: Plan(21, 12),
    3: Plan(90, 8),
    4: Plan(12, 14),
    5: Plan(36, 7, arrive=4, prefix=(1, 33)),
    6: Plan(8, 10),
    7: Plan(40, 5),
}
_ALONE = (2,)
_PACKED = (4, 6, 7)
_PADDED = (1, 5, 0, 3)


def requests(options: BedOptions, vocab: int) -> list[Request]:
    """The requests of a run, in order of submission."""
    if options.on_gpu and options.size == "full":
        from zkl_debug.beds.gpu import full_requests

        return _permuted(full_requests(options, vocab), options.permute)
    from zkl_debug.engines.megatron.generation import Request

    prompts: dict[int, tuple[int, ...]] = {}
    for sample, plan in PLANS.items():
        head = prompts[plan.prefix[0]][: plan.prefix[1]] if plan.prefix else ()
        prompt = head + _tokens(options.seed, sample, plan.prompt, vocab)[len(head) :]
        prompts[sample] = prompt[: options.longest_prompt or None]
    made = [Request(s, prompts[s], plan.generate, plan.arrive) for s, plan in PLANS.items()]
    for i in range(options.neighbours):
        sample = NEIGHBOUR + i
        made.append(
            Request(sample, _tokens(options.seed, sample, 7 + 5 * (i % 8), vocab), 3 + i % 4, arrive=2 * (i % 6))
        )
    return _permuted(made, options.permute)


def crowd(options: BedOptions, vocab: int) -> dict[int, tuple[int, ...]]:
    """Tokens by sample of the sequences that are only scored."""
    return {CROWD + i: _tokens(options.seed, CROWD + i, 6 + i % 9, vocab) for i in range(options.crowd)}


def _tokens(seed: int, sample: int, count: int, vocab: int) -> tuple[int, ...]:
    """Random tokens; no two samples start with the same one, so that only a planned prefix is shared."""
    first = np.random.default_rng(seed).permutation(vocab)[_ordinal(sample)]
    rest = np.random.default_rng([seed, sample]).integers(0, vocab, count - 1)
    return (int(first), *rest.tolist())


def _ordinal(sample: int) -> int:
    """Samples, neighbours and crowd numbered without gaps that matter: 0.., 16.., 40.. ."""
    if sample >= CROWD:
        return 40 + sample - CROWD
    return 16 + sample - NEIGHBOUR if sample >= NEIGHBOUR else sample


def _permuted[T](items: Sequence[T], seed: int) -> list[T]:
    items = list(items)
    if seed:
        random.Random(seed).shuffle(items)
    return items


def micro_batches(options: BedOptions, sequences: Mapping[int, Sequence[int]], *, packing: bool) -> list[MicroBatch]:
    """How ``sequences`` (tokens by sample) are scored, each exactly once: alone, packed, and in padded batches."""
    from zkl_debug.engines.megatron import scoring

    groups = [[s for s in group if s in sequences] for group in (_ALONE, _PACKED if packing else ())]
    alone, packed = groups
    padded = [s for s in (*_PADDED, *(() if packing else _PACKED)) if s in sequences]
    padded += [s for s in sequences if s not in PLANS]
    padded = _permuted(padded, options.permute)
    packed = _permuted(packed, options.permute)

    batches = _padded(options, [(s, sequences[s]) for s in padded], options.micro_batch)
    for sample in alone:  # unpadded, unless its rows are shared out among ranks
        multiple = options.pad_multiple if options.layout else 1
        batches.append(scoring.padded_batch(len(batches), [(sample, sequences[sample])], multiple=multiple))
    if packed:
        members = [(s, sequences[s]) for s in packed]
        batches.append(scoring.packed_batch(len(batches), members, multiple=options.pack_multiple))
    return batches


def rescoring_batches(options: BedOptions, sequences: Mapping[int, Sequence[int]], first: int) -> list[MicroBatch]:
    """A second pass over every sequence: padded batches of ``options.rescore``, numbered from ``first``."""
    return _padded(options, list(sequences.items()), options.rescore, first) if options.rescore else []


def _padded(
    options: BedOptions, members: Sequence[tuple[int, Sequence[int]]], size: int, first: int = 0
) -> list[MicroBatch]:
    from zkl_debug.engines.megatron import scoring

    starts = range(0, len(members), size)
    return [
        scoring.padded_batch(
            first + number, members[at : at + size], multiple=options.pad_multiple, left=options.left_pad
        )
        for number, at in enumerate(starts)
    ]
