"""``dedicated``: the engine lives in a process of its own; weights cross by mcore's resharding over gloo.

Each process has its own one-rank world, as trainer and generation clusters have; one more process group spans both and
is used for refits only. Orders and answers go through a pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.beds.grpo.side import LocalSide, Restorable
from zkl_debug.diff.state_values import Values
from zkl_debug.schema import Json, StateRecord

if TYPE_CHECKING:
    from torch import nn

    from zkl_debug.capture.events import EventLog
    from zkl_debug.engines.megatron.generation import GenResult, Request
    from zkl_debug.engines.megatron.rollout import BlockUse

TRAINER, ENGINE = 0, 1
_WAIT = 300.0  # seconds an answer may take


class EngineProcessError(RuntimeError):
    """The engine's process raised, died, or did not answer."""


class Worker:
    """The engine's process, as the trainer's process holds it. Start it before anything is set up here."""

    def __init__(self, options: GrpoOptions) -> None:
        self.rendezvous = Path(tempfile.mkdtemp(prefix="zkl-grpo-")) / "refit"
        context = multiprocessing.get_context("fork")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, options, str(self.rendezvous)), daemon=True)
        self._process.start()
        there.close()

    def start(self, order: str, *args: Any) -> None:
        """Send an order; :meth:`answer` must follow."""
        try:
            self._here.send((order, args))
        except OSError as error:
            raise EngineProcessError(f"the engine's process is gone (exit code {self._process.exitcode})") from error

    def answer(self) -> Any:
        """What the order gave.

        Raises:
            EngineProcessError: it raised there, or there is no answer.
        """
        try:
            if not self._here.poll(_WAIT):
                raise EngineProcessError(f"no answer from the engine's process in {_WAIT:.0f} s")
            ok, value = self._here.recv()
        except EOFError as error:
            self._process.join(5)
            raise EngineProcessError(f"the engine's process ended (exit code {self._process.exitcode})") from error
        if not ok:
            raise EngineProcessError(f"in the engine's process: {value}")
        return value

    def call(self, order: str, *args: Any) -> Any:
        """Order and answer."""
        self.start(order, *args)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        try:
            if self._process.is_alive():
                self._here.send(("stop", ()))
                self._process.join(20)
        except OSError:
            pass
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)
        self._here.close()
        self.rendezvous.unlink(missing_ok=True)
        self.rendezvous.parent.rmdir()


class DedicatedLayout:
    """Trainer here, engine there."""

    def __init__(self, options: GrpoOptions, worker: Worker) -> None:
        from zkl_debug.beds.grpo.layouts import bed_model
        from zkl_debug.engines.megatron.refit import join_refit_group

        self.trainer: nn.Module = bed_model(options)
        self.worker = worker
        worker.start("join")
        self._group = join_refit_group(str(worker.rendezvous), TRAINER, 2)
        worker.answer()
        self.side = RemoteSide(worker)

    def refit(self) -> None:
        """Both processes take part; each knows its half of the plan."""
        from zkl_debug.engines.megatron.refit import swap_weights

        self.worker.start("refit")
        swap_weights(self.trainer, None, group=self._group)
        self.worker.answer()


class _RemoteImage:
    """An image that lies in the engine's process."""

    def __init__(self, side: RemoteSide, number: int, nbytes: int) -> None:
        self._side, self._number, self.nbytes = side, number, nbytes

    def restore(self) -> None:
        """Put it back, there."""
        self._side.worker.call("restore", self._number)

    def __del__(self) -> None:
        self._side.dropped.append(self._number)


class RemoteSide:
    """The engine side of another process; see :class:`zkl_debug.beds.grpo.side.EngineSide`."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.dropped: list[int] = []
        self.uses: Sequence[BlockUse] = ()
        self.parameters: int = worker.call("parameters")
        self._log: EventLog | None = None

    def generate(self, requests: Sequence[Request], seed: int, naps: tuple[int, ...] = ()) -> list[GenResult]:
        """Wake, run the requests to their end, sleep; what happened there is told to the log here."""
        watched = self._log is not None and self._log.enabled
        results, uses, moments, seconds = self.worker.call("generate", list(requests), seed, naps, watched)
        self.uses = uses
        if self._log is not None and watched:
            self._log.adopt(moments, "gen", seconds)
        return list(results)

    def invalidate(self) -> None:
        """Forget every cached KV block."""
        self.worker.call("invalidate")

    def attach(self, log: EventLog) -> None:
        """State by asking, events with every answer."""
        self._log = log
        log.sources["gen"] = self._state
        log.on_close(self._detach)

    def _detach(self) -> None:
        self._log = None

    def _state(self) -> list[StateRecord]:
        records: list[StateRecord] = self.worker.call("state")
        return records

    def image(self) -> Restorable:
        """A copy of the engine's state, kept there."""
        dropped, self.dropped = self.dropped, []
        return _RemoteImage(self, *self.worker.call("image", dropped))

    def values(self) -> Mapping[str, Values]:
        """Every tensor of the model, by path."""
        found: Mapping[str, Values] = self.worker.call("values")
        return found

    def block(self, block: int) -> bytes | None:
        """K and V of one KV block."""
        found: bytes | None = self.worker.call("block", block)
        return found

    def capture(
        self, folder: Path, meta: dict[str, Json], step: int, version: int, requests: Sequence[Request], seed: int
    ) -> list[GenResult]:
        """Generate once, captured there into ``folder``."""
        results: list[GenResult] = self.worker.call("capture", folder, meta, step, version, list(requests), seed)
        return results


# ---- the engine's process --------------------------------------------------------------------------------------------


def _serve(pipe: Connection, options: GrpoOptions, rendezvous: str) -> None:
    """Body of the engine's process: set up, then obey until told to stop or the pipe closes."""
    os.environ.pop("OMP_NUM_THREADS", None)
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
    from zkl_debug.beds.grpo.layouts import bed_model, gen_config
    from zkl_debug.beds.grpo.loop import surroundings
    from zkl_debug.engines.megatron.rollout import RolloutGenerator

    fault = loop_fault(options.fault)
    with surroundings(options):
        side = LocalSide(RolloutGenerator(bed_model(options), gen_config(options)))
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

    def parameters(self) -> int:
        return self.side.parameters

    def generate(self, requests: list[Request], seed: int, naps: tuple[int, ...], watched: bool) -> Any:
        self.log.enabled = watched
        self.log.moments.clear()
        before = self.log.cost.seconds
        results = self.side.generate(requests, seed, naps)
        self.log.enabled = False
        return results, self.side.uses, list(self.log.moments), self.log.cost.seconds - before

    def invalidate(self) -> None:
        self.side.invalidate()

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
