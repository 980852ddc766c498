"""A one-process world: the process group and the model-parallel state mcore insists on."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zkl_debug.engines.cpu import is_needed, quiet
from zkl_debug.engines.megatron.layout import ParallelLayout
from zkl_debug.errors import UsageError
from zkl_debug.schema import Json

_PATIENCE = 120  # seconds a rank waits for the others
_MANY_THREADS = 160  # about three worlds
_owns_process_group = False
_owns_parallel_state = False


def ensure_world(seed: int = 123, inference_rng: bool = False) -> None:
    """Initialise what is missing: process group (in-process store, no port), model-parallel state, RNG tracker.

    Idempotent; leaves alone what a host program has already set up. ``inference_rng``: the tracker is the one that
    megatron-core's CUDA graphs ask for.
    """
    global _owns_process_group, _owns_parallel_state
    if not dist.is_initialized():
        backend = "gloo" if is_needed() else "nccl"
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
        _owns_process_group = True
    with quiet():
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
            _owns_parallel_state = True
            seed_tracker(seed, inference_rng)


def seed_tracker(seed: int, inference_rng: bool = False) -> None:
    """(Re)seed mcore's CUDA RNG tracker without moving the process's default CPU generator."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    before = torch.get_rng_state()
    if inference_rng:
        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
    else:
        get_cuda_rng_tracker().reset()
        model_parallel_cuda_manual_seed(seed)
    torch.set_rng_state(before)


def close_world() -> None:
    """Tear down what :func:`ensure_world` set up, and nothing else. Idempotent.

    Models hold their process groups and lie in reference cycles, so the threads of a group outlive it until a garbage
    collection: one is made where they have become many.
    """
    global _owns_process_group, _owns_parallel_state
    if _owns_parallel_state:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        _owns_parallel_state = False
    if _owns_process_group and dist.is_initialized():
        dist.destroy_process_group()
        _owns_process_group = False
        if _threads() > _MANY_THREADS:
            gc.collect()


def _threads() -> int:
    """Threads of this process, those of libraries included; 0 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a count of names is all that is wanted
    except OSError:
        return 0


@contextmanager
def world(seed: int = 123, inference_rng: bool = False) -> Iterator[None]:
    """:func:`ensure_world` for a block; torn down afterwards if the block set it up."""
    owned = _owns_process_group or _owns_parallel_state
    ensure_world(seed, inference_rng)
    try:
        yield
    finally:
        if not owned:
            close_world()


@contextmanager
def ranked_world(layout: ParallelLayout, seed: int = 123) -> Iterator[None]:
    """One process of a world of ``layout.world``: rank, size and meeting point from the environment, as torchrun sets.

    Raises:
        UsageError: when the environment's world has another size.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != layout.world:
        raise UsageError(f"a world of {world_size} processes for {layout.text}", f"{layout.world} processes")
    dist.init_process_group("gloo" if is_needed() else "nccl", timeout=timedelta(seconds=_PATIENCE))
    try:
        with quiet():
            from megatron.core import parallel_state

            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=1,
            )
            seed_tracker(seed)
        yield
        parallel_state.destroy_model_parallel()
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Place:
    """Where this process is in the parallel groups.

    Attributes:
        at_group: (rank, size) by group: tp, pp, cp, ep, dp, etp.
        ranks: global ranks by group, those of the group this process is in.
        sp: sequence parallel is on.
    """

    at_group: dict[str, tuple[int, int]]
    ranks: dict[str, tuple[int, ...]]
    sp: bool = False

    def at(self, group: str) -> tuple[int, int]:
        """(rank, size) in a group."""
        return self.at_group.get(group, (0, 1))

    @property
    def is_last_stage(self) -> bool:
        """Whether this is the last pipeline stage (or there is one only)."""
        rank, size = self.at("pp")
        return rank == size - 1

    def to_json(self) -> dict[str, Json]:
        """For the metadata of a capture: sizes, this rank's coordinates and the members of its groups."""
        sizes: dict[str, Json] = {name: size for name, (_, size) in self.at_group.items()}
        return {
            **sizes,
            "sp": self.sp,
            "coords": {name: rank for name, (rank, _) in self.at_group.items()},
            "groups": {name: list(ranks) for name, ranks in self.ranks.items()},
        }


def place(config: Any = None) -> Place:
    """This process's place, from megatron-core's parallel state; one of one where that is not set up.

    Args:
        config: the model's config, which says whether sequence parallel is on.
    """
    from megatron.core import parallel_state

    names = ("tp", "pp", "cp", "ep", "dp", "etp")
    if not parallel_state.model_parallel_is_initialized():
        return Place(dict.fromkeys(names, (0, 1)), {})
    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(check_initialized=False),
        "pp": parallel_state.get_pipeline_model_parallel_group(check_initialized=False),
        "cp": parallel_state.get_context_parallel_group(check_initialized=False),
        "ep": parallel_state.get_expert_model_parallel_group(check_initialized=False),
        "dp": parallel_state.get_data_parallel_group(),
        "etp": parallel_state.get_expert_tensor_parallel_group(check_initialized=False),
    }
    known = {name: group for name, group in groups.items() if group is not None}
    return Place(
        {name: (group.rank(), group.size()) for name, group in known.items()},
        {name: tuple(dist.get_process_group_ranks(group)) for name, group in known.items()},
        bool(getattr(config, "sequence_parallel", False)),
    )
