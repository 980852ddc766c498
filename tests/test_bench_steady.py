"""What is told of times taken on a machine that others use, too."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from zkl_debug.bench import steady
from zkl_debug.bench.steady import Sample, Steps, Times

FAST, NEARLY, SLOW = 1.0, 1.09, 1.8  # of the processor


def test_what_fell_into_a_slow_phase_of_the_processor_is_told_apart() -> None:
    """Most of the time it was slow, and more of it beside one than beside the other."""
    times = Times()
    times.add("plain", [*[Sample(4.0, FAST)] * 2, *[Sample(4.2, NEARLY)] * 3, *[Sample(5.0, SLOW)] * 6])
    times.add("digest", [*[Sample(4.4, FAST)] * 5, *[Sample(7.0, SLOW)] * 9])
    times.add("naive", [Sample(400.0, FAST)] * 4)
    found: Any = times.figures()
    assert found["seconds"] == {"plain": 5.0, "digest": 7.0, "naive": 400.0}
    assert found["undisturbed_seconds"] == {"plain": 4.2, "digest": 4.4, "naive": None}, "of four there is no median"
    assert found["ratio"]["digest"] == 1.4
    assert found["mean_ratio"]["digest"] == round((5 * 4.4 + 9 * 7) / 14 / ((2 * 4.0 + 3 * 4.2 + 6 * 5) / 11), 4)
    assert found["undisturbed_ratio"] == {"plain": 1.0, "digest": round(4.4 / 4.2, 4), "naive": None}
    assert found["count"] == {"plain": 11, "digest": 14, "naive": 4}
    assert found["undisturbed_count"] == {"plain": 5, "digest": 5, "naive": 4}


def test_nothing_is_compared_to_a_base_that_was_always_disturbed() -> None:
    times = Times()
    times.add("plain", [Sample(4.0, SLOW)])
    times.add("digest", [Sample(4.4, FAST)] * 5)
    found: Any = times.figures()
    assert found["undisturbed_ratio"] == {"plain": None, "digest": None}
    assert found["undisturbed_seconds"]["digest"] == 4.4
    assert found["ratio"]["digest"] == 1.1
    assert Times().figures()["count"] == {}


def test_the_device_has_nothing_to_do_before_and_nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = iter([10.0, 12.5])
    looks = iter([0.5, 0.25])
    monkeypatch.setattr(steady, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    def look() -> float:
        order.append("look")
        return next(looks)

    monkeypatch.setattr(steady, "processor", look)

    def told(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    times = Times(told("barrier"))
    times.time("digest", told("run"))
    assert order == ["look", "barrier", "run", "barrier", "look"]
    assert times.samples == {"digest": [Sample(2.5, 0.5)]}, "the slower of the two"


def test_a_look_at_the_processor_is_a_time() -> None:
    assert 0 < steady.processor() < 1


class _Device:
    """A step takes one second, and leaves a quarter that the next one waits for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.busy_until = 0.0
        self.looks: list[float] = []
        monkeypatch.setattr(steady, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def step(self) -> str:
        self.now = max(self.now, self.busy_until) + 1.0
        self.busy_until = self.now + 0.25
        return "tokens"

    def look(self) -> float:
        self.now += 10.0
        self.looks.append(self.now)
        return [3.0, 1.0, 2.0][len(self.looks) - 1]


def test_a_step_pays_for_what_the_one_before_left_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that goes on behind a step holds up the next one, which waits for it; a look hides none of it."""
    device = _Device(monkeypatch)
    timed = Steps(device.step, 3, device.look)
    assert [timed() for _ in range(3 + 2 * 9)] == ["tokens"] * 21
    assert [sample.seconds for sample in timed.samples] == [1.25] * 16
    assert [sample.beside for sample in timed.samples] == [3.0] * 8 + [2.0] * 8, "the slower of those around it"
    assert len(device.looks) == 3


def test_steps_between_no_two_looks_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(monkeypatch)
    timed = Steps(device.step, 3, device.look)
    for _ in range(3 + 8):
        timed()
    assert timed.samples == []
