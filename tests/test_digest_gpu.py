"""The digest kernels of a GPU: what can be known without one, and on one the bits, and that they are read in time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from zkl_debug import digest, digest_cuda
from zkl_debug.capture.api import Capture
from zkl_debug.capture.graphs import GraphWatch
from zkl_debug.capture.rows import FrameRows, make_rows, warmup_rows
from zkl_debug.digest import digest_array, prefix_digests
from zkl_debug.lanes import lane_view
from zkl_debug.schema import Phase
from zkl_debug.store.reader import open_capture

gpu = pytest.mark.gpu


def _need_gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch.device("cuda", 0)


def test_encoded_weights_give_the_digest() -> None:
    """low is signed, so lane * (low + high * 2^32) needs no correction; wrapping sums as the kernel makes them."""
    lanes = np.random.default_rng(0).integers(-(2**31), 2**31, 1000).astype(np.int32)
    pairs = digest_cuda.encoded_weights(1000).view(np.int32).reshape(2, 1000, 2)
    low, high = pairs[..., 0].astype(np.int64), pairs[..., 1].astype(np.int64)
    wide = lanes.astype(np.int64)
    got = (wide * low).sum(1).view(np.uint64) + ((wide * high).sum(1).view(np.uint64) << np.uint64(32))
    assert tuple(got) == digest.digest_bytes(lanes.tobytes())


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_the_kernel_compiles_without_a_gpu(arch: str) -> None:
    try:
        digest_cuda._nvrtc()
    except digest_cuda.CudaError as error:
        pytest.skip(str(error))
    assert digest_cuda.cubin(arch).startswith(b"\x7fELF")


def test_every_row_is_in_exactly_one_block() -> None:
    for rows in (1, 7, 64, 2047, 2048, 2049, 16384):
        for lanes in (1, 128, 129, 512, 1024, 8192):
            few = rows < 2048
            shift, blocks = digest_cuda._shape(rows, lanes, few)
            per_block = (8 >> shift) * (1 if few else 8)
            assert (blocks - 1) * per_block < rows <= blocks * per_block
            assert few or shift == 0


def _tensors(device: torch.device, seed: int, count: int) -> list[tuple[torch.Tensor, int]]:
    """Tensors of many shapes and strides, with their rows."""
    rng = np.random.default_rng(seed)
    made: list[tuple[torch.Tensor, int]] = []
    while len(made) < count:
        rows = int(rng.choice([1, 2, 3, 7, 8, 9, 63, 64, 65, 200, 2047, 2048, 2049, 3000]))
        lanes = int(rng.choice([1, 2, 3, 4, 8, 12, 31, 64, 100, 128, 129, 256, 512, 1000, 1028, 4096, 4100]))
        kind = len(made) % 4
        wide = lanes + int(rng.integers(0, 9)) if kind == 1 else lanes
        bits = torch.from_numpy(rng.integers(-(2**31), 2**31, (rows, wide)).astype(np.int32)).to(device)
        if kind == 1:
            bits = bits[:, :lanes]
        elif kind == 2:
            heads = torch.from_numpy(rng.integers(-(2**31), 2**31, (min(rows, 300), 4, 3, lanes)).astype(np.int32))
            bits, rows = heads.to(device)[:, :, :2], min(rows, 300)
        elif kind == 3:
            bits = bits.view(torch.bfloat16)
        made.append((bits, rows))
    return made


@gpu
@pytest.mark.parametrize("which", ["cuda", "triton"])
def test_the_bits_are_those_of_the_cpu_over_two_hundred_shapes(which: str) -> None:
    device = _need_gpu()
    if which == "cuda":
        assert digest_cuda.unavailable(device) == ""
    from zkl_debug import digest_triton

    seen = 0
    for tensor, rows in _tensors(device, 1, 240):
        view = lane_view(tensor, rows)
        if view is None:
            continue
        seen += 1
        found = digest_cuda.digest_device(view) if which == "cuda" else digest_triton.digest_device(tensor, rows)
        assert found is not None
        host = tensor.contiguous().view(torch.int32).cpu().numpy().reshape(rows, -1)
        assert np.array_equal(found.cpu().numpy().view(np.uint64), digest_array(host)), (tuple(tensor.shape), view)
    assert seen >= 200


@gpu
def test_several_tensors_in_one_launch_shards_and_places() -> None:
    device = _need_gpu()
    launcher = digest_cuda.launcher(device)
    tensors = [torch.randn(64, k, device=device).bfloat16() for k in (2048, 16384, 512, 2, 8192)]
    views = [lane_view(t, 64) for t in tensors]
    outs = [torch.zeros(64, 2, dtype=torch.int64, device=device) for _ in tensors]
    launcher.launch([digest_cuda.Target(v, o.data_ptr()) for v, o in zip(views, outs, strict=True) if v is not None])
    for view, out in zip(views, outs, strict=True):
        assert view is not None
        assert torch.equal(out, digest_cuda.digest_device(view))
    left, right = (lane_view(t.contiguous(), 64) for t in (tensors[0][:, :600], tensors[0][:, 600:]))
    assert left is not None
    assert right is not None
    assert torch.equal(digest_cuda.digest_device(left) + digest_cuda.digest_device(right, 300), outs[0])
    places = torch.randperm(64, device=device)
    places[3] = -1
    out = torch.zeros(64, 2, dtype=torch.int64, device=device)
    assert views[0] is not None
    launcher.launch_one(views[0], out.data_ptr(), places.data_ptr())
    kept = places >= 0
    assert torch.equal(out[places[kept]], outs[0][kept])


@gpu
def test_further_tensors_of_kinds_that_were_worked_out() -> None:
    device = _need_gpu()
    launcher = digest_cuda.launcher(device)
    shapes = [(64, 8), (64, 4096), (64, 12), (7, 1000), (64, 33000)]
    for dtype in (torch.float32, torch.bfloat16):
        first = [torch.randn(*shape, device=device).to(dtype) for shape in shapes]
        views = [lane_view(tensor, tensor.shape[0]) for tensor in first]
        starts = itertools.accumulate((16 * len(tensor) for tensor in first), initial=0)
        targets = [digest_cuda.Target(v, start) for v, start in zip(views, starts, strict=False) if v is not None]
        launch = launcher.several(targets)
        for _ in range(3):
            tensors = [torch.randn(*shape, device=device).to(dtype) for shape in shapes]
            out = torch.full((sum(len(t) for t in tensors), 2), -1, dtype=torch.int64, device=device)
            assert launch([tensor.data_ptr() for tensor in tensors], out.data_ptr())
            want = [digest_array(tensor.view(torch.int32).cpu().numpy()) for tensor in tensors]
            assert np.array_equal(out.cpu().numpy().view(np.uint64), np.concatenate(want))
        off = [torch.randn(shape[0] * shape[1] + 1, device=device).to(dtype)[1:] for shape in shapes]
        assert not launch([tensor.data_ptr() for tensor in off], out.data_ptr())


class InPlace(nn.Module):
    """x -> x + 1, written over x by a kernel that does not touch the version counter of x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.data.add_(1.0)
        return x


class Chain(nn.Module):
    """Layers that all write one buffer in place, eager or out of a CUDA graph."""

    def __init__(self, layers: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList([InPlace() for _ in range(layers)])
        self.table = torch.arange(100 * width, dtype=torch.float32, device=device).view(100, width)
        self.static = torch.zeros(4, 1, width, device=device)
        self.graph: Any = None
        self.use_graph = False

    def run(self) -> torch.Tensor:
        x = self.static
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.static.copy_(self.table[input_ids.T])
        if not self.use_graph:
            return self.run()
        if self.graph is None:
            self.run()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run()
            self.static.copy_(self.table[input_ids.T])
        self.graph.replay()
        return self.static


def _rows(tokens: list[int], graph: int) -> FrameRows:
    ids = np.array(tokens, np.int32)
    n = len(ids)
    rows = make_rows(np.zeros(n, np.int64), np.arange(n), ids, prefix_digests(ids), int(Phase.DECODE))
    return FrameRows((4, 1), rows, np.arange(n), Phase.DECODE, n, 1, graph=graph)


@gpu
@pytest.mark.parametrize("graph", [False, True])
def test_a_site_is_read_before_the_next_kernel_writes_over_it(graph: bool, tmp_path: Path) -> None:
    """Every layer writes the one buffer in place: each site must hold what was there when it was passed."""
    device = _need_gpu()
    model = Chain(6, 256, device)
    model.use_graph = graph
    batches = [[5, 6, 7], [8, 9], [1, 2, 3, 4], *([k, k + 1, k + 2] for k in range(40))]
    with Capture(model, tmp_path / "c", "gen", strict=True) as capture:
        assert isinstance(capture.session.graphs, GraphWatch)
        capture.next_rows(warmup_rows((4, 1)))
        model(torch.zeros(1, 4, dtype=torch.int64, device=device))
        for tokens in batches:
            capture.next_rows(_rows(tokens, 4 if graph else -1))
            model(torch.tensor([[*tokens, *[0] * (4 - len(tokens))]], device=device))
    order = [token for tokens in batches for token in tokens]
    table = model.table.cpu().numpy()
    with open_capture(tmp_path / "c") as found:
        assert found.manifest["probe"] == {"ok": True, "errors": []}
        for i in range(6):
            for port, plus in (("in", i), ("out", i + 1)):
                got = np.array(found.sites[f"layers.{i}:{port}"].digest)
                assert np.array_equal(got, digest_array(table[order] + np.float32(plus))), (i, port)


class Times(nn.Module):
    """x -> x * factor, a new tensor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Part(nn.Module):
    """Three modules of which the second writes over the result of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Times(2.0), InPlace(), Times(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.third(self.second(self.first(x)))
        return out


class Block(nn.Module):
    """x -> x + 1 in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Part(), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.one(x))
        return out


class Blocks(Chain):
    """Numbered blocks; the result is copied to the static tensor."""

    def __init__(self, layers: int, width: int, device: torch.device) -> None:
        super().__init__(0, width, device)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])

    def run(self) -> torch.Tensor:
        x = self.static
        for layer in self.layers:
            x = layer(x)
        self.static.copy_(x)
        return x


@gpu
def test_launches_are_left_out_of_a_real_graph_and_the_digests_stay(tmp_path: Path) -> None:
    """What is written over keeps its launch; of the others the block's launch is enough. The program's result stays."""
    device = _need_gpu()
    steps = [[k, k + 1, k + 2] for k in range(80)]
    found = {}
    for name in ("eager", "graph"):
        model = Blocks(3, 256, device)
        model.use_graph = name == "graph"
        with Capture(model, tmp_path / name, "gen", strict=True) as capture:
            capture.next_rows(warmup_rows((4, 1)))
            model(torch.zeros(1, 4, dtype=torch.int64, device=device))
            for tokens in steps:
                capture.next_rows(_rows(tokens, 4 if name == "graph" else -1))
                out = model(torch.tensor([[*tokens, 0]], device=device))
                assert torch.equal(out[:3, 0], model.table[tokens] + 3)
                capture.session.flush()
        with open_capture(tmp_path / name) as opened:
            assert opened.manifest["probe"] == {"ok": True, "errors": []}
            found[name] = {site: np.array(opened.sites[site].digest) for site in opened.sites}
            facts = opened.manifest["graphs"]
    assert set(found["eager"]) == set(found["graph"])
    for site, want in found["eager"].items():
        assert np.array_equal(want, found["graph"][site]), site
    assert facts["launches_left_out"] > 0
    assert facts["read_at_once"] >= 6  # out of ``first`` of every part
