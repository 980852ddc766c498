"""A one-process world: the process group and the model-parallel state mcore insists on."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from zkl_debug.engines.cpu import is_needed, quiet

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
