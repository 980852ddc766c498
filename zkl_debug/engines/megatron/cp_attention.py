"""Core attention under context parallel on a CPU.

megatron-core runs context parallel through Transformer Engine alone. This class stands in for it: the same two
layouts of communication round the attention of the local spec. ``a2a``: heads change places with the sequence, each
rank attends over whole sequences with its share of the heads. ``p2p``: queries stay, keys and values come round.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from zkl_debug.engines.megatron.zigzag import whole_order


class ContextParallelAttention(DotProductAttention):  # type: ignore[misc]
    """``DotProductAttention`` over a sequence that is spread over the context-parallel group in zigzag order."""

    def __init__(self, config: Any, *args: Any, cp_comm_type: str | None = None, **kwargs: Any) -> None:
        alone = copy.copy(config)  # the class refuses a config that says there are more ranks
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)
        self.cp_comm_type = cp_comm_type or "a2a"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """q [s / cp, b, heads, d], k and v [s / cp, b, groups, d]; mask [.., s, s]; result [s / cp, b, heads * d]."""
        group = parallel_state.get_context_parallel_group()
        attend = super().forward
        if self.cp_comm_type == "a2a":
            whole = [_to_heads(t, group) for t in (query, key, value)]
            out = attend(*whole, attention_mask, *args, **kwargs)
            heads = query.shape[2] // group.size()
            return _to_sequence(out.unflatten(-1, (heads, -1)), group).flatten(2)
        keys, values = _round_the_ring(key, group), _round_the_ring(value, group)
        # The attention functions take the last queries of a sequence: all of them run, the rank's own are kept.
        size, rank = group.size(), group.rank()
        queries = query.new_zeros(keys.shape[0], *query.shape[1:])
        mine = whole_order(keys.shape[0], size)[rank].to(query.device)
        queries[mine] = query
        every: Tensor = attend(queries, keys, values, attention_mask, *args, **kwargs)
        return every[mine]


def _all_to_all(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return out


def _to_heads(t: Tensor, group: Any) -> Tensor:
    """[s / cp, b, n, d] of this rank's rows -> [s, b, n / cp, d] of its heads, in the order of positions."""
    size = group.size()
    rows, batch, heads, depth = t.shape
    parts = t.reshape(rows, batch, size, heads // size, depth).permute(2, 0, 1, 3, 4)
    got = _all_to_all(parts, group).flatten(0, 1)  # rank by rank, each in its own order
    out = torch.empty_like(got)
    out[whole_order(rows * size, size).flatten()] = got
    return out


def _to_sequence(t: Tensor, group: Any) -> Tensor:
    """Inverse of :func:`_to_heads`."""
    size = group.size()
    length, batch, heads, depth = t.shape
    parts = t[whole_order(length, size).flatten()].reshape(size, length // size, batch, heads, depth)
    got = _all_to_all(parts, group)
    return got.permute(1, 2, 0, 3, 4).reshape(length // size, batch, size * heads, depth)


def _round_the_ring(t: Tensor, group: Any) -> Tensor:
    """[s / cp, ...] of this rank -> [s, ...] in the order of positions; each rank passes on what it got."""
    size, rank = group.size(), group.rank()
    ranks = dist.get_process_group_ranks(group)
    order = whole_order(t.shape[0] * size, size)
    out = t.new_empty(t.shape[0] * size, *t.shape[1:])
    block, owner = t.contiguous(), rank
    for turn in range(size):
        out[order[owner]] = block
        if turn == size - 1:
            break
        coming = torch.empty_like(block)
        work = [
            dist.P2POp(dist.isend, block, ranks[(rank + 1) % size], group),
            dist.P2POp(dist.irecv, coming, ranks[(rank - 1) % size], group),
        ]
        for request in dist.batch_isend_irecv(work):
            request.wait()
        block, owner = coming, (owner - 1) % size
    return out
