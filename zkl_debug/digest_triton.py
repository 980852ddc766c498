"""multilinear-128 on an NVIDIA GPU: one read of the tensor, several tensors in one launch, the bits of the CPU digest.

Every launch adds into zeroed 64-bit sums with atomics; wrapping integer addition does not depend on the order in which
blocks arrive, so the result is exact whatever the launch looks like. All work is issued on the current stream and no
call synchronises; the launch can therefore be recorded into a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from zkl_debug import digest
from zkl_debug.lanes import LaneView, lane_view

#: (rows, lanes, warps) of a block: tall blocks reuse each weight more often, flat ones keep a few rows busy, a single
#: row spreads the few rows of a decode step over as many multiprocessors as there are.
TALL = (64, 64, 8)
FLAT = (4, 256, 4)
SINGLE = (1, 1024, 4)
_TALL_FROM_ROWS = 2048
_FLAT_FROM_ROWS = 256
_LANES_PER_PROGRAM = 4096
_ALIGNED = 16
_MAX_RUNNERS = 16384
_FIRST_LANES = 1 << 17  # wide enough that no table has to grow while a graph is being captured
_weights: dict[torch.device, torch.Tensor] = {}
_outgrown: list[torch.Tensor] = []
_runners: dict[tuple[Any, ...], Callable[..., None]] = {}


@triton.jit  # type: ignore[untyped-decorator]
def _digest_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, out_ptr, dest_ptr, rows, lanes, row_stride, w_stride, lane_offset, inner, group_stride,
    LANES_PER_PROGRAM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_LANES: tl.constexpr, SPLIT: tl.constexpr,
    PLACED: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_ok = row < rows
    base = x_ptr + row.to(tl.int64)[:, None] * row_stride
    start = tl.program_id(1) * LANES_PER_PROGRAM
    sum_1 = tl.zeros([BLOCK_ROWS, BLOCK_LANES], dtype=tl.int64)
    sum_2 = tl.zeros([BLOCK_ROWS, BLOCK_LANES], dtype=tl.int64)
    for at in range(start, tl.minimum(start + LANES_PER_PROGRAM, lanes), BLOCK_LANES):
        lane = at + tl.arange(0, BLOCK_LANES)
        ok = lane < lanes
        w_1 = tl.load(w_ptr + lane_offset + lane, mask=ok, other=0)
        w_2 = tl.load(w_ptr + w_stride + lane_offset + lane, mask=ok, other=0)
        if GROUPED:  # noqa: SIM108 - a branch the compiler drops
            where = (lane // inner) * group_stride + lane % inner
        else:
            where = lane
        b = tl.load(base + where[None, :], mask=row_ok[:, None] & ok[None, :], other=0).to(tl.int64)
        sum_1 += b * w_1[None, :]
        sum_2 += b * w_2[None, :]
    h_1 = tl.sum(sum_1, axis=1)
    h_2 = tl.sum(sum_2, axis=1)
    if PLACED:
        place = tl.load(dest_ptr + row, mask=row_ok, other=-1)
        row_ok = row_ok & (place >= 0)
        out = out_ptr + place * 2
    else:
        out = out_ptr + row.to(tl.int64) * 2
    if SPLIT:
        tl.atomic_add(out, h_1, mask=row_ok, sem="relaxed")
        tl.atomic_add(out + 1, h_2, mask=row_ok, sem="relaxed")
    else:
        tl.store(out, h_1, mask=row_ok)
        tl.store(out + 1, h_2, mask=row_ok)


@triton.jit  # type: ignore[untyped-decorator]
def _many_kernel(  # type: ignore[no-untyped-def]
    table_ptr, w_ptr, out_ptr, w_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_LANES: tl.constexpr,
):  # fmt: skip
    """Program (t, r): a block of rows of tensor t. A table row is address, rows, lanes, row stride, first output."""
    entry = table_ptr + tl.program_id(0) * 5
    x_ptr = tl.load(entry).to(tl.pointer_type(tl.int32))
    rows = tl.load(entry + 1)
    lanes = tl.load(entry + 2)
    row_stride = tl.load(entry + 3)
    first = tl.load(entry + 4)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_ok = row < rows
    base = x_ptr + row.to(tl.int64)[:, None] * row_stride
    sum_1 = tl.zeros([BLOCK_ROWS, BLOCK_LANES], dtype=tl.int64)
    sum_2 = tl.zeros([BLOCK_ROWS, BLOCK_LANES], dtype=tl.int64)
    for at in range(0, lanes, BLOCK_LANES):
        lane = at + tl.arange(0, BLOCK_LANES)
        ok = lane < lanes
        w_1 = tl.load(w_ptr + lane, mask=ok, other=0)
        w_2 = tl.load(w_ptr + w_stride + lane, mask=ok, other=0)
        b = tl.load(base + lane[None, :], mask=row_ok[:, None] & ok[None, :], other=0).to(tl.int64)
        sum_1 += b * w_1[None, :]
        sum_2 += b * w_2[None, :]
    out = out_ptr + (first + row.to(tl.int64)) * 2
    tl.store(out, tl.sum(sum_1, axis=1), mask=row_ok)
    tl.store(out + 1, tl.sum(sum_2, axis=1), mask=row_ok)


def weights_on(device: torch.device, lanes: int) -> torch.Tensor:
    """Weights of lanes 0 .. n-1 (n >= ``lanes``) on ``device``, int64, shape [2, n]; grown in powers of two.

    A table that was outgrown stays allocated: a CUDA graph may hold its address.
    """
    known = _weights.get(device)
    if known is None or known.shape[1] < lanes:
        size = max(_FIRST_LANES, 1 << (lanes - 1).bit_length())
        table = np.ascontiguousarray(digest.weights(0, size)).view(np.int64)
        with torch.inference_mode(mode=False):
            _weights[device] = torch.from_numpy(table.copy()).to(device)
        if known is not None:
            _outgrown.append(known)
        known = _weights[device]
    return known


def needs_zeros(view: LaneView) -> bool:
    """Whether :func:`digest_into` adds into its output, which must then hold zeros."""
    return view.lanes > _LANES_PER_PROGRAM and triton.cdiv(view.rows, _blocks(view.rows)[0]) < 512


def digest_into(view: LaneView, out: int, dest: int = 0, lane_offset: int = 0) -> None:
    """Write the digest of each row on the current stream.

    Args:
        view: the rows.
        out: device address of int64 [n, 2], aligned to 16 bytes; zeros where :func:`needs_zeros`.
        dest: device address of int64 [rows], the output row of each row or -1 to drop it; 0 when they are in order.
        lane_offset: index of the first lane in the whole row, for shards.
    """
    w = weights_on(view.owner.device, view.lanes + lane_offset)
    grid, sizes, fixed, warps = _launch(view, w, dest, lane_offset)
    key = (view.owner.device, *sizes, *fixed, view.address % _ALIGNED == 0)
    runner = _runners.get(key)
    if runner is not None:
        stream = torch._C._cuda_getCurrentRawStream(view.owner.device.index)
        runner(*grid, stream, view.address, w.data_ptr(), out, dest or out, *sizes, *fixed)
        return
    compiled = _digest_kernel[grid](
        _Address(view.address, torch.int32), w, _Address(out, torch.int64), _Address(dest or out, torch.int64),
        *sizes, *fixed, num_warps=warps,
    )  # fmt: skip
    if len(_runners) < _MAX_RUNNERS:
        _runners[key] = _launcher(compiled)


def _launcher(compiled: Any) -> Callable[..., None]:
    """What Triton calls once it has chosen a kernel: grid, stream, then all arguments."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(x: int, y: int, z: int, stream: int, *args: Any) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *args)

    return launch


def is_loaded(view: LaneView) -> bool:
    """Whether the kernel for such rows was launched before: then it can be recorded into a graph, loading cannot."""
    w = weights_on(view.owner.device, view.lanes)
    _, sizes, fixed, _ = _launch(view, w, 0, 0)
    return (view.owner.device, *sizes, *fixed, view.address % _ALIGNED == 0) in _runners


def _launch(
    view: LaneView, w: torch.Tensor, dest: int, lane_offset: int
) -> tuple[tuple[int, int, int], tuple[int, ...], tuple[Any, ...], int]:
    """Grid, run-time sizes, constants and warps of a launch.

    Sizes and alignment are what Triton specialises on: a launcher kept for exactly these is the one it would choose,
    without the binding of arguments that costs more than the kernel of a small tensor.
    """
    block_rows, block_lanes, warps = _blocks(view.rows)
    split = needs_zeros(view)
    per_program = _LANES_PER_PROGRAM if split else triton.cdiv(view.lanes, block_lanes) * block_lanes
    grouped = 0 < view.inner < view.lanes
    apart = (view.inner, view.group_stride) if grouped else (0, 0)
    sizes = (view.rows, view.lanes, view.stride, w.stride(0), lane_offset, *apart)
    fixed = (per_program, block_rows, block_lanes, split, dest != 0, grouped)
    return (triton.cdiv(view.rows, block_rows), triton.cdiv(view.lanes, per_program), 1), sizes, fixed, warps


def _blocks(rows: int) -> tuple[int, int, int]:
    if rows >= _TALL_FROM_ROWS:
        return TALL
    return FLAT if rows >= _FLAT_FROM_ROWS else SINGLE


def digest_device(tensor: torch.Tensor, rows: int, lane_offset: int = 0) -> torch.Tensor | None:
    """Digest of each row, int64 [rows, 2] on the tensor's device (bit pattern of the unsigned sums).

    Returns None when :func:`lane_view` cannot take the tensor.
    """
    view = lane_view(tensor, rows)
    if view is None:
        return None
    make = torch.zeros if needs_zeros(view) else torch.empty
    out = make((rows, 2), dtype=torch.int64, device=tensor.device)
    digest_into(view, out.data_ptr(), 0, lane_offset)
    return out


class _Address:
    """A device address that Triton takes as a pointer to ``dtype``."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._address


def digest_many(tensors: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor] | None:
    """Digests of several small tensors in one launch (decode steps); each int64 [rows, 2], in order.

    Args:
        tensors: (tensor, rows) pairs on one device.

    Returns:
        None when any of them cannot be read without a copy.
    """
    views = [lane_view(tensor, rows) for tensor, rows in tensors]
    if not views or any(v is None for v in views):
        return None
    device = tensors[0][0].device
    good = [v for v in views if v is not None]
    first = np.cumsum([0, *[v.rows for v in good]])
    table = torch.tensor(
        [[v.address, v.rows, v.lanes, v.stride, int(at)] for v, at in zip(good, first, strict=False)], dtype=torch.int64
    ).pin_memory()
    out = torch.empty((int(first[-1]), 2), dtype=torch.int64, device=device)
    w = weights_on(device, max(v.lanes for v in good))
    grid = (len(good), triton.cdiv(max(v.rows for v in good), FLAT[0]))
    _many_kernel[grid](
        table.to(device, non_blocking=True), w, out, w.stride(0),
        BLOCK_ROWS=FLAT[0], BLOCK_LANES=FLAT[1], num_warps=FLAT[2],
    )  # fmt: skip
    return [out[int(a) : int(b)] for a, b in itertools.pairwise(first)]
