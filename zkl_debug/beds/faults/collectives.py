"""Faults between ranks: what each rank has is right, and it is put together in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.faults.registry import BOTH_DTYPES, Answer, Fault, register

if TYPE_CHECKING:
    from torch import Tensor

    from zkl_debug.beds.run import BedContext


@contextmanager
def reversed_ranks(_context: BedContext) -> Iterator[None]:
    """The all-reduce behind row-parallel linears adds the ranks from the last to the first."""
    from zkl_debug.engines.megatron import seams
    from zkl_debug.stack.tree_reduce import gathered

    def add(x: Tensor, group: Any) -> Tensor:
        parts = gathered(x.float(), group)[::-1]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
        def region(input_: Tensor, tp_group: Any = None, group: Any = None, **options: Any) -> Any:
            ranks = tp_group or group
            if ranks is None or ranks.size() == 1:
                return original(input_, group=ranks, **options)
            return add(input_, ranks)

        return region

    with seams.tensor_parallel_reduce(all_reduce, lambda original: original):
        yield


@contextmanager
def combine_by_rank(_context: BedContext) -> Iterator[None]:
    """The combine adds up the experts of each expert-parallel rank first, then the ranks: its order is that of ep."""
    import torch

    from zkl_debug.engines.megatron import seams, world

    size = world.place().at("ep")[1]

    def wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def unpermute(tokens: Tensor, where: Tensor, *args: Any, routing_map: Any = None, **options: Any) -> Tensor:
            if size == 1 or routing_map is None:
                return original(tokens, where, *args, routing_map=routing_map, **options)
            expert = routing_map.T.nonzero()[:, 0]
            per_rank = routing_map.shape[1] // size
            total = None
            for rank in range(size):
                mine = torch.where((expert // per_rank == rank)[:, None], tokens, torch.zeros_like(tokens))
                part = original(mine, where, *args, routing_map=routing_map, **options)
                total = part if total is None else total + part
            assert total is not None
            return total

        return unpermute

    with seams.unpermute(wrap):
        yield


register(
    Fault(
        "C1",
        "an all-reduce adds the ranks from the last to the first",
        "torchtitan#3827",
        ("tiny-gpt",),
        BOTH_DTYPES,
        ("train",),
        reversed_ranks,
        Answer(
            ("decoder.layers.0.self_attention.linear_proj/tp.reduce:out.0",),
            "score-prefill",
            "own",
            "every row",
            "the partial sums of all ranks are equal; they are added in another order",
            rule_says=("^every row", "^no rule: every row alike"),
            names=("collective-order",),
            says=("4 ranks are equal on both sides", "3, 2, 1, 0"),
        ),
        options={"layout": {"tp": 4}, "gen_layout": {"tp": 4}},
    ),
    Fault(
        "C4",
        "the order in which expert outputs are added depends on the number of expert-parallel ranks",
        "NeMo-RL#4243",
        ("tiny-moe",),
        BOTH_DTYPES,
        ("train",),
        combine_by_rank,
        Answer(
            ("decoder.layers.1.mlp/unpermute:out.0",),
            "score-prefill",
            "own",
            "every row",
            "expert outputs are equal; they are added in another order",
            rule_says=("^every row", "^no rule: every row alike"),
            names=("reduction-order",),
        ),
        options={"layout": {"ep": 2, "dp": 2}},
    ),
)
