"""Runs timed on a machine whose processor is not always as fast: only those at its full speed are compared.

A processor that is shared, or that saves power, may take half as long again for the same work, for seconds at a time.
Ratios of runs that began at different speeds tell nothing. So a fixed piece of work is timed before and after each run,
when nothing else of this process is under way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from zkl_debug.schema import Json

#: How much longer the fixed work may take than at its best for a run to count.
SLOWER = 1.15
_LEAST = 2  # runs of a name, below which it is not asked how fast they were
_ROUNDS, _REPEATS = 16000, 3


def host_seconds() -> float:
    """Seconds of a fixed piece of interpreter work, the best of three: 1-2 ms."""
    best = float("inf")
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        table: dict[int, tuple[int, int]] = {}
        for number in range(_ROUNDS):
            table[number & 255] = (number, number + 1)
        best = min(best, time.perf_counter() - begin)
    return best


@dataclass(frozen=True)
class Run:
    """One timed run: its seconds, those of a part of it, and what the fixed work took before or behind it, the longer.

    ``part`` is what ``measure`` of :meth:`Runs.time` gave; the seconds where there is none.
    """

    seconds: float
    part: float
    host: float


class Runs:
    """Timed runs by name.

    Args:
        barrier: waits until the device has nothing to do.
        host: the fixed work.
    """

    def __init__(self, barrier: Callable[[], None], host: Callable[[], float] = host_seconds) -> None:
        self._barrier, self._host = barrier, host
        self.runs: dict[str, list[Run]] = {}

    def time(
        self,
        name: str,
        run: Callable[[], None],
        measure: Callable[[], float] | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """Time a run.

        Args:
            name: what it is an example of.
            run: does it.
            measure: gives the seconds of a part of it, asked for behind it.
            settle: ends what the run left to other threads; not timed.
        """
        before = self._host()
        self._barrier()
        begin = time.perf_counter()
        run()
        self._barrier()
        seconds = time.perf_counter() - begin
        part = seconds if measure is None else measure()
        if settle is not None:
            settle()
        self.runs.setdefault(name, []).append(Run(seconds, part, max(before, self._host())))

    def enough(self, least: int = _LEAST) -> bool:
        """Whether so many runs of each name that was run more than once were at full speed."""
        return all(len(kept) >= min(least, len(self.runs[name])) for name, kept in self._kept().items())

    def _kept(self) -> dict[str, list[Run]]:
        fastest = min(run.host for runs in self.runs.values() for run in runs)
        limit = SLOWER * fastest
        return {n: [r for r in runs if r.host <= limit or len(runs) < _LEAST] for n, runs in self.runs.items()}

    @property
    def steady(self) -> dict[str, list[Run]]:
        """The runs at full speed; all of them where too few of one name are."""
        return self._kept() if self.enough() else self.runs

    def figures(self, base: str = "plain", parts: bool = False) -> dict[str, Json]:
        """Medians, best, and ratios of medians to those of ``base``; ``parts``: of the parts of the runs."""
        steady = self.steady
        values = {n: [r.part if parts else r.seconds for r in runs] for n, runs in steady.items()}
        median = {name: statistics.median(some) for name, some in values.items()}
        return {
            "seconds": {name: round(value, 5) for name, value in median.items()},
            "best": {name: round(min(some), 5) for name, some in values.items()},
            "ratio": {name: round(value / median[base], 4) for name, value in median.items()},
            "ratio_of_best": {name: round(min(some) / min(values[base]), 4) for name, some in values.items()},
            "runs": {name: len(some) for name, some in values.items()},
        }

    def host(self) -> dict[str, Json]:
        """How steady the processor was: the fixed work at its best in seconds, at its worst as a multiple of that."""
        hosts = [run.host for runs in self.runs.values() for run in runs]
        count = sum(len(runs) for runs in self.runs.values())
        return {
            "fixed_work_s": round(min(hosts), 6),
            "slowest": round(max(hosts) / min(hosts), 3),
            "left_out": count - sum(len(runs) for runs in self.steady.values()),
            "steady": self.enough(),
        }
