"""The thread that reads frames out of the device and hands them to the writer.

Reading out is quick and comes first, for it frees device memory. Filing hundreds of sites is not, and would take the
interpreter lock from the program between two kernels; it waits until the program flushes, pauses, or has left enough
behind.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

#: Bytes of frames that may wait for filing before it starts while the program runs.
SPOOL_BYTES = 256 << 20
#: Bytes of frames at which the program has to wait.
LIMIT_BYTES = 4 * SPOOL_BYTES
_PAUSE_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """One frame.

    Attributes:
        read: waits for the frame's copies and returns what files it.
        nbytes: bytes it holds on the host until it is filed.
    """

    read: Callable[[], Callable[[], None]]
    nbytes: int


class Drain:
    """Runs jobs in order. The first failure stops it, is kept in ``failure`` and raised by the next :meth:`flush`."""

    def __init__(self, spool: int = SPOOL_BYTES, limit: int = LIMIT_BYTES, pause: float = _PAUSE_SECONDS) -> None:
        self.failure: Exception | None = None
        self._spool, self._limit, self._pause = spool, limit, pause
        self._jobs: deque[Job] = deque()
        self._filing: deque[tuple[Callable[[], None], int]] = deque()
        self._bytes = 0
        self._busy = self._held = self._flushing = self._ending = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="zkl-drain", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a frame; waits only when far too much is queued."""
        self.go_on()
        with self._condition:
            self._condition.wait_for(lambda: self.failure or self._bytes + job.nbytes <= self._limit or not self._bytes)
            self._jobs.append(job)
            self._bytes += job.nbytes
            self._condition.notify_all()

    def flush(self) -> None:
        """Wait until everything queued is with the writer.

        Raises:
            Exception: what stopped the thread.
        """
        with self._condition:
            self._flushing = True
            self.go_on()
            self._condition.wait_for(lambda: self.failure or not (self._jobs or self._filing or self._busy))
            self._flushing = False
            if self.failure is not None:
                raise self.failure

    def hold(self) -> None:
        """Do nothing from here on, when what is being done is through, until the program goes on or hands over more."""
        with self._condition:
            self._held = True
            self._condition.wait_for(lambda: not self._busy)

    def go_on(self) -> None:
        """Take back :meth:`hold`."""
        with self._condition:
            self._held = False
            self._condition.notify_all()

    def close(self) -> None:
        """Do what is queued and end the thread; raises like :meth:`flush`."""
        try:
            self.flush()
        finally:
            with self._condition:
                self._ending = True
                self._condition.notify_all()
            self._thread.join()

    def _run(self) -> None:
        while self.failure is None:
            with self._condition:
                task = self._next()
                if task is None:
                    if self._ending:
                        return
                    continue
                self._busy = True
            try:
                task()
            except Exception as error:
                self.failure = error
            with self._condition:
                self._busy = False
                self._condition.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """What to do now: read out if anything can be, else file if it is time; None after a wait without work."""
        if self._held:
            self._condition.wait()
            return None
        if self._jobs:
            job = self._jobs.popleft()
            return lambda: self._filing.append((job.read(), job.nbytes))
        if self._filing and (self._flushing or self._ending or self._bytes > self._spool):
            return self._file
        if self._ending:
            return None
        if self._condition.wait(timeout=self._pause if self._filing else None):
            return None
        return self._file if self._filing and not self._held else None  # the program pauses

    def _file(self) -> None:
        task, nbytes = self._filing.popleft()
        task()
        with self._condition:
            self._bytes -= nbytes
