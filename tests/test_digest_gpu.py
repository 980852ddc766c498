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
from zkl_debug.capture.device import ChunkPool, DeviceFrame
from zkl_debug.capture.graphs import GraphWatch
from zkl_debug.capture.kernels import Kernels
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


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernel_compiles_without_a_gpu(arch: str) -> None:
    try:
        digest_cuda._nvrtc()
    except digest_cuda.CudaError as error:
        pytest.skip(str(error))
    image = digest_cuda.cubin(arch)
    assert image.startswith(b"\x7fELF")
    assert (b"digest_cluster_32" in image) == (arch != "sm_80")


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


def _host(tensor: torch.Tensor, rows: int) -> np.ndarray[Any, Any]:
    return digest_array(tensor.contiguous().view(torch.int32).cpu().numpy().reshape(rows, -1))


def _bits(device: torch.device, rows: int, lanes: int, behind: int = 0) -> torch.Tensor:
    """Random lanes [rows, lanes], ``behind`` lanes after an address that is a multiple of sixteen."""
    flat = torch.randint(-(2**31), 2**31, (rows * lanes + behind,), device=device, dtype=torch.int32)
    return flat[behind:].view(rows, lanes)


def _launch_all(tensors: list[torch.Tensor], offsets: list[int] | None = None) -> str:
    """Digest tensors [rows, ...] in one launch and hold them against those of the CPU; returns the kind of kernel.

    Every third tensor drops a row and has its other rows in another order.
    """
    device = tensors[0].device
    launcher = digest_cuda.launcher(device)
    targets, checks = [], []
    for i, tensor in enumerate(tensors):
        rows = len(tensor)
        view, offset = lane_view(tensor, rows), offsets[i] if offsets else 0
        assert view is not None
        out = torch.full((rows, 2), -7, dtype=torch.int64, device=device)
        order = torch.arange(rows, device=device)
        if i % 3 == 2:
            order = torch.randperm(rows, device=device)
            order[rows // 2] = -1
        whole = tensor.contiguous().view(torch.int32).reshape(rows, -1).cpu().numpy()
        want = digest_array(np.concatenate([np.zeros((rows, offset), np.int32), whole], axis=1))
        targets.append(digest_cuda.Target(view, out.data_ptr(), order.data_ptr() if i % 3 == 2 else 0, offset))
        checks.append((out, order, want))
    launcher.launch(targets)
    for i, (out, order, want) in enumerate(checks):
        full = np.full((len(want), 2), -7, np.int64).view(np.uint64)
        places = order.cpu().numpy()
        full[places[places >= 0]] = want[places >= 0]
        assert np.array_equal(out.cpu().numpy().view(np.uint64), full), (i, tuple(tensors[i].shape), targets[i])
    return digest_cuda.arrange(targets, launcher._clusters).kind


@gpu
@pytest.mark.parametrize("rows", [1, 7, 63, 64, 65, 200, 2047])
@pytest.mark.parametrize("behind", [0, 1])
def test_blocks_that_share_rows_give_the_bits_of_the_cpu(
    rows: int, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = _need_gpu()
    monkeypatch.setattr(digest_cuda, "CLUSTER_LANES", 1)
    monkeypatch.setattr(digest_cuda, "CLUSTER_MOST_ROWS", 2047)
    widths = [1, 2, 5, 128, 129, 1000, 1024, 1025, 2048, 2052, 4096, 4099, 8192, 8196, 16384, 40000, 39999]
    for lanes in widths if rows <= 200 else [1, 129, 1028, 4099]:
        tensor = _bits(device, rows, lanes, behind)
        assert _launch_all([tensor]) == ("cluster" if digest_cuda.launcher(device)._clusters else "few")
        view = lane_view(tensor, rows)
        assert view is not None
        out = torch.full((rows, 2), -1, dtype=torch.int64, device=device)
        digest_cuda.launcher(device).launch_one(view, out.data_ptr())
        assert np.array_equal(out.cpu().numpy().view(np.uint64), _host(tensor, rows)), lanes
        again = digest_cuda.launcher(device).again(view)
        out.fill_(-1)
        assert again(view.address, out.data_ptr())
        assert np.array_equal(out.cpu().numpy().view(np.uint64), _host(tensor, rows)), lanes


@gpu
@pytest.mark.parametrize("clusters", [False, True])
def test_launches_of_tensors_that_are_not_alike(clusters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of four and of sixteen bytes, few and many rows, short and long ones, shards: each in one launch."""
    device = _need_gpu()
    monkeypatch.setattr(digest_cuda, "CLUSTERS", clusters)
    kind = "cluster" if clusters and digest_cuda.launcher(device)._clusters else "few"
    fused = _bits(device, 64, 2048).view(64, 4, 512)
    ids = torch.arange(64, device=device).view(64, 1)
    small = [ids, ids + 1, fused[:, :, :256], fused[:, :, 256:384], fused[:, :, 384:], fused]
    assert _launch_all(small) == "few"
    assert _launch_all([_bits(device, 64, 32768), *small], [0, 3, 0, 4, 5, 0, 2]) == kind
    assert _launch_all([*small, _bits(device, 7, 4099, 3), _bits(device, 65, 8192), _bits(device, 1, 1)]) == kind
    assert (
        _launch_all([*small, _bits(device, 2048, 12), _bits(device, 3, 9000), _bits(device, 2050, 1027, 1)]) == "many"
    )
    rng = np.random.default_rng(5)
    for count in (2, 8, 9, 32):
        made = [_bits(device, *(int(k) for k in rng.integers(1, (200, 3000, 4)))) for _ in range(count)]
        _launch_all([*made[1:], _bits(device, 64, 4096)])
        _launch_all([*made[1:], _bits(device, 2100, 1024)], [int(k) for k in rng.integers(0, 9, count)])


@gpu
@pytest.mark.parametrize("interleave", [False, True])
def test_many_rows_shared_and_read_side_by_side(interleave: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = _need_gpu()
    monkeypatch.setattr(digest_cuda, "INTERLEAVE", interleave)
    for rows in (2048, 2049, 3001):
        fused = _bits(device, rows, 2048).view(rows, 4, 512)
        parts = [fused[:, :, :256], fused[:, :, 256:384], fused[:, :, 384:], fused, fused[:, :, :384]]
        others = [_bits(device, rows, lanes, behind) for lanes, behind in ((1024, 0), (1024, 1), (513, 0), (5, 2))]
        assert _launch_all([others[0], *parts, *others[1:], parts[0]]) == "many"
    for lanes in (4096, 8192, 8195, 8196, 20000):
        assert _launch_all([_bits(device, 2050, lanes)]) == "many"


@gpu
@pytest.mark.parametrize("n", [1, 64, 300])
def test_labels_of_a_step_are_picked_as_torch_picks_them(n: int) -> None:
    """Tokens that are none are copied as they are, and the table is not read behind its end."""
    device = _need_gpu()
    table = torch.randn(n + 3, 5000, device=device)[:n, :4099]
    tokens = torch.randint(0, 4099, (n,), device=device)
    tokens[n // 2] = [-1, 4099, 1 << 40][n % 3]
    selected = torch.randn(n, device=device)
    frame = DeviceFrame(ChunkPool(), Kernels())
    found = [frame.fetch_labels(tokens, selected, table)]
    frame.kernels.pick = lambda *_: False  # type: ignore[method-assign]
    found.append(frame.fetch_labels(tokens, selected, table))
    frame.copy_out()
    part = frame.arrays()[0]
    picked, copied = (part[at.start : at.start + at.rows].tobytes() for at in found)
    assert picked == copied
    assert np.array_equal(np.frombuffer(picked, np.int64)[:n], tokens.cpu().numpy())


@gpu
def test_what_graphs_wrote_is_copied_as_torch_copies_it() -> None:
    device = _need_gpu()
    memory = torch.randint(-(1 << 62), 1 << 62, (5000, 2), device=device)
    frame = DeviceFrame(ChunkPool(), Kernels())
    part = memory[17:4017]
    found = [frame.fetch(part), frame.fetch(memory, torch.arange(17, 4017, device=device))]
    memory.zero_()  # behind the copy
    frame.copy_out()
    read = frame.arrays()[0]
    one, other = (read[at.start : at.start + at.rows] for at in found)
    assert np.array_equal(one, other)
    assert len(np.unique(one)) > 7000


@gpu
def test_launches_recorded_into_a_graph_read_what_is_there_at_replay() -> None:
    device = _need_gpu()
    launcher = digest_cuda.launcher(device)
    tensors = [_bits(device, 64, 8192), _bits(device, 64, 2), _bits(device, 64, 33), _bits(device, 5, 32768)]
    views = [view for view in (lane_view(t, len(t)) for t in tensors) if view is not None]
    starts = list(itertools.accumulate((16 * len(t) for t in tensors), initial=0))
    places = torch.arange(64, device=device).flip(0)
    places[7] = -1
    targets = [
        digest_cuda.Target(view, start, places.data_ptr() if i == 2 else 0)
        for i, (view, start) in enumerate(zip(views, starts, strict=False))
    ]
    several, one = launcher.several(targets), launcher.again(views[0])
    out = torch.zeros(starts[-1] // 16 + 64, 2, dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        assert several([tensor.data_ptr() for tensor in tensors], out.data_ptr())
        assert one(tensors[0].data_ptr(), out.data_ptr() + starts[-1])
    for _ in range(3):
        for tensor in tensors:
            tensor.random_(-(2**31), 2**31)
        out.fill_(-7)
        graph.replay()
        want = [_host(tensor, len(tensor)) for tensor in tensors]
        kept, order = np.full((64, 2), -7, np.int64).view(np.uint64), places.cpu().numpy()
        kept[order[order >= 0]] = want[2][order >= 0]
        want[2] = kept
        assert np.array_equal(out.cpu().numpy().view(np.uint64), np.concatenate([*want, want[0]]))


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
