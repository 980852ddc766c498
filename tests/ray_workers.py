"""Ray with two workers, and the processes of a machine, for tests that take workers away."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def two_workers() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def killing(candidates: Callable[[], Iterable[int]], most: int = 1, wait: float = 0.0) -> Iterator[list[int]]:
    """Kill processes in the background until ``most`` were; yields those that were.

    Args:
        candidates: processes that may be killed now.
        most: how many to kill, no process twice.
        wait: seconds from seeing one to killing it, for it to be in the middle of its work.
    """
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not over.is_set() and len(killed) < most:
            pid = next((pid for pid in candidates() if pid not in killed), None)
            if pid is not None:
                time.sleep(wait)
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield killed
    finally:
        over.set()
        killer.join()


def children(pid: int) -> list[int]:
    """Processes that a process started and that are still there."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in listing.read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Children, and theirs."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        more = children(waiting.pop())
        found += more
        waiting += more
    return found


def title(pid: int) -> str:
    """What a process calls itself; a worker of Ray goes by its task. Empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
