"""Reading frames out on a thread of its own, and when the program waits for that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from graph_fakes import FakeGraph, Model, recorded_model

from zkl_debug.capture.drain import Drain, Job
from zkl_debug.capture.readout import ReadOut


def test_what_is_read_out_can_be_waited_for_before_it_is_filed() -> None:
    order: list[str] = []
    gate = threading.Event()

    def read() -> Callable[[], None]:
        gate.wait(10)
        order.append("read")
        return lambda: order.append("filed")

    drain = Drain(pause=60)
    drain.settle()  # nothing to wait for
    for _ in range(2):
        drain.submit(Job(read, 1))
    threading.Timer(0.05, gate.set).start()
    drain.settle()
    assert order == ["read", "read"]
    drain.close()
    assert order == ["read", "read", "filed", "filed"]


def test_a_read_out_that_failed_is_not_waited_for() -> None:
    def read() -> Callable[[], None]:
        raise OSError("the device is gone")

    drain = Drain()
    for _ in range(2):
        drain.submit(Job(read, 1))
    drain.settle()
    with pytest.raises(OSError, match="the device is gone"):
        drain.close()


def test_nothing_is_being_read_out_when_a_graph_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device refuses what that takes, on whatever thread, while the program records."""
    recording: list[bool] = []
    settle = ReadOut.settle

    def watched(self: ReadOut) -> None:
        recording.append(FakeGraph.current is not None)
        settle(self)

    monkeypatch.setattr(ReadOut, "settle", watched)
    capture = recorded_model(Model(), tmp_path / "c")
    assert capture.session.graphs is not None
    assert recording == [False] * capture.session.graphs.recorded
    assert recording
    capture.__exit__(None, None, None)
