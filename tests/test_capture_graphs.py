"""Capture inside graphs, with a stand-in for CUDA graphs that records and replays on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from zkl_debug.capture import postponed
from zkl_debug.capture.api import Capture
from zkl_debug.capture.device import Again, Kernels
from zkl_debug.capture.graphs import GraphWatch
from zkl_debug.capture.late import AUDITED_ROWS, ends_part
from zkl_debug.capture.rows import FrameRows, make_rows
from zkl_debug.capture.twins import RECHECK
from zkl_debug.digest import digest_array, prefix_digests
from zkl_debug.digest_torch import digest_tensor
from zkl_debug.lanes import LaneView
from zkl_debug.schema import Phase
from zkl_debug.store.reader import open_capture

WIDTH = 8


class FakeGraph:
    """Records the operations of :class:`Layer` and of the probe as closures over fixed buffers, and replays them."""

    current: FakeGraph | None = None

    def __init__(self, keep_graph: bool = False) -> None:
        self.steps: list[Callable[[], None]] = []
        self.kept = keep_graph
        self.made = 0

    def raw_cuda_graph(self) -> int:
        return id(self)

    def instantiate(self) -> None:
        assert self.kept, "the template is gone"
        self.made += 1

    def capture_begin(self) -> None:
        FakeGraph.current = self

    def capture_end(self) -> None:
        FakeGraph.current = None
        self.made += not self.kept

    def replay(self) -> None:
        for step in self.steps:
            step()


class FakeExecutable:
    """Some of the steps of a graph."""

    launches = 0
    ready = True

    def __init__(self, steps: list[Callable[[], None]]) -> None:
        self.steps = steps

    def launch(self) -> None:
        FakeExecutable.launches += 1
        for step in self.steps:
            step()


def _copy(to: torch.Tensor, value: torch.Tensor) -> None:
    to.copy_(value)


class FakeKernels(Kernels):
    """Digests on the host; inside a recording they become steps of the graph."""

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point()

    def capturing(self) -> bool:
        return FakeGraph.current is not None

    def slots(self, rows: int) -> torch.Tensor:
        return torch.zeros((rows, 2), dtype=torch.int64)

    def moment(self) -> tuple[int, ...] | None:
        return None if FakeGraph.current is None else (len(FakeGraph.current.steps),)

    def edits(self, graph_class: Any) -> bool:  # noqa: ARG002
        return True

    def can_wait(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        return True

    def without(self, graph: FakeGraph, nodes: list[int]) -> Any:
        return FakeExecutable([step for at, step in enumerate(graph.steps, 1) if at not in nodes]), set(nodes)

    def drawn(self, generators: Sequence[Any]) -> tuple[int, ...]:
        return tuple(generators)

    def ready(self, tensor: torch.Tensor, rows: int) -> bool:  # noqa: ARG002
        return True

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.clone()
        if FakeGraph.current is not None:
            FakeGraph.current.steps.append(lambda: _copy(kept, tensor))
        return kept

    def job(
        self, tensor: torch.Tensor, rows: int, out: torch.Tensor, start: int, dest: torch.Tensor | None, *, clear: bool
    ) -> Callable[[], None]:
        if clear:
            out[start : start + rows].zero_()

        def step() -> None:
            found = torch.from_numpy(digest_tensor(tensor, rows).view(np.int64))
            at = torch.arange(rows) if dest is None else dest
            out[start + at[at >= 0]] = found[at >= 0]

        return step

    def issue(self, jobs: list[Callable[[], None]]) -> int:
        if FakeGraph.current is not None:
            FakeGraph.current.steps.append(lambda: self.run(jobs))
        else:
            self.run(jobs)
        return 1

    def run(self, jobs: list[Callable[[], None]]) -> None:
        """What one launch does."""
        for job in jobs:
            job()

    def again(self, tensor: torch.Tensor, rows: int) -> Again:
        def issue(like: torch.Tensor, out: torch.Tensor, start: int) -> bool:
            return self.digest(
                like.reshape(-1)[: tensor.numel()].reshape(tensor.shape), rows, out, start, None, clear=False
            )

        return Again(issue, issue)

    def several(self, views: Sequence[LaneView]) -> Callable[[Sequence[int], int], bool]:
        def launch(addresses: Sequence[int], out: int) -> bool:
            at = out
            for view, address in zip(views, addresses, strict=True):
                raw = (ctypes.c_int32 * (view.rows * view.lanes)).from_address(address)
                digests = digest_array(np.frombuffer(raw, np.int32).reshape(view.rows, view.lanes))
                ctypes.memmove(at, digests.tobytes(), digests.nbytes)
                at += digests.nbytes
            self.issue([lambda: None] * len(views))
            return True

        return launch


class Layer(nn.Module):
    """x -> x * w, always into one buffer that all layers of a model share, as memory of a graph pool is."""

    def __init__(self, weight: float, buffer: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.buffer = weight, buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.buffer[: x.shape[0] * x.shape[1]].view(x.shape)

        def step() -> None:
            out.copy_(x * self.weight)

        if FakeGraph.current is not None:
            FakeGraph.current.steps.append(step)
        step()
        return out


class Model(nn.Module):
    """Two layers over a table of token vectors; ``graph`` replays what was recorded for the call's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = buffer = torch.zeros(64, WIDTH)
        self.layers = nn.ModuleList([Layer(2.0, buffer), Layer(3.0, buffer)])
        self.table = torch.arange(100 * WIDTH, dtype=torch.float32).view(100, WIDTH)
        self.static = torch.zeros(4, 1, WIDTH)
        self.graph: FakeGraph | None = None
        self.use_graph = False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table[input_ids.T]
        if not self.use_graph:
            for layer in self.layers:
                x = layer(x)
            return x
        self.static.copy_(x)
        if self.graph is None:
            self.graph = graph = FakeGraph()
            graph.capture_begin()
            y = self.static
            for layer in self.layers:
                y = layer(y)
            graph.capture_end()
        self.graph.replay()
        return self.buffer[:4].view(4, 1, WIDTH)


def _rows(tokens: list[int], graph: int) -> FrameRows:
    ids = np.array(tokens, np.int32)
    n = len(ids)
    rows = make_rows(np.zeros(n, np.int64), np.arange(n), ids, prefix_digests(ids), int(Phase.DECODE))
    return FrameRows((4, 1), rows, np.arange(n), Phase.DECODE, n, 1, graph=graph)


def _call(model: Model, capture: Capture | None, tokens: list[int], graph: bool) -> torch.Tensor:
    if capture is not None:
        capture.next_rows(_rows(tokens, 4 if graph else -1))
    model.use_graph = graph
    padded = torch.tensor([*tokens, *[0] * (4 - len(tokens))])
    out: torch.Tensor = model(padded[None])
    return out[: len(tokens)].clone()


def _watched(model: Model, folder: Path, **options: Any) -> Capture:
    capture = Capture(model, folder, "gen", **options)
    capture.__enter__()
    capture.session.kernels = FakeKernels()
    capture.watch_graphs(GraphWatch(capture.session, capture.session.kernels, FakeGraph))
    return capture


def _digests(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    with open_capture(folder) as found:
        assert found.manifest["probe"] == {"ok": True, "errors": []}
        return {name: np.array(site.digest) for name, site in found.sites.items()}


@pytest.mark.parametrize("level", ["digest", "payload"])
def test_replays_give_what_eager_frames_give_padding_dropped_and_recording_not_counted(
    tmp_path: Path, level: str
) -> None:
    batches = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
    model = Model()
    capture = _watched(model, tmp_path / "eager", level=level)
    for tokens in batches:
        _call(model, capture, tokens, graph=False)
    capture.__exit__(None, None, None)

    model = Model()
    capture = _watched(model, tmp_path / "graph", level=level)
    capture.next_rows(_warmup())
    model.use_graph = True
    model(torch.zeros(1, 4, dtype=torch.int64))  # the engine records its graphs before it serves
    for tokens in batches:
        _call(model, capture, tokens, graph=True)
    capture.__exit__(None, None, None)

    eager, graphed = _digests(tmp_path / "eager"), _digests(tmp_path / "graph")
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


def _warmup() -> FrameRows:
    from zkl_debug.capture.rows import warmup_rows

    return warmup_rows((4, 1))


def test_a_site_is_read_once_only_while_nothing_was_recorded_in_between(tmp_path: Path) -> None:
    model = Model()
    capture = _watched(model, tmp_path / "c")
    capture.next_rows(_warmup())
    model.use_graph = True
    model(torch.zeros(1, 4, dtype=torch.int64))
    watch = capture.session.graphs
    assert watch is not None
    _call(model, capture, [5, 6], graph=True)
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
        capture.next_rows(_rows([1, 2, 3, 4], -1))
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
    found = _digests(tmp_path / "c")
    assert np.array_equal(found["a:in.0"], want)
    assert np.array_equal(found["e:in.0"], want)
    assert len({found[f"{name}:in.0"].tobytes() for name in "abcd"}) == 4


def _recorded(model: Model, folder: Path) -> Capture:
    capture = _watched(model, folder)
    capture.next_rows(_warmup())
    model.use_graph = True
    model(torch.zeros(1, 4, dtype=torch.int64))
    return capture


def _steps(count: int) -> list[list[int]]:
    return [[1 + i % 90, 2 + i % 7, 3, 4 + i % 50] for i in range(count)]


def test_launches_that_second_readings_stand_for_are_left_out_and_the_digests_stay(tmp_path: Path) -> None:
    model, steps = Model(), _steps(70)
    FakeExecutable.launches = 0
    capture = _recorded(model, tmp_path / "graph")
    assert model.graph is not None
    recorded = len(model.graph.steps)
    for tokens in steps:
        _call(model, capture, tokens, graph=True)
        capture.session.flush()
    capture.__exit__(None, None, None)
    assert (model.graph.made, len(model.graph.steps)) == (1, recorded)  # the program's graph is as it was
    settled = AUDITED_ROWS // 4  # after so many frames, and one that notices
    assert FakeExecutable.launches == len([i for i in range(settled + 1, len(steps)) if i % RECHECK])
    eager = Model()
    capture = _watched(eager, tmp_path / "eager")
    for tokens in steps:
        _call(eager, capture, tokens, graph=False)
    capture.__exit__(None, None, None)
    want, found = _digests(tmp_path / "eager"), _digests(tmp_path / "graph")
    assert set(want) == set(found)
    assert all(np.array_equal(want[name], found[name]) for name in want)
    with open_capture(tmp_path / "graph") as opened:
        facts = opened.manifest["graphs"]
    # Out of layer 0 is the buffer that layer 1 writes over: it is still read when it is there. The other two wait.
    assert (facts["launches_left_out"], facts["read_at_once"]) == (2, 1)


def test_a_graph_of_the_whole_model_is_replayed_lightly_too(tmp_path: Path) -> None:
    """No hook runs before its replay: the frame is opened by the replay itself."""
    model, steps = Model(), _steps(60)
    capture = _recorded(model, tmp_path / "c")
    assert model.graph is not None
    FakeExecutable.launches = 0
    for tokens in steps:
        capture.next_rows(_rows(tokens, 4))
        model.static.copy_(model.table[torch.tensor(tokens)][:, None])
        model.graph.replay()
        if tokens[0] % 4 == 0:
            capture.session.flush()
    capture.__exit__(None, None, None)
    assert FakeExecutable.launches > 30
    got = _digests(tmp_path / "c")["layers.1:out"].reshape(len(steps), 4, 2)
    assert np.array_equal(got, np.stack([digest_array(model.table[tokens].numpy() * 6) for tokens in steps]))


def test_at_once_means_at_once(tmp_path: Path) -> None:
    model = Model()
    capture = _watched(model, tmp_path / "c", at_once=True)
    capture.next_rows(_warmup())
    model.use_graph = True
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert model.graph is not None
    assert not model.graph.kept
    for tokens in _steps(60):
        _call(model, capture, tokens, graph=True)
        capture.session.flush()
    capture.__exit__(None, None, None)
    assert model.graph.made == 1
    twins = capture.session.twins
    assert not any(twins.trusted(*pair[:1], 1, *pair[1:]) or twins.until_end(pair[0], 1) for pair in twins.known)
    with open_capture(tmp_path / "c") as opened:
        assert opened.manifest["graphs"]["launches_left_out"] == 0


def test_a_few_replays_are_not_enough_to_take_anything_out(tmp_path: Path) -> None:
    model = Model()
    capture = _recorded(model, tmp_path / "c")
    for tokens in _steps(AUDITED_ROWS // 4 - 1):
        _call(model, capture, tokens, graph=True)
        capture.session.flush()
    _call(model, capture, [1, 2, 3, 4], graph=True)
    watch = capture.session.graphs
    assert watch is not None
    assert not watch._settled
    capture.__exit__(None, None, None)


def test_a_tensor_written_only_now_and_then_is_found_while_both_readings_are_compared(tmp_path: Path) -> None:
    """The buffer is written over when one token comes by, and left alone otherwise."""
    model = Model()
    capture = _recorded(model, tmp_path / "c")
    graph, late = model.graph, capture.session.graphs
    assert graph is not None
    assert late is not None
    first = next(i for i, step in enumerate(graph.steps) if step.__qualname__.startswith("Layer"))
    graph.steps.insert(first + 1, lambda: None)
    static = model.static
    graph.steps[first + 1] = lambda: _copy(static, static + 1) if static[0, 0, 0] == model.table[7, 0] else None
    for tokens in _steps(60):
        _call(model, capture, tokens, graph=True)
        capture.session.flush()
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as opened:
        assert opened.manifest["graphs"]["read_at_once"] == 2


def test_readings_that_part_after_one_was_left_out_are_an_error_and_both_are_made_again(tmp_path: Path) -> None:
    """The buffer is written over when one token comes by, for the first time long after the readings were compared."""
    model = Model()
    capture = _recorded(model, tmp_path / "c")
    graph = model.graph
    assert graph is not None
    static, steps = model.static, _steps(100)
    steps[64][0] = 99
    first = next(i for i, step in enumerate(graph.steps) if step.__qualname__.startswith("Layer"))
    layer = graph.steps[first]

    def run_layer() -> None:
        layer()
        if static[0, 0, 0] == model.table[99, 0]:
            static.add_(1)

    graph.steps[first] = run_layer
    for tokens in steps:
        _call(model, capture, tokens, graph=True)
        capture.session.flush()
        if tokens is steps[64]:  # both readings were made, for its number is a multiple of RECHECK
            FakeExecutable.launches = 0
    assert FakeExecutable.launches == 0
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as opened:
        probe = opened.manifest["probe"]
        got = np.array(opened.sites["layers.0:in"].digest).reshape(len(steps), 4, 2)
    assert not probe["ok"]
    assert "layers.0:in" in probe["errors"][0]
    want = [digest_array(model.table[tokens].numpy()) for tokens in steps]
    assert np.array_equal(got, np.stack(want))


def test_a_graph_that_draws_random_numbers_is_replayed_as_it_is(tmp_path: Path) -> None:
    model, drawn = Model(), iter(range(1000))
    capture = _recorded(model, tmp_path / "c")
    capture.session.kernels.drawn = lambda generators: (len(generators), next(drawn))  # type: ignore[method-assign]
    FakeExecutable.launches = 0
    for tokens in _steps(40):
        _call(model, capture, tokens, graph=True)
        capture.session.flush()
    capture.__exit__(None, None, None)
    assert next(drawn) == 2  # asked once, before and after a replay
    assert FakeExecutable.launches == 0


@pytest.mark.parametrize(("owner", "name"), [(FakeExecutable, "launch"), (FakeKernels, "without")])
def test_a_lighter_graph_that_the_driver_refuses_is_done_without(
    owner: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("refused")

    monkeypatch.setattr(owner, name, refuse)
    model = Model()
    capture = _recorded(model, tmp_path / "c")
    for tokens in _steps(40):
        out = _call(model, capture, tokens, graph=True)
        assert torch.equal(out[:, 0], model.table[tokens] * 6)
        capture.session.flush()
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as opened:
        assert opened.manifest["probe"]["ok"]
        assert opened.manifest["graphs"]["light_refused"] == "refused"
        got = np.array(opened.sites["layers.0:in"].digest).reshape(40, 4, 2)
    assert np.array_equal(got, np.stack([digest_array(model.table[tokens].numpy()) for tokens in _steps(40)]))


def test_a_graph_whose_template_the_program_keeps_is_not_edited(tmp_path: Path) -> None:
    capture = _watched(Model(), tmp_path / "c")
    watch = capture.session.graphs
    assert watch is not None
    mine, other = FakeGraph(keep_graph=True), FakeGraph()
    assert (mine.kept, other.kept) == (True, True)
    for graph in (mine, other):
        graph.capture_begin()
        assert watch.recording is not None
        assert (watch.recording.late is None) == (graph is mine)
        graph.capture_end()
    assert (mine.made, other.made) == (0, 1)
    capture.__exit__(None, None, None)


def test_sites_outside_the_graphs_wait_for_the_end_of_the_forward_only_where_nothing_writes_over_them(
    tmp_path: Path,
) -> None:
    steps = _steps(70)
    counts = {}
    for name, bucket in (("plain", -1), ("waiting", 4)):
        model = Model()
        capture = _watched(model, tmp_path / name)
        launches: list[int] = []
        kernels = capture.session.kernels
        issue = kernels.issue
        kernels.issue = lambda jobs, launches=launches, issue=issue: (launches.append(len(jobs)), issue(jobs))[1]  # type: ignore[method-assign, misc]
        with torch.inference_mode():
            model.buffer, model.table = model.buffer.clone(), model.table.clone()
            for layer in model.layers:
                layer.buffer = model.buffer
            for tokens in steps:
                capture.next_rows(_rows(tokens, bucket))
                model(torch.tensor([tokens]))
                capture.session.flush()
        capture.__exit__(None, None, None)
        counts[name] = sum(launches)
        twins = capture.session.twins
        if bucket > 0:
            assert {pair[1] for pair in twins.known} >= {"layers.0:in", "layers.1:out"}
            assert {pair[1] for pair in twins.refuted} == {"layers.0:out", "layers.1:in"}
            # Of the sites that wait, those on the device: one launch a step.
            assert 30 < launches.count(2) < len(steps)
    # Each site once; and while readings are compared, and again now and then, twice.
    assert counts["plain"] < counts["waiting"] < 1.2 * counts["plain"]
    found = {name: _digests(tmp_path / name) for name in counts}
    assert set(found["plain"]) == set(found["waiting"])
    assert all(np.array_equal(digest, found["waiting"][site]) for site, digest in found["plain"].items())


@pytest.mark.parametrize(("most", "most_bytes"), [(1, 1 << 30), (32, 4 * WIDTH * 4 + 1)])
def test_steps_with_many_or_large_sites_outside_graphs_do_not_wait(
    most: int, most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postponed, "MOST", most)
    monkeypatch.setattr(postponed, "MOST_BYTES", most_bytes)
    model = Model()
    capture = _watched(model, tmp_path / "c")
    for tokens in _steps(40):
        capture.next_rows(_rows(tokens, 4))
        model(torch.tensor([tokens]))
        assert capture.session.frame is not None
        assert not capture.session.frame.waiting
        capture.session.flush()
    capture.__exit__(None, None, None)
    assert len(capture.session.postponed._too_many) == 1
    got = _digests(tmp_path / "c")
    for name, times in (("layers.0:in", 1), ("layers.0:out", 2), ("layers.1:in", 2), ("layers.1:out", 6)):
        want = [digest_array(model.table[tokens].numpy() * times) for tokens in _steps(40)]
        assert np.array_equal(got[name], np.concatenate(want)), name


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("decoder.layers.0.mlp", True),
        ("model.layers.11.self_attn", True),
        ("layers.0", False),
        ("layers.0.mlp.linear_fc1", False),
        ("decoder.layers.0.mlp.experts.local_experts.3", False),
        ("output_layer", False),
    ],
)
def test_parts_of_a_block(path: str, expected: bool) -> None:
    assert ends_part(path) == expected


def test_two_replays_in_one_frame_are_two_occurrences(tmp_path: Path) -> None:
    model = Model()
    capture = _watched(model, tmp_path / "c")
    capture.next_rows(_warmup())
    model.use_graph = True
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert model.graph is not None
    _call(model, capture, [5, 6], graph=True)
    model.static.copy_(model.static + 1)
    model.graph.replay()
    capture.__exit__(None, None, None)
    found = _digests(tmp_path / "c")
    assert np.array_equal(found["layers.1:out"], digest_array(model.table[[5, 6]].numpy() * 6))
    assert np.array_equal(found["layers.1#1:out"], digest_array((model.table[[5, 6]].numpy() + 1) * 6))


def test_a_graph_of_before_is_left_alone_and_said_to_be_out_of_reach(tmp_path: Path) -> None:
    model = Model()
    _call(model, None, [5, 6], graph=True)
    assert model.graph is not None
    steps = list(model.graph.steps)
    capture = _watched(model, tmp_path / "c")
    _call(model, capture, [5, 6], graph=True)
    _call(model, capture, [5, 6], graph=False)
    capture.__exit__(None, None, None)
    assert model.graph.steps == steps
    with open_capture(tmp_path / "c") as found:
        facts = found.manifest["graphs"]
    assert (facts["recorded"], facts["replays_out_of_reach"]) == (0, 1)
    assert set(facts["only_eager"]) == {f"layers.{i}:{port}" for i in (0, 1) for port in ("in", "out")}


def test_nothing_of_the_probe_stays_on_the_graph_class(tmp_path: Path) -> None:
    before = dict(vars(FakeGraph))
    capture = _watched(Model(), tmp_path / "c")
    assert FakeGraph.replay is not before["replay"]
    capture.__exit__(None, None, None)
    assert dict(vars(FakeGraph)) == before


def test_a_recorder_that_reads_the_shared_buffer_after_the_replay_is_refused(tmp_path: Path) -> None:
    """The trap this module avoids: every layer's tensor views one buffer, read once the whole graph has run."""
    from zkl_debug.diff import diff_captures

    for side in ("a", "b"):
        model = Model()
        capture = _watched(model, tmp_path / side)
        capture.next_rows(_warmup())
        model.use_graph = True
        model(torch.zeros(1, 4, dtype=torch.int64))
        out = _call(model, capture, [5, 6, 7, 8], graph=True)
        for name in ("layers.0.linear_proj", "layers.1.linear_proj"):
            capture.record(f"{name}:out", out)
        capture.__exit__(None, None, None)
    verdict = diff_captures(tmp_path / "a", tmp_path / "b")
    assert verdict.exit_code == 3
    assert verdict.to_json()["refusal"]["code"] == "one-buffer"
