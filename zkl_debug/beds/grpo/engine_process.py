"""The engine's process of the dedicated layout: ``python -m zkl_debug.beds.grpo.engine_process FD``.

A new interpreter, not a fork: a process that has run torch's thread pools and gloo cannot be forked safely, and the
trainer's process may be a notebook or a test session that has run other loops.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.beds.grpo.side import LocalSide, Restorable
from zkl_debug.diff.state_values import Values
from zkl_debug.schema import StateRecord

if TYPE_CHECKING:
    from zkl_debug.engines.megatron.generation import GenResult, Request
    from zkl_debug.engines.megatron.rollout import Traffic

#: Rank of the engine in the refit group.
ENGINE = 1


def serve(pipe: Connection) -> None:
    """Set up as the first message says, then obey until told to stop or the pipe closes."""
    os.environ.pop("OMP_NUM_THREADS", None)
    options, rendezvous = pipe.recv()
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(_engine(options, rendezvous))
        except BaseException:
            pipe.recv()
            pipe.send((False, traceback.format_exc(limit=-3)))
            raise
        while True:
            try:
                order, args = pipe.recv()
            except EOFError:
                return
            if order == "stop":
                return
            try:
                pipe.send((True, getattr(engine, order)(*args)))
            except Exception:
                pipe.send((False, traceback.format_exc(limit=-3)))


@contextmanager
def _engine(options: GrpoOptions, rendezvous: str) -> Iterator[_Engine]:
    from zkl_debug.beds.grpo.faults_loop import loop_fault
    from zkl_debug.beds.grpo.layouts import bed_model, rollouts
    from zkl_debug.beds.grpo.loop import surroundings

    fault = loop_fault(options.fault)
    with surroundings(options):
        side = LocalSide(rollouts(options, bed_model(options)))
        with fault.breaks_everywhere():
            yield _Engine(side, rendezvous)


class _Engine:
    """What the engine's process does when asked."""

    def __init__(self, side: LocalSide, rendezvous: str) -> None:
        from zkl_debug.capture.events import EventLog

        self.side, self.rendezvous = side, rendezvous
        self.group: Any = None
        self.images: dict[int, Restorable] = {}
        self.next_image = 0
        self.log = EventLog({})
        self.log.enabled = False
        side.attach(self.log)

    def join(self) -> None:
        from zkl_debug.engines.megatron.refit import join_refit_group

        self.group = join_refit_group(self.rendezvous, ENGINE, 2)

    def refit(self) -> None:
        from zkl_debug.engines.megatron.refit import swap_weights

        swap_weights(None, self.side.model, group=self.group, target_offset=1)

    def traffic(self) -> Traffic:
        return self.side.traffic

    def parameters(self) -> int:
        return self.side.parameters

    def generate(self, requests: list[Request], seed: int, naps: tuple[int, ...], watched: bool) -> Any:
        self.log.enabled = watched
        self.log.moments.clear()
        before = self.log.cost.seconds
        results = self.side.generate(requests, seed, naps)
        self.log.enabled = False
        seconds = self.log.cost.seconds - before
        return results, self.side.uses, self.side.traffic, list(self.log.moments), seconds

    def invalidate(self) -> None:
        self.side.invalidate()

    def refresh(self) -> None:
        self.side.refresh()

    def state(self) -> list[StateRecord]:
        from dataclasses import replace

        records = self.log.snapshot().values()
        return [replace(r, name=r.name.removeprefix("gen:")) for r in records]

    def image(self, dropped: list[int]) -> tuple[int, int]:
        for number in dropped:
            self.images.pop(number, None)
        self.next_image += 1
        made = self.images[self.next_image] = self.side.image()
        return self.next_image, made.nbytes

    def restore(self, number: int) -> None:
        self.images[number].restore()

    def values(self) -> Mapping[str, Values]:
        return self.side.values()

    def block(self, block: int) -> bytes | None:
        return self.side.block(block)

    def capture(self, *args: Any) -> list[GenResult]:
        return self.side.capture(*args)


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as inherited:
        serve(inherited)
