"""A forward through pipeline stages: megatron-core's own point-to-point communication, one micro-batch at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def forward(model: nn.Module, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run this rank's stage of ``model``; what a stage before the last returns has been sent to the next one.

    Args:
        model: a stage, or a whole model (then it is simply called).
        tokens: [b, s] as this rank is given them.
        args, kwargs: the other arguments of the model.
    """
    from megatron.core import parallel_state

    ready = parallel_state.model_parallel_is_initialized()
    if not ready or parallel_state.get_pipeline_model_parallel_world_size() == 1:
        alone: torch.Tensor = model(tokens, *args, **kwargs)
        return alone
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    config: Any = model.config
    link = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    rows = tokens.shape[1] // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    got = link.recv_forward((rows, tokens.shape[0], config.hidden_size), first)
    model.set_input_tensor(got)  # type: ignore[operator]
    out: torch.Tensor = model(tokens, *args, **kwargs)
    link.send_forward(out, last)
    return out


def is_last_stage() -> bool:
    """Whether this process has the last pipeline stage (or the whole model)."""
    from megatron.core import parallel_state

    return not parallel_state.model_parallel_is_initialized() or bool(parallel_state.is_pipeline_last_stage())
