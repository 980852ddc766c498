"""``dedicated``: the engine lives in a process of its own; weights cross by mcore's resharding over gloo.

Each process has its own one-rank world, as trainer and generation clusters have; one more process group spans both and
is used for refits only. Orders and answers go through a pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.beds.grpo.side import Restorable
from zkl_debug.diff.state_values import Values
from zkl_debug.schema import Json, StateRecord

if TYPE_CHECKING:
    from torch import nn

    from zkl_debug.capture.events import EventLog
    from zkl_debug.engines.megatron.generation import GenResult, Request
    from zkl_debug.engines.megatron.rollout import BlockUse, Traffic

TRAINER = 0
_WAIT = 300.0  # seconds an answer may take


class EngineProcessError(RuntimeError):
    """The engine's process raised, died, or did not answer."""


class Worker:
    """The engine's process, as the trainer's process holds it."""

    def __init__(self, options: GrpoOptions) -> None:
        self.rendezvous = Path(tempfile.mkdtemp(prefix="zkl-grpo-")) / "refit"
        self._here, there = multiprocessing.Pipe()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "zkl_debug.beds.grpo.engine_process", str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stdout belongs to this process's document
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        self._here.send((options, str(self.rendezvous)))

    def start(self, order: str, *args: Any) -> None:
        """Send an order; :meth:`answer` must follow."""
        try:
            self._here.send((order, args))
        except OSError as error:
            raise EngineProcessError(f"the engine's process is gone (exit code {self._exit_code()})") from error

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
            raise EngineProcessError(f"the engine's process ended (exit code {self._exit_code()})") from error
        if not ok:
            raise EngineProcessError(f"in the engine's process: {value}")
        return value

    def call(self, order: str, *args: Any) -> Any:
        """Order and answer."""
        self.start(order, *args)
        return self.answer()

    def _exit_code(self) -> int | None:
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """End the process."""
        try:
            if self._process.poll() is None:
                self._here.send(("stop", ()))
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(5)
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
        self.traffic: Traffic = worker.call("traffic")
        self.parameters: int = worker.call("parameters")
        self._log: EventLog | None = None

    def generate(self, requests: Sequence[Request], seed: int, naps: tuple[int, ...] = ()) -> list[GenResult]:
        """Wake, run the requests to their end, sleep; what happened there is told to the log here."""
        watched = self._log is not None and self._log.enabled
        answer = self.worker.call("generate", list(requests), seed, naps, watched)
        results, self.uses, self.traffic, moments, seconds = answer
        if self._log is not None and watched:
            self._log.adopt(moments, "gen", seconds)
        return list(results)

    def invalidate(self) -> None:
        """Forget every cached KV block."""
        self.worker.call("invalidate")

    def refresh(self) -> None:
        """Let the model there see ``train()`` and ``eval()``."""
        self.worker.call("refresh")

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
