"""Bodies of the ladder's patches of megatron-core and TransformerEngine (RECIPES.md), each a reversible block."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zkl_debug.engines.patching import PatchSet, patched

_MULTIPLE = 64
_WORKSPACE_BYTES = 4


@contextmanager
def te_gemm_workspace() -> Iterator[None]:
    """Patch 1: TE's cuBLAS workspace has 4 bytes."""
    gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions.gemm")
    with patched(gemm, "get_cublas_workspace_size_bytes", lambda _original: lambda: _WORKSPACE_BYTES):
        yield


@contextmanager
def fused_log_softmax() -> Iterator[None]:
    """Patch 2: scoring takes F.log_softmax (of the beds; NeMo-RL's own function belongs to NeMo-RL)."""
    from zkl_debug.engines.megatron import scoring

    def same_as_generation(logits: Tensor) -> Tensor:
        return torch.nn.functional.log_softmax(logits, dim=-1)

    with patched(scoring, "log_softmax_impl", lambda _original: same_as_generation):
        yield


@contextmanager
def index_put_routing() -> Iterator[None]:
    """Patch 4: the sparse routing map and probabilities are filled by index_put_."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.router as router

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def routing(logits: Tensor, topk: int, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("fused") or kwargs.get("dense_output") or len(args) > 6:
                return original(logits, topk, *args, **kwargs)
            probs, experts = original(logits, topk, *args, **{**kwargs, "dense_output": True})
            rows = torch.arange(logits.shape[0], device=logits.device)[:, None]
            sparse = torch.zeros_like(logits).index_put_((rows, experts), probs)
            chosen = torch.zeros_like(logits, dtype=torch.bool)
            return sparse, chosen.index_put_((rows, experts), torch.ones_like(experts, dtype=torch.bool))

        return routing

    name = "topk_routing_with_score_function"
    with patched(moe_utils, name, make), patched(router, name, make):
        yield


#: controller's context -> {request id: routing rebuilt before its blocks were handed on}
_rebuilt: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()


@contextmanager
def routing_before_update() -> Iterator[None]:
    """Patch 5: routing of finished requests is rebuilt before ``update_requests`` frees their KV blocks."""
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def bookkeeping(self: Any) -> Any:
            context = self.inference_wrapped_model.inference_context
            update = context.update_requests

            def rebuild_first(active_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
                _rebuilt.setdefault(context, {}).update(_rebuild(context, active_mask))
                return update(active_mask, *args, **kwargs)

            with PatchSet() as patches:
                patches.set(context, "update_requests", rebuild_first)
                return original(self)

        return bookkeeping

    with patched(TextGenerationController, "_dynamic_step_context_bookkeeping", make):
        yield


def _rebuild(context: Any, active_mask: Tensor) -> dict[int, Any]:
    """Routing [tokens - 1, layers, topk] of every request that ends now, by request id."""
    allocator = context.kv_block_allocator
    if not allocator.block_routing:
        return {}
    found = {}
    lengths = context.get_active_sequence_lengths().tolist()
    for index in torch.nonzero(active_mask == 0, as_tuple=True)[0].tolist():
        slot = index + context.paused_request_count
        blocks = context.request_to_kv_block_ids[slot]
        routing = allocator.reconstruct_routing_from_blocks(blocks[blocks >= 0].tolist(), lengths[index])
        if routing is not None:
            found[int(context.request_ids[slot])] = routing
    return found


@contextmanager
def routing_on_bookkeep() -> Iterator[None]:
    """Patch 6: finished requests carry the routing that was rebuilt in time; late block ids are dropped."""
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def post_process(self: Any, *args: Any, **kwargs: Any) -> Any:
            routing = _rebuilt.get(self.context, {})
            late = kwargs.get("finished_routing_block_ids")
            if late:
                kwargs["finished_routing_block_ids"] = {k: v for k, v in late.items() if k not in routing}
            active, records = original(self, *args, **kwargs)
            for record in records:
                request = record.requests[-1]
                rebuilt = routing.pop(int(request.request_id), None)
                if rebuilt is not None and len(record.requests) == 1:
                    request.routing_indices = rebuilt
            return active, records

        return post_process

    with patched(DynamicInferenceEngine, "post_process_requests", make):
        yield


@contextmanager
def graph_buckets_64() -> Iterator[None]:
    """Patch 7: CUDA graphs are captured for multiples of 64 tokens only, where any such bucket exists."""
    from megatron.core.inference.batch_dimensions_utils import CUDAGraphBatchDimensionBuilder as Builder

    def make(original: Callable[..., Any]) -> Any:
        def generate(*args: Any, **kwargs: Any) -> Any:
            buckets, counts = original(*args, **kwargs)
            kept = [b for b in buckets if b.token_count % _MULTIPLE == 0]
            if not kept:
                return buckets, counts
            return kept, sorted({b.token_count for b in kept}, reverse=True)

        return staticmethod(generate)

    with (
        _static(Builder, "generate_cuda_graph_batch_dimensions_list", make),
        patched(Builder, "CUDA_GRAPH_ROUNDER", lambda _original: _MULTIPLE),
    ):
        yield


@contextmanager
def _static(owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """Replace a static method, and put back the very descriptor that was there."""
    descriptor = vars(owner)[name]
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        setattr(owner, name, descriptor)


@contextmanager
def mamba_cache_refreshed() -> Iterator[None]:
    """The cached -exp(A) of every mixer is computed anew after a weight swap."""
    import megatron.core.resharding as resharding
    import megatron.core.resharding.refit as refit

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def swap(src_model: Any, target_model: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(src_model, target_model, *args, **kwargs)
            for module in target_model.modules() if target_model is not None else ():
                if hasattr(module, "_A_neg_exp_cache_stale"):
                    module._A_neg_exp_cache_stale = True
            return done

        return swap

    with patched(refit, "swap_model_weights", make), patched(resharding, "swap_model_weights", make):
        yield
