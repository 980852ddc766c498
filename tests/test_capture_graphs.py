"""Capture inside graphs, with a stand-in for CUDA graphs that records and replays on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_fakes import (
    WIDTH,
    FakeGraph,
    FakeKernels,
    Model,
    call,
    digests,
    recorded_model,
    rows_of,
    warmup,
    watched,
)

from zkl_debug.capture.api import Capture
from zkl_debug.digest import digest_array
from zkl_debug.store.reader import open_capture


@pytest.mark.parametrize("level", ["digest", "payload"])
def test_replays_give_what_eager_frames_give_padding_dropped_and_recording_not_counted(
    tmp_path: Path, level: str
) -> None:
    batches = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
    model = Model()
    capture = watched(model, tmp_path / "eager", level=level)
    for tokens in batches:
        call(model, capture, tokens, graph=False)
    capture.__exit__(None, None, None)

    model = Model()
    capture = watched(model, tmp_path / "graph", level=level)
    capture.next_rows(warmup())
    model.use_graph = True
    model(torch.zeros(1, 4, dtype=torch.int64))  # the engine records its graphs before it serves
    for tokens in batches:
        call(model, capture, tokens, graph=True)
    capture.__exit__(None, None, None)

    eager, graphed = digests(tmp_path / "eager"), digests(tmp_path / "graph")
    assert set(eager) == set(graphed)
    assert len(graphed) == 5  # token ids, and in and out of two layers
    for name, digest in eager.items():
        assert digest.shape == (9, 2)
        assert np.array_equal(digest, graphed[name]), name
    with open_capture(tmp_path / "graph") as found:
        assert [int(f) for f in found.frames["graph"]] == [4, 4, 4]
        facts = found.manifest["graphs"]
        assert (facts["recorded"], facts["replays"], facts["replays_out_of_reach"]) == (1, 3, 0)
        assert facts["only_eager"] == {}
        if level == "payload":
            values = found.sites["layers.1:out"].payload(slice(0, 3))
            assert np.array_equal(values.view(np.float32), model.table[[5, 6, 7]].numpy() * 6)
    # The buffer all layers share holds only the last layer's values; the digests are those at the time of each kernel.
    assert np.array_equal(graphed["layers.0:out"][:3], digest_array(model.table[[5, 6, 7]].numpy() * 2))
    assert np.array_equal(graphed["layers.1:out"][:3], digest_array(model.table[[5, 6, 7]].numpy() * 6))


def test_a_site_is_read_once_only_while_nothing_was_recorded_in_between(tmp_path: Path) -> None:
    model = Model()
    capture = recorded_model(model, tmp_path / "c")
    watch = capture.session.graphs
    assert watch is not None
    call(model, capture, [5, 6], graph=True)
    capture.session.end_frame()
    starts = {s.name: s.start for reading in watch._readings.values() for s in reading.sites}
    capture.__exit__(None, None, None)
    # The two layers write one buffer: out of layer 0 is in of layer 1, read once; out of layer 1 is the same memory.
    assert starts["layers.0:out"] == starts["layers.1:in"]
    assert len({starts["layers.0:in"], starts["layers.0:out"], starts["layers.1:out"]}) == 3


def test_sites_of_one_hook_go_out_in_one_launch_and_hold_what_launches_of_their_own_would(tmp_path: Path) -> None:
    class Counting(FakeKernels):
        def __init__(self) -> None:
            super().__init__()
            self.launches: list[int] = []

        def issue(self, jobs: list[Callable[[], None]]) -> int:
            self.launches.append(len(jobs))
            return super().issue(jobs)

    model = Model()
    with Capture(model, tmp_path / "c", "gen") as capture:
        session = capture.session
        session.kernels = kernels = Counting()
        capture.next_rows(rows_of([1, 2, 3, 4], -1))
        model(torch.tensor([[1, 2, 3, 4]]))
        kernels.launches.clear()
        x = torch.arange(4.0 * WIDTH).view(4, 1, WIDTH)
        want = digest_array(x[:, 0].numpy())
        with session.guarded("outer"):
            session.record("a:in.0", x)
            with session.guarded("inner"):
                session.record("b:in.0", x + 1)
            assert kernels.launches == []
            session.record("c:in.0", x + 2)
        assert kernels.launches == [3]
        session.record("d:in.0", x + 3)
        assert kernels.launches == [3, 1]
        # Outside a hook the program writes on: what was asked for has been read.
        with session.guarded("e"):
            session.record("e:in.0", x)
        x.zero_()
        session.flush()
    found = digests(tmp_path / "c")
    assert np.array_equal(found["a:in.0"], want)
    assert np.array_equal(found["e:in.0"], want)
    assert len({found[f"{name}:in.0"].tobytes() for name in "abcd"}) == 4


def test_two_replays_in_one_frame_are_two_occurrences(tmp_path: Path) -> None:
    model = Model()
    capture = recorded_model(model, tmp_path / "c")
    assert model.graph is not None
    call(model, capture, [5, 6], graph=True)
    model.static.copy_(model.static + 1)
    model.graph.replay()
    capture.__exit__(None, None, None)
    found = digests(tmp_path / "c")
    assert np.array_equal(found["layers.1:out"], digest_array(model.table[[5, 6]].numpy() * 6))
    assert np.array_equal(found["layers.1#1:out"], digest_array((model.table[[5, 6]].numpy() + 1) * 6))


def test_a_graph_of_before_is_left_alone_and_said_to_be_out_of_reach(tmp_path: Path) -> None:
    model = Model()
    call(model, None, [5, 6], graph=True)
    assert model.graph is not None
    steps = list(model.graph.steps)
    capture = watched(model, tmp_path / "c")
    call(model, capture, [5, 6], graph=True)
    call(model, capture, [5, 6], graph=False)
    capture.__exit__(None, None, None)
    assert model.graph.steps == steps
    with open_capture(tmp_path / "c") as found:
        facts = found.manifest["graphs"]
    assert (facts["recorded"], facts["replays_out_of_reach"]) == (0, 1)
    assert set(facts["only_eager"]) == {f"layers.{i}:{port}" for i in (0, 1) for port in ("in", "out")}


def test_nothing_of_the_probe_stays_on_the_graph_class(tmp_path: Path) -> None:
    before = dict(vars(FakeGraph))
    capture = watched(Model(), tmp_path / "c")
    assert FakeGraph.replay is not before["replay"]
    capture.__exit__(None, None, None)
    assert dict(vars(FakeGraph)) == before


def test_a_recorder_that_reads_the_shared_buffer_after_the_replay_is_refused(tmp_path: Path) -> None:
    """The trap this module avoids: every layer's tensor views one buffer, read once the whole graph has run."""
    from zkl_debug.diff import diff_captures

    for side in ("a", "b"):
        model = Model()
        capture = watched(model, tmp_path / side)
        capture.next_rows(warmup())
        model.use_graph = True
        model(torch.zeros(1, 4, dtype=torch.int64))
        out = call(model, capture, [5, 6, 7, 8], graph=True)
        for name in ("layers.0.linear_proj", "layers.1.linear_proj"):
            capture.record(f"{name}:out", out)
        capture.__exit__(None, None, None)
    verdict = diff_captures(tmp_path / "a", tmp_path / "b")
    assert verdict.exit_code == 3
    assert verdict.to_json()["refusal"]["code"] == "one-buffer"
