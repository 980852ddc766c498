"""Watching a loop: events with state, and for the last steps everything that is needed to run them again."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from zkl_debug.beds.grpo.data import Batch
from zkl_debug.beds.grpo.side import Restorable, values_of
from zkl_debug.capture.events import EventLog
from zkl_debug.capture.image import Image, module_objects
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
    image: Restorable
    weights: dict[str, torch.Tensor]


class LoopWatch:
    """Instruments a loop while it runs.

    Args:
        loop: the loop.
        keep: steps whose :class:`Kept` is held (a ring buffer); None for all.
        session: also write events and state into this capture session.
        light: state only after events, not before, and not around a generation (waking and going to sleep have it);
            less than half the cost.

    Attributes:
        log: the events.
        kept: steps by number.
    """

    def __init__(
        self, loop: GrpoLoop, *, keep: int | None = None, session: CaptureSession | None = None, light: bool = False
    ) -> None:
        self.loop = loop
        self.keep = keep
        self.kept: OrderedDict[int, Kept] = OrderedDict()
        self.image_seconds = 0.0
        self.log = EventLog(
            {"train": loop.layout.trainer},
            session=session,
            before=not light,
            stateless=("generate",) if light else (),
        )

    def __enter__(self) -> Self:
        loop = self.loop
        self.log.step, self.log.version = loop.step, loop.version
        loop.layout.side.attach(self.log)
        self.log.mark("build")
        if self.log.roots.get("gen") is not loop.layout.trainer:
            self.log.instrument(loop.layout.trainer, "train", "mode", state=False)
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
        image = _Images([Image(module_objects(loop.layout.trainer)), loop.layout.side.image()])
        self.kept[batch.step] = Kept(batch, loop.version, image, weights)
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


class _Images:
    """Several images that are put back together."""

    def __init__(self, parts: Sequence[Restorable]) -> None:
        self.parts = tuple(parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(part.nbytes for part in self.parts)

    def restore(self) -> None:
        """Put all of them back."""
        for part in self.parts:
            part.restore()


class LoopValues:
    """Values of the engine as it is now, and of the trainer's parameters in every kept step."""

    def __init__(self, watch: LoopWatch) -> None:
        self._engine = watch.loop.layout.side.values()
        self._weights = {kept.version: kept.weights for kept in watch.kept.values()}

    def engine(self, path: str) -> Values | None:
        """See :class:`zkl_debug.diff.state.ValueSource`."""
        return self._engine.get(path)

    def trainer(self, path: str, version: int) -> Values | None:
        """See :class:`zkl_debug.diff.state.ValueSource`."""
        tensor = self._weights.get(version, {}).get(path)
        return values_of(tensor) if tensor is not None else None
