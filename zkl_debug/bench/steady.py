"""Times taken on a machine that is shared: what something takes when nobody disturbs it, and what it usually takes.

Others only ever add to a time, and for seconds at a time: a processor that is shared, or that saves power, may take
half as long again for the same work. So beside the median stands what a tenth of the times stayed below.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

from zkl_debug.schema import Json

_TENTHS = 10


class Times:
    """Seconds of what was timed, by name.

    Args:
        barrier: waits until the device has nothing to do.
        base: name of what the others are compared to.
    """

    def __init__(self, barrier: Callable[[], object] = lambda: None, base: str = "plain") -> None:
        self._barrier, self._base = barrier, base
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, run: Callable[[], object]) -> None:
        """Time something, with all it leaves to the device."""
        self._barrier()
        begin = time.perf_counter()
        run()
        self._barrier()
        self.add(name, [time.perf_counter() - begin])

    def add(self, name: str, seconds: list[float]) -> None:
        """Take in what was timed elsewhere."""
        self.seconds.setdefault(name, []).extend(seconds)

    def figures(self) -> dict[str, Json]:
        """By name, in seconds: median, what a tenth stayed below; both over those of the base; how many there are."""
        median = {name: statistics.median(some) for name, some in self.seconds.items()}
        quiet = {name: _tenth(some) for name, some in self.seconds.items()}
        return {
            "seconds": {name: round(value, 5) for name, value in median.items()},
            "undisturbed": {name: round(value, 5) for name, value in quiet.items()},
            "ratio": {name: round(value / median[self._base], 4) for name, value in median.items()},
            "undisturbed_ratio": {name: round(value / quiet[self._base], 4) for name, value in quiet.items()},
            "count": {name: len(some) for name, some in self.seconds.items()},
        }


def _tenth(seconds: list[float]) -> float:
    if len(seconds) == 1:
        return seconds[0]
    return statistics.quantiles(seconds, n=_TENTHS, method="inclusive")[0]


class Steps:
    """Times the steps of a run, each from the end of the one before: what that left undone counts, too.

    Args:
        step: does one.
        skipped: so many at the beginning are not counted, at least one.
    """

    def __init__(self, step: Callable[[], Any], skipped: int) -> None:
        self._step, self._skipped = step, skipped
        self._ends: list[float] = []

    def __call__(self) -> Any:
        """Do the next step, and give what it gives."""
        result = self._step()
        self._ends.append(time.perf_counter())
        return result

    @property
    def seconds(self) -> list[float]:
        """Of each step that counts."""
        return [b - a for a, b in itertools.pairwise(self._ends[self._skipped - 1 :])]
