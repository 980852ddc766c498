"""Two threads in a row: the first files data and finds its place, the second writes bytes.

The second spends its time in system calls, without the interpreter lock, so that filing one frame overlaps with the
writing of the one before.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.store.column import write_at

Task = Callable[[], None]

# Writes are handed to the second thread by this many bytes, or when a task follows them.
_BATCH_BYTES = 8 << 20
_YIELD_BYTES = 128 << 10
_IOV_MAX = 512


class Pipeline:
    """Runs tasks in order in a background thread, and what they hand on, in order, in a second one.

    The first exception of either thread stops both, is kept in :attr:`failure` and raised by every later call as it is.

    Args:
        queue_bytes: bytes under way beyond which :meth:`submit` waits. One task may exceed it alone.
    """

    def __init__(self, queue_bytes: int) -> None:
        self.failure: BaseException | None = None
        self._limit = queue_bytes
        self._bytes = 0
        self._tasks: tuple[deque[tuple[Task, int]], deque[tuple[Task, int]]] = (deque(), deque())
        self._writes: list[tuple[int, NDArray[Any], int]] = []
        self._write_bytes = 0
        self._busy = [False, False]
        self._ending = [False, False]
        self._condition = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(stage,), name=f"zkl-writer-{stage}", daemon=True)
            for stage in (0, 1)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task, nbytes: int) -> None:
        """Queue a task for the first thread; it has to give its ``nbytes`` back with :meth:`then`."""
        with self._condition:
            self._raise()
            self._condition.wait_for(lambda: self.failure or not self._bytes or self._bytes + nbytes <= self._limit)
            self._raise()
            self._bytes += nbytes
            self._tasks[0].append((task, 0))
            self._condition.notify_all()

    def then(self, task: Task, nbytes: int = 0) -> None:
        """From the first thread: queue a task for the second. ``nbytes`` are free again once it is done."""
        self._hand_on()
        self._push(task, nbytes)

    def write(self, fd: int, data: NDArray[Any], offset: int) -> None:
        """From the first thread: write an array's bytes at an offset of a file, later, before what is queued later."""
        self._writes.append((fd, data, offset))
        self._write_bytes += data.nbytes
        if self._write_bytes >= _BATCH_BYTES:
            self._hand_on()
        if data.nbytes >= _YIELD_BYTES:
            time.sleep(0)  # the second thread needs the interpreter lock for a moment between two system calls

    def _hand_on(self) -> None:
        if self._writes:
            writes, self._writes, self._write_bytes = self._writes, [], 0
            self._push(lambda: _write_all(writes), 0)

    def _push(self, task: Task, nbytes: int) -> None:
        with self._condition:
            self._raise()
            self._tasks[1].append((task, nbytes))
            self._condition.notify_all()

    def settle(self) -> None:
        """From the first thread: wait until the second has done everything."""
        self._hand_on()
        self._wait(1)

    def drain(self) -> None:
        """Wait until both threads have done everything that was queued."""
        self._wait(0)
        self._wait(1)

    def finish(self) -> None:
        """Do everything that is queued, then end both threads."""
        self._end()
        with self._condition:
            self._raise()

    def cancel(self) -> None:
        """Forget what is queued and end both threads; a task under way is completed."""
        with self._condition:
            for tasks in self._tasks:
                tasks.clear()
        self._end()

    def _end(self) -> None:
        for stage in (0, 1):
            with self._condition:
                self._ending[stage] = True
                self._condition.notify_all()
            self._threads[stage].join()

    def _wait(self, stage: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self.failure or not (self._tasks[stage] or self._busy[stage]))
            self._raise()

    def _raise(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _run(self, stage: int) -> None:
        tasks = self._tasks[stage]
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self.failure or tasks or self._ending[stage])
                if self.failure or not tasks:
                    return
                task, nbytes = tasks.popleft()
                self._busy[stage] = True
            try:
                task()
            except BaseException as error:
                with self._condition:
                    self.failure = self.failure or error
            with self._condition:
                self._busy[stage] = False
                self._bytes -= nbytes
                self._condition.notify_all()


def _write_all(writes: list[tuple[int, NDArray[Any], int]]) -> None:
    """Write in order; what follows in the file on what was written before goes in the same system call."""
    start = 0
    for k in range(1, len(writes) + 1):
        if k < len(writes) and k - start < _IOV_MAX and _follows(writes[k - 1], writes[k]):
            continue
        run = writes[start:k]
        start = k
        fd, _, offset = run[0]
        done = os.pwritev(fd, [_flat(data) for _, data, _ in run], offset) if len(run) > 1 else 0
        for _, data, at in run:
            if at + data.nbytes > offset + done:  # alone, or a short write: the rest
                skip = max(0, offset + done - at)
                write_at(fd, _flat(data)[skip:], at + skip)


def _follows(before: tuple[int, NDArray[Any], int], after: tuple[int, NDArray[Any], int]) -> bool:
    return before[0] == after[0] and before[2] + before[1].nbytes == after[2]


def _flat(data: NDArray[Any]) -> NDArray[np.uint8]:
    return data.reshape(-1).view(np.uint8)
