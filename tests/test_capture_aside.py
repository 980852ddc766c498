"""A scoring forward is read out when the next one has been issued; in the meantime it keeps no tensor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from test_capture_waiting import Blocks, batches, same, watching

from zkl_debug.capture import batch
from zkl_debug.capture.api import Capture
from zkl_debug.capture.rows import FrameRows, Sketch, padded_rows
from zkl_debug.schema import Phase
from zkl_debug.store.reader import open_capture

AFTER = "logprobs/log_softmax:out.0"


def forward(model: Blocks, capture: Capture, tokens: np.ndarray, after: bool = True) -> torch.Tensor:
    def rows() -> FrameRows:
        return padded_rows(tokens, samples=[0, 1], lengths=[5, 3])

    capture.next_rows(Sketch(Phase.SCORE, -1, 8, rows))
    out: torch.Tensor = model(torch.from_numpy(tokens)) * 2
    if after:
        capture.record(AFTER, out, layout="sb")
    return out


@pytest.mark.parametrize("large", [False, True])
def test_a_frame_is_finished_in_the_forward_behind_it(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each is worth a read-out of its own; what is captured is the same."""
    if large:
        monkeypatch.setattr(batch, "CHUNK_ROWS", 16)
    steps = batches(12)
    for folder, options in (("a", {"at_once": True}), ("b", {})):
        model = Blocks()
        capture = watching(tmp_path / folder, model, **options)
        seen: list[tuple[int, bool]] = []
        hook = model.layers[0].register_forward_hook(
            lambda *_, c=capture, s=seen: s.append((c.session.frames_written, c.session._ended is not None))
        )
        for number, tokens in enumerate(steps):
            forward(model, capture, tokens)
            if number == 6:
                capture.session.flush()
                assert capture.session.frames_written == 7
        hook.remove()
        capture.__exit__(None, None, None)
        put_aside = [number for number, (_, aside) in enumerate(seen) if aside]
        if folder == "a":
            assert not put_aside
        elif large:
            assert put_aside == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11]
            assert [written for written, aside in seen if aside] == [number - 1 for number in put_aside]
    assert same(tmp_path / "a", tmp_path / "b")
    with open_capture(tmp_path / "a") as a, open_capture(tmp_path / "b") as b:
        assert np.array_equal(a.frames, b.frames)
        assert np.array_equal(a.rows, b.rows)


def test_a_frame_that_was_put_aside_keeps_no_tensor_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "CHUNK_ROWS", 16)
    model = Blocks()
    capture = watching(tmp_path / "c", model)
    steps = batches(8)
    for tokens in steps[:-1]:
        last = weakref.ref(forward(model, capture, tokens))
    alive: list[bool] = []

    def look(*_: object) -> None:
        gc.collect()
        alive.append(last() is not None)

    model.layers[0].register_forward_pre_hook(look)
    forward(model, capture, steps[-1])
    assert alive == [False]
    capture.__exit__(None, None, None)


@pytest.mark.parametrize("ends", ["event", "set_step", "flush", "exit", "error"])
def test_whatever_ends_frames_ends_one_that_was_put_aside(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From within the forward behind it, too."""
    monkeypatch.setattr(batch, "CHUNK_ROWS", 16)
    model, steps = Blocks(), batches(6)
    capture = watching(tmp_path / "c", model)
    for tokens in steps[:4]:
        forward(model, capture, tokens)
    acts: dict[str, Callable[[], object]] = {
        "event": lambda: capture.event("in the middle", {}),
        "set_step": lambda: capture.set_step(3),
        "flush": lambda: capture.session.flush(),
        "exit": lambda: capture.__exit__(None, None, None),
        "error": lambda: capture.session.fail("here", ValueError("no")),
    }

    def act(*_: object) -> None:
        handle.remove()
        assert capture.session._ended is not None
        acts[ends]()

    handle = model.layers[1].register_forward_pre_hook(act)
    forward(model, capture, steps[4], after=False)
    if ends != "exit":
        capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as found:
        whole = 4 if ends != "error" else 3
        assert len(found.frames) == whole + (ends != "error")
        assert len(found.sites[AFTER].digest) == 8 * whole


def test_an_interrupt_that_is_survived_loses_no_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "CHUNK_ROWS", 16)
    model, steps = Blocks(), batches(6)
    capture = watching(tmp_path / "c", model)
    for tokens in steps[:4]:
        forward(model, capture, tokens)
    check = capture.session.read_out.check

    def interrupt() -> None:
        monkeypatch.setattr(capture.session.read_out, "check", check)
        raise KeyboardInterrupt

    monkeypatch.setattr(capture.session.read_out, "check", interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, capture, steps[4])
    forward(model, capture, steps[5])
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as found:
        assert len(found.frames) == 6
        assert len(found.sites["layers.0:in"].digest) == 8 * 6


def test_what_is_copied_later_was_made_on_the_stream_of_its_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another is current by then, that waits first."""
    monkeypatch.setattr(batch, "CHUNK_ROWS", 16)
    model, steps = Blocks(), batches(6)
    capture = watching(tmp_path / "c", model)
    kernels = capture.session.kernels
    followed: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(kernels, "follow", lambda stream: followed.append((capture.session.frames_written, stream)))
    for tokens in steps[:5]:
        forward(model, capture, tokens)
    assert not followed
    model.norm.register_forward_hook(lambda *_: setattr(kernels, "current", (0, 1)))
    forward(model, capture, steps[5])
    assert (4, (0, 0)) in followed, "before the fifth frame is read out"
    capture.__exit__(None, None, None)
