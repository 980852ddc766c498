"""Runs of a bisection made by the workers of a Ray cluster. The search, the journal and the judging stay here.

Ray is imported when it is asked for, never before. Folders must be at the same path on every node. A worker on
another kind of machine refuses: its runs would be those of another bisection. A run whose worker is lost is made
again, from the beginning, by another.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zkl_debug.bisect.oracle import environment_hash
from zkl_debug.bisect.outcome import Cancelled, Oracle, RawRun, Trial
from zkl_debug.bisect.process import RUN_ID, Limits, run_isolated, tail
from zkl_debug.cluster import RETRIES, connected, first_line, import_ray
from zkl_debug.errors import UsageError, ZklError

_POLL_S = 0.5
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Job(Protocol):
    """One run, ready to be made by any process that sees the same folders; it can be pickled."""

    def environment_hash(self) -> str:
        """As that of its oracle, of the machine this is called on."""

    def make(self, extra: Mapping[str, str]) -> RawRun:
        """Make the run, from the beginning; ``extra`` are variables that this machine adds."""


class Farmed(Oracle, Protocol):
    """An oracle whose runs can be made elsewhere."""

    def job(self, trial: Trial) -> Job:
        """The run of a configuration."""


def make_run(job: Job, environment: str, gpus: int) -> RawRun | ZklError:
    """Make a run in a worker. What the user must put right comes back as it is, not wrapped into a Ray error."""
    refusal = _other_machine(job.environment_hash(), environment)
    if refusal is not None:
        return refusal
    try:
        return job.make(_visible(gpus))
    except ZklError as error:
        return error


def _other_machine(here: str, there: str) -> ZklError | None:
    if here == there:
        return None
    return UsageError(
        "a worker runs on another kind of machine, or with other versions, than the one that asks",
        "workers with the same processor, GPUs, Python and libraries: only their runs can be compared",
        "start the bisection on such a node, or leave --ray away",
    )


def _visible(gpus: int) -> dict[str, str]:
    """Which GPUs Ray gave to this task."""
    return {_VISIBLE: os.environ[_VISIBLE]} if gpus and _VISIBLE in os.environ else {}


class RayOracle:
    """An oracle whose runs are made on Ray; several threads may ask at once.

    Args:
        oracle: what is run.
        address: ``local`` for a cluster of this machine that lives as long as this oracle, else that of one that runs.
        jobs: workers of a local cluster; default one a core.
        gpus: GPUs of one run.

    Raises:
        UsageError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, oracle: Farmed, address: str, jobs: int | None = None, gpus: int = 0) -> None:
        self._oracle, self._gpus = oracle, gpus
        self.probe_hash, self.environment_hash = oracle.probe_hash, oracle.environment_hash
        self._ray = import_ray()
        self._stop = threading.Event()
        self._running = 0
        self._changed = threading.Condition()
        self._stack = ExitStack()
        self._stack.enter_context(connected(self._ray, address, jobs))
        self._task = self._ray.remote(max_retries=RETRIES, num_cpus=1, num_gpus=gpus)(make_run)

    @property
    def workers(self) -> int:
        """Runs that the cluster can make at once."""
        have = self._ray.cluster_resources()
        return max(1, int(have.get("GPU", 0) // self._gpus if self._gpus else have.get("CPU", 1)))

    def run(self, trial: Trial) -> RawRun:
        """Have one configuration run.

        Raises:
            Cancelled: the oracle was closed meanwhile.
            UsageError: a worker refused, or every worker that tried was lost. The journal does not learn of it.
        """
        with self._changed:
            if self._stop.is_set():
                raise Cancelled
            self._running += 1
        try:
            reference = self._task.remote(self._oracle.job(trial), self.environment_hash, self._gpus)
            found: RawRun = _wait(self._ray, reference, self._stop)
            return found
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """End what runs, and leave the cluster."""
        self._stop.set()
        self._oracle.close()
        with self._changed:  # asked anything later, Ray would start a cluster of its own
            self._changed.wait_for(lambda: not self._running)
            self._stack.close()


def _wait(ray: Any, reference: Any, stop: threading.Event) -> Any:
    try:
        while not ray.wait([reference], timeout=_POLL_S)[0]:
            if stop.is_set():
                raise Cancelled
        found = ray.get(reference)
    except ray.exceptions.RayError as error:
        if stop.is_set():
            raise Cancelled from None
        raise UsageError(
            f"Ray gave up on a run, tried {RETRIES + 1} times: {first_line(error)}",
            "workers that see the same folders and have the memory for a run",
            "the finished runs are in the journal: go on with it, or leave --ray away",
        ) from None
    except BaseException:
        with contextlib.suppress(Exception):
            ray.cancel(reference)
        raise
    if isinstance(found, ZklError):
        raise found
    return found


@dataclass(frozen=True)
class WholeCommand:
    """A command that a worker runs as a whole, in the environment of the process that asks.

    Attributes:
        command, env, cwd: of the run.
        out: a folder it fills, empty before it, or None.
    """

    command: tuple[str, ...]
    env: dict[str, str]
    cwd: Path
    out: Path | None = None

    def make(self, environment: str, gpus: int) -> tuple[int, bytes, str] | ZklError:
        """Exit code (128 and a signal's number where one ended it), standard output, end of standard error."""
        refusal = _other_machine(environment_hash(self.env), environment)
        if refusal is not None:
            return refusal
        if self.out is not None and self.out.is_dir():
            shutil.rmtree(self.out)  # of a worker that was lost in the middle
        with tempfile.TemporaryDirectory(prefix="zkl-ray-") as name:
            stdout, stderr = Path(name) / "stdout", Path(name) / "stderr"
            env = {**self.env, **_visible(gpus), RUN_ID: uuid.uuid4().hex}
            ended = run_isolated(
                self.command, env=env, cwd=self.cwd, stdout=stdout, stderr=stderr, limits=Limits(), tied=True
            )
            code = 128 + ended.signal if ended.exit_code is None else ended.exit_code
            return code, stdout.read_bytes(), tail(stderr)


def command_on_ray(address: str, whole: WholeCommand, gpus: int = 0) -> tuple[int, bytes, str]:
    """Have a whole command run by a worker, again from the beginning when the worker is lost.

    Args:
        address: as for :class:`RayOracle`.
        whole: the command.
        gpus: GPUs it needs.

    Raises:
        UsageError: no Ray, no cluster, a worker on another kind of machine, or none that lived to the end of it.
    """
    ray = import_ray()
    with connected(ray, address, 1):
        task = ray.remote(max_retries=RETRIES, num_cpus=1, num_gpus=gpus)(WholeCommand.make)
        reference = task.remote(whole, environment_hash(whole.env), gpus)
        code, output, errors = _wait(ray, reference, threading.Event())
        return int(code), bytes(output), str(errors)
