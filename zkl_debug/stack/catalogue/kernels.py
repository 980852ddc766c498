"""The batch-invariant overrides of megatron-core 0.19.2, each by itself, and all of them together."""

from __future__ import annotations

from typing import Any

from zkl_debug.stack.applying import by_function
from zkl_debug.stack.needs import TE, Need, gpu, symbol
from zkl_debug.stack.switches import Switch

_BODIES = "zkl_debug.engines.megatron.invariant_kernels:"
_MODULE = "megatron.core.transformer.custom_layers.batch_invariant_kernels:"
_SINGLE = ("bi-mm", "bi-addmm", "bi-log-softmax", "bi-mean", "bi-te-gemm", "bi-te-rmsnorm", "bi-te-normalization")


def _kernel(name: str, body: str, function: str, fixes: str, needs: tuple[Need, ...] = (), **fields: Any) -> Switch:
    return by_function(
        name,
        _BODIES + body,
        _BODIES + body + "_is_on",
        fixes=fixes,
        owner="mcore",
        group="batch invariance",
        kind="kernel",
        needs=(gpu(), symbol(_MODULE + function), *needs),
        stacked=False,
        **fields,
    )


KERNELS: tuple[Switch, ...] = (
    _kernel(
        "bi-mm",
        "mm",
        "mm_batch_invariant",
        "matrix products run in a persistent kernel with a fixed BLOCK_K and a serial loop over K",
        target="aten::mm",
    ),
    _kernel(
        "bi-addmm",
        "addmm",
        "addmm_batch_invariant",
        "the same for products with a bias",
        target="aten::addmm",
    ),
    _kernel(
        "bi-log-softmax",
        "log_softmax",
        "_log_softmax_batch_invariant",
        "log-softmax row by row",
        target="aten::_log_softmax",
    ),
    _kernel(
        "bi-mean",
        "mean_dim",
        "mean_batch_invariant",
        "means row by row",
        target="aten::mean.dim",
    ),
    _kernel(
        "bi-te-gemm",
        "te_gemm",
        "_te_general_gemm_patched",
        "TE's linears run the same persistent matmul",
        (TE,),
        target="general_gemm in TE's linear, layernorm_linear and mcore's TE extension",
        alternatives=("te-gemm-workspace",),
    ),
    _kernel(
        "bi-te-rmsnorm",
        "te_rmsnorm",
        "_te_rmsnorm_forward_patched",
        "TE's RMSNorm takes a mean that does not depend on the number of rows",
        (TE,),
        target="RMSNorm.forward and rmsnorm functions of TE",
    ),
    _kernel(
        "bi-te-normalization",
        "te_normalization",
        "_te_apply_normalization_patched",
        "the norm inside TE's fused layernorm_linear and layernorm_mlp does not depend on the number of rows",
        (TE,),
        target="apply_normalization in TE's fused modules",
    ),
    _kernel(
        "bi-kernels",
        "all_kernels",
        "enable_batch_invariant_mode",
        "all seven overrides, as megatron-core itself turns them on",
        (TE,),
        target="enable_batch_invariant_mode()",
        conflicts=_SINGLE,
    ),
)
