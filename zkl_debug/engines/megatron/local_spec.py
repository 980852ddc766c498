"""Changes to megatron-core's local layer spec for layouts that it leaves to Transformer Engine."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from zkl_debug.engines.megatron.cp_attention import ContextParallelAttention
from zkl_debug.engines.megatron.layout import ParallelLayout


class RowShardedNorm:
    """``WrappedTorchNorm`` under sequence parallel: a norm of rows does not care which rows it is given.

    megatron-core refuses it there because the gradients of its weight have to be added over the ranks; the forward,
    which is all that scoring runs, is the same.
    """

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        module: nn.Module = WrappedTorchNorm(alone, *args, **kwargs)
        for parameter in module.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return module


def fit_layout(block: Any, layout: ParallelLayout) -> None:
    """Put the stand-ins into a block spec, in place."""
    swaps: dict[Any, Any] = {}
    if layout.sp:
        swaps[WrappedTorchNorm] = RowShardedNorm
    if layout.cp > 1:
        swaps[DotProductAttention] = ContextParallelAttention
    _swap(block, swaps, set())


def _swap(value: Any, swaps: dict[Any, Any], seen: set[int]) -> None:
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, list | tuple):
        for item in value:
            _swap(item, swaps, seen)
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, type) and item in swaps:
                value[key] = swaps[item]
            else:
                _swap(item, swaps, seen)
        return
    for name, item in list(getattr(value, "__dict__", {}).items()):
        if isinstance(item, type) and item in swaps:
            setattr(value, name, swaps[item])
        else:
            _swap(item, swaps, seen)
