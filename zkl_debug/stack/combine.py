"""The MoE combine with a stated order of addition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def ordered_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Any,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    reverse: bool = False,
    **_options: Any,
) -> Tensor:
    """mcore's ``unpermute`` with a stated order of addition, in the dtype of ``permuted_tokens``.

    Args:
        permuted_tokens: [slots, hidden], grouped by expert, within an expert by token.
        sorted_indices: token of each slot, [slots].
        restore_shape: (tokens, hidden).
        probs, routing_map: [tokens, experts], when the probabilities are still to be applied.
        reverse: add in descending instead of ascending expert order.
    """
    dtype = permuted_tokens.dtype
    if probs is not None:
        assert routing_map is not None
        weights = probs.T.contiguous().masked_select(routing_map.T.contiguous())
        permuted_tokens = permuted_tokens * weights.unsqueeze(-1)
    order = sorted_indices.flip(0).argsort(stable=True) if reverse else sorted_indices.argsort(stable=True)
    if reverse:
        order = sorted_indices.numel() - 1 - order
    counts = torch.bincount(sorted_indices, minlength=int(restore_shape[0]))
    starts = counts.cumsum(0) - counts
    out = permuted_tokens.new_zeros(tuple(restore_shape))
    for turn in range(int(counts.max()) if counts.numel() else 0):
        tokens = (counts > turn).nonzero()[:, 0]
        out[tokens] = out[tokens] + permuted_tokens[order[starts[tokens] + turn]]
    return out.to(dtype)
