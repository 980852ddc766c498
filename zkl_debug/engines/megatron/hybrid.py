"""Small real ``HybridModel`` s of megatron-core (Mamba, attention, MoE), and the kernels they lack on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zkl_debug.engines import mamba_reference
from zkl_debug.engines.cpu import is_needed, quiet
from zkl_debug.engines.megatron.model import DTYPES, ModelSpec, seed_weights, transformer_config
from zkl_debug.engines.patching import PatchSet

_KERNELS = (
    "mamba_split_conv1d_scan_combined",
    "mamba_chunk_scan_combined_varlen",
    "causal_conv1d_varlen_states",
    "causal_conv1d_update",
    "selective_state_update",
    "tensor_masked_update",
    "tensor_get_slice_after",
    "tensor_merge",
)


@contextmanager
def mamba_backend() -> Iterator[None]:
    """Reference kernels in the place of mamba_ssm, causal_conv1d and mcore's Triton SSM operators; none on a GPU.

    ``MambaMixer`` itself, its caches and its states are mcore's.
    """
    if not is_needed():
        yield
        return
    with quiet(), PatchSet() as patches:
        import megatron.core.models.hybrid.hybrid_block as hybrid_block
        import megatron.core.ssm.mamba_mixer as mixer
        import megatron.core.ssm.ops.causal_conv1d_varlen as varlen
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        for name in _KERNELS:
            patches.set(mixer, name, getattr(mamba_reference, name), create=True)
        patches.set(varlen, "causal_conv1d_varlen_fn", mamba_reference.causal_conv1d_varlen_fn)
        patches.set(mixer, "HAVE_MAMBA_SSM", True)
        patches.set(mixer, "ExtendedRMSNorm", mamba_reference.GatedNorm)
        patches.set(mixer, "_check_mamba_sequence_packing_support", lambda *_a, **_k: (True, None))
        patches.set(hybrid_block, "TENorm", WrappedTorchNorm)
        yield


def build_hybrid(spec: ModelSpec, dtype: str, seed: int, pattern: str, gated_norm: bool = True) -> nn.Module:
    """A ``HybridModel`` in eval mode, weights from a seed. Needs :func:`mamba_backend` on a CPU.

    Args:
        spec: sizes; ``layers`` must be the length of ``pattern``.
        dtype: ``fp32`` or ``bf16``; decay rates, step sizes and skips of the mixers are fp32 in both.
        seed: weights seed.
        pattern: one letter a layer: ``M`` Mamba, ``*`` attention, ``-`` MLP, ``E`` mixture of experts.
        gated_norm: the mixers norm what they scanned, gated; else the gate is all there is, inside the scan.
    """
    assert len(pattern) == spec.layers, (pattern, spec.layers)
    with quiet():
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        config = transformer_config(
            spec, DTYPES[dtype], is_hybrid_model=True, mamba_state_dim=8, mamba_head_dim=16, mamba_num_groups=2
        )
        model = HybridModel(
            config,
            _stack_spec(spec.experts, gated_norm),
            vocab_size=spec.vocab,
            max_sequence_length=spec.max_length,
            hybrid_layer_pattern=pattern,
            parallel_output=False,
            position_embedding_type="none",
        )
    if dtype == "bf16":
        model = model.to(torch.bfloat16)
    seed_weights(model, seed)
    _seed_decay(model, seed)
    result: nn.Module = model.eval()
    return result


def _seed_decay(model: nn.Module, seed: int) -> None:
    """Decay rates and step sizes in the range Mamba starts from; these and the skips in fp32, as mcore keeps them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.data = torch.log(1.0 + 15.0 * torch.rand(parameter.shape, generator=generator))
            elif name.endswith("dt_bias"):
                value = torch.log(torch.expm1(0.01 + 0.09 * torch.rand(parameter.shape, generator=generator)))
                parameter.data = value
            elif name.endswith("mixer.D"):
                parameter.data = parameter.data.float()


def _stack_spec(experts: int, gated_norm: bool) -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    # Without the mixer's own norm all three paths gate inside the scan; with it prefill and decode gate in the norm.
    mixer = ModuleSpec(
        module=MambaMixer,
        params={"chunk_size": 16, "rmsnorm": gated_norm},
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    moe = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=get_mlp_module_spec(use_te=False, num_experts=experts),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    layers = HybridStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add),
        ),
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm, self_attention=attention, self_attn_bda=get_bias_dropout_add
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm, mlp=get_mlp_module_spec(use_te=False), mlp_bda=get_bias_dropout_add
            ),
        ),
        **({"moe_layer": moe} if experts else {}),
    )
    return ModuleSpec(module=HybridStack, submodules=layers)
