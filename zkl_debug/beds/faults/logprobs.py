"""Faults of log-probs, sampling settings and weight sync."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.faults.registry import BOTH_BEDS, BOTH_DTYPES, Answer, Fault, register

if TYPE_CHECKING:
    from torch import Tensor

    from zkl_debug.beds.run import BedContext

TEMPERATURE = 0.7


@contextmanager
def train_temperature(_context: BedContext) -> Iterator[None]:
    """Scoring divides the logits by a temperature, generation's log-probs are raw."""
    from zkl_debug.engines.megatron import scoring
    from zkl_debug.engines.patching import patched

    with patched(scoring, "log_softmax_impl", lambda original: lambda logits: original(logits / TEMPERATURE)):
        yield


@contextmanager
def shifted_series(_context: BedContext) -> Iterator[None]:
    """Scoring's log-probs come one position late."""
    from zkl_debug.engines.megatron import scoring
    from zkl_debug.engines.patching import patched

    def wrap(original: Any) -> Any:
        def select(log_probs: Tensor, labels: Tensor) -> Tensor:
            right: Tensor = original(log_probs, labels)
            return right.roll(1, -1)

        return select

    with patched(scoring, "select_logprobs", wrap):
        yield


@contextmanager
def dropout_on(context: BedContext) -> Iterator[None]:
    """Scoring runs the model in training mode, with dropout seeded afresh."""
    import torch

    before = torch.get_rng_state()
    torch.manual_seed(int.from_bytes(os.urandom(6), "little"))
    context.model.train()
    try:
        yield
    finally:
        context.model.eval()
        torch.set_rng_state(before)


@contextmanager
def old_output_weight(context: BedContext) -> Iterator[None]:
    """Generation's output layer holds a clone of the tied embedding, taken before the last update."""
    import torch

    from zkl_debug.engines.patching import patched

    weight = context.model.shared_embedding_or_output_weight()
    generator = torch.Generator().manual_seed(context.options.seed + 1)
    update = torch.randn(weight.shape, generator=generator) * 1e-2
    old = (weight.detach() - update.to(weight.dtype)).clone()
    with patched(context.model, "shared_embedding_or_output_weight", lambda _original: lambda: old):
        yield


register(
    Fault(
        "L1",
        "temperature on one side",
        "trl#4159",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("train",),
        train_temperature,
        Answer(
            ("logprobs/log_softmax:out*",),
            "score-prefill",
            "own",
            "every row",
            f"temperature {TEMPERATURE}",
            rule_says=("^every row",),
            names=("temperature",),
            says=(r"0\.7",),
        ),
    ),
    Fault(
        "L4",
        "log-prob series shifted by one",
        "prime-rl#1525",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("train",),
        shifted_series,
        Answer(
            ("logprobs/selected:out*",),
            "score-prefill",
            "own",
            "every row",
            "best lag +1",
            rule_says=("^every row",),
            names=("row-shift",),
        ),
    ),
    Fault(
        "L6",
        "dropout left on in scoring",
        "trl#3234",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("train",),
        dropout_on,
        Answer(
            ("embedding*:out",),
            "",
            "",
            "train does not repeat",
            "first stochastic operator",
            verdict="refused",
            names=("does-not-repeat",),
            says=("embedding",),
        ),
        model={"dropout": 0.1},
    ),
    Fault(
        "W2",
        "tied output layer cloned, not updated",
        "torchtitan#2402",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("gen",),
        old_output_weight,
        Answer(
            ("output_layer:out",),
            "score-prefill",
            "own",
            "every row",
            "stale output weight",
            rule_says=("^every row",),
            names=("other-weights",),
        ),
        model={"tied_output": True},
    ),
)
