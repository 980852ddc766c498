"""Faults of routing replay: scoring is given the experts that generation chose, and gets them wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.faults.registry import BOTH_DTYPES, Answer, Fault, register

if TYPE_CHECKING:
    from torch import Tensor

    from zkl_debug.beds.run import BedContext

Routing = tuple["Tensor", "Tensor"]


@contextmanager
def weights_recomputed(_context: BedContext) -> Iterator[None]:
    """The replayed expert ids are right, their weights are recomputed over all experts instead of the chosen ones."""
    from zkl_debug.engines.megatron import seams
    from zkl_debug.stack import rowwise

    def wrap(original: Callable[..., Routing]) -> Callable[..., Routing]:
        def route(logits: Tensor, *args: Any, **kwargs: Any) -> Routing:
            probs, chosen = original(logits, *args, **kwargs)
            every = rowwise.softmax(logits).to(probs.dtype)
            return every * chosen, chosen

        return route

    with seams.topk_routing(wrap):
        yield


@contextmanager
def replay_transposed(_context: BedContext) -> Iterator[None]:
    """The replay buffer is flattened [b, s] where the model's tokens run [s, b]."""
    from zkl_debug.engines.megatron import scoring, seams
    from zkl_debug.engines.patching import patched
    from zkl_debug.stack import rowwise

    shape = [1, 1]

    def note_shape(original: Any) -> Any:
        def forward(model: Any, mb: Any) -> Any:
            shape[:] = mb.tokens.shape
            return original(model, mb)

        return forward

    def wrap(original: Callable[..., Routing]) -> Callable[..., Routing]:
        def route(logits: Tensor, *args: Any, **kwargs: Any) -> Routing:
            probs, chosen = original(logits, *args, **kwargs)
            batch, length = shape
            wrong = chosen.reshape(length, batch, -1).transpose(0, 1).flatten(0, 1)
            weights = rowwise.softmax(logits.float().masked_fill(~wrong, float("-inf")))
            return weights.to(probs.dtype), wrong

        return route

    with patched(scoring, "forward_logits", note_shape), seams.topk_routing(wrap):
        yield


register(
    Fault(
        "R1",
        "expert ids replayed, weights recomputed",
        "miles#2722",
        ("tiny-moe",),
        BOTH_DTYPES,
        ("train",),
        weights_recomputed,
        Answer(
            ("decoder.layers.1.mlp/router.topk:out.0",),
            "score-prefill",
            "own",
            "every row",
            "ids equal, weights not",
            rule_says=("^every row",),
            names=("routing-weights",),
        ),
    ),
    Fault(
        "R2",
        "routing replay flattened [b, s] for [s, b]",
        "miles#3146",
        ("tiny-moe",),
        BOTH_DTYPES,
        ("train",),
        replay_transposed,
        Answer(
            ("decoder.layers.1.mlp/router.topk:out*",),
            "score-prefill",
            "own",
            "scored in a batch of several sequences",
            "row permutation of the router's choice",
            rule_says=("sequences in call|in call of score",),
            names=("row-permutation",),
        ),
    ),
)
