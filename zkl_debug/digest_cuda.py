"""multilinear-128 as a CUDA kernel: near the bandwidth of the memory, and several tensors in one launch.

The source, ``digest_cuda.cu``, is compiled by NVRTC, which every torch for CUDA brings along, once a process; what it
computes are the bits of :mod:`zkl_debug.digest`. A launch is one call of the driver with all sizes by value: it copies
nothing, waits for nothing, and can be recorded into a CUDA graph. Every kernel is loaded with the first, so that none
has to be loaded during a recording.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from zkl_debug import digest
from zkl_debug.lanes import LaneView

#: Tensors of one launch at most.
ENTRIES = 32
#: Sizes of the tables kernels are compiled for: every node of a graph carries the whole of its table.
_TABLES = (1, 8, ENTRIES)
_MANY_FROM_ROWS = 2048  # from here on a warp reads eight rows side by side
_WARPS = 8
_MANY_ROWS = 8
_BLOCKS = 8  # of a cluster
_FIRST_LANES = 1 << 17
_HEADER = struct.Struct("<QqiI")
_ENTRY = struct.Struct("<QQQqiiiiiiiBBBx")
_SINGLE = struct.Struct("<QqiIQQQqiiiiiiiBBBx")
_PICK = struct.Struct("<QQQQqii")
_ENDS = struct.Struct("<QQ")  # first lane and output of the first entry, behind the header
_NVRTC = ("libnvrtc.so.13", "libnvrtc.so.12")

# How work is cut up: never what is computed, so measurements may set these. The first three are compiled in.
FEW_ROWS = 2  # rows a warp reads side by side: their weights are loaded once
CLUSTER_ROWS = 4
KEEP_LANES = False  # whether lanes may stay in the first level cache
FEW_LOADS = 1  # reads of sixteen bytes that a thread makes of a row before warps share it
CLUSTER_LOADS = 1
CLUSTERS = True  # blocks may share rows, where the device can
CLUSTER_LANES = 4096  # few rows of this many lanes cannot keep a device busy with a block each
CLUSTER_MOST_ROWS = 128  # more of them can
LONG_LANES = 8192  # weights of longer rows outgrow the first level cache: warps that read the same lanes share them
INTERLEAVE = True  # tensors that lie in each other's memory are read side by side, so that it is loaded once


class CudaError(Exception):
    """The kernel cannot be compiled, loaded or launched here."""


@dataclass(frozen=True)
class Target:
    """Where the digests of a view go.

    Attributes:
        view: the rows.
        out: device address of int64 [n, 2], aligned to 8 bytes.
        dest: device address of int64 [rows], the output row of each row or -1 to drop it; 0 when they are in order.
        lane_offset: index of the first lane in the whole row, for shards.
    """

    view: LaneView
    out: int
    dest: int = 0
    lane_offset: int = 0


class Launcher:
    """The loaded kernels of one device.

    Raises:
        CudaError: NVRTC or the driver cannot be used.
    """

    def __init__(self, device: torch.device) -> None:
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", self.index)
        self._driver = ctypes.CDLL("libcuda.so.1")
        major, minor = torch.cuda.get_device_capability(self.index)
        with torch.cuda.device(self.index):
            torch.zeros(1, device=self.device)  # the context exists from here on
            self._clusters = major >= 9
            self._functions = _load(self._driver, cubin(f"sm_{major}{minor}"), self._clusters)
        self._launch = self._driver.cuLaunchKernel
        self._local = threading.local()
        self._weights: list[torch.Tensor] = []
        self._lanes = self._table = 0
        self.weights(1)

    def weights(self, lanes: int) -> torch.Tensor:
        """Weights of lanes 0 .. n-1 (n >= ``lanes``) as (low, high) pairs, int64 [2, n].

        A table that was outgrown stays allocated: a CUDA graph may hold its address.
        """
        if not self._weights or self._weights[-1].shape[1] < lanes:
            size = max(_FIRST_LANES, 1 << (lanes - 1).bit_length())
            with torch.inference_mode(mode=False):
                self._weights.append(torch.from_numpy(encoded_weights(size)).to(self.device))
            self._lanes, self._table = size, self._weights[-1].data_ptr()
        return self._weights[-1]

    def launch_one(self, view: LaneView, out: int, dest: int = 0) -> None:
        """:meth:`launch` of one view: what every site of a forward goes through, so it is short.

        Raises:
            CudaError: the driver refuses.
        """
        rows, lanes, stride, inner, apart = view.rows, view.lanes, view.stride, view.inner, view.group_stride
        if lanes > self._lanes:
            self.weights(lanes)
        if not 0 < inner < lanes:
            inner, apart = lanes, 0
        wide = not (view.address & 15 or (stride | lanes | inner | apart) & 3)
        kind = _kind(rows, lanes, self._clusters)
        shift, blocks = _shape(rows, lanes, kind)
        buffer, arguments = self._buffer()
        _SINGLE.pack_into(
            buffer, 0, self._table, self._lanes, 1, 0,
            view.address, out, dest, stride, rows, lanes, inner, apart, 0, 0, 1, shift, wide, kind == "many",
        )  # fmt: skip
        self._issue(self._functions[kind, 1], blocks, arguments)

    def again(self, view: LaneView) -> Callable[[int, int], bool]:
        """A launch for tensors like this one, with all but two addresses worked out.

        The function takes the addresses of the first lane and of the output, and issues the launch on the current
        stream; False where the address does not allow the reads it was made for. Not to be called by two threads.
        """
        rows, lanes, stride, inner, apart = view.rows, view.lanes, view.stride, view.inner, view.group_stride
        self.weights(lanes)
        if not 0 < inner < lanes:
            inner, apart = lanes, 0
        wide = not (view.address & 15 or (stride | lanes | inner | apart) & 3)
        kind = _kind(rows, lanes, self._clusters)
        shift, blocks = _shape(rows, lanes, kind)
        buffer = ctypes.create_string_buffer(_SINGLE.size)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        _SINGLE.pack_into(
            buffer, 0, self._table, self._lanes, 1, 0,
            0, 0, 0, stride, rows, lanes, inner, apart, 0, 0, 1, shift, wide, kind == "many",
        )  # fmt: skip
        function, issue, at = self._functions[kind, 1], self._issue, _HEADER.size
        mask = 15 if wide else 3
        put = _ENDS.pack_into

        def launch(address: int, out: int) -> bool:
            if address & mask:
                return False
            put(buffer, at, address, out)
            issue(function, blocks, arguments)
            return True

        return launch

    def launch(self, targets: Sequence[Target]) -> None:
        """Write the digests of up to :data:`ENTRIES` views on the current stream, all in one launch.

        Raises:
            CudaError: the driver refuses.
        """
        buffer, arguments = self._buffer()
        plan = self._fill(buffer, targets)
        self._issue(self._functions[plan.kind, plan.size], plan.blocks, arguments)

    def several(self, targets: Sequence[Target]) -> Callable[[Sequence[int], int], bool]:
        """One launch for up to :data:`ENTRIES` tensors like these, with all but addresses worked out.

        The ``out`` of a target is told in bytes behind the output that is given later. The function takes the address
        of each tensor and that of the output, and issues the launch on the current stream; False where an address does
        not allow the reads it was made for. Not to be called by two threads.
        """
        buffer = ctypes.create_string_buffer(_HEADER.size + ENTRIES * _ENTRY.size)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        plan = self._fill(buffer, targets)
        function, blocks = self._functions[plan.kind, plan.size], plan.blocks
        places = [(0, 0, 0)] * len(targets)
        for place, slot in enumerate(plan.slots):
            target = targets[slot.target]
            at = _HEADER.size + place * _ENTRY.size
            places[slot.target] = (at, target.out, 15 if _is_wide(target.view, target.lane_offset) else 3)
        put, issue = _ENDS.pack_into, self._issue

        def launch(addresses: Sequence[int], out: int) -> bool:
            for address, (at, start, mask) in zip(addresses, places, strict=True):
                if address & mask:
                    return False
                put(buffer, at, address, out + start)
            issue(function, blocks, arguments)
            return True

        return launch

    def pick(self, tokens: torch.Tensor, selected: torch.Tensor, table: torch.Tensor, out: int) -> None:
        """Write tokens int64 [n], log-probs float32 [n] and those of the tokens in ``table`` float32 [>= n, v], all of
        them contiguous but for the rows of the table, one behind the other to the address ``out``.

        Raises:
            CudaError: the driver refuses.
        """
        buffer, arguments = self._buffer()
        n, addresses = tokens.shape[0], [tensor.data_ptr() for tensor in (tokens, selected, table)]
        _PICK.pack_into(buffer, 0, *addresses, out, table.stride(0), table.shape[1], n)
        self._issue(self._functions["pick", 0], -(-n // (32 * _WARPS)), arguments)

    def copy(self, address: int, out: int, nbytes: int) -> None:
        """Copy memory of the device on the current stream.

        Raises:
            CudaError: the driver refuses.
        """
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self.index))
        ends = ctypes.c_ulonglong(out), ctypes.c_ulonglong(address)
        status = self._driver.cuMemcpyDtoDAsync_v2(*ends, ctypes.c_size_t(nbytes), stream)
        if status != 0:
            raise CudaError(f"the driver refused a copy: CUDA error {status}")

    def _fill(self, buffer: Any, targets: Sequence[Target]) -> Plan:
        """Write the table of a launch."""
        table = self.weights(max(t.view.lanes + t.lane_offset for t in targets))
        plan = arrange(targets, self._clusters)
        fill(buffer, targets, plan, table.data_ptr(), table.shape[1])
        return plan

    def _issue(self, function: Any, blocks: int, arguments: Any) -> None:
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self.index))
        status = self._launch(function, blocks, 1, 1, 32 * _WARPS, 1, 1, 0, stream, arguments, None)
        if status != 0:
            raise CudaError(f"the driver refused the digest kernel: CUDA error {status}")

    def _buffer(self) -> tuple[Any, Any]:
        """Memory for the table of a launch, one a thread; the driver has copied it when the call returns."""
        known = getattr(self._local, "buffer", None)
        if known is None:
            buffer = ctypes.create_string_buffer(_HEADER.size + ENTRIES * _ENTRY.size)
            known = (buffer, (ctypes.c_void_p * 1)(ctypes.addressof(buffer)))
            self._local.buffer = known
        found: tuple[Any, Any] = known
        return found


@functools.cache
def launcher(device: torch.device) -> Launcher:
    """The launcher of a device, made once.

    Raises:
        CudaError: see :class:`Launcher`.
    """
    return Launcher(device)


@functools.cache
def unavailable(device: torch.device) -> str:
    """Why the kernel cannot be used on a device, or an empty string."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "not an NVIDIA GPU"
    try:
        launcher(device)
    except (CudaError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def digest_device(view: LaneView, lane_offset: int = 0) -> torch.Tensor:
    """Digest of each row, int64 [rows, 2] on the view's device (bit pattern of the unsigned sums)."""
    device = view.owner.device
    out = torch.empty((view.rows, 2), dtype=torch.int64, device=device)
    launcher(device).launch([Target(view, out.data_ptr(), 0, lane_offset)])
    return out


def encoded_weights(lanes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Weights of the first ``lanes`` lanes as the kernel reads them, int64 [2, lanes].

    W = low + high * 2^32 with a signed low half: then lane * W needs no correction for negative lanes.
    """
    w = digest.weights(0, lanes).view(np.int64)
    low = w.astype(np.int32).astype(np.int64)
    high = (w - low) >> 32
    return np.ascontiguousarray((high << 32) | (low & 0xFFFFFFFF))


# ---- cutting up ---------------------------------------------------------------------------------------------------
class Slot(NamedTuple):
    """An entry of a table.

    Attributes:
        target: its index among the targets.
        shift: log2 of the warps that share a row's lanes.
        first: its first block, or that of its run.
        run: entries whose blocks take turns, in sequence in the table; 1 for an entry by itself.
    """

    target: int
    shift: int
    first: int
    run: int


@dataclass(frozen=True)
class Plan:
    """A launch: which kernel, how many blocks, and the entries in the order of the table."""

    kind: str
    size: int
    blocks: int
    slots: tuple[Slot, ...]


def arrange(targets: Sequence[Target], clusters: bool) -> Plan:
    """Cut a launch up; ``clusters`` tells whether blocks of the device may share rows."""
    shapes = [(target.view.rows, target.view.lanes) for target in targets]
    kind = "few"
    for rows, lanes in shapes:
        if (found := _kind(rows, lanes, clusters)) != "few":
            kind = found
        if kind == "many":
            break
    size = next(size for size in _TABLES if len(targets) <= size)
    slots: list[Slot] = []
    first = 0
    if kind != "many":
        for index, (rows, lanes) in enumerate(shapes):
            shift, blocks = _shape(rows, lanes, kind)
            slots.append(Slot(index, shift, first, 1))
            first += blocks
        return Plan(kind, size, first, tuple(slots))
    # Blocks that read most come first, so that the last ones to end are small; of those alike, what was made last and
    # may still be in the cache.
    runs = []
    for run in _nested([target.view for target in targets]) if INTERLEAVE else [[i] for i in range(len(targets))]:
        widest = max(run, key=lambda index: shapes[index][1])
        shift, blocks = _shape(*shapes[widest], kind)
        runs.append((shapes[widest][1] >> shift, max(run), run, shift, blocks))
    for _, _, run, shift, blocks in sorted(runs, reverse=True):
        slots += (Slot(index, shift, first, len(run)) for index in run)
        first += blocks * len(run)
    return Plan(kind, size, first, tuple(slots))


def fill(buffer: Any, targets: Sequence[Target], plan: Plan, weights: int, pitch: int) -> None:
    """Write the parameters of a launch: ``weights`` is the address of int64 [2, pitch]."""
    _HEADER.pack_into(buffer, 0, weights, pitch, len(targets), 0)
    at = _HEADER.size
    for slot in plan.slots:
        target = targets[slot.target]
        view = target.view
        grouped = 0 < view.inner < view.lanes
        inner, apart = (view.inner, view.group_stride) if grouped else (view.lanes, 0)
        _ENTRY.pack_into(
            buffer, at, view.address, target.out, target.dest, view.stride,
            view.rows, view.lanes, inner, apart, target.lane_offset, slot.first, slot.run,
            slot.shift, _is_wide(view, target.lane_offset), plan.kind == "many",
        )  # fmt: skip
        at += _ENTRY.size


def _is_wide(view: LaneView, lane_offset: int) -> bool:
    """Whether every row can be read sixteen bytes at a time."""
    fits = view.address % 16 == 0 and view.stride % 4 == 0 and view.lanes % 4 == 0 and lane_offset % 2 == 0
    return fits and (not 0 < view.inner < view.lanes or (view.inner % 4 == 0 and view.group_stride % 4 == 0))


def _kind(rows: int, lanes: int, clusters: bool) -> str:
    """The kernel for a tensor by itself."""
    if rows >= _MANY_FROM_ROWS:
        return "many"
    return "cluster" if clusters and CLUSTERS and lanes >= CLUSTER_LANES and rows <= CLUSTER_MOST_ROWS else "few"


def _shape(rows: int, lanes: int, kind: str) -> tuple[int, int]:
    """(log2 of the warps that share a row's lanes, blocks)."""
    shift = 0
    if kind == "few":
        while shift < 3 and (128 * FEW_LOADS << shift) < lanes:
            shift += 1
        return shift, -(-rows // ((_WARPS >> shift) * FEW_ROWS))
    if kind == "cluster":
        while shift < 6 and (128 * CLUSTER_LOADS << shift) < lanes:
            shift += 1
        return shift, -(-rows // ((_WARPS * _BLOCKS >> shift) * CLUSTER_ROWS)) * _BLOCKS
    if lanes > LONG_LANES:
        shift = 3
    elif rows < _MANY_FROM_ROWS:  # a small tensor among large ones
        while shift < 3 and (256 << shift) <= lanes:
            shift += 1
    return shift, -(-rows // ((_WARPS >> shift) * _MANY_ROWS))


def _nested(views: Sequence[LaneView]) -> list[list[int]]:
    """Views in runs: each of a run lies in the memory of its first, row by row."""
    ranges = []
    for index, view in enumerate(views):
        width = view.lanes
        if 0 < view.inner < view.lanes:
            width = (view.lanes // view.inner - 1) * view.group_stride + view.inner
        end = view.address + 4 * ((view.rows - 1) * view.stride + width)
        ranges.append((view.rows, view.stride, view.address, -end, index))
    runs: list[list[int]] = []
    outer: tuple[int, int, int] | None = None
    for rows, stride, _, end, index in sorted(ranges):
        if outer is not None and outer[:2] == (rows, stride) and -end <= outer[2]:
            runs[-1].append(index)
        else:
            runs.append([index])
            outer = (rows, stride, -end)
    return runs


# ---- compiling and loading ----------------------------------------------------------------------------------------
@functools.cache
def cubin(arch: str) -> bytes:
    """The compiled kernels for an architecture such as ``sm_90``; needs NVRTC, but no GPU.

    Raises:
        CudaError: there is no NVRTC, or it does not know the architecture.
    """
    library = _nvrtc()
    source = Path(__file__).with_name("digest_cuda.cu").read_bytes()
    program = ctypes.c_void_p()
    options = [f"--gpu-architecture={arch}".encode(), b"-std=c++17"]
    compiled_in = {"FEW_ROWS": FEW_ROWS, "CLUSTER_ROWS": CLUSTER_ROWS, "KEEP_LANES": int(KEEP_LANES)}
    options += [f"-D{name}={value}".encode() for name, value in compiled_in.items()]
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source, b"digest_cuda.cu", 0, None, None), "NVRTC")
    try:
        status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if status != 0:
            raise CudaError(f"NVRTC cannot compile the digest kernel for {arch}: {_log(library, program)}")
        size = ctypes.c_size_t()
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "NVRTC")
        image = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, image), "NVRTC")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


def _log(library: Any, program: Any) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value + 1)
    library.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace").strip()[:500]


@functools.cache
def _nvrtc() -> Any:
    spec = importlib.util.find_spec("nvidia")
    homes = [Path(p) for p in (spec.submodule_search_locations or ())] if spec is not None else []
    for name in _NVRTC:
        found = [str(p) for home in homes for p in sorted(home.glob(f"*/lib/{name}"))]
        for candidate in (*found, name):
            try:
                return ctypes.CDLL(candidate)
            except OSError:
                continue
    raise CudaError(f"none of {', '.join(_NVRTC)} can be loaded")


def _load(driver: Any, image: bytes, clusters: bool) -> dict[tuple[str, int], Any]:
    """The kernels by (kind, size of the table), all of them loaded now."""
    module = ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), image), "the driver")
    found = {}
    kinds = ("few", "many", "cluster") if clusters else ("few", "many")
    for kind, size in (*itertools.product(kinds, _TABLES), ("pick", 0)):
        function = ctypes.c_void_p()
        name = f"digest_{kind}_{size}".encode() if size else kind.encode()
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name), "the driver")
        if hasattr(driver, "cuFuncLoad"):
            _check(driver.cuFuncLoad(function), "the driver")
        found[kind, size] = function
    return found


def _check(status: int, who: str) -> None:
    if status != 0:
        raise CudaError(f"{who} gives error {status}")
