"""Taps on the collectives: what goes into them and what comes out, on this rank.

A reduction takes a partial sum of each rank and gives the sum; a gather takes a part of each row. Before, in and after
a collective are then three sites, and a difference that begins between ranks begins at one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zkl_debug.capture.experts import Sent, get_permutation, record_dispatch, set_sent
from zkl_debug.engines.megatron.shard_sites import GATHER, REDUCE

if TYPE_CHECKING:
    from zkl_debug.capture.api import Capture
    from zkl_debug.engines.megatron.adapter import MegatronAdapter

#: function of ``tensor_parallel.layers`` -> operator
_COLLECTIVES = {
    "reduce_from_tensor_model_parallel_region": REDUCE,
    "reduce_scatter_to_sequence_parallel_region": REDUCE,
    "gather_from_tensor_model_parallel_region": GATHER,
}


def install(capture: Capture, adapter: MegatronAdapter) -> None:
    """Install the taps into ``capture.taps``."""
    import megatron.core.tensor_parallel.layers as layers
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    for name, operator in _COLLECTIVES.items():
        if getattr(layers, name, None) is not None:
            capture.taps.wrap(layers, name, functools.partial(_collective, capture, adapter, operator))
    if adapter.place.at("ep")[1] > 1:
        capture.taps.wrap(MoEAlltoAllTokenDispatcher, "dispatch_postprocess", functools.partial(_received, capture))


def _active(capture: Capture) -> bool:
    return capture.session.enabled and capture.session.frame is not None


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Size of the group a collective is called with."""
    for value in (kwargs.get("group"), kwargs.get("tp_group"), *args):
        if value is not None and callable(getattr(value, "size", None)) and not isinstance(value, torch.Tensor):
            return int(value.size())
    return 1


def _collective(
    capture: Capture, adapter: MegatronAdapter, operator: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        lone = _size(args, kwargs) == 1
        if not _active(capture) or (lone and not (adapter.lone_collectives and operator == REDUCE)):
            return function(input_, *args, **kwargs)
        site = f"{capture.session.current_path()}/{operator}"
        with capture.session.guarded(operator):
            if not lone:
                # An all-reduce writes into its argument, unseen by torch: read a copy, before.
                before = input_.detach().clone()
                capture.session.record(f"{site}:in.0", before, semantic=operator, layout=_layout(capture, before))
        result = function(input_, *args, **kwargs)
        with capture.session.guarded(operator):
            capture.session.record(f"{site}:out.0", result, semantic=operator, layout=_layout(capture, result))
        return result

    return tapped


def _layout(capture: Capture, tensor: torch.Tensor) -> str:
    """The vocabulary-parallel embedding reduces [b, s, h]; where it shares rows out it has transposed before."""
    frame = capture.session.frame
    if frame is None or not capture.session.current_path().endswith("word_embeddings"):
        return ""
    s, b = frame.rows.grid
    return "bs" if tuple(tensor.shape[:2]) == (b, s) and not (frame.rows.split[1] > 1) else ""


def _received(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    """Behind the all-to-all: how many tokens each rank sent to each local expert, and where this rank sent its own."""

    @functools.wraps(function)
    def tapped(dispatcher: Any, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _active(capture) and not capture.session.recording:
            with capture.session.guarded("dispatch"):
                path = capture.session.current_path()
                counts = _counts(dispatcher)
                if counts is not None:
                    set_sent(capture.session, path, Sent(counts, int(dispatcher.local_expert_indices[0])))
                permutation = get_permutation(capture.session, path)
                if permutation is not None:
                    record_dispatch(capture.session, path, permutation)
        return function(dispatcher, tokens, *args, **kwargs)

    return tapped


def _counts(dispatcher: Any) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Tokens by source rank and local expert; None where the group of an expert has more than one rank."""
    if dispatcher.tp_size > 1:
        return None
    if dispatcher.num_local_experts > 1:
        table = dispatcher.num_global_tokens_per_local_expert
        return np.asarray(torch.as_tensor(table).cpu().numpy(), np.int64).reshape(-1, dispatcher.num_local_experts)
    return np.asarray(torch.as_tensor(dispatcher.output_splits).cpu().numpy(), np.int64).reshape(-1, 1)
