"""How many runs a search over a space will take, and which come first: the real search, driven by made-up outcomes."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from zkl_debug.bisect.outcome import Observation, Outcome, Request
from zkl_debug.bisect.search import Search
from zkl_debug.bisect.space import Config, Space

_SAMPLES = 12
_SEED = 20


@dataclass(frozen=True)
class Expected:
    """Runs of a search when so many switches are necessary together.

    Attributes:
        causes: number of necessary switches (what they require comes on top).
        mean, worst: over random choices of them.
        phases: mean by purpose.
    """

    causes: int
    mean: float
    worst: int
    phases: dict[str, float]


@dataclass(frozen=True)
class Step:
    """One of the first runs.

    Attributes:
        number: position in the search; several steps may share one, after different outcomes.
        purpose: why.
        on: the switches that are on, in ladder order.
        after: the outcomes so far that lead to it, as ``run 3 zero``; empty where there is no choice.
    """

    number: int
    purpose: str
    on: tuple[str, ...]
    after: str


def expected_runs(space: Space, causes: int, samples: int = _SAMPLES) -> Expected | None:
    """Runs when ``causes`` random switches are necessary together; None when there are not so many."""
    members = space.sort(space.top - space.bottom)
    if causes > len(members):
        return None
    rng = random.Random(_SEED)
    totals: list[int] = []
    phases: Counter[str] = Counter()
    for _ in range(samples):
        needed = space.closure(rng.sample(members, causes))
        runs = [request.purpose.value for request in _simulate(space, needed)]
        totals.append(len(runs))
        phases.update(runs)
    mean_phases = {name: round(count / samples, 1) for name, count in phases.items()}
    return Expected(causes, round(statistics.mean(totals), 1), max(totals), mean_phases)


def _simulate(space: Space, needed: Config) -> Iterator[Request]:
    search = Search(space)
    while search.result is None:
        (request,) = search.proposals(1)
        yield request
        search.tell(request, Observation(Outcome.ZERO if needed <= request.config else Outcome.MISMATCH))


def first_steps(space: Space, depth: int = 5) -> tuple[Step, ...]:
    """The first runs: both ends, then each outcome's successor, up to run number ``depth``."""
    found: list[Step] = []
    _walk(space, (), depth, found)
    return tuple(sorted(found, key=lambda step: (step.number, step.after)))


def _walk(space: Space, told: tuple[tuple[Request, Outcome], ...], depth: int, found: list[Step]) -> None:
    search = Search(space)
    for request, outcome in told:
        search.tell(request, Observation(outcome))
    if search.result is not None or len(told) >= depth:
        return
    (request,) = search.proposals(1)
    number = len(told) + 1
    after = ", ".join(f"run {i} {outcome.value}" for i, (_, outcome) in enumerate(told, start=1) if i > 2)
    found.append(Step(number, request.purpose.value, space.sort(request.config - space.bottom), after))
    # The two ends have one outcome that leads on; anything else ends the search.
    outcomes = {1: (Outcome.MISMATCH,), 2: (Outcome.ZERO,)}.get(number, (Outcome.ZERO, Outcome.MISMATCH))
    for outcome in outcomes:
        _walk(space, (*told, (request, outcome)), depth, found)
