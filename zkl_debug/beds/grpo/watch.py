"""Watching a loop: events with state, and for the last steps everything that is needed to run them again."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from zkl_debug.beds.grpo.data import Batch
from zkl_debug.capture.events import EventLog
from zkl_debug.capture.image import Image, module_objects
from zkl_debug.capture.walk import walk
from zkl_debug.diff.state_values import Values
from zkl_debug.schema import Json

if TYPE_CHECKING:
    import torch

    from zkl_debug.beds.grpo.loop import GrpoLoop
    from zkl_debug.capture.session import CaptureSession


@dataclass(frozen=True)
class Kept:
    """A step as it was when it was ready to generate: after the refit, before the first token.

    Attributes:
        batch: its data.
        version: weight version of the trainer.
        image: models, engine context, block tables, layout; can be put back.
        weights: the trainer's parameters by name, copies.
    """

    batch: Batch
    version: int
    image: Image
    weights: dict[str, torch.Tensor]


class LoopWatch:
    """Instruments a loop while it runs.

    Args:
        loop: the loop.
        keep: steps whose :class:`Kept` is held (a ring buffer); None for all.
        session: also write events and state into this capture session.
        light: state only after events, not before; half the cost.

    Attributes:
        log: the events.
        kept: steps by number.
    """

    def __init__(
        self, loop: GrpoLoop, *, keep: int | None = None, session: CaptureSession | None = None, light: bool = False
    ) -> None:
        from zkl_debug.engines.megatron.kv import kv_source

        self.loop = loop
        self.keep = keep
        self.kept: OrderedDict[int, Kept] = OrderedDict()
        self.image_seconds = 0.0
        generator = loop.layout.generator
        source = kv_source(generator.context, lambda: generator.uses)
        roots = {"train": loop.layout.trainer, "gen": loop.layout.engine_model}
        self.log = EventLog(roots, {"gen": source}, session=session, before=not light)

    def __enter__(self) -> Self:
        loop, engine = self.loop, self.loop.layout.generator.engine
        self.log.step, self.log.version = loop.step, loop.version
        self.log.mark("build")
        self.log.instrument(engine, "resume", "wake")
        self.log.instrument(engine, "suspend", "sleep")
        models = {id(m): m for m in (loop.layout.trainer, loop.layout.engine_model)}
        for model in models.values():
            self.log.instrument(model, "train", "mode", state=False)
        loop.events = self.log
        loop.on_ready = self._ready
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.log.close()
        self.loop.events = None
        self.loop.on_ready = lambda _loop, _batch: None

    def _ready(self, loop: GrpoLoop, batch: Batch) -> None:
        started = time.perf_counter()
        weights = {name: p.detach().clone() for name, p in loop.layout.trainer.named_parameters()}
        self.kept[batch.step] = Kept(batch, loop.version, Image(held_objects(loop)), weights)
        while self.keep is not None and len(self.kept) > self.keep:
            self.kept.popitem(last=False)
        self.image_seconds += time.perf_counter() - started

    def cost(self, loop_seconds: float) -> dict[str, Json]:
        """What watching cost, and the slowdown of a loop that took ``loop_seconds`` with it."""
        spent = self.log.cost.seconds + self.image_seconds
        images = sum(kept.image.nbytes for kept in self.kept.values())
        return {
            **self.log.cost.to_json(),
            "image_seconds": round(self.image_seconds, 4),
            "image_bytes": images,
            "slowdown": round(loop_seconds / max(loop_seconds - spent, 1e-9), 4),
        }


def held_objects(loop: GrpoLoop) -> list[Any]:
    """Every object whose contents decide what a step's generation and scoring give."""
    layout, context = loop.layout, loop.layout.generator.context
    inner = ("kv_block_allocator", "mamba_slot_allocator", "mamba_metadata")
    parts = [getattr(context, name, None) for name in inner]
    models = module_objects(layout.trainer, layout.engine_model)
    return [layout, *models, context, *(p for p in parts if p is not None)]


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


class LoopValues:
    """Values of the engine as it is now, and of the trainer's parameters in every kept step."""

    def __init__(self, watch: LoopWatch) -> None:
        self._engine = {f.path: values_of(f.tensor) for f in walk(watch.loop.layout.engine_model).found}
        self._weights = {kept.version: kept.weights for kept in watch.kept.values()}

    def engine(self, path: str) -> Values | None:
        """See :class:`zkl_debug.diff.state.ValueSource`."""
        return self._engine.get(path)

    def trainer(self, path: str, version: int) -> Values | None:
        """See :class:`zkl_debug.diff.state.ValueSource`."""
        tensor = self._weights.get(version, {}).get(path)
        return values_of(tensor) if tensor is not None else None
