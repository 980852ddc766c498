"""A GPU tensor seen as rows of 32-bit lanes: what the digest kernels read, without a copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LaneView:
    """A tensor as rows of 32-bit lanes: what the kernels can read without a copy.

    Attributes:
        address: device address of the first lane.
        rows: number of rows.
        lanes: lanes of a row.
        stride: distance between rows, lanes.
        owner: keeps the storage alive until the launch was issued.
        inner: lanes that lie together; a row is ``lanes / inner`` such groups.
        group_stride: distance between groups, lanes.
    """

    address: int
    rows: int
    lanes: int
    stride: int
    owner: torch.Tensor
    inner: int = 0
    group_stride: int = 0


def lane_view(tensor: torch.Tensor, rows: int) -> LaneView | None:
    """See a GPU tensor as [rows, lanes] of int32; None when a copy would be needed first.

    Rows may be strided (a slice of a wider buffer), and a row may consist of equal groups at equal distances (the keys
    of a fused projection, which lie between queries and values). A row whose bytes are not a multiple of four, or that
    does not start on a four-byte boundary, needs padding and is not taken.
    """
    count = tensor.numel()
    if rows <= 0 or count == 0 or count % rows:
        return None
    size = tensor.element_size()
    row_bytes = count // rows * size
    if row_bytes % 4 or tensor.data_ptr() % 4:
        return None
    lanes = row_bytes // 4
    if tensor.is_contiguous():
        return LaneView(tensor.data_ptr(), rows, lanes, lanes, tensor)
    if tensor.dim() < 2 or tensor.shape[0] != rows:
        return None
    inner, group = _groups(tensor)
    stride_bytes = tensor.stride(0) * size
    if inner == 0 or stride_bytes % 4 or inner * size % 4 or group * size % 4:
        return None
    return LaneView(tensor.data_ptr(), rows, lanes, stride_bytes // 4, tensor, inner * size // 4, group * size // 4)


def _groups(tensor: torch.Tensor) -> tuple[int, int]:
    """(elements that lie together, distance between such groups) of a row; (0, 0) when it takes more than that."""
    inner, group, count = 1, 0, 1
    for extent, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if extent == 1:
            continue
        if count == 1 and stride == inner:
            inner *= extent
        elif count == 1:
            group, count = stride, extent
        elif stride == group * count:
            count *= extent
        else:
            return 0, 0
    return inner, group if count > 1 else inner
