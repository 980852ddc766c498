"""Real GPT models of megatron-core on a GPU: Transformer Engine, inference-optimised and local specs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zkl_debug.engines.cpu import quiet
from zkl_debug.engines.megatron.model import seed_weights
from zkl_debug.errors import UsageError

KINDS = ("te", "infopt", "local-fa4")


@dataclass(frozen=True)
class GpuSpec:
    """Sizes and kernel choices of a GPU model.

    Attributes:
        kind: ``te`` (Transformer Engine spec), ``infopt`` (inference-optimised spec) or ``local-fa4`` (local spec with
            FlashAttention-4 as the training core attention).
        experts: 0 for a dense model.
        flash_attention_version: None leaves the choice to megatron-core and Transformer Engine.
        attention_backend: ``auto`` or ``flash``.
        cuda_graphs: decode steps may be replayed from CUDA graphs (``cuda_graph_impl="local"``).
        batch_invariant: ``TransformerConfig.batch_invariant_mode``; the kernels are switched on by the caller.
    """

    kind: str = "te"
    layers: int = 4
    hidden: int = 1024
    heads: int = 16
    kv_groups: int = 4
    ffn: int = 2816
    vocab: int = 8192
    max_length: int = 2048
    experts: int = 0
    topk: int = 2
    expert_ffn: int = 512
    batch_invariant: bool = False
    flash_attention_version: int | None = None
    attention_backend: str = "auto"
    cuda_graphs: bool = False


def build_gpu_model(spec: GpuSpec, seed: int) -> nn.Module:
    """A bf16 ``GPTModel`` on the current GPU, in eval mode, weights from the seed.

    Raises:
        UsageError: unknown kind.
    """
    if spec.kind not in KINDS:
        raise UsageError(f"model kind {spec.kind!r}", f"one of {', '.join(KINDS)}")
    with quiet():
        from megatron.core.models.gpt.gpt_model import GPTModel

        config = _config(spec)
        model = GPTModel(
            config=config,
            transformer_layer_spec=_layer_spec(spec),
            vocab_size=spec.vocab,
            max_sequence_length=spec.max_length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
    model = model.cuda().bfloat16()
    seed_weights(model, seed)
    built: nn.Module = model.eval()
    return built


def _config(spec: GpuSpec) -> Any:
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    extra: dict[str, Any] = {}
    if spec.experts:
        extra.update(
            num_moe_experts=spec.experts,
            moe_router_topk=spec.topk,
            moe_ffn_hidden_size=spec.expert_ffn,
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="none",
        )
    if spec.kind == "infopt":
        extra["transformer_impl"] = "inference_optimized"
    if spec.cuda_graphs:
        extra["cuda_graph_impl"] = "local"
    if spec.flash_attention_version is not None:
        extra["flash_attention_version"] = spec.flash_attention_version
    return TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_groups,
        ffn_hidden_size=spec.ffn,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_backend=AttnBackend[spec.attention_backend],
        batch_invariant_mode=spec.batch_invariant,
        **extra,
    )


def _layer_spec(spec: GpuSpec) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    experts = spec.experts or None
    if spec.kind == "te":
        return specs.get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=bool(experts))
    if spec.kind == "infopt":
        return specs.get_gpt_layer_with_inference_spec()
    layer = specs.get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = Fa4CoreAttention
    return layer


class Fa4CoreAttention(nn.Module):
    """Training core attention of the local spec on FlashAttention-4, one split, causal.

    Inputs [s, b, heads, d], output [s, b, heads * d].
    """

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _attention_mask: Any = None, **_: Any
    ) -> torch.Tensor:
        """Causal attention of every sequence of the batch; the mask argument is implied."""
        from megatron.core.transformer import attention

        s, b, h, d = query.shape
        q, k, v = (t.transpose(0, 1).reshape(b * s, t.shape[2], d) for t in (query, key, value))
        ends = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=query.device)
        out = attention.flash_attn4_varlen_func(
            q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=s, max_seqlen_k=s, causal=True, num_splits=1
        )
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first.reshape(b, s, h * d).transpose(0, 1).contiguous()
