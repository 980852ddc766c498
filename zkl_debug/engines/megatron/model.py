"""Small real GPT models of megatron-core, dense and MoE, with weights that depend on a seed and nothing else."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zkl_debug.engines.cpu import quiet
from zkl_debug.engines.megatron.layout import ONE, ParallelLayout
from zkl_debug.engines.megatron.shard_map import ShardMap

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a model. ``experts == 0`` means dense; with experts the first ``dense_layers`` layers stay dense.

    ``window``: keys before its own that a row sees, in all layers but every second one; 0 for all keys everywhere.
    ``yarn``: factor by which rotary frequencies are stretched, beyond ``max_length / yarn`` positions; 0 for none.
    ``mtp``: layers that predict further tokens.
    """

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_groups: int = 2
    ffn: int = 128
    vocab: int = 128
    max_length: int = 128
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 64
    dense_layers: int = 0
    tied_output: bool = False
    dropout: float = 0.0
    routing_replay: bool = False
    window: int = 0
    yarn: float = 0.0
    mtp: int = 0


def build_model(spec: ModelSpec, dtype: str, seed: int, layout: ParallelLayout = ONE) -> nn.Module:
    """A ``GPTModel`` of local spec in eval mode, weights from :func:`seed_weights`.

    Args:
        spec: sizes.
        dtype: ``fp32`` or ``bf16``; the router computes in fp32 in both.
        seed: weights seed. The process's RNG is not used.
        layout: how it is spread over the ranks of the world that is up; this rank's part is built, with its part of
            the same weights.
    """
    with quiet():
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        config = transformer_config(spec, DTYPES[dtype], **_layout_fields(layout, spec, DTYPES[dtype]))
        layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        if layout.sp or layout.cp > 1:
            from zkl_debug.engines.megatron.local_spec import fit_layout

            fit_layout(layers, layout)
        if spec.routing_replay:
            from megatron.core.transformer.moe.router_replay import RouterReplay

            RouterReplay.clear_global_router_replay_instances()  # those of a model that is gone
        further = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False) if spec.mtp else None
        model = GPTModel(
            config,
            layers,
            vocab_size=spec.vocab,
            max_sequence_length=spec.max_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="yarn" if spec.yarn else "rope",
            mtp_block_spec=further,
            parallel_output=False,
            share_embeddings_and_output_weights=spec.tied_output,
        )
    if dtype == "bf16":
        model = model.to(torch.bfloat16)
    seed_weights(model, seed)
    result: nn.Module = model.eval()
    return result


def _layout_fields(layout: ParallelLayout, spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    if layout == ONE:
        return {}
    layout.check_model(spec)
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sp,
        "pipeline_model_parallel_size": layout.pp,
        "pipeline_dtype": dtype,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
    }
    if layout.ep > 1:
        fields["inference_moe_token_dispatcher_type"] = "nccl"  # the other one needs symmetric memory of GPUs
    if layout.cp > 1:
        fields["cp_comm_type"] = layout.cp_comm
    if spec.experts:
        fields["expert_tensor_parallel_size"] = 1
    return fields


def transformer_config(spec: ModelSpec, dtype: torch.dtype, **more: Any) -> Any:
    """mcore's ``TransformerConfig`` of a model that runs on a CPU as on a GPU; ``more`` are further fields."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe: dict[str, Any] = {}
    if spec.experts:
        if spec.routing_replay:
            moe["moe_enable_routing_replay"] = True
        moe |= {
            "num_moe_experts": spec.experts,
            "moe_router_topk": spec.topk,
            "moe_ffn_hidden_size": spec.expert_ffn,
            "moe_layer_freq": [int(i >= spec.dense_layers) for i in range(spec.layers)],
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": False,
        }
    if spec.window:
        more |= {"window_size": (spec.window, 0), "window_attn_skip_freq": 2}
    if spec.mtp:
        more |= {"mtp_num_layers": spec.mtp}
    config = TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_groups,
        ffn_hidden_size=spec.ffn,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=True,
        hidden_dropout=spec.dropout,
        attention_dropout=spec.dropout,
        **moe,
        **more,
    )
    if spec.yarn:
        for name, value in _yarn(spec).items():
            setattr(config, name, value)  # mcore reads them of the config, yet declares none
    return config


def _yarn(spec: ModelSpec) -> dict[str, Any]:
    """What YaRN reads, at the values it is published with."""
    return {
        "yarn_rotary_scaling_factor": spec.yarn,
        "yarn_original_max_position_embeddings": int(spec.max_length / spec.yarn),
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 0.0,
        "yarn_correction_range_round_to_int": True,
    }


def seed_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter from a generator of its own, keyed by ``seed`` and the parameter's name.

    Matrices get fan-in scaling (embeddings and the output layer are wider, so that logits are not all alike), norm
    weights are uniform in [0.5, 1.5], which makes a wrong order of rounding and scaling visible. A rank's part of a
    tensor is cut out of the whole one, under its name in the whole model.
    """
    parts = ShardMap(model)
    with torch.no_grad():
        for local, parameter in model.named_parameters():
            name, part = parts.path(local), parts.parameter(local, parameter)
            shape = tuple(parameter.shape) if part is None else part.shape
            generator = torch.Generator().manual_seed(_name_seed(seed, name))
            if parameter.dim() < 2:
                value = torch.rand(shape, generator=generator) + 0.5
            else:
                value = torch.randn(shape, generator=generator) * _std(name, shape[-1])
            parameter.copy_(value if part is None else part.cut(value))


def _std(name: str, fan_in: int) -> float:
    if "embedding" in name:
        return 1.0
    return (2.0 if "output_layer" in name or "router" in name else 1.0) / math.sqrt(fan_in)


def _name_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
