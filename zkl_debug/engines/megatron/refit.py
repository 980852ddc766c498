"""Weight sync as mcore does it: ``swap_model_weights`` over gloo, and what a refit leaves behind in the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from zkl_debug.engines.cpu import quiet
from zkl_debug.engines.patching import patched


def prepare(model: nn.Module) -> None:
    """Give a model the process groups that mcore's planner reads; without effect where it has them."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    if getattr(model, "pg_collection", None) is None:
        model.pg_collection = ProcessGroupCollection.use_mpu_process_groups()


def swap_weights(
    source: nn.Module | None,
    target: nn.Module | None,
    *,
    group: Any = None,
    source_offset: int = 0,
    target_offset: int = 0,
) -> None:
    """Copy parameters and persistent buffers of ``source`` into ``target`` by mcore's resharding plan.

    Either may be None where the other process has it; then every process of ``group`` must call this.
    """
    from megatron.core.resharding import refit

    for model in (source, target):
        if model is not None:
            prepare(model)
    with quiet():
        refit.swap_model_weights(
            source, target, "gloo", group=group, src_rank_offset=source_offset, dst_rank_offset=target_offset
        )


def join_refit_group(path: str, rank: int, size: int) -> Any:
    """A gloo group of processes that are each in a world of their own, for refits only.

    Args:
        path: a file all of them can reach; made by the first, and new for every group.
        rank: of this process in the group.
        size: processes in the group; returns when all have joined.
    """
    from datetime import timedelta

    import torch.distributed

    dist: Any = torch.distributed  # its stores and backends are not in torch's type stubs
    store = dist.PrefixStore("refit", dist.FileStore(path, size))
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=120))
    gloo._set_sequence_number_for_group()
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    # Point-to-point calls translate ranks through this table, which new_group would have filled.
    dist.distributed_c10d._world.pg_group_ranks[group] = {r: r for r in range(size)}
    return group


def forget_plans() -> None:
    """Drop mcore's process-wide refit plans and copy services: they belong to one world and one model shape."""
    from megatron.core.resharding import refit

    refit.clear_all_caches()


@contextmanager
def planned_transfers(keep: Callable[[str], bool]) -> Iterator[None]:
    """Only transfers of parameters whose name passes ``keep`` are executed, whatever the plan says."""
    from dataclasses import replace

    import megatron.core.resharding.refit as refit

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute(plan: Any, *args: Any, **kwargs: Any) -> Any:
            fewer = replace(
                plan,
                send_ops=[op for op in plan.send_ops if keep(op.param_name)],
                recv_ops=[op for op in plan.recv_ops if keep(op.param_name)],
            )
            return original(fewer, *args, **kwargs)

        return execute

    with patched(refit, "execute_reshard_plan", wrap):
        yield


def drop_prefix_cache(context: Any) -> None:
    """Forget every cached KV block of an idle ``DynamicInferenceContext``.

    mcore does not do this by itself when weights change: in persist and offload mode cached blocks stay valid for it.
    """
    context.kv_block_allocator.reset()
