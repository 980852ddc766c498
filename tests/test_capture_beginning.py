"""A decode step that goes like the one before it: its frame is opened when the first graph has been launched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from graph_fakes import WIDTH, FakeExecutable, FakeGraph, FakeKernels, Layer, digests, rows_of, warmup
from torch import nn

from zkl_debug.capture import postponed
from zkl_debug.capture.api import Capture
from zkl_debug.capture.graphs import GraphWatch
from zkl_debug.capture.rows import FrameRows, Sketch
from zkl_debug.capture.twins import END, RECHECK
from zkl_debug.digest import digest_array
from zkl_debug.schema import Phase
from zkl_debug.store.reader import open_capture


class Kernels(FakeKernels):
    """Token ids are digested on the device, too."""

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype in (torch.float32, torch.int64)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(100 * WIDTH, dtype=torch.float32).view(100, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids.T]


class Fronted(nn.Module):
    """A table of token vectors before the graph of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = nn.ModuleList([Layer(2.0, torch.zeros(64, WIDTH))])
        self.static = torch.zeros(4, 1, WIDTH)
        self.graph: FakeGraph | None = None
        self.before: Callable[[torch.Tensor], Any] = lambda x: None  # noqa: ARG005

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        self.before(x)
        self.static.copy_(x)
        if self.graph is None:
            self.graph = FakeGraph()
            self.graph.capture_begin()
            self.layers[0](self.static)
            self.graph.capture_end()
        self.graph.replay()
        return cast("torch.Tensor", cast("Any", self.layers[0]).buffer[:4].view(4, 1, WIDTH))


_FLUSHED = 18
STEPS = [[1 + i % 90, 2 + i % 7, 3, 4 + i % 50] for i in range(2 * RECHECK)]


def digest_of(tokens: list[int]) -> Any:
    """Digests of the vectors of tokens."""
    return digest_array(Embedding().table[tokens].numpy())


class Program:
    """Decodes with a :class:`Fronted` model under a capture; tells in which steps the frame was opened late."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.model = Fronted()
        self.capture = Capture(self.model, folder, "gen", **options)
        self.capture.__enter__()
        self.capture.session.kernels = kernels = Kernels()
        self.capture.watch_graphs(GraphWatch(self.capture.session, kernels, FakeGraph))
        self.capture.next_rows(warmup())
        self.model(torch.zeros(1, 4, dtype=torch.int64))
        self.late: list[int] = []
        self.count = 0
        launch = FakeExecutable.launch

        def launched(executable: FakeExecutable) -> None:
            if self.capture.session.beginning is not None:
                self.late.append(self.count)
            launch(executable)

        monkeypatch.setattr(FakeExecutable, "launch", launched)

    def step(self, tokens: list[int]) -> None:
        def rows() -> FrameRows:
            return rows_of(tokens, 4)

        self.capture.next_rows(Sketch(Phase.DECODE, 4, len(tokens), rows))
        self.model(torch.tensor([[*tokens, *[0] * (4 - len(tokens))]]))
        if self.count < _FLUSHED:  # so that what is compared is known soon; no forward follows on such a frame
            self.capture.session.flush()
        self.count += 1

    def end(self) -> None:
        self.capture.__exit__(None, None, None)


def warmed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program whose frames are opened late by now."""
    program = Program(folder, monkeypatch)
    while program.count < _FLUSHED + 4:
        program.step(STEPS[program.count])
    assert program.late
    return program


def test_frames_are_opened_late_except_in_rechecks_and_hold_what_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, options in (("at_once", {"at_once": True}), ("late", {})):
        program = Program(tmp_path / folder, monkeypatch, **options)
        for tokens in STEPS:
            program.step(tokens)
        program.end()
        if folder == "at_once":
            assert not program.late
    first = program.late[0]
    assert program.late == [i for i in range(first, len(STEPS)) if i % RECHECK]
    want, got = digests(tmp_path / "at_once"), digests(tmp_path / "late")
    assert {"inputs/token_ids:in.0", "embedding:out"} <= set(want)
    assert set(want) == set(got)
    assert [name for name in want if not np.array_equal(want[name], got[name])] == []
    with open_capture(tmp_path / "at_once") as a, open_capture(tmp_path / "late") as b:
        assert np.array_equal(a.frames, b.frames)
        assert np.array_equal(a.rows, b.rows)


@pytest.mark.parametrize("what", ["rows", "event", "step", "stream"])
def test_a_forward_that_goes_otherwise_is_opened_at_once(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = warmed(tmp_path / "c", monkeypatch)
    tokens, before = STEPS[program.count], len(program.late)
    if what == "event":
        program.capture.event("weights moved", {})
    elif what == "step":
        program.capture.set_step(1)
    elif what == "stream":
        program.capture.session.kernels.current = (0, 1)  # type: ignore[attr-defined]
    program.step(tokens[:3] if what == "rows" else tokens)
    assert len(program.late) == before
    program.end()
    want = np.concatenate([*(digest_of(some) for some in STEPS[:22]), digest_of(tokens)[: 3 if what == "rows" else 4]])
    assert np.array_equal(digests(tmp_path / "c")["embedding:out"], want)


@pytest.mark.parametrize("unseen", [False, True])
def test_a_forward_that_broke_off_or_was_not_seen_is_no_hindrance(
    unseen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What began with it is in a frame of its own, as far as it came."""
    program = warmed(tmp_path / "c", monkeypatch)
    session, frames = program.capture.session, program.capture.session._next_frame
    if unseen:
        session.enabled = False
        program.step(STEPS[22])
        session.enabled = True
    else:
        with monkeypatch.context() as patched:
            patched.setattr(program.model, "before", lambda _x: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                program.step(STEPS[22])
    assert session._next_frame == frames + (not unseen)
    program.step(STEPS[23])
    program.end()
    seen = [*STEPS[:22], STEPS[23]]
    got = digests(tmp_path / "c")
    assert np.array_equal(got["layers.0:in"], np.concatenate([digest_of(some) for some in seen]))
    begun = seen if unseen else STEPS[:24]
    assert np.array_equal(got["embedding:out"], np.concatenate([digest_of(some) for some in begun]))


def test_a_site_that_may_not_wait_opens_the_frame_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read when it is passed, as what is written over it then must not be what is read."""
    program = warmed(tmp_path / "c", monkeypatch)
    session = program.capture.session
    frame = session.frame
    assert frame is not None
    session.twins.refuse(frame.kind, "embedding:out", END)  # also when the forward before has ended already
    before = len(program.late)
    program.model.before = lambda x: x.mul_(0)
    tokens = STEPS[program.count]
    program.step(tokens)
    assert len(program.late) == before, "opened before the launch"
    program.end()
    got = digests(tmp_path / "c")["embedding:out"][-4:]
    again = Program(tmp_path / "d", monkeypatch, at_once=True)
    again.step(tokens)
    again.end()
    assert np.array_equal(got, digests(tmp_path / "d")["embedding:out"])


def test_too_much_behind_a_forward_and_a_further_occurrence_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From there on no site of such a frame waits: neither does the first of two that come then."""
    program = warmed(tmp_path / "c", monkeypatch)
    for number in range(postponed.MOST + 1):
        program.capture.record(f"behind{number}:out", torch.zeros(4, WIDTH))
    before, tokens = len(program.late), STEPS[program.count]
    monkeypatch.setattr(program.model, "before", lambda x: program.capture.record("embedding:out", x + 1))
    program.step(tokens)
    assert len(program.late) == before
    program.end()
    got = digests(tmp_path / "c")
    assert np.array_equal(got["embedding:out"][-4:], digest_of(tokens))
    assert np.array_equal(got["embedding#1:out"], digest_array(Embedding().table[tokens].numpy() + 1))


def test_a_launch_that_is_refused_is_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = warmed(tmp_path / "c", monkeypatch)

    def refuse(_executable: FakeExecutable) -> None:
        raise OSError("CUDA error 1")

    with monkeypatch.context() as patched:
        patched.setattr(FakeExecutable, "launch", refuse)
        program.step(STEPS[program.count])
    program.end()
    assert program.capture.session.summary()["graphs"]["light_refused"] == "CUDA error 1"
    got = digests(tmp_path / "c")
    assert len(got["layers.0:out"]) == len(got["embedding:out"]) == 4 * program.count


def test_a_probe_that_fails_when_it_opens_a_frame_leaves_the_program_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = warmed(tmp_path / "c", monkeypatch)

    def fail(_rows: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(program.capture.session, "begin_frame", fail)
    program.step(STEPS[program.count])
    program.step(STEPS[program.count])
    assert program.capture.session.errors == ["model:in: RuntimeError: no more"]
    assert "the program goes on" in capsys.readouterr().err
    program.end()


def test_an_interrupt_that_is_survived_loses_no_frame_that_was_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = warmed(tmp_path / "c", monkeypatch)
    read_out = program.capture.session.read_out
    with monkeypatch.context() as patched:

        def interrupt() -> None:
            patched.undo()
            raise KeyboardInterrupt

        patched.setattr(read_out, "check", interrupt)
        with pytest.raises(KeyboardInterrupt):
            program.step(STEPS[program.count])
    broken_off, program.count = program.count, program.count + 1
    program.step(STEPS[program.count])
    program.end()
    got = digests(tmp_path / "c")["embedding:out"]
    kept = [*STEPS[:broken_off], *STEPS[broken_off + 1 : program.count]]
    assert np.array_equal(got, np.concatenate([digest_of(some) for some in kept]))


def test_what_is_copied_later_waits_for_the_stream_it_was_made_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another is current by then, and nothing else had to be read."""
    program = warmed(tmp_path / "c", monkeypatch)
    session = program.capture.session
    followed: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(session.kernels, "follow", lambda stream: followed.append((session.frames_written, stream)))
    monkeypatch.setattr(session.kernels, "lead", lambda _stream: None)
    program.step(STEPS[program.count])
    assert not followed
    last = session.frame
    assert last is not None
    assert not last.waiting
    written = session.frames_written
    program.model.before = lambda _x: setattr(session.kernels, "current", (0, 1))
    program.step(STEPS[program.count])
    assert followed[0] == (written, (0, 0)), "before that frame is read out"
    program.end()
