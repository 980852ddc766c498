"""Faults of the harness itself: what is captured, or asked for, is not what it claims to be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.faults.registry import BOTH_BEDS, BOTH_DTYPES, Answer, Fault, register

if TYPE_CHECKING:
    from zkl_debug.beds.run import BedContext

_LAYER = re.compile(r"\blayers\.\d+\b")
_LATE = "no-permute-fusion"


@contextmanager
def one_buffer(_context: BedContext) -> Iterator[None]:
    """Outputs are read at the end of a forward, when all layers have written them into one and the same buffer."""
    from zkl_debug.capture.session import CaptureSession
    from zkl_debug.engines.patching import patched

    def wrap(original: Any) -> Any:
        def end_frame(self: Any) -> None:
            if self.frame is not None:
                blocks = self.frame.blocks
                last = {_buffer(block): block for block in blocks}
                blocks[:] = [_read_from(block, last[_buffer(block)]) for block in blocks]
            original(self)

        return end_frame

    with patched(CaptureSession, "end_frame", wrap):
        yield


def _buffer(block: Any) -> tuple[str, int]:
    """One buffer for all layers of a size."""
    return _LAYER.sub("layers.*", block.meta.name), len(block.row)


def _read_from(block: Any, buffer: Any) -> Any:
    is_output = block.meta.port.startswith("out") and "layers." in block.meta.name
    return replace(block, digest=buffer.digest, payload=buffer.payload) if is_output else block


@contextmanager
def alias_compared(_context: BedContext) -> Iterator[None]:
    """The digest of a parameter is looked up by its address: it is compared with an alias of itself for ever."""
    from zkl_debug.capture import state
    from zkl_debug.engines.patching import patched

    kept: dict[tuple[int, int], tuple[int, int]] = {}

    def wrap(original: Any) -> Any:
        def tensor_digest(tensor: Any) -> tuple[int, int]:
            key = tensor.data_ptr(), tensor.numel()
            if key not in kept:
                kept[key] = original(tensor)
            return kept[key]

        return tensor_digest

    with patched(state, "tensor_digest", wrap):
        yield


def _nothing(_context: BedContext) -> Any:
    return nullcontext()


@contextmanager
def late_switch(context: BedContext) -> Iterator[None]:
    """A switch that shapes the model's config is turned on after the model was built."""
    from zkl_debug.stack.switches import switch

    before, late = context.switches, switch(_LATE)
    context.switches = (*before, late)
    try:
        with late.apply():
            yield
    finally:
        context.switches = before


@contextmanager
def retokenised(context: BedContext) -> Iterator[None]:
    """Responses were turned into text and back: from some token on, scoring is given other tokens."""
    before = context.sequences
    vocab = context.spec.vocab
    context.sequences = {
        sample: (*tokens[: length + 2], *((token + 1) % vocab for token in tokens[length + 2 :]))
        for sample, tokens in before.items()
        for length in (context.prompt_lens[sample],)
    }
    try:
        yield
    finally:
        context.sequences = before


register(
    Fault(
        "H1",
        "all layers' outputs are read from one reused buffer",
        "imp#1274",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("gen",),
        one_buffer,
        Answer(rule="capture invalid", verdict="refused", names=("one-buffer",), says=("capture B",)),
    ),
    Fault(
        "H2",
        "the weight checker compares a tensor with its own alias",
        "sglang#37651",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("gen", "train"),
        alias_compared,
        Answer(rule="self-test fails", verdict="refused", names=("self-test-failed",)),
    ),
    Fault(
        "H3",
        "prompts too short to cross any edge",
        "vllm#58131",
        BOTH_BEDS,
        BOTH_DTYPES,
        (),
        _nothing,
        Answer(rule="edges that were never crossed", verdict="identical", says=("chunk_edge", "after_cache_hit")),
        options={"longest_prompt": 4, "reprefill": False},
    ),
    Fault(
        "H6",
        "a switch set after the model is built does nothing",
        "AReaL#1544, Megatron-LM#6521",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("gen", "train"),
        late_switch,
        Answer(rule="requested on, effective off", verdict="refused", names=("switch-not-effective",), says=(_LATE,)),
    ),
    Fault(
        "L7",
        "the response was tokenised again before scoring",
        "trl#5224",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("train",),
        retokenised,
        Answer(rule="token ids differ at p", verdict="refused", names=("token-ids-differ",), says=("position",)),
    ),
)
