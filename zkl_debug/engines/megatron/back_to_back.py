"""Whether a model replays the CUDA graphs of its layers one right behind the other."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

from torch import nn


def is_back_to_back(model: nn.Module) -> bool:
    """Whether nothing writes to the output of a layer between its graph and the next: only megatron-core's loop runs.

    It hands the output of one layer to the next. A layer, a loop or a graph manager that was replaced or subclassed
    elsewhere may do anything in between, in some steps only, and so is not trusted.
    """
    from megatron.core.transformer.cuda_graphs import CudaGraphManager, _CudaGraphRunner
    from megatron.core.transformer.transformer_block import TransformerBlock

    blocks = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    layers = [layer for block in blocks for layer in block.layers]
    called = [(module, name) for module in (*blocks, *layers) for name in ("__call__", "forward")]
    shared = [(CudaGraphManager, "__call__"), (_CudaGraphRunner, "replay_graph_capture")]
    return bool(layers) and all(_is_own(owner, name) for owner, name in (*called, *shared))


def _is_own(owner: Any, name: str) -> bool:
    """Whether a method of a class, or of an object, is code of megatron-core."""
    import megatron.core

    cls = owner if isinstance(owner, type) else type(owner)
    function = getattr(cls, name, None)
    if not isinstance(function, types.FunctionType) or (owner is not cls and name in vars(owner)):
        return False
    home = Path(megatron.core.__file__ or "").parent
    return home in Path(function.__code__.co_filename).parents
