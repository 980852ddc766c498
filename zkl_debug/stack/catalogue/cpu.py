"""The CPU stack: stand-ins for the batch-invariant kernels, and what else a bed on a CPU can switch."""

from __future__ import annotations

from typing import Any

from zkl_debug.stack.applying import by_config, by_function, by_kernels
from zkl_debug.stack.switches import Setting, Switch

EVERY_PRESET = ("bf16", "mxfp8", "nvfp4-flashinfer", "mxfp8-flashinfer")
_BODIES = "zkl_debug.stack.cpu:"
_GEN = "policy.generation.mcore_generation_config."

CPU_LADDER: tuple[Switch, ...] = (
    by_kernels(
        "gemm-row-tiles",
        _BODIES + "gemm_row_tiles",
        *("mm", "addmm"),
        fixes="matrix products see one fixed number of rows, whatever the batch: one reduction order for K",
        owner="TE",
        group="batch invariance",
        target="aten::mm, aten::addmm",
    ),
    by_function(
        "attention-reference",
        _BODIES + "attention_reference",
        fixes="scoring and paged generation run one attention, a query row at a time; packed scoring becomes possible",
        owner="mcore",
        group="batch invariance",
        target="DotProductAttention.forward, flash_attn_varlen_func, flash_attn_with_kvcache",
    ),
    by_function(
        "tp-tree-reduce",
        _BODIES.replace("cpu:", "tree_reduce:") + "tp_tree_reduce",
        fixes="sums over K are one float32 tree of four parts, on one, two or four tensor-parallel ranks, rounded once",
        owner="mcore",
        group="batch invariance",
        kind="patch",
        target="RowParallelLinear, ColumnParallelLinear, reduce_from_tensor_model_parallel_region",
        stacked=False,
        not_searched="it matters between layouts of several ranks only; beds on such turn it on",
        needs=(),
    ),
    by_kernels(
        "norm-rows",
        _BODIES + "norm_rows",
        "mean.dim",
        fixes="the mean square of a norm is a fixed tree per row",
        owner="TE",
        group="batch invariance",
        target="aten::mean.dim",
    ),
    by_kernels(
        "activation-rows",
        _BODIES + "activation_rows",
        "silu",
        fixes="silu does not depend on where an element falls in a vectorised or threaded loop",
        owner="environment",
        group="batch invariance",
        mechanism="shape class",
        target="aten::silu",
    ),
    by_kernels(
        "rope-rows",
        _BODIES + "rope_rows",
        *("cos", "sin"),
        fixes="cos and sin do not depend on where an angle falls in a vectorised loop",
        owner="environment",
        group="batch invariance",
        mechanism="shape class",
        target="aten::cos, aten::sin",
    ),
    by_kernels(
        "softmax-rows",
        _BODIES + "softmax_rows",
        "_softmax",
        fixes="router softmax row by row",
        owner="mcore",
        group="batch invariance",
        target="aten::_softmax",
    ),
    by_function(
        "moe-ordered-combine",
        _BODIES + "moe_ordered_combine",
        fixes="unpermute adds a token's expert outputs in expert order instead of by scatter-add",
        owner="mcore",
        group="batch invariance",
        kind="patch",
        patch="3",
        target="moe_utils.unpermute, token_dispatcher.unpermute",
        presets=EVERY_PRESET,
        needs=(),
    ),
    by_kernels(
        "log-softmax",
        _BODIES + "log_softmax_rows",
        "_log_softmax",
        fixes="scoring takes the log-softmax of generation, not the distributed max / exp-sum / log decomposition",
        owner="NeMo-RL",
        group="log-probs",
        target="scoring.log_softmax, aten::_log_softmax",
        alternatives=("fused-log-softmax",),
    ),
    by_function(
        "chunk-edge-labels",
        _BODIES + "chunk_edge_labels",
        fixes="the prompt log-prob at a prefill chunk edge is scored against the next prompt token",
        owner="mcore",
        group="log-probs",
        mechanism="label",
        kind="patch",
        target="DynamicInferenceContext.calculate_log_probs_tensors",
        alternatives=("no-chunked-prefill",),
        needs=(),
    ),
    by_function(
        "reseed-sides",
        _BODIES + "reseed_sides",
        fixes="the CUDA RNG tracker starts from one seed on both sides",
        owner="NeMo-RL",
        group="lifecycle",
        mechanism="lifecycle",
        target="tensor_parallel.random",
    ),
    by_function(
        "mamba-version-pinned",
        _BODIES + "mamba_version_pinned",
        fixes="mcore does not import mamba_ssm to learn its version",
        owner="mcore",
        group="unrelated",
        mechanism="nothing",
        kind="patch",
        patch="14",
        target="megatron.core.utils.get_mamba_version",
        presets=EVERY_PRESET,
        needs=(),
    ),
    by_function(
        "fresh-rope-cache",
        _BODIES + "fresh_rope_cache",
        fixes="rotary tables cached by an earlier model of the process are dropped",
        owner="mcore",
        group="lifecycle",
        mechanism="lifecycle",
        target="RotaryEmbedding.forward.cache_clear",
        needs=(),
    ),
)


def _whole_prompts(config: Any) -> int:
    """A token budget of a step that no prompt exceeds."""
    return max(int(config.max_tokens or 0), 2 * int(config.max_sequence_length))


#: Keys of the engine that a bed can switch as well. Not part of `--stack on`: they avoid a path instead of mending it.
BED_ENGINE_KEYS: tuple[Switch, ...] = (
    by_config(
        "no-chunked-prefill",
        "InferenceConfig",
        {"enable_chunked_prefill": False, "max_tokens": _whole_prompts},
        fixes="a prompt is prefilled in one step: no chunk edge, no other row groups than scoring has",
        owner="mcore",
        group="engine",
        mechanism="shape class",
        kind="engine key",
        target="InferenceConfig.enable_chunked_prefill",
        settings=(Setting("recipe", _GEN + "enable_chunked_prefill", "false", "true"),),
        presets=("bf16",),
        alternatives=("chunk-edge-labels",),
        needs=(),
        stacked=False,
    ),
    by_config(
        "no-prefix-caching",
        "InferenceConfig",
        {"enable_prefix_caching": False},
        fixes="every prompt row is computed; none comes from a block that another request, or older weights, wrote",
        owner="mcore",
        group="engine",
        mechanism="lifecycle",
        kind="engine key",
        target="InferenceConfig.enable_prefix_caching",
        settings=(Setting("recipe", _GEN + "enable_prefix_caching", "false", "true"),),
        presets=("bf16",),
        needs=(),
        stacked=False,
    ),
)
