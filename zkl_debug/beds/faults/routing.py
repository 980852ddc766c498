"""Faults of routing replay: scoring is given the experts that generation chose, and gets them wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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


@contextmanager
def padding_counted(context: BedContext) -> Iterator[None]:
    """The experts' linear layers sum K in one chunk when as many rows are counted as the step has tokens, else in two.

    mcore routes the padding rows of an engine step like any others, so every padded step is counted wrongly.
    """
    import torch

    from zkl_debug.engines.megatron import seams

    split = [False]

    def experts(original: Any) -> Any:
        def forward(module: Any, hidden: Tensor, tokens_per_expert: Tensor, *args: Any, **kwargs: Any) -> Any:
            tokens = int(context.generator.context.active_token_count)
            split[0] = int(tokens_per_expert.sum()) != tokens * module.config.moe_router_topk
            try:
                return original(module, hidden, tokens_per_expert, *args, **kwargs)
            finally:
                split[0] = False

        return forward

    def linear(original: Any) -> Any:
        @functools.wraps(original)  # mcore keeps state in attributes of the function
        def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
            if not split[0]:
                whole: Tensor = original(input, weight, bias, *args, **kwargs)
                return whole
            parts = zip(input.chunk(2, -1), weight.chunk(2, 1), strict=True)
            first, second = (torch.mm(a.reshape(-1, a.shape[-1]), b.t()) for a, b in parts)
            out = (first + second).reshape(*input.shape[:-1], weight.shape[0])
            return out if bias is None else out + bias

        return forward

    with seams.expert_forward(experts), seams.linear_forward(linear):
        yield


def _nothing(_context: BedContext) -> Any:
    return nullcontext()


register(
    Fault(
        "M5",
        "padding rows of an engine step are routed and counted",
        "Megatron-LM#7061",
        ("tiny-moe",),
        BOTH_DTYPES,
        ("gen",),
        padding_counted,
        Answer(
            ("decoder.layers.1.mlp.experts.local_experts.*.linear_fc1:out",),
            "score-prefill|prefill-decode|within-b",
            "own",
            "rows in the step < its bucket",
            "expert counts: padding rows are counted",
            rule_says=("padding rows in call",),
            names=("padding-counted",),
        ),
    ),
    Fault(
        "R0",
        "a finished request's routing is lost with a KV block that was given away in the same step",
        "Megatron-LM main",
        ("tiny-moe",),
        BOTH_DTYPES,
        (),
        _nothing,
        Answer(
            ("routing/indices:out*",),
            "within-b",
            "own",
            "that request only",
            "routing capture; the reuse event",
            rule_says=("^only requests? .*KV block.*given to another request in the step",),
            names=("routing-lost",),
            says=(r"request \d+: nothing was handed back", r"block \d+, number .* was given to request \d+"),
        ),
        model={"routing_replay": True},
    ),
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
