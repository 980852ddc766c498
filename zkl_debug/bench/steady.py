"""Times taken on a machine that is shared: what something takes when nobody disturbs it, and what it usually takes.

Others only ever add to a time, and for seconds at a time: a processor whose other half is busy, or that saves power,
takes up to twice as long for the same work. So the same piece of work, which needs nothing but a processor, is timed
before and behind everything that is timed, and what fell into a slow phase is told apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from zkl_debug.schema import Json

#: A processor that takes this much longer than at its fastest is disturbed.
SLOWER = 1.1
#: Undisturbed times that make a median.
FEWEST = 5
_TURNS = 40_000
_WINDOW = 8


class Sample(NamedTuple):
    """Seconds of what was timed, and those of a piece of work of the processor beside it: see :func:`processor`."""

    seconds: float
    beside: float


def processor() -> float:
    """Seconds that this thread takes for a fixed piece of work, about a millisecond."""
    begin, sink = time.perf_counter(), 0
    for turn in range(_TURNS):
        sink += turn
    return time.perf_counter() - begin


class Times:
    """What was timed, by name.

    Args:
        barrier: waits until the device has nothing to do.
        base: name of what the others are compared to.
    """

    def __init__(self, barrier: Callable[[], object] = lambda: None, base: str = "plain") -> None:
        self._barrier, self._base = barrier, base
        self.samples: dict[str, list[Sample]] = {}

    def time(self, name: str, run: Callable[[], object]) -> None:
        """Time something, with all it leaves to the device."""
        before = processor()
        self._barrier()
        begin = time.perf_counter()
        run()
        self._barrier()
        seconds = time.perf_counter() - begin
        self.add(name, [Sample(seconds, max(before, processor()))])

    def add(self, name: str, samples: Iterable[Sample]) -> None:
        """Take in what was timed elsewhere."""
        self.samples.setdefault(name, []).extend(samples)

    def figures(self) -> dict[str, Json]:
        """By name, in seconds: the median, and that of what was not disturbed; both over those of the base.

        ``count`` and ``undisturbed_count`` tell of how many. Of less than :data:`FEWEST` that were not disturbed there
        is no median, but None, and so is a ratio to it. ``mean_ratio`` has what a median leaves out: what falls on few
        of many times.
        """
        fastest = min((sample.beside for some in self.samples.values() for sample in some), default=0.0)
        every = {name: [sample.seconds for sample in some] for name, some in self.samples.items()}
        quiet = {
            name: [sample.seconds for sample in some if sample.beside <= SLOWER * fastest]
            for name, some in self.samples.items()
        }
        means = {name: statistics.fmean(some) for name, some in every.items()}
        base = means.get(self._base, 0.0)
        return {
            **self._told(every, "", 1),
            "mean_ratio": {name: round(value / base, 4) if base else None for name, value in means.items()},
            **self._told(quiet, "undisturbed_", FEWEST),
        }

    def _told(self, seconds: dict[str, list[float]], prefix: str, fewest: int) -> dict[str, Json]:
        median = {name: statistics.median(some) if len(some) >= fewest else None for name, some in seconds.items()}
        base = median.get(self._base)
        return {
            f"{prefix}seconds": {name: None if value is None else round(value, 5) for name, value in median.items()},
            f"{prefix}ratio": {
                name: None if value is None or base is None else round(value / base, 4)
                for name, value in median.items()
            },
            f"{prefix}count": {name: len(some) for name, some in seconds.items()},
        }


class Steps:
    """Times the steps of a run, each from the end of the one before: what that left undone counts, too.

    Only the step behind a look at the processor is left out, for meanwhile the device went on.

    Args:
        step: does one.
        skipped: so many at the beginning are not counted, at least one.
        look: as :func:`processor`.
    """

    def __init__(self, step: Callable[[], Any], skipped: int, look: Callable[[], float] = processor) -> None:
        self._step, self._look, self._left = step, look, skipped
        self._window: list[float] = []
        self._begun: float | None = None  # end of the step before, where the next one counts
        self._before = 0.0
        self.samples: list[Sample] = []

    def __call__(self) -> Any:
        """Do the next step, and give what it gives."""
        result = self._step()
        end = time.perf_counter()
        if self._left > 0:
            self._left -= 1
            if self._left == 0:
                self._before = self._look()
            return result
        if self._begun is not None:
            self._window.append(end - self._begun)
        self._begun = end
        if len(self._window) == _WINDOW:
            beside = self._look()
            self.samples += (Sample(seconds, max(self._before, beside)) for seconds in self._window)
            self._window, self._begun, self._before = [], None, beside
        return result
