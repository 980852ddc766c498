"""Work timed on a machine whose processor is not always as fast: only what ran at its full speed is compared.

A processor that is shared, or that saves power, may take half as long again for the same work, for seconds at a time.
Ratios of times that were taken at different speeds tell nothing. So a fixed piece of work is timed before and behind
each, when nothing else of this process is under way.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from zkl_debug.schema import Json

#: How much longer the fixed work may take than at its best for a time to count: more than repeats of it differ by, and
#: less than what times are compared for.
SLOWER = 1.05
_GROUP = 16  # steps between which nothing else is done
_ROUNDS, _REPEATS = 16000, 3
_SHORT_ROUNDS = 3000

Result = TypeVar("Result")


def host_seconds(rounds: int = _ROUNDS) -> float:
    """Seconds of a fixed piece of interpreter work, the best of three: 1-2 ms."""
    best = float("inf")
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        table: dict[int, tuple[int, int]] = {}
        for number in range(rounds):
            table[number & 255] = (number, number + 1)
        best = min(best, time.perf_counter() - begin)
    return best


def short_host_seconds() -> float:
    """:func:`host_seconds` of less work, to stand between groups of steps of milliseconds: 0.2 ms."""
    return host_seconds(_SHORT_ROUNDS)


@dataclass(frozen=True)
class Timed:
    """The seconds something took, and those of the fixed work before or behind it, the longer."""

    seconds: float
    host: float


class Times:
    """What was timed, by name.

    Args:
        barrier: waits until the device has nothing to do.
        host: the fixed work.
        least: of each name so many must have been at full speed, or all where there are fewer.
    """

    def __init__(
        self,
        barrier: Callable[[], object] = lambda: None,
        host: Callable[[], float] = host_seconds,
        least: int = 2,
    ) -> None:
        self._barrier, self.host, self._least = barrier, host, least
        self.times: dict[str, list[Timed]] = {}

    def time(self, name: str, run: Callable[[], Result], settle: Callable[[], object] | None = None) -> Result:
        """Time something, and give what it gave.

        Args:
            name: what it is an example of.
            run: does it.
            settle: ends what it left to other threads; not timed.
        """
        before = self.host()
        self._barrier()
        begin = time.perf_counter()
        result = run()
        self._barrier()
        seconds = time.perf_counter() - begin
        if settle is not None:
            settle()
        self.add(name, Timed(seconds, max(before, self.host())))
        return result

    def add(self, name: str, timed: Timed) -> None:
        """Take in what was timed elsewhere."""
        self.times.setdefault(name, []).append(timed)

    @property
    def enough(self) -> bool:
        """Whether enough times of each name were at full speed."""
        return all(len(kept) >= min(self._least, len(self.times[name])) for name, kept in self._kept().items())

    def _kept(self) -> dict[str, list[Timed]]:
        fastest = min(timed.host for times in self.times.values() for timed in times)
        limit = SLOWER * fastest
        return {n: [t for t in times if t.host <= limit or len(times) == 1] for n, times in self.times.items()}

    @property
    def steady(self) -> dict[str, list[Timed]]:
        """Those at full speed; all of them where too few of one name are."""
        return self._kept() if self.enough else self.times

    def figures(self, base: str = "plain") -> dict[str, Json]:
        """Medians, best, and ratios of both to those of ``base``; how many they are of, and how many were left out."""
        values = {name: [timed.seconds for timed in times] for name, times in self.steady.items()}
        median = {name: statistics.median(some) for name, some in values.items()}
        return {
            "seconds": {name: round(value, 5) for name, value in median.items()},
            "best": {name: round(min(some), 5) for name, some in values.items()},
            "ratio": {name: round(value / median[base], 4) for name, value in median.items()},
            "ratio_of_best": {name: round(min(some) / min(values[base]), 4) for name, some in values.items()},
            "count": {name: len(some) for name, some in values.items()},
            "left_out": {name: len(self.times[name]) - len(some) for name, some in values.items()},
            "host": self._steadiness(),
        }

    def _steadiness(self) -> dict[str, Json]:
        """How steady the processor was: the fixed work at its best in seconds, at its worst as a multiple of that."""
        hosts = [timed.host for times in self.times.values() for timed in times]
        slowest = round(max(hosts) / min(hosts), 3)
        return {"fixed_work_s": round(min(hosts), 7), "slowest": slowest, "steady": self.enough}


class Steps:
    """Times the steps of a run, each from the end of the one before: what that left undone counts, too.

    The fixed work is done between groups of steps. The first of a group is not counted: it found nothing left undone.

    Args:
        times: where they go.
        name: what they are examples of.
        step: does one.
        skipped: so many at the beginning are not counted.
    """

    def __init__(self, times: Times, name: str, step: Callable[[], Any], skipped: int = 0) -> None:
        self._times, self._name, self._step, self._skipped = times, name, step, skipped
        self._ends: list[float] = []
        self._host = 0.0
        self.aside = 0.0  # seconds of the fixed work

    def __call__(self) -> Any:
        """Do the next step, and give what it gives."""
        if self._skipped:
            self._skipped -= 1
            return self._step()
        if len(self._ends) in (0, _GROUP + 1):
            self.end()
        result = self._step()
        self._ends.append(time.perf_counter())
        return result

    def end(self) -> None:
        """A group of steps has ended."""
        begin = time.perf_counter()
        host = self._times.host()
        for first, second in itertools.pairwise(self._ends):
            self._times.add(self._name, Timed(second - first, max(self._host, host)))
        self._ends, self._host = [], host
        self.aside += time.perf_counter() - begin
