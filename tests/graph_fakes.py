"""A stand-in for CUDA graphs that records and replays on a CPU, and a small model over it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from zkl_debug.capture.api import Capture
from zkl_debug.capture.graphs import GraphWatch
from zkl_debug.capture.kernels import Again, Kernels
from zkl_debug.capture.rows import FrameRows, make_rows
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


def lanes_at(view: LaneView, address: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The lanes of a tensor like the one of a view, int32 [rows, lanes]."""
    inner = view.inner if 0 < view.inner < view.lanes else view.lanes
    groups, apart = view.lanes // inner, view.group_stride if inner < view.lanes else 0
    count = (view.rows - 1) * view.stride + (groups - 1) * apart + inner
    raw = np.frombuffer((ctypes.c_int32 * count).from_address(address), np.int32)
    strides = (4 * view.stride, 4 * apart, 4)
    return np.lib.stride_tricks.as_strided(raw, (view.rows, groups, inner), strides).reshape(view.rows, view.lanes)


def copy_to(to: torch.Tensor, value: torch.Tensor) -> None:
    to.copy_(value)


def run(step: Callable[[], None]) -> None:
    """What a program issues: a step of the graph that is being recorded, if one is."""
    if FakeGraph.current is not None:
        FakeGraph.current.steps.append(step)
    step()


class FakeKernels(Kernels):
    """Digests on the host; inside a recording they become steps of the graph."""

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point()

    current = (0, 0)

    def anywhere(self) -> bool:
        return True

    def stream(self) -> tuple[int, int]:
        return self.current

    def follow(self, stream: tuple[int, int]) -> None:
        assert stream != self.current

    def lead(self, stream: tuple[int, int]) -> None:
        assert stream != self.current
        assert not self._held, "what was read there is to be issued first"

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
            FakeGraph.current.steps.append(lambda: copy_to(kept, tensor))
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

        return issue

    def several(
        self, views: Sequence[LaneView], dests: Sequence[torch.Tensor | None], counts: Sequence[int]
    ) -> Callable[[Sequence[int], int], bool]:
        def launch(addresses: Sequence[int], out: int) -> bool:
            at = out
            for view, address, dest, count in zip(views, addresses, dests, counts, strict=True):
                digests = digest_array(lanes_at(view, address))
                if dest is not None:
                    placed = np.zeros((count, 2), np.uint64)
                    placed[dest[dest >= 0].numpy()] = digests[(dest >= 0).numpy()]
                    digests = placed
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

        run(step)
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


def rows_of(tokens: list[int], graph: int) -> FrameRows:
    ids = np.array(tokens, np.int32)
    n = len(ids)
    rows = make_rows(np.zeros(n, np.int64), np.arange(n), ids, prefix_digests(ids), int(Phase.DECODE))
    return FrameRows((4, 1), rows, np.arange(n), Phase.DECODE, n, 1, graph=graph)


def call(model: Model, capture: Capture | None, tokens: list[int], graph: bool) -> torch.Tensor:
    if capture is not None:
        capture.next_rows(rows_of(tokens, 4 if graph else -1))
    model.use_graph = graph
    padded = torch.tensor([*tokens, *[0] * (4 - len(tokens))])
    out: torch.Tensor = model(padded[None])
    return out[: len(tokens)].clone()


def watched(model: Model, folder: Path, **options: Any) -> Capture:
    capture = Capture(model, folder, "gen", **options)
    capture.__enter__()
    capture.session.kernels = FakeKernels()
    capture.watch_graphs(GraphWatch(capture.session, capture.session.kernels, FakeGraph))
    return capture


def digests(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    with open_capture(folder) as found:
        assert found.manifest["probe"] == {"ok": True, "errors": []}
        return {name: np.array(site.digest) for name, site in found.sites.items()}


def warmup() -> FrameRows:
    from zkl_debug.capture.rows import warmup_rows

    return warmup_rows((4, 1))


def recorded_model(model: Model, folder: Path, **options: Any) -> Capture:
    """A capture that has seen the model's graph recorded."""
    capture = watched(model, folder, **options)
    capture.next_rows(warmup())
    model.use_graph = True
    model(torch.zeros(1, 4, dtype=torch.int64))
    return capture


def steps_of(count: int) -> list[list[int]]:
    return [[1 + i % 90, 2 + i % 7, 3, 4 + i % 50] for i in range(count)]
