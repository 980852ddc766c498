"""Ratios are of runs that were made while the processor was at its full speed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from zkl_debug.bench import gpu_bench, steady
from zkl_debug.bench.steady import Steps, Timed, Times, host_seconds, short_host_seconds


def times_of(least: int = 2, **told: list[tuple[float, float]]) -> Times:
    """Times of (seconds, what the fixed work took)."""
    made = Times(host=lambda: 1.0, least=least)
    made.times = {name: [Timed(*each) for each in some] for name, some in told.items()}
    return made


def test_runs_on_a_slow_processor_are_left_out() -> None:
    runs = times_of(
        plain=[(1.0, 1.0), (1.1, 1.04), (1.7, 1.6), (1.0, 1.0)], digest=[(1.1, 1.0), (1.8, 1.06), (1.1, 1.05)]
    )
    found: Any = runs.figures()
    assert (found["ratio"]["digest"], found["count"]) == (1.1, {"plain": 3, "digest": 2})
    assert found["host"] == {"fixed_work_s": 1.0, "slowest": 1.6, "steady": True}
    assert found["left_out"] == {"plain": 1, "digest": 1}


def test_too_few_runs_at_full_speed_are_told_and_none_is_left_out() -> None:
    runs = times_of(plain=[(1.0, 1.0), (1.0, 1.0)], digest=[(1.8, 1.5), (1.8, 1.5), (1.1, 1.0)])
    found: Any = runs.figures()
    assert found["ratio"]["digest"] == 1.8
    assert found["host"]["steady"] is False
    assert found["left_out"] == {"plain": 0, "digest": 0}


def test_a_run_that_is_made_once_counts_however_fast_it_was() -> None:
    runs = times_of(plain=[(1.0, 1.0), (1.0, 1.0)], naive=[(100.0, 2.0)])
    found: Any = runs.figures()
    assert (runs.enough, found["ratio"]["naive"], found["count"]["naive"]) == (True, 100.0, 1)


def test_the_fixed_work_is_timed_before_and_behind_and_what_was_left_to_others_is_ended_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, order = iter([1.0, 3.0]), []
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(steady, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    def step(name: str) -> Callable[[], Any]:
        def done() -> str:
            order.append(name)
            return name

        return done

    def host() -> float:
        order.append("host")
        return next(told)

    times = Times(step("barrier"), host)
    assert times.time("digest", step("run"), step("settle")) == "run"
    assert order == ["host", "barrier", "run", "barrier", "settle", "host"]
    assert times.times == {"digest": [Timed(2.5, 3.0)]}


@pytest.mark.parametrize(("speeds", "rounds"), [([1.0] * 10, 4), ([2.0, 1.0] * 5, 4), ([1.0, *[2.0] * 9], 8)])
def test_rounds_are_made_until_half_of_them_were_at_full_speed(speeds: list[float], rounds: int) -> None:
    """At least as many as were asked for, at most twice as many."""
    times, made = times_of(6), 0
    for number in gpu_bench._rounds(times, 4):
        for name in ("plain", "digest"):
            for _ in range(3):
                times.add(name, Timed(1.0, speeds[number]))
        made += 1
    assert made == rounds


def test_few_of_many_at_full_speed_are_not_enough() -> None:
    some = times_of(100, plain=[(1.0, 1.0)] * 930, digest=[(1.3, 1.2)] * 928 + [(1.0, 1.0)] * 2)
    found: Any = some.figures()
    assert (found["ratio"]["digest"], found["host"]["steady"]) == (1.3, False)


def test_a_step_pays_for_what_the_one_before_left_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that goes on behind a step holds up the next one, which waits for it; not one behind the fixed work."""
    now, busy_until, left = 0.0, 0.0, 0.25
    monkeypatch.setattr(steady, "time", SimpleNamespace(perf_counter=lambda: now))

    def host() -> float:
        nonlocal now
        now += 10.0
        return 1.0

    def step() -> str:
        nonlocal now, busy_until
        now = max(now, busy_until) + 1.0
        busy_until = now + left
        return "tokens"

    times = Times(host=host)
    timed = Steps(times, "digest", step, skipped=3)
    for _ in range(3 + 2 * (steady._GROUP + 1) + 4):
        assert timed() == "tokens"
    timed.end()
    assert {each.seconds for each in times.times["digest"]} == {1.0 + left}
    assert len(times.times["digest"]) == 2 * steady._GROUP + 3
    assert timed.aside == 40.0


def test_the_fixed_work_is_short() -> None:
    assert 0 < short_host_seconds() < host_seconds() < 0.1
