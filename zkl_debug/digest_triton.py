"""multilinear-128 on an NVIDIA GPU: one read of the tensor, several tensors in one launch, the bits of the CPU digest.

Every launch adds into zeroed 64-bit sums with atomics; wrapping integer addition does not depend on the order in which
blocks arrive, so the result is exact whatever the launch looks like. All work is issued on the current stream and no
call synchronises; the launch can therefore be recorded into a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from zkl_debug import digest

#: (rows, lanes, warps) of a block: tall blocks reuse each weight more often, flat ones keep a few rows busy.
TALL = (64, 64, 8)
FLAT = (4, 256, 4)
_TALL_FROM_ROWS = 2048
_LANES_PER_PROGRAM = 4096
_weights: dict[torch.device, torch.Tensor] = {}


@triton.jit  # type: ignore[untyped-decorator]
def _digest_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, out_ptr, rows, lanes, row_stride, w_stride, lane_offset,
    LANES_PER_PROGRAM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_LANES: tl.constexpr, SPLIT: tl.constexpr,
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
        b = tl.load(base + lane[None, :], mask=row_ok[:, None] & ok[None, :], other=0).to(tl.int64)
        sum_1 += b * w_1[None, :]
        sum_2 += b * w_2[None, :]
    h_1 = tl.sum(sum_1, axis=1)
    h_2 = tl.sum(sum_2, axis=1)
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


@dataclass(frozen=True)
class LaneView:
    """A tensor as rows of 32-bit lanes: what the kernels can read without a copy.

    Attributes:
        address: device address of the first lane.
        rows: number of rows.
        lanes: lanes of a row.
        stride: distance between rows, lanes.
        owner: keeps the storage alive until the launch was issued.
    """

    address: int
    rows: int
    lanes: int
    stride: int
    owner: torch.Tensor


def lane_view(tensor: torch.Tensor, rows: int) -> LaneView | None:
    """See a GPU tensor as [rows, lanes] of int32; None when a copy would be needed first.

    Rows may be strided (a slice of a wider buffer); within a row elements must be contiguous. A row whose bytes are not
    a multiple of four, or that does not start on a four-byte boundary, needs padding and is not taken.
    """
    count = tensor.numel()
    if rows <= 0 or count == 0 or count % rows:
        return None
    row_bytes = count // rows * tensor.element_size()
    if row_bytes % 4 or tensor.data_ptr() % 4:
        return None
    if tensor.is_contiguous():
        return LaneView(tensor.data_ptr(), rows, row_bytes // 4, row_bytes // 4, tensor)
    if tensor.dim() >= 2 and tensor.shape[0] == rows and tensor[0].is_contiguous():
        stride_bytes = tensor.stride(0) * tensor.element_size()
        if stride_bytes % 4 == 0:
            return LaneView(tensor.data_ptr(), rows, row_bytes // 4, stride_bytes // 4, tensor)
    return None


def weights_on(device: torch.device, lanes: int) -> torch.Tensor:
    """Weights of lanes 0 .. n-1 (n >= ``lanes``) on ``device``, int64, shape [2, n]; grown in powers of two."""
    known = _weights.get(device)
    if known is None or known.shape[1] < lanes:
        size = max(1 << 14, 1 << (lanes - 1).bit_length())
        table = np.ascontiguousarray(digest.weights(0, size)).view(np.int64)
        known = torch.from_numpy(table.copy()).to(device)
        _weights[device] = known
    return known


def digest_device(tensor: torch.Tensor, rows: int, lane_offset: int = 0) -> torch.Tensor | None:
    """Digest of each row, int64 [rows, 2] on the tensor's device (bit pattern of the unsigned sums).

    Returns None when :func:`lane_view` cannot take the tensor.
    """
    view = lane_view(tensor, rows)
    if view is None:
        return None
    w = weights_on(tensor.device, view.lanes + lane_offset)
    block_rows, block_lanes, warps = TALL if rows >= _TALL_FROM_ROWS else FLAT
    row_blocks = triton.cdiv(rows, block_rows)
    split = view.lanes > _LANES_PER_PROGRAM and row_blocks < 512
    per_program = _LANES_PER_PROGRAM if split else triton.cdiv(view.lanes, block_lanes) * block_lanes
    make = torch.zeros if split else torch.empty
    out = make((rows, 2), dtype=torch.int64, device=tensor.device)
    grid = (row_blocks, triton.cdiv(view.lanes, per_program))
    source: Any = _as_int32(view)
    _digest_kernel[grid](
        source, w, out, rows, view.lanes, view.stride, w.stride(0), lane_offset,
        LANES_PER_PROGRAM=per_program, BLOCK_ROWS=block_rows, BLOCK_LANES=block_lanes, SPLIT=split, num_warps=warps,
    )  # fmt: skip
    return out


class _Address:
    """A device address that Triton takes as an int32 pointer."""

    dtype = torch.int32

    def __init__(self, view: LaneView) -> None:
        self._view = view

    def data_ptr(self) -> int:
        return self._view.address


def _as_int32(view: LaneView) -> Any:
    return _Address(view)


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
