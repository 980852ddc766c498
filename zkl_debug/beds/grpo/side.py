"""The generation side as the loop sees it: generate, forget, be looked into. In this process or in another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from zkl_debug.capture.image import Image, module_objects
from zkl_debug.capture.walk import walk
from zkl_debug.diff.state_values import Values
from zkl_debug.schema import Json

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zkl_debug.capture.events import EventLog
    from zkl_debug.engines.megatron.generation import GenResult, Request
    from zkl_debug.engines.megatron.rollout import BlockUse, RolloutGenerator, Traffic


class Restorable(Protocol):
    """State that can be put back."""

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""

    def restore(self) -> None:
        """Put it back."""


class EngineSide(Protocol):
    """What generates."""

    @property
    def uses(self) -> Sequence[BlockUse]:
        """KV blocks every request of the last generation was given."""

    @property
    def traffic(self) -> Traffic:
        """What the engine steps of the last generation were made of."""

    @property
    def parameters(self) -> int:
        """Parameters of its model."""

    def generate(self, requests: Sequence[Request], seed: int, naps: tuple[int, ...] = ()) -> list[GenResult]:
        """Wake, run the requests to their end, sleep."""

    def invalidate(self) -> None:
        """Forget every cached KV block."""

    def refresh(self) -> None:
        """Let the model see ``train()`` and ``eval()``, so that modules drop what they derived from old weights."""

    def attach(self, log: EventLog) -> None:
        """Let ``log`` see the state and the events of this side, as part ``gen``."""

    def image(self) -> Restorable:
        """A copy of everything that decides what a generation gives."""

    def values(self) -> Mapping[str, Values]:
        """Every tensor of the model as it is now, by path."""

    def block(self, block: int) -> bytes | None:
        """K and V of all layers of one KV block; None where the cache is not allocated."""

    def capture(
        self, folder: Path, meta: dict[str, Json], step: int, version: int, requests: Sequence[Request], seed: int
    ) -> list[GenResult]:
        """Generate once, captured into ``folder``."""


class LocalSide:
    """An engine of this process.

    Args:
        generator: the engine.
        extra: further objects whose contents belong to its state.
    """

    def __init__(self, generator: RolloutGenerator, extra: Sequence[Any] = ()) -> None:
        self.generator = generator
        self.extra = tuple(extra)

    @property
    def model(self) -> nn.Module:
        """The model that generates."""
        return self.generator.model

    @property
    def uses(self) -> Sequence[BlockUse]:
        """See :class:`EngineSide`."""
        return tuple(self.generator.uses)

    @property
    def traffic(self) -> Traffic:
        """See :class:`EngineSide`."""
        return self.generator.traffic

    @property
    def parameters(self) -> int:
        """See :class:`EngineSide`."""
        return len(list(self.model.parameters()))

    def generate(self, requests: Sequence[Request], seed: int, naps: tuple[int, ...] = ()) -> list[GenResult]:
        """See :class:`EngineSide`."""
        self.model.eval()
        self.generator.reseed(seed)
        self.generator.naps = naps
        return self.generator.generate(requests)

    def invalidate(self) -> None:
        """See :class:`EngineSide`."""
        from zkl_debug.engines.megatron.refit import drop_prefix_cache

        drop_prefix_cache(self.generator.context)

    def refresh(self) -> None:
        """See :class:`EngineSide`."""
        self.model.train()
        self.model.eval()

    def attach(self, log: EventLog) -> None:
        """See :class:`EngineSide`."""
        from zkl_debug.engines.megatron.kv import kv_source

        log.roots["gen"] = self.model
        log.sources["gen"] = kv_source(self.generator.context, lambda: self.generator.uses)
        log.instrument(self.generator.engine, "resume", "wake")
        log.instrument(self.generator.engine, "suspend", "sleep")
        log.instrument(self.model, "train", "mode", state=False)

    def image(self) -> Image:
        """See :class:`EngineSide`."""
        context = self.generator.context
        inner = ("kv_block_allocator", "mamba_slot_allocator", "mamba_metadata")
        parts = [p for p in (getattr(context, name, None) for name in inner) if p is not None]
        return Image([*self.extra, *module_objects(self.model), context, *parts])

    def values(self) -> Mapping[str, Values]:
        """See :class:`EngineSide`."""
        return {f.path: values_of(f.tensor) for f in walk(self.model).found}

    def block(self, block: int) -> bytes | None:
        """See :class:`EngineSide`."""
        buffer = getattr(self.generator.context, "memory_buffer", None)
        if buffer is None:
            return None
        axis = 2 if buffer.dim() == 6 else 1
        if buffer.untyped_storage().nbytes() < buffer.numel() * buffer.element_size():  # offloaded: read the backup
            buffer = self.generator.context._offloadable_cpu_backups["memory_buffer"]
        return values_of(buffer.select(axis, block)).bits.tobytes()

    def capture(
        self, folder: Path, meta: dict[str, Json], step: int, version: int, requests: Sequence[Request], seed: int
    ) -> list[GenResult]:
        """See :class:`EngineSide`."""
        from zkl_debug.capture.api import Capture

        with Capture(self.model, folder, "gen", meta=meta) as capture:
            capture.set_step(step, version)
            return self.generate(requests, seed, self.generator.naps)


def values_of(tensor: torch.Tensor) -> Values:
    """A copy of a tensor as raw bits."""
    import numpy as np
    import torch

    flat = tensor.detach().cpu().contiguous().clone()
    if flat.dim() == 0:
        flat = flat.reshape(1)
    width = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}
    as_torch, as_numpy = width.get(flat.element_size(), (torch.int64, np.uint64))
    return Values(flat.view(as_torch).numpy().view(as_numpy), str(tensor.dtype).removeprefix("torch."))
