"""The places in megatron-core where a function can be replaced: every name that zkl-debug patches is in this file.

mcore imports functions by value, so each seam is the *binding site*, the module that calls the function. Each helper is
a context manager that puts back what it found; ``wrap`` receives the original function and returns the replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zkl_debug.engines import paged_attention
from zkl_debug.engines.patching import PatchSet, patched

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def patch_for_cpu(patches: PatchSet) -> None:
    """What mcore itself needs on a CPU, added to ``patches`` (see :func:`zkl_debug.engines.cpu.cpu_backend`)."""
    import megatron.core.fusions.fused_softmax as fused_softmax
    import megatron.core.inference.contexts.dynamic_context as dynamic_context
    import megatron.core.inference.text_generation_controllers.text_generation_controller as controller
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.attention as attention
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def get_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(state)

    def no_range(*_args: Any, **_kwargs: Any) -> None:
        return None

    def window_mask(queries: int, keys: int, window: tuple[int, int]) -> torch.Tensor:
        behind = keys - queries
        seen = torch.ones(queries, keys, dtype=torch.bool).triu(behind - window[0]).tril(behind + window[1])
        return ~seen

    patches.set(fused_softmax, "get_sliding_window_causal_mask", window_mask)  # made on a GPU by name
    patches.set(random, "_get_cuda_rng_state", get_state)
    patches.set(random, "_set_cuda_rng_state", set_state)
    patches.set(attention, "flash_attn_varlen_func", paged_attention.flash_attn_varlen_func)
    patches.set(attention, "flash_attn_with_kvcache", paged_attention.flash_attn_with_kvcache)
    patches.set(attention, "is_fa_min_version", lambda *_a, **_k: True)
    if attention.rearrange is None:  # einops is optional for mcore, yet its dynamic attention needs it
        patches.set(attention, "rearrange", _merge_heads)
    # Triton can be imported without a GPU; None selects the index_put path.
    patches.set(dynamic_context, "triton_append_key_value_cache", None)
    patches.set(controller, "range_push", no_range)
    patches.set(controller, "range_pop", no_range)
    # It turns the splits of an all-to-all into numpy arrays only where they come from a GPU.
    patches.set(token_dispatcher, "maybe_move_tensor_to_cpu", _on_the_host)


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _merge_heads(tensor: torch.Tensor, pattern: str) -> torch.Tensor:
    assert pattern == "s b h d -> s b (h d)", pattern
    return tensor.flatten(-2)


@contextmanager
def train_core_attention(wrap: Wrap) -> Iterator[None]:
    """``DotProductAttention.forward(self, query, key, value, attention_mask, ...)``: scoring and the static engine."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    with patched(DotProductAttention, "forward", wrap):
        yield


@contextmanager
def paged_core_attention(varlen: Wrap, decode: Wrap) -> Iterator[None]:
    """The two flash-attention entry points of the dynamic engine: prefill and mixed steps, and decode-only steps."""
    import megatron.core.transformer.attention as attention

    with (
        patched(attention, "flash_attn_varlen_func", varlen),
        patched(attention, "flash_attn_with_kvcache", decode),
    ):
        yield


@contextmanager
def unpermute(wrap: Wrap) -> Iterator[None]:
    """``unpermute(permuted_tokens, sorted_indices, restore_shape, ...)`` as the token dispatchers call it."""
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    with patched(token_dispatcher, "unpermute", wrap):
        yield


@contextmanager
def router_gating(wrap: Wrap) -> Iterator[None]:
    """``router_gating_linear(inp, weight, bias, router_dtype)`` as the router calls it."""
    import megatron.core.transformer.moe.router as router

    with patched(router, "router_gating_linear", wrap):
        yield


@contextmanager
def topk_routing(wrap: Wrap) -> Iterator[None]:
    """``topk_routing_with_score_function(logits, topk, ...)`` as the router calls it."""
    import megatron.core.transformer.moe.router as router

    with patched(router, "topk_routing_with_score_function", wrap):
        yield


@contextmanager
def expert_forward(wrap: Wrap) -> Iterator[None]:
    """``SequentialMLP.forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs)``."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    with patched(SequentialMLP, "forward", wrap):
        yield


@contextmanager
def linear_forward(wrap: Wrap) -> Iterator[None]:
    """The function under Column- and RowParallelLinear: ``f(input, weight, bias, ...)``, keyword or positional."""
    import megatron.core.tensor_parallel.layers as layers

    with (
        patched(layers, "linear_with_grad_accumulation_and_async_allreduce", wrap),
        patched(layers, "linear_with_frozen_weight", wrap),
    ):
        yield


@contextmanager
def block_linears(multiply: Callable[[bool, torch.Tensor, torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """The product of Column- and RowParallelLinear inside the transformer block, of experts too; not the output layer.

    ``multiply(is_expert, input, weight)`` gives the product, or None to leave it to mcore. Layers with a bias or with
    work distributed over ranks are left alone.
    """
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_block import TransformerBlock

    inside = [0]

    def note(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            inside[0] += 1
            try:
                return original(self, *args, **kwargs)
            finally:
                inside[0] -= 1

        return forward

    def product(original: Callable[..., Any]) -> Callable[..., Any]:
        def _forward_impl(self: Any, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            plain = kwargs.get("bias") is None and not kwargs.get("sequence_parallel")
            out = multiply(bool(self.is_expert), input, weight) if inside[0] and plain else None
            return original(self, input, weight, *args, **kwargs) if out is None else out

        return _forward_impl

    with (
        patched(TransformerBlock, "forward", note),
        patched(HybridStack, "forward", note),
        patched(ColumnParallelLinear, "_forward_impl", product),
        patched(RowParallelLinear, "_forward_impl", product),
    ):
        yield


@contextmanager
def row_parallel(wrap: Wrap) -> Iterator[None]:
    """``RowParallelLinear.forward(self, input_)``: its linear, and the reduction over the ranks behind it."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    with patched(RowParallelLinear, "forward", wrap):
        yield


@contextmanager
def tensor_parallel_reduce(all_reduce: Wrap, reduce_scatter: Wrap) -> Iterator[None]:
    """The two reductions behind row-parallel linears and the vocabulary-parallel embedding."""
    import megatron.core.tensor_parallel.layers as layers

    with (
        patched(layers, "reduce_from_tensor_model_parallel_region", all_reduce),
        patched(layers, "reduce_scatter_to_sequence_parallel_region", reduce_scatter),
    ):
        yield


@contextmanager
def gen_rope(wrap: Wrap) -> Iterator[None]:
    """``apply_rotary_pos_emb(t, freqs, config, ...)`` as the dynamic inference context calls it."""
    import megatron.core.inference.contexts.dynamic_context as dynamic_context

    with patched(dynamic_context, "apply_rotary_pos_emb", wrap):
        yield


@contextmanager
def train_rope(wrap: Wrap) -> Iterator[None]:
    """``apply_rotary_pos_emb(t, freqs, config, ...)`` as attention calls it in scoring and in the static engine."""
    import megatron.core.transformer.attention as attention

    with patched(attention, "apply_rotary_pos_emb", wrap):
        yield


@contextmanager
def gen_log_probs(wrap: Wrap) -> Iterator[None]:
    """``DynamicInferenceContext.calculate_log_probs_tensors(self, logits, new_tokens, ...)``."""
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    with patched(DynamicInferenceContext, "calculate_log_probs_tensors", wrap):
        yield


@contextmanager
def gen_log_softmax(wrap: Wrap) -> Iterator[None]:
    """``DynamicInferenceContext._processed_log_probs(self, logits, ...)``."""
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    with patched(DynamicInferenceContext, "_processed_log_probs", wrap):
        yield


@contextmanager
def add_request(wrap: Wrap) -> Iterator[None]:
    """``DynamicInferenceContext.add_request(self, req, prefill_chunk_length=None)``."""
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    with patched(DynamicInferenceContext, "add_request", wrap):
        yield


@contextmanager
def recurrent_slots(wrap: Wrap) -> Iterator[None]:
    """``DynamicInferenceContext._execute_pending_mamba_ops(self)``: zeroes new recurrent slots right before a step."""
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    with patched(DynamicInferenceContext, "_execute_pending_mamba_ops", wrap):
        yield


@contextmanager
def prefill_scan(wrap: Wrap) -> Iterator[None]:
    """``mamba_chunk_scan_combined_varlen(..., initial_states=...)`` as the mixer calls it in prefill."""
    import megatron.core.ssm.mamba_mixer as mixer

    with patched(mixer, "mamba_chunk_scan_combined_varlen", wrap):
        yield


@contextmanager
def training_ssm(wrap: Wrap) -> Iterator[None]:
    """``MambaMixer._ssm_training(self, zxBCdt, packed_seq_params)``: convolution, scan, gate and norm of training."""
    from megatron.core.ssm.mamba_mixer import MambaMixer

    with patched(MambaMixer, "_ssm_training", wrap):
        yield


@contextmanager
def prefill_conv_state(prefill: Wrap, last_inputs: Wrap) -> Iterator[None]:
    """What a prefill step leaves behind for its convolutions, and where.

    ``prefill``: ``MambaMixer._ssm_prefill(self, zxBCdt, *, conv_state, batch_indices, ...)``. ``last_inputs``:
    ``causal_conv1d_varlen_states(x, cu_seqlens, state_len)`` as it is called in there.

    Raises:
        ImportError: mcore found no causal_conv1d, and nothing stands in for it.
    """
    import megatron.core.ssm.mamba_mixer as mixer

    if not hasattr(mixer, "causal_conv1d_varlen_states"):
        raise ImportError("causal_conv1d is not installed")
    with (
        patched(mixer.MambaMixer, "_ssm_prefill", prefill),
        patched(mixer, "causal_conv1d_varlen_states", last_inputs),
    ):
        yield


@contextmanager
def recurrent_state_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inference states of Mamba layers configured inside the block are kept in ``dtype``."""
    from megatron.core.inference.config import MambaInferenceStateConfig

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def from_model(model: Any, conv_states_dtype: Any = None, ssm_states_dtype: Any = None) -> Any:
            return original(model, conv_states_dtype, ssm_states_dtype or dtype)

        return from_model

    with patched(MambaInferenceStateConfig, "from_model", lambda original: staticmethod(wrap(original))):
        yield


@contextmanager
def mamba_version(version: str) -> Iterator[None]:
    """``megatron.core.utils.get_mamba_version()`` answers ``version`` without an import."""
    import megatron.core.utils as utils

    with patched(utils, "get_mamba_version", lambda _original: lambda: version):
        yield


def attention_window(module: Any) -> tuple[int, int] | None:
    """(left, right) window of a ``DotProductAttention``: the configured one in the layers that have it."""
    from megatron.core.transformer.utils import is_layer_window_attention

    config = module.config
    has = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, module.layer_number)
    return tuple(config.window_size) if has else None


def clear_rotary_cache() -> None:
    """Forget the rotary tables that mcore keeps per process and length."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()


def inference_mode_active() -> bool:
    """mcore's process-wide ``InferenceMode`` flag."""
    from megatron.core.inference.utils import InferenceMode

    return bool(InferenceMode.is_active())
