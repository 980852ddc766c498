"""Linear layers whose results do not depend on the number of tensor-parallel ranks.

A row-parallel linear cuts its sum over K into ranks, and an all-reduce adds the parts in an order of its own. Here K is
always cut into :data:`PIECES` parts, whatever the number of ranks: each part is one product in float32, the parts are
added as a fixed binary tree over K, the all-reduce (or reduce-scatter) becomes a gather and the upper levels of the
same tree, and the sum is rounded once. One, two and four ranks then add the same numbers in the same order. A
column-parallel linear computes its outputs in blocks of :data:`COLUMNS`, so that a product has the same shape however
many of them a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PIECES = 4
COLUMNS = 16

#: Row-parallel linears that are being run now, innermost last.
_inside: list[Any] = []


def add_as_tree(parts: list[Tensor]) -> Tensor:
    """Neighbours are added, then neighbours of the sums, until one is left; a power of two of parts."""
    assert len(parts) & (len(parts) - 1) == 0, len(parts)
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def row_product(x: Tensor, weight: Tensor, pieces: int) -> Tensor:
    """x [..., k] times weight [n, k] transposed, float32 [..., n], K cut into ``pieces`` parts."""
    rows = x.reshape(-1, x.shape[-1]).float()
    width = rows.shape[1] // pieces
    parts = [
        torch.mm(rows[:, at : at + width].contiguous(), weight[:, at : at + width].float().contiguous().t())
        for at in range(0, rows.shape[1], width)
    ]
    return add_as_tree(parts).reshape(*x.shape[:-1], weight.shape[0])


def column_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., k] times weight [n, k] transposed, [..., n] in their dtype, :data:`COLUMNS` of n at a time."""
    rows = x.reshape(-1, x.shape[-1])
    parts = [torch.mm(rows, weight[at : at + COLUMNS].t()) for at in range(0, weight.shape[0], COLUMNS)]
    return torch.cat(parts, 1).reshape(*x.shape[:-1], weight.shape[0])


def gathered(x: Tensor, group: Any) -> list[Tensor]:
    """``x`` of every rank of the group, in the order of ranks."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def tree_all_reduce(x: Tensor, group: Any) -> Tensor:
    """Sum over the ranks in float32, in the dtype of ``x``."""
    if group is None or group.size() == 1:
        return x
    return add_as_tree(gathered(x.float(), group)).to(x.dtype)


def tree_reduce_scatter(x: Tensor, group: Any) -> Tensor:
    """This rank's rows of the sum over the ranks; dimension 0 is shared out."""
    if group is None or group.size() == 1:
        return x
    mine: Tensor = tree_all_reduce(x, group).chunk(group.size(), 0)[group.rank()]
    return mine.contiguous()


@contextmanager
def tp_tree_reduce() -> Iterator[None]:
    """Row-parallel sums as one tree over K, column-parallel products in blocks."""
    from zkl_debug.engines.megatron import seams

    with (
        seams.row_parallel(_row_parallel),
        seams.linear_forward(_linear),
        seams.tensor_parallel_reduce(
            lambda _original: tree_all_reduce_region, lambda _original: tree_reduce_scatter_region
        ),
    ):
        yield


def tree_all_reduce_region(input_: Tensor, tp_group: Any = None, group: Any = None, **_options: Any) -> Tensor:
    """As megatron-core calls its all-reduce."""
    return tree_all_reduce(input_, tp_group or group)


def tree_reduce_scatter_region(input_: Tensor, group: Any = None, *_args: Any, **_options: Any) -> Tensor:
    """As megatron-core calls its reduce-scatter over the sequence."""
    return tree_reduce_scatter(input_, group)


def _row_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, input_: Tensor) -> Any:
        _inside.append(self)
        try:
            out, bias = original(self, input_)
        finally:
            _inside.pop()
        return out.to(input_.dtype), bias

    return forward


def _linear(_original: Callable[..., Any]) -> Callable[..., Any]:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
        if _inside:
            return row_product(input, weight, max(1, PIECES // _inside[-1].tp_group.size()))
        x = input
        if options.get("sequence_parallel") and options.get("tp_group") is not None:
            x = torch.cat(gathered(x, options["tp_group"]), 0)
        out = column_product(x, weight)
        return out if bias is None else out + bias

    return linear
