"""Sites compared by several processes of one machine, which inherit the open captures and the joined rows."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress

from zkl_debug.cluster import cores
from zkl_debug.diff.sitework import Packed, SiteOutcome, SiteWork, Unpacker, chunks, in_process, pack

#: Digests of both sides from which on a second process is worth starting.
WORTH = 4_000_000

_inherited: list[SiteWork] = []  # what a forked process works on


_MOST_JOBS = 64  # more processes than that only cost


class Processes:
    """A :class:`~zkl_debug.diff.sitework.Runner` of forked processes.

    A process that dies takes nothing with it: what it had not handed over is compared in this process.

    Args:
        jobs: number of processes; None for one a core where there is enough to compare, else none at all.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self._jobs = jobs

    def __call__(self, work: SiteWork, numbers: list[int]) -> Iterator[SiteOutcome]:
        """Outcomes of sites, in order."""
        jobs = self._jobs if self._jobs is None else min(self._jobs, _MOST_JOBS)
        if jobs is None:
            jobs = cores() if work.digests >= WORTH else 1
        if jobs < 2 or len(numbers) < 2 or "fork" not in multiprocessing.get_all_start_methods():
            return in_process(work, numbers)
        return _shared_out(work, numbers, jobs)


def _shared_out(work: SiteWork, numbers: list[int], jobs: int) -> Iterator[SiteOutcome]:
    unpack = Unpacker(len(work.pairs))
    tasks = deque(chunks(numbers, jobs))
    running: deque[tuple[list[int], Future[list[Packed]]]] = deque()
    _inherited.append(work)
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork"))
    try:
        while tasks or running:
            while tasks and len(running) < 2 * jobs:
                part = tasks.popleft()
                running.append((part, _submit(pool, part)))
            part, future = running.popleft()
            try:
                packed = future.result()
            except BrokenProcessPool:
                yield from in_process(work, part)
                continue
            for outcome in packed:
                yield unpack(outcome)
    finally:
        _inherited.pop()
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, part: list[int]) -> Future[list[Packed]]:
    with suppress(BrokenProcessPool):
        return pool.submit(_task, part)
    lost: Future[list[Packed]] = Future()
    lost.set_exception(BrokenProcessPool("a process is gone"))
    return lost


def _task(part: list[int]) -> list[Packed]:
    return [pack(_inherited[-1].compare(i)) for i in part]
