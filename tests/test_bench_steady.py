"""What is told of times taken on a machine that others use, too."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from zkl_debug.bench import steady
from zkl_debug.bench.steady import Steps, Times


def test_what_a_tenth_stayed_below_is_what_it_takes_when_nobody_disturbs() -> None:
    """Most of the time somebody did, and more of it beside one than beside the other."""
    times = Times()
    times.add("plain", [1.0, 1.0, *[1.5] * 3, *[1.0] * 6])
    times.add("digest", [1.1, 1.1, 1.1, *[1.7] * 17])
    times.add("naive", [100.0])
    found: Any = times.figures()
    assert found["undisturbed_ratio"] == {"plain": 1.0, "digest": 1.1, "naive": 100.0}
    assert found["ratio"] == {"plain": 1.0, "digest": 1.7, "naive": 100.0}
    assert found["count"] == {"plain": 11, "digest": 20, "naive": 1}
    assert (found["seconds"]["digest"], found["undisturbed"]["digest"]) == (1.7, 1.1)


def test_the_device_has_nothing_to_do_before_and_nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(steady, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    def told(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    times = Times(told("barrier"))
    times.time("digest", told("run"))
    assert order == ["barrier", "run", "barrier"]
    assert times.seconds == {"digest": [2.5]}


def test_a_step_pays_for_what_the_one_before_left_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that goes on behind a step holds up the next one, which waits for it."""
    now, busy_until, left = 0.0, 0.0, 0.25
    monkeypatch.setattr(steady, "time", SimpleNamespace(perf_counter=lambda: now))

    def step() -> str:
        nonlocal now, busy_until
        now = max(now, busy_until) + 1.0
        busy_until = now + left
        return "tokens"

    timed = Steps(step, 3)
    assert [timed() for _ in range(8)] == ["tokens"] * 8
    assert timed.seconds == [1.0 + left] * 5
