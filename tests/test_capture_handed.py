"""What a graph reads at its end is left to the graph behind it, once that was seen to read the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from graph_fakes import WIDTH, FakeExecutable, FakeGraph, call, copy_to, digests, run, steps_of, warmup, watched
from torch import nn

from zkl_debug.capture.api import Capture
from zkl_debug.capture.late import AUDITED_ROWS
from zkl_debug.capture.twins import RECHECK
from zkl_debug.store.reader import open_capture

LAYERS = 3


class Times(nn.Module):
    """x -> x * w, into memory of its own."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight, self.buffer = weight, torch.zeros(4, 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.buffer
        run(lambda: copy_to(out, x * self.weight))
        return out


class Block(nn.Module):
    """x -> x + mlp(attn(x)), the sum in the memory of the mlp, as the residual add of inference does it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Times(2.0), Times(3.0)
        self.spoilt: torch.Tensor | None = None  # written over before anything else runs
        self.when: Callable[[], bool] = lambda: True

    def spoil(self) -> None:
        if self.spoilt is not None and self.when():
            self.spoilt.add_(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run(self.spoil)
        out = self.mlp(self.attn(x))
        run(lambda: copy_to(out, out + x))
        return cast("torch.Tensor", out)


class Layered(nn.Module):
    """Blocks that are recorded each into a graph of its own, whose input is the output of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.table = torch.arange(100 * WIDTH, dtype=torch.float32).view(100, WIDTH)
        self.static = torch.zeros(4, 1, WIDTH)
        self.graphs: list[FakeGraph] = []
        self.use_graph = False
        self.order = list(range(LAYERS))
        self.between: Callable[[int, torch.Tensor], Any] = lambda at, out: None  # noqa: ARG005

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table[input_ids.T]
        self.static.copy_(x)
        x = self.static
        if not self.use_graph:
            for index, layer in enumerate(self.layers):
                x = layer(x)
                self.between(index, x)
            return x
        if not self.graphs:
            for layer in self.layers:
                self.graphs.append(graph := FakeGraph())
                graph.capture_begin()
                x = layer(x)
                graph.capture_end()
                graph.replay()
            return x
        for index in self.order:
            self.graphs[index].replay()
            self.between(index, cast("Block", self.layers[index]).mlp.buffer)
        return cast("Block", self.layers[-1]).mlp.buffer


def recorded(folder: Path, model: Layered | None = None, in_a_row: bool = True) -> tuple[Layered, Capture]:
    model = model or Layered()
    capture = watched(cast("Any", model), folder)
    assert capture.session.graphs is not None
    capture.session.graphs.in_a_row = lambda: in_a_row
    capture.next_rows(warmup())
    model.use_graph = True
    model(torch.zeros(1, 4, dtype=torch.int64))
    return model, capture


def steps(model: Layered, capture: Capture, tokens: list[list[int]], graph: bool = True) -> None:
    for some in tokens:
        call(cast("Any", model), capture, some, graph=graph)
        capture.session.flush()


def same_digests(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Those of the capture ``graph``, which are found to be those of ``eager``."""
    want, found = digests(folder / "eager"), digests(folder / "graph")
    assert set(want) == set(found)
    assert {name for name in want if not np.array_equal(want[name], found[name])} == set()
    return found


def plans(model: Layered) -> list[Any]:
    return [graph._zkl_plan for graph in model.graphs]  # type: ignore[attr-defined]


def test_the_launch_at_the_end_of_a_graph_is_left_out_and_the_digests_stay(tmp_path: Path) -> None:
    tokens = steps_of(70)
    model, capture = recorded(tmp_path / "graph")
    steps(model, capture, tokens)
    lights = [plan.light for plan in plans(model)]
    capture.__exit__(None, None, None)
    assert [light.plan.needs is plan.late for light, plan in zip(lights, plans(model)[1:], strict=False)] == [True] * 2
    assert lights[-1].plan.needs is None  # nothing follows it
    # The first two keep the launches behind attn and mlp, the last one that of its end, too.
    kept = [len([s for s in light.executable.steps if "FakeKernels" in s.__qualname__]) for light in lights]
    assert kept == [2, 2, 3]
    eager = Layered()
    other = watched(cast("Any", eager), tmp_path / "eager")
    steps(eager, other, tokens, graph=False)
    other.__exit__(None, None, None)
    found = same_digests(tmp_path)
    assert len(np.unique(found["layers.0:out"], axis=0)) > 50


def test_memory_that_the_next_graph_writes_over_first_is_read_where_it_was(tmp_path: Path) -> None:
    model = Layered()
    second = cast("Block", model.layers[1])
    second.spoilt = cast("Block", model.layers[0]).mlp.buffer
    eager, tokens = Layered(), steps_of(60)
    cast("Block", eager.layers[1]).spoilt = cast("Block", eager.layers[0]).mlp.buffer
    model, capture = recorded(tmp_path / "graph", model)
    steps(model, capture, tokens)
    needs = [plan.light.plan.needs is not None for plan in plans(model)]
    capture.__exit__(None, None, None)
    assert needs == [False, True, False]
    other = watched(cast("Any", eager), tmp_path / "eager")
    steps(eager, other, tokens, graph=False)
    other.__exit__(None, None, None)
    same_digests(tmp_path)


def test_memory_written_over_later_on_is_an_error_that_names_the_site(tmp_path: Path) -> None:
    model, tokens = Layered(), steps_of(100)
    second, first = cast("Block", model.layers[1]), cast("Block", model.layers[0])
    tokens[2 * RECHECK][0] = 99
    second.spoilt = first.mlp.buffer
    second.when = lambda: bool(model.static[0, 0, 0] == model.table[99, 0])
    model, capture = recorded(tmp_path / "c", model)
    steps(model, capture, tokens)
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as opened:
        probe = opened.manifest["probe"]
    assert not probe["ok"]
    assert "layers.0:out" in probe["errors"][0]


@pytest.mark.parametrize("order", [[0, 2], [0, 2, 1], [1, 0, 2], [0, 1, 1, 2]])
def test_another_order_after_that_refuses_the_capture(tmp_path: Path, order: list[int]) -> None:
    model, capture = recorded(tmp_path / "c")
    steps(model, capture, steps_of(40))
    assert plans(model)[0].light.plan.needs is not None
    model.order = order
    steps(model, capture, steps_of(3))
    assert not capture.session.enabled
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as opened:
        probe = opened.manifest["probe"]
    assert not probe["ok"]
    assert "another order" in probe["errors"][0]
    assert "--at-once" in probe["errors"][0]


def test_another_order_before_that_leaves_the_launch_where_it_is(tmp_path: Path) -> None:
    model, capture = recorded(tmp_path / "c")
    model.order = [0, 2, 1]
    steps(model, capture, steps_of(2))
    model.order = [0, 1, 2]
    steps(model, capture, steps_of(AUDITED_ROWS))
    needs = [plan.light.plan.needs is not None for plan in plans(model)]
    capture.__exit__(None, None, None)
    assert needs == [False, False, False]
    with open_capture(tmp_path / "c") as opened:
        assert opened.manifest["probe"]["ok"]


def test_a_program_that_may_write_between_two_graphs_keeps_the_launch(tmp_path: Path) -> None:
    """It does so in a few steps only, long after the readings were compared, and in none of those that compare."""
    model, capture = recorded(tmp_path / "graph", in_a_row=False)
    eager = Layered()
    other = watched(cast("Any", eager), tmp_path / "eager", at_once=True)
    number = 0

    def between(at: int, out: torch.Tensor) -> None:
        if at == 0 and number in (45, 46, 50):
            out.add_(1)

    model.between = eager.between = between
    for number, some in enumerate(steps_of(60)):  # noqa: B007
        steps(model, capture, [some])
        steps(eager, other, [some], graph=False)
    assert all(plan.light is not None and plan.light.plan.needs is None for plan in plans(model))
    other.__exit__(None, None, None)
    capture.__exit__(None, None, None)
    same_digests(tmp_path)


def test_a_program_that_came_to_be_patched_before_it_mattered_keeps_the_launch(tmp_path: Path) -> None:
    model, capture = recorded(tmp_path / "c")
    assert capture.session.graphs is not None
    capture.session.graphs.in_a_row = lambda: False
    steps(model, capture, steps_of(40))
    assert all(plan.light is not None and plan.light.plan.needs is None for plan in plans(model))
    capture.__exit__(None, None, None)


def test_a_loop_over_layers_that_is_not_megatrons_own_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.transformer_block import TransformerBlock

    from zkl_debug.engines.cpu import cpu_backend
    from zkl_debug.engines.megatron import world
    from zkl_debug.engines.megatron.back_to_back import is_back_to_back
    from zkl_debug.engines.megatron.model import ModelSpec, build_model

    with cpu_backend(), world.world(inference_rng=True):
        model = cast("Any", build_model(ModelSpec(layers=2), "bf16", 0))
    assert is_back_to_back(model)
    assert not is_back_to_back(nn.Linear(2, 2))
    forward = model.decoder.layers[1].forward
    model.decoder.layers[1].forward = lambda *args, **kwargs: forward(*args, **kwargs)
    assert not is_back_to_back(model)
    del model.decoder.layers[1].forward
    assert is_back_to_back(model)
    block = TransformerBlock.forward
    monkeypatch.setattr(TransformerBlock, "forward", lambda *args, **kwargs: block(*args, **kwargs))
    assert not is_back_to_back(model)


def test_tensors_are_let_go_of_with_the_forward(tmp_path: Path) -> None:
    _, capture = recorded(tmp_path / "c")
    assert capture.session.graphs is not None
    assert capture.session.graphs.handing is None
    capture.__exit__(None, None, None)


def test_graphs_of_two_forwards_leave_each_other_nothing(tmp_path: Path) -> None:
    model, capture = recorded(tmp_path / "c")
    graphs, model.graphs = model.graphs, []
    capture.next_rows(warmup())
    model(torch.zeros(1, 4, dtype=torch.int64))
    firsts = [cast("Any", some[at])._zkl_plan for some, at in ((graphs, -1), (model.graphs, 0))]
    assert firsts[0].late.taker is None
    assert not firsts[0].late.handed
    FakeExecutable.launches = 0
    steps(model, capture, steps_of(40))
    assert FakeExecutable.launches > LAYERS * 10
    capture.__exit__(None, None, None)
