"""Faults of rows: masks, packing, positions, labels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.faults.registry import BOTH_BEDS, BOTH_DTYPES, Answer, Fault, register

if TYPE_CHECKING:
    from torch import Tensor

    from zkl_debug.beds.run import BedContext


@contextmanager
def labels_over_pack(_context: BedContext) -> Iterator[None]:
    """In a pack, the label of a sequence's last predicting row is the first token of the next sequence."""
    from zkl_debug.engines.megatron import scoring
    from zkl_debug.engines.patching import patched

    def wrap(original: Any) -> Any:
        def packed_batch(*args: Any, **kwargs: Any) -> Any:
            mb = original(*args, **kwargs)
            for which, length in enumerate(mb.lengths):
                start, following = mb.offsets[which], mb.offsets[(which + 1) % len(mb.offsets)]
                mb.labels[0, start + length - 2] = mb.tokens[0, following]
            return mb

        return packed_batch

    with patched(scoring, "packed_batch", wrap):
        yield


@contextmanager
def open_borders(_context: BedContext) -> Iterator[None]:
    """Packed documents attend to everything before them in the pack."""
    from zkl_debug.engines.megatron import seams
    from zkl_debug.stack.attention import reference_attention

    def wrap(original: Any) -> Any:
        def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("packed_seq_params") is None:
                return original(self, query, key, value, *args, **kwargs)
            return reference_attention(query, key, value, self.softmax_scale)

        return forward

    with seams.train_core_attention(wrap):
        yield


@contextmanager
def interleaved_rope(_context: BedContext) -> Iterator[None]:
    """Generation rotates neighbouring pairs of channels instead of the two halves."""
    import torch

    from zkl_debug.engines.megatron import seams

    def wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def rope(t: Tensor, freqs: Tensor, config: Any, *args: Any, **kwargs: Any) -> Tensor:
            pairs = torch.chunk(freqs, 2, -1)[0].repeat_interleave(2, -1)
            other = copy.copy(config)
            other.rotary_interleaved = True
            return original(t, pairs, other, *args, **kwargs)

        return rope

    with seams.gen_rope(wrap):
        yield


@contextmanager
def window_ignored(_context: BedContext) -> Iterator[None]:
    """Generation attends to all keys in the layers that have a sliding window."""
    from zkl_debug.engines.megatron import seams

    def wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, window_size: Any = None, **kwargs: Any) -> Tensor:
            del window_size
            return original(*args, **kwargs)

        return call

    with seams.paged_core_attention(wrap, wrap):
        yield


def _nothing(_context: BedContext) -> Any:
    return nullcontext()


# The label itself where a capture has it, else the log-prob selected by it.
_LABEL = ("logprobs/label:out*", "logprobs/selected:out*")
_ROPE = ("decoder.layers.0.self_attention/rope.[qk]:out*",)

register(
    Fault(
        "M1",
        "labels rolled over the whole pack",
        "verl#6475",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("train",),
        labels_over_pack,
        Answer(
            _LABEL,
            "score-prefill",
            "own",
            "last position of each packed sequence",
            "label",
            rule_says=("last position of its sequence in call.*packed|packed.*last position of its sequence in call",),
            names=("label-fault",),
        ),
    ),
    Fault(
        "M4",
        "prompt log-prob at a prefill chunk edge scored against the sampled token",
        "Megatron-LM main",
        BOTH_BEDS,
        BOTH_DTYPES,
        (),
        _nothing,
        Answer(
            _LABEL,
            "score-prefill|within-b",
            "own",
            "position = chunk edge",
            "label, not numerics",
            rule_says=("chunk edge",),
            names=("label-fault",),
        ),
        options={"switches": {"chunk-edge-labels": False}},
    ),
    Fault(
        "M12",
        "packed documents attend across borders",
        "prime-rl#2944",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("train",),
        open_borders,
        Answer(
            ("decoder.layers.0.self_attention.core_attention:out",),
            "score-prefill",
            "own",
            "packed sequences but the first of the pack, from their first token",
            "attention over another document",
            rule_says=("packed.*not first sequence in call|not first sequence in call.*packed",),
            names=("mask-fit",),
        ),
        options={"packing": True},
    ),
    Fault(
        "M14",
        "generation ignores the sliding window",
        "",
        ("tiny-window",),
        BOTH_DTYPES,
        ("gen",),
        window_ignored,
        Answer(
            ("decoder.layers.0.self_attention.core_attention:out",),
            "score-prefill",
            "own",
            "positions behind the window",
            "all keys entered",
            rule_says=(r"position >= 1\d\b",),
            names=("mask-fit",),
            says=(r"B \(prefill\).*without the window",),
        ),
    ),
    Fault(
        "X1",
        "left padding without position ids",
        "trl#6800",
        BOTH_BEDS,
        BOTH_DTYPES,
        (),
        _nothing,
        Answer(
            _ROPE,
            "score-prefill",
            "own",
            "left-padded sequences",
            "position shifted by the pad count",
            rule_says=("padding of its sequence",),
            names=("position-shift",),
        ),
        options={"left_pad": True},
    ),
    Fault(
        "X2",
        "rotary pairs interleaved instead of halves",
        "Camelid#266",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("gen",),
        interleaved_rope,
        Answer(
            _ROPE,
            "score-prefill",
            "own",
            "equal at position 0 only",
            "rotary pairing; norm kept",
            rule_says=(r"^position >= 1\b",),
            names=("rope-pairing",),
        ),
    ),
)
