"""How the faults of the loop are put in: one thing broken each, on the real objects of an open loop."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zkl_debug.errors import UsageError

if TYPE_CHECKING:
    import torch

    from zkl_debug.beds.grpo.layouts import InferenceModelLayout
    from zkl_debug.beds.grpo.loop import GrpoLoop


def _second(loop: GrpoLoop) -> InferenceModelLayout:
    """The layout of a loop whose engine is in this process.

    Raises:
        UsageError: the engine is in another process, where nothing can be replaced from here.
    """
    from zkl_debug.beds.grpo.layouts import InferenceModelLayout, SharedLayout

    if not isinstance(loop.layout, InferenceModelLayout | SharedLayout):
        raise UsageError(
            f"a fault of the engine in layout {loop.options.layout}, where the engine is another process",
            "a colocated layout",
            "--layout colocated-inference-model",
        )
    return loop.layout  # type: ignore[return-value]


@contextmanager
def _refit_wrapped(loop: GrpoLoop, wrap: Callable[[Callable[[], None]], Callable[[], None]]) -> Iterator[None]:
    from zkl_debug.engines.patching import patched

    with patched(loop.layout, "refit", wrap):
        yield


@contextmanager
def nothing_sent(loop: GrpoLoop) -> Iterator[None]:
    """The refit runs its plan, but no transfer is executed."""
    from zkl_debug.engines.megatron.refit import planned_transfers

    del loop
    with planned_transfers(lambda _name: False):
        yield


def one_missing(name: str) -> Callable[[GrpoLoop], Any]:
    """The payload of the refit lacks one tensor."""

    @contextmanager
    def breaks(loop: GrpoLoop) -> Iterator[None]:
        from zkl_debug.engines.megatron.refit import planned_transfers

        del loop
        with planned_transfers(lambda sent: sent != name):
            yield

    return breaks


@contextmanager
def shuffled_twice(loop: GrpoLoop) -> Iterator[None]:
    """After the transfer the rows of a weight are shuffled for a kernel, and shuffled once more."""
    import torch

    parameter = dict(_second(loop).engine_model.named_parameters())["decoder.layers.0.mlp.linear_fc1.weight"]
    order = torch.arange(parameter.shape[0]).reshape(-1, 4).T.reshape(-1)

    def wrap(original: Callable[[], None]) -> Callable[[], None]:
        def refit() -> None:
            original()
            with torch.no_grad():
                parameter.copy_(parameter[order][order])

        return refit

    with _refit_wrapped(loop, wrap):
        yield


def sent_as(name: str, dtype: str) -> Callable[[GrpoLoop], Any]:
    """One weight travels in a narrower dtype."""

    @contextmanager
    def breaks(loop: GrpoLoop) -> Iterator[None]:
        import torch

        parameter = dict(_second(loop).engine_model.named_parameters())[name]

        def wrap(original: Callable[[], None]) -> Callable[[], None]:
            def refit() -> None:
                original()
                with torch.no_grad():
                    parameter.copy_(parameter.to(getattr(torch, dtype)))

            return refit

        with _refit_wrapped(loop, wrap):
            yield

    return breaks


@contextmanager
def experts_off_by_one(loop: GrpoLoop) -> Iterator[None]:
    """Expert i of the engine gets the weights of expert i + 1."""
    import torch

    named = dict(_second(loop).engine_model.named_parameters())
    experts = sorted(n for n in named if ".local_experts." in n)

    def of(name: str, shift: int) -> str:
        head, _, tail = name.partition(".local_experts.")
        index, _, rest = tail.partition(".")
        return f"{head}.local_experts.{(int(index) + shift) % loop.options.experts}.{rest}"

    def wrap(original: Callable[[], None]) -> Callable[[], None]:
        def refit() -> None:
            original()
            with torch.no_grad():
                new = {n: named[of(n, 1)].clone() for n in experts}
                for n in experts:
                    named[n].copy_(new[n])

        return refit

    with _refit_wrapped(loop, wrap):
        yield


@contextmanager
def untied_copy(loop: GrpoLoop) -> Iterator[None]:
    """The engine's tied output layer works on a clone of the embedding, made when the engine was built."""
    from zkl_debug.engines.patching import PatchSet

    model = _second(loop).engine_model
    clone = model.shared_embedding_or_output_weight().detach().clone()  # type: ignore[operator]
    with PatchSet() as patches:
        patches.set(model, "output_weight_copy", clone, create=True)
        patches.set(model, "shared_embedding_or_output_weight", lambda: model.output_weight_copy)
        yield


@contextmanager
def float_head(loop: GrpoLoop) -> Iterator[None]:
    """The engine's output layer keeps a float32 copy of its weight, made at first use and never refreshed."""
    from zkl_debug.engines.patching import PatchSet

    layer: Any = _second(loop).engine_model.output_layer
    plain = layer.forward

    def forward(self: Any, hidden: torch.Tensor, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        del weight
        if getattr(self, "weight_fp32", None) is None:
            self.weight_fp32 = self.weight.detach().clone().float()
        return plain(hidden, self.weight_fp32.to(self.weight.dtype), *args, **kwargs)

    with PatchSet() as patches:
        patches.set(layer, "forward", types.MethodType(forward, layer))
        try:
            yield
        finally:
            vars(layer).pop("weight_fp32", None)


@contextmanager
def old_backup(loop: GrpoLoop) -> Iterator[None]:
    """Waking restores the weights from a CPU backup that is two refits behind."""
    import torch

    from zkl_debug.engines.patching import PatchSet

    layout: Any = _second(loop)
    named = dict(layout.engine_model.named_parameters())
    engine = layout.generator.engine
    layout.backups = deque()

    def wrap_refit(original: Callable[[], None]) -> Callable[[], None]:
        def refit() -> None:
            original()
            layout.backups.append({n: p.detach().clone() for n, p in named.items()})
            while len(layout.backups) > 3:
                layout.backups.popleft()

        return refit

    def wrap_resume(original: Callable[[], None]) -> Callable[[], None]:
        def resume() -> None:
            original()
            if len(layout.backups) == 3:
                with torch.no_grad():
                    for name, saved in layout.backups[0].items():
                        named[name].copy_(saved)

        return resume

    with PatchSet() as patches:
        patches.set(layout, "refit", wrap_refit(layout.refit))
        patches.set(engine, "resume", wrap_resume(engine.resume))
        try:
            yield
        finally:
            vars(layout).pop("backups", None)


@contextmanager
def chunk_merge(loop: GrpoLoop) -> Iterator[None]:
    """A prefill chunk behind the first runs attention over old and new keys apart and merges them by log-sum-exp."""
    import torch

    from zkl_debug.engines.megatron import seams
    from zkl_debug.stack import attention

    del loop

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        old = k.shape[0] - q.shape[0]
        if old == 0 or q.shape[0] == 1:
            return attention.reference_attention(q, k, v, scale)
        outs, lses = [], []
        for part in (slice(0, old), slice(old, None)):
            out, total, top = attention.attention_parts(q, k, v, scale, part)
            outs.append((out / total[..., None]).to(q.dtype).float())
            lses.append(top + total.log())
        both = torch.logaddexp(*lses)
        first, second = (out * (lse - both).exp()[..., None] for out, lse in zip(outs, lses, strict=True))
        return (first + second).to(q.dtype)

    plain = attention.reference_attention
    with seams.paged_core_attention(attention.paged_varlen(attend), attention.paged_decode(plain)):
        yield


@contextmanager
def linear_by_size(loop: GrpoLoop) -> Iterator[None]:
    """Linear layers sum K in one chunk for calls of 1 or 33 rows, in two for all others (as K2 of the static beds)."""
    from zkl_debug.beds.faults.kernels import linear_chunks

    del loop
    with linear_chunks(None):  # type: ignore[arg-type]
        yield


@contextmanager
def blocks_freed_at_sleep(loop: GrpoLoop) -> Iterator[None]:
    """From step 4 on sleeping gives KV blocks back to the pool though requests in flight still point to them."""
    from zkl_debug.engines.patching import PatchSet

    engine = _second(loop).generator.engine
    allocator = _second(loop).generator.context.kv_block_allocator

    def wrap(original: Callable[[], None]) -> Callable[[], None]:
        def suspend() -> None:
            in_flight = engine.has_unfinished_requests()
            original()
            if in_flight and loop.step >= 4:
                allocator.reset()

        return suspend

    with PatchSet() as patches:
        patches.set(engine, "suspend", wrap(engine.suspend))
        yield


def slots_not_zeroed(_loop: GrpoLoop) -> Any:
    """A recurrent slot is zeroed when it is given out for the first time only (as S10 of the static bed)."""
    from zkl_debug.beds.faults import recurrent

    return recurrent.slots_not_zeroed()


def state_dropped_between_chunks(_loop: GrpoLoop) -> Any:
    """Every prefill chunk starts its scan from zero, also one that goes on with a prompt (as S15 there)."""
    from zkl_debug.beds.faults import recurrent

    return recurrent.state_dropped_between_chunks()


@contextmanager
def reused_rows(loop: GrpoLoop) -> Iterator[None]:
    """Prompt log-probs are put into rows of a buffer past the cached part, and handed out from the row's start."""
    import numpy as np

    from zkl_debug.engines.megatron.rollout import RolloutGenerator
    from zkl_debug.engines.patching import patched

    del loop

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(self: Any, requests: Any) -> Any:
            rows = np.zeros((7, self.config.max_sequence_length), np.float32)
            handed_out = []
            for result in original(self, requests):
                count = len(result.prompt_log_probs)
                row, new = rows[result.sample % len(rows), :count], ~np.isnan(result.prompt_log_probs)
                row[new] = result.prompt_log_probs[new]
                handed_out.append(replace(result, prompt_log_probs=row.copy()))
            return handed_out

        return generate

    with patched(RolloutGenerator, "generate", wrap):
        yield
