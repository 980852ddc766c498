"""The two writing threads: order, limits, failures; and the store benchmark on a small size."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zkl_debug.bench.store_bench import bench_store
from zkl_debug.store.pipeline import Pipeline


def test_order_of_both_threads() -> None:
    pipeline = Pipeline(1 << 20)
    seen: list[tuple[str, int]] = []

    def first(k: int) -> None:
        seen.append(("first", k))
        pipeline.then(lambda: seen.append(("second", k)))

    for k in range(50):
        pipeline.submit(lambda k=k: first(k), 0)  # type: ignore[misc]
    pipeline.drain()
    assert [k for stage, k in seen if stage == "first"] == list(range(50))
    assert [k for stage, k in seen if stage == "second"] == list(range(50))
    pipeline.finish()


def wait(gate: threading.Event) -> Callable[[], None]:
    """A task that waits for an event."""

    def task() -> None:
        assert gate.wait(10)

    return task


def test_submit_waits_while_too_much_is_under_way() -> None:
    pipeline = Pipeline(100)
    gate = threading.Event()
    pipeline.submit(lambda: pipeline.then(wait(gate), 80), 80)
    done = threading.Event()

    def second() -> None:
        pipeline.submit(lambda: pipeline.then(lambda: None, 80), 80)
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    time.sleep(0.05)
    assert not done.is_set()
    gate.set()
    thread.join(10)
    assert done.is_set()
    pipeline.submit(lambda: pipeline.then(lambda: None, 1000), 1000)  # alone it may exceed the limit
    pipeline.finish()


@pytest.mark.parametrize("stage", [0, 1])
def test_failure_stops_both_threads(stage: int) -> None:
    def fail() -> None:
        raise OSError("disk full")

    pipeline = Pipeline(100)
    pipeline.submit(fail if stage == 0 else lambda: pipeline.then(fail), 60)
    with pytest.raises(OSError, match="disk full"):
        pipeline.drain()
    for call in (pipeline.drain, pipeline.finish, lambda: pipeline.submit(lambda: None, 0)):
        with pytest.raises(OSError, match="disk full"):
            call()
    pipeline.cancel()


def test_cancel_forgets_what_waits() -> None:
    pipeline = Pipeline(100)
    gate, ran = threading.Event(), []
    pipeline.submit(wait(gate), 0)
    pipeline.submit(lambda: ran.append(1), 0)
    threading.Timer(0.05, gate.set).start()
    pipeline.cancel()
    assert ran == []


@pytest.mark.parametrize("short", [False, True])
def test_writes_are_joined_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool) -> None:
    rng = np.random.default_rng(0)
    calls = []
    real = os.pwritev

    def pwritev(fd: int, buffers: list[Any], offset: int) -> int:
        calls.append(len(buffers))
        if not short:
            return real(fd, buffers, offset)
        whole = b"".join(bytes(b) for b in buffers)
        return os.pwrite(fd, whole[: len(whole) // 2 + 3], offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    pieces = [rng.integers(0, 255, n, dtype=np.uint8) for n in (1000, 24, 4096, 7, 300)]
    offsets = [0, 1000, 1024, 9000, 9007]
    expected = np.zeros(9307, np.uint8)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    pipeline = Pipeline(1 << 20)

    def task() -> None:
        for piece, offset in zip(pieces, offsets, strict=True):
            pipeline.write(fd, piece, offset)
        pipeline.settle()

    pipeline.submit(task, 0)
    pipeline.finish()
    os.close(fd)
    for piece, offset in zip(pieces, offsets, strict=True):
        expected[offset : offset + len(piece)] = piece
    assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), expected)
    assert calls == [3, 2]


def test_bench_store(tmp_path: Path) -> None:
    result = bench_store(1 << 20, rows=32, width=256, sites=2, repeats=2, folder=tmp_path)
    assert result["bytes"] >= 1 << 20
    assert result["ratio"] > 0
    assert result["ok"] == (result["ratio"] >= result["goal"] == 0.70)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_bench_store_reaches_its_goal(tmp_path: Path) -> None:
    """May fail on a machine that is busy with other work."""
    assert bench_store(512 << 20, repeats=9, folder=tmp_path)["ratio"] >= 0.70
