"""Reading frames out on a thread of its own, and when the program waits for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from graph_fakes import FakeGraph, Model, call, recorded_model, steps_of, watched

from zkl_debug.capture.device import DeviceFrame
from zkl_debug.capture.drain import Drain, Job
from zkl_debug.capture.readout import ReadOut


class Slow:
    """A job that is read out when it is let, and filed."""

    def __init__(self) -> None:
        self.let, self.begun = threading.Event(), threading.Event()
        self.order: list[str] = []

    def job(self) -> Job:
        return Job(self._read, 1)

    def _read(self) -> Callable[[], None]:
        self.begun.set()
        self.let.wait(10)
        self.order.append("read")
        return lambda: self.order.append("filed")


def test_nothing_is_read_out_or_filed_while_it_is_held() -> None:
    slow, drain = Slow(), Drain(pause=0.05)
    drain.hold()  # nothing to wait for
    drain.go_on()
    drain.submit(slow.job())
    assert slow.begun.wait(10)
    threading.Timer(0.1, slow.let.set).start()
    drain.hold()
    assert slow.order == ["read"], "what is being done is waited for"
    time.sleep(0.2)
    assert slow.order == ["read"]
    drain.go_on()
    until = time.monotonic() + 10
    while slow.order != ["read", "filed"] and time.monotonic() < until:
        time.sleep(0.01)
    assert slow.order == ["read", "filed"]
    drain.close()


@pytest.mark.parametrize("ends", ["flush", "close", "submit"])
def test_a_recording_that_never_ends_holds_nothing_up_for_good(ends: str) -> None:
    slow, drain = Slow(), Drain(spool=100, limit=1, pause=0.01)
    slow.let.set()
    drain.submit(slow.job())
    assert slow.begun.wait(10)
    drain.hold()
    time.sleep(0.1)  # its pause has run out, and it waits to be let go on
    if ends == "submit":
        drain.submit(slow.job())  # more than may be queued
    elif ends == "flush":
        drain.flush()
    drain.close()


def test_a_read_out_that_failed_is_not_waited_for() -> None:
    def read() -> Callable[[], None]:
        raise OSError("the device is gone")

    drain = Drain()
    for _ in range(2):
        drain.submit(Job(read, 1))
    drain.hold()
    with pytest.raises(OSError, match="the device is gone"):
        drain.close()


def test_a_frame_that_fills_a_batch_where_a_recording_begins_is_not_read_out_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[bool] = []
    arrays = DeviceFrame.arrays

    def watched_arrays(self: DeviceFrame) -> Any:
        inside.append(FakeGraph.current is not None)
        return arrays(self)

    monkeypatch.setattr(DeviceFrame, "arrays", watched_arrays)
    model = Model()
    capture = watched(model, tmp_path / "c")
    for number, tokens in enumerate(steps_of(40), 1):
        call(model, capture, tokens, False)
        if number % 8 == 0:
            graph = FakeGraph()
            graph.capture_begin()
            time.sleep(0.05)
            graph.capture_end()
    capture.__exit__(None, None, None)
    assert inside
    assert not any(inside)


def test_nothing_is_being_read_out_when_a_graph_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device refuses what that takes, on whatever thread, while the program records."""
    calls: list[tuple[str, bool]] = []
    for name in ("hold", "go_on"):

        def watched(_self: ReadOut, name: str = name) -> None:
            calls.append((name, FakeGraph.current is not None))

        monkeypatch.setattr(ReadOut, name, watched)
    capture = recorded_model(Model(), tmp_path / "c")
    assert capture.session.graphs is not None
    assert calls == [("hold", False), ("go_on", False)] * capture.session.graphs.recorded
    assert calls
    capture.__exit__(None, None, None)
