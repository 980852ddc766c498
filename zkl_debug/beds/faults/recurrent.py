"""Faults of recurrent layers: states lost, kept or mixed up, weights of the scan that are old, kernel order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.faults.registry import BOTH_DTYPES, Answer, Fault, register

if TYPE_CHECKING:
    from torch import Tensor

    from zkl_debug.beds.run import BedContext

_BEDS = ("tiny-hybrid",)
#: K11: calls whose longest sequence has so many tokens add up in halves.
_LONG = 32


@contextmanager
def slots_not_zeroed() -> Iterator[None]:
    """A recurrent slot is zeroed when it is given out for the first time only."""
    from zkl_debug.engines.megatron import seams

    def wrap(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def prepare(self: Any) -> None:
            seen = vars(self).setdefault("slots_seen", [])
            new = [s for s in map(int, self._pending_mamba_zeros) if s not in seen]
            seen.extend(new)
            self._pending_mamba_zeros[:] = new
            original(self)

        return prepare

    with seams.recurrent_slots(wrap):
        yield


@contextmanager
def slots_not_zeroed_since_waking(context: BedContext) -> Iterator[None]:
    """:func:`slots_not_zeroed`; an engine that wakes knows of no slot, so that a run repeats itself."""
    from zkl_debug.engines.patching import PatchSet

    engine, inference = context.generator.engine, context.generator.context

    def wrap(original: Callable[[], Any]) -> Callable[[], Any]:
        def resume() -> Any:
            vars(inference).pop("slots_seen", None)
            return original()

        return resume

    with slots_not_zeroed(), PatchSet() as patches:
        patches.set(engine, "resume", wrap(engine.resume))
        try:
            yield
        finally:
            vars(inference).pop("slots_seen", None)


@contextmanager
def state_dropped_between_chunks() -> Iterator[None]:
    """Every prefill chunk starts its scan from zero, also one that goes on with a prompt."""
    from zkl_debug.engines.megatron import seams

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def scan(*args: Any, initial_states: Any, **kwargs: Any) -> Any:
            return original(*args, initial_states=initial_states.new_zeros(initial_states.shape), **kwargs)

        return scan

    with seams.prefill_scan(wrap):
        yield


def _state_dropped(_context: BedContext) -> Any:
    return state_dropped_between_chunks()


@contextmanager
def old_decay(context: BedContext) -> Iterator[None]:
    """A refit brought new decay rates to a model that stays in eval(): mcore's mixers decode with what they kept."""
    import torch

    mixers = [m for m in context.model.modules() if type(m).__name__ == "MambaMixer"]
    with torch.no_grad():
        for mixer in mixers:
            now = mixer.A_log.detach().clone()
            mixer.A_log.sub_(0.02)  # the weights before the refit
            mixer._A_neg_exp_cache_stale = True
            mixer._get_decode_A_neg_exp()
            mixer.A_log.copy_(now)
    try:
        yield
    finally:
        for mixer in mixers:
            mixer._A_neg_exp_cache_stale = True


@contextmanager
def scan_by_length(_context: BedContext) -> Iterator[None]:
    """Scans add up their states in halves, rounded to the model's dtype, in calls with a sequence of 32 or more."""
    from zkl_debug.engines import mamba_reference
    from zkl_debug.engines.megatron import seams
    from zkl_debug.engines.patching import patched

    def longest_is(longest: int) -> Any:
        return patched(mamba_reference, "sequence_scan", _in_halves if longest >= _LONG else lambda original: original)

    def batch(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def scan(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            seq_idx = args[-1] if len(args) == 8 else kwargs.get("seq_idx")
            with longest_is(x.shape[1] if seq_idx is None else int(seq_idx[0].bincount().max())):
                return original(x, *args, **kwargs)

        return scan

    def varlen(original: Callable[..., Any]) -> Callable[..., Any]:
        def scan(**kwargs: Any) -> Any:
            ends = kwargs["cu_chunk_seqlens"][kwargs["last_chunk_indices"] + 1].tolist()
            with longest_is(max(b - a for a, b in itertools.pairwise([0, *ends]))):
                return original(**kwargs)

        return scan

    with patched(mamba_reference, "scan_batch", batch), seams.prefill_scan(varlen):
        yield


def _in_halves(original: Callable[..., Any]) -> Callable[..., Any]:
    """The scan twice, with C cut down to half of the states each time; D goes with the first half."""

    def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, *rest: Any) -> Any:
        middle = c.shape[-1] // 2
        first, second = c.clone(), c.clone()
        first[..., middle:], second[..., :middle] = 0, 0
        one, state = original(x, dt, a, b, first, d, *rest)
        two, _ = original(x, dt, a, b, second, d.new_zeros(d.shape), *rest)
        return one.to(x.dtype).float() + two.to(x.dtype).float(), state

    return scan


register(
    Fault(
        "S7",
        "a Mamba mixer that stays in eval() decodes with -exp(A_log) of the weights before the refit",
        "mcore 0.19.2, Megatron-LM#6723",
        _BEDS,
        BOTH_DTYPES,
        ("gen",),
        old_decay,
        Answer(
            ("decoder.layers.0.mixer/ssm_weights:out.0",),
            "prefill-decode",
            "own",
            "phase decode",
            "parameters equal, what was derived from one is old",
            rule_says=("phase decode",),
            names=("stale-derived-value",),
        ),
    ),
    Fault(
        "S10",
        "a recurrent slot is not zeroed when it is given to another request",
        "AReno#520",
        _BEDS,
        BOTH_DTYPES,
        ("gen",),
        slots_not_zeroed_since_waking,
        Answer(
            ("decoder.layers.0.mixer/conv_state.read:out*", "decoder.layers.0.mixer/conv:out*"),
            "within-b|score-prefill",
            "own",
            "first token of a reused slot",
            "the state of the slot's previous owner",
            rule_says=("reused recurrent slot", "^no rule: every row alike"),
            names=("state-not-reset",),
            says=("left behind",),
        ),
        options={"neighbours": 6},
    ),
    Fault(
        "S15",
        "the scan's state is dropped at a prefill chunk edge",
        "NeMo-RL#2100",
        _BEDS,
        BOTH_DTYPES,
        ("gen",),
        _state_dropped,
        Answer(
            ("decoder.layers.0.mixer/scan:out*",),
            "score-prefill|within-b|prefill-decode",
            "own",
            "chunks behind the first of a prompt",
            "the state was not carried over",
            rule_says=("chunk's first row",),
            names=("state-dropped",),
        ),
    ),
    Fault(
        "K11",
        "the scan adds up its states in halves in calls whose longest sequence has 32 tokens or more",
        "",
        _BEDS,
        BOTH_DTYPES,
        ("gen", "train"),
        scan_by_length,
        Answer(
            ("decoder.layers.0.mixer/scan:out*",),
            "within-b|prefill-decode|score-prefill",
            "own",
            "longest query in call >= 32",
            "reduction order",
            rule_says=("longest query in call",),
            names=("reduction-order",),
        ),
    ),
)
