"""Drives the search with an oracle and a journal: the Python entry point of ``bisect switches``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from zkl_debug.bisect.criterion import AUTO, Criterion, judge
from zkl_debug.bisect.journal import Identity, Journal
from zkl_debug.bisect.outcome import Cancelled, Observation, Oracle, RawRun, Request, Trial
from zkl_debug.bisect.replay import Policy
from zkl_debug.bisect.result import SearchResult
from zkl_debug.bisect.search import Search
from zkl_debug.bisect.space import Space
from zkl_debug.errors import UsageError

#: Called after each run: the request, what it left, how it was judged, and whether it came from the journal.
Progress = Callable[[Request, RawRun, Observation, bool], None]


@dataclass
class _Runner:
    """Settles requests: from the journal when it can, else with the oracle. Safe to call from several threads."""

    oracle: Oracle
    criterion: Criterion
    attempts: int
    journal: Journal | None
    progress: Progress | None
    made: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, request: Request) -> Observation:
        """Run ``request`` and judge it; a run that does not repeat itself gets further attempts."""
        for attempt in range(self.attempts):
            trial = Trial(request, attempt)
            stored = self.journal.get(trial) if self.journal is not None else None
            raw = stored if stored is not None else self._run(trial)
            seen = judge(raw, self.criterion)
            if self.progress is not None:
                with self.lock:
                    self.progress(request, raw, seen, stored is not None)
            if not seen.retry:
                break
        return seen

    def stored(self, request: Request) -> bool:
        """Whether the journal alone settles ``request``."""
        return self.journal is not None and look_up(self.journal, request, self.criterion, self.attempts) is not None

    def _run(self, trial: Trial) -> RawRun:
        try:
            raw = self.oracle.run(trial)
        except (Cancelled, UsageError):
            raise
        except Exception as error:
            raw = RawRun(failure=f"{type(error).__name__}: {error}")
        with self.lock:
            self.made += 1
            if self.journal is not None:
                self.journal.put(trial, raw)
        return raw


def bisect_switches(
    space: Space,
    oracle: Oracle,
    *,
    journal: Path | None = None,
    policy: Policy | None = None,
    criterion: Criterion = AUTO,
    jobs: int = 1,
    attempts: int = 2,
    max_runs: int | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Find which switches make the mismatch go away.

    Args:
        space: the switches in ladder order.
        oracle: runs configurations.
        journal: file of finished runs; those in it are not made again.
        policy: how careful the search is.
        criterion: how runs are judged.
        jobs: runs at once; the answer does not depend on it.
        attempts: runs of a configuration that does not repeat itself before it counts as untestable.
        max_runs: stop with a partial result after this many new runs.
        progress: called after every run.

    Raises:
        Refused: the journal belongs to another bisection.
        UsageError: a number out of range, or a journal that cannot be written.
    """
    if jobs < 1 or attempts < 1:
        raise UsageError(f"jobs {jobs} and attempts {attempts} cannot be used", "numbers of at least 1")
    identity = Identity(space.digest(), oracle.probe_hash, oracle.environment_hash)
    opened = Journal(journal, identity) if journal is not None else None
    runner = _Runner(oracle, criterion, attempts, opened, progress)
    search = Search(space, policy)
    limit = max_runs if max_runs is not None else float("inf")
    try:
        drive = _serial if jobs == 1 else _parallel
        drive(search, runner, jobs, limit)
    finally:
        oracle.close()
        if opened is not None:
            opened.close()
    return search.result or search.incomplete(f"the budget of {max_runs} runs is used up")


def rejudge(
    space: Space, journal: Path, criterion: Criterion, *, policy: Policy | None = None, attempts: int = 2
) -> SearchResult:
    """Answer from stored runs alone, judged by ``criterion``; incomplete when a run it needs was never made.

    Raises:
        Refused: the journal is of another space, or damaged.
    """
    search = Search(space, policy)
    with Journal(journal, Identity(space.digest(), "", ""), read_only=True) as opened:
        while search.result is None:
            (request,) = search.proposals(1)
            seen = look_up(opened, request, criterion, attempts)
            if seen is None:
                break
            search.tell(request, seen)
    return search.result or search.incomplete(f"the journal holds no run that {criterion.text!r} needs next")


def look_up(journal: Journal, request: Request, criterion: Criterion, attempts: int) -> Observation | None:
    """The judged outcome of a request by the journal alone, or None when a run is missing."""
    seen: Observation | None = None
    for attempt in range(attempts):
        raw = journal.get(Trial(request, attempt))
        seen = judge(raw, criterion) if raw is not None else None
        if seen is None or not seen.retry:
            break
    return seen


def _serial(search: Search, runner: _Runner, jobs: int, limit: float) -> None:  # noqa: ARG001
    while search.result is None:
        (request,) = search.proposals(1)
        if runner.made >= limit and not runner.stored(request):
            return
        search.tell(request, runner.settle(request))


def _replay_journal(search: Search, runner: _Runner, running: Iterable[Request]) -> None:
    """Tell everything the journal holds of what the search waits for, before any speculation starts."""
    busy = {r.key for r in running}
    while search.result is None:
        (request,) = search.proposals(1)
        if request.key in busy or not runner.stored(request):
            return
        search.tell(request, runner.settle(request))


def _parallel(search: Search, runner: _Runner, jobs: int, limit: float) -> None:
    running: dict[Future[Observation], Request] = {}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while search.result is None:
                _replay_journal(search, runner, running.values())
                for request in search.proposals(jobs - len(running), running.values()):
                    if runner.made + len(running) < limit or runner.stored(request):
                        running[pool.submit(runner.settle, request)] = request
                if not running or search.result is not None:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda f: (running[f].wide, running[f].repeat)):
                    search.tell(running.pop(future), future.result())
        finally:
            runner.oracle.close()  # what still runs was speculation, or nobody waits for it any more
