"""Find the token rows in a tensor, and read them as raw bits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.rows import Places
from zkl_debug.schema import Shard

I64 = NDArray[np.int64]

_UNSIGNED = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.uint16),
    4: (torch.int32, np.uint32),
    8: (torch.int64, np.uint64),
}


@dataclass(frozen=True)
class RowView:
    """A tensor seen as [n_view, *row_shape], and which of its rows belong to which row of the frame.

    Attributes:
        tensor: contiguous or strided tensor whose leading dimension is the row.
        take: rows of ``tensor`` to read, shape [n]; None means all of them, in order.
        row: index into the frame's rows for each row read, shape [n], uint32.
        row_shape: shape of one row.
        shard: what of the whole row this is, None for all of it.
    """

    tensor: torch.Tensor
    take: I64 | None
    row: NDArray[np.uint32]
    row_shape: tuple[int, ...]
    shard: Shard | None = None


def resolve(tensor: torch.Tensor, frame: Places, layout: str = "") -> RowView | None:
    """Match a tensor's leading dimensions with the frame's token slots.

    Args:
        tensor: any activation. Recognised: [s, b, *], [b, s, *], [s*b, *], the valid rows only ([n, *], engine
            frames), and one row a sequence ([n_seqs, *], engines that compute last logits only).
        frame: the frame's rows.
        layout: ``"bs"`` or ``"sb"`` where both would fit; default prefers ``"sb"``.

    Returns:
        The view, or None when the tensor has no token rows.
    """
    s, b = frame.grid
    shape = tuple(tensor.shape)
    n = len(frame.slot)
    if len(shape) == 0 or n == 0:
        return None
    batch_first = len(shape) >= 2 and shape[:2] == (b, s)
    seq_first = len(shape) >= 2 and shape[:2] == (s, b)
    if batch_first and (layout == "bs" or not seq_first) and b > 1:
        return _view(tensor.reshape(s * b, *shape[2:]), frame, shape[2:], batch_first=True)
    if seq_first or (batch_first and b == 1):
        return _view(tensor.reshape(s * b, *shape[2:]), frame, shape[2:])
    if layout == "bs" and b > 1 and shape[:2] == (b, 1) and len(frame.last) == b:
        return RowView(tensor.reshape(b, *shape[2:]), None, frame.last.astype(np.uint32), tuple(shape[2:]))
    if shape[0] == s * b:
        return _view(tensor, frame, shape[1:], batch_first=layout == "bs")
    if frame.split[1] > 1:
        return _share(tensor, frame)
    body = tensor
    if len(shape) > 2 and shape[0] == 1:
        body = tensor.squeeze(0)
    elif len(shape) > 2 and shape[1] == 1:
        body = tensor.squeeze(1)
    if b == 1 and body.shape[0] == n and np.array_equal(frame.slot, np.arange(n)):
        return _view(body, frame, tuple(body.shape[1:]))
    if b == 1 and len(frame.last) and body.shape[0] == len(frame.last):
        return RowView(body, None, frame.last.astype(np.uint32), tuple(body.shape[1:]))
    return None


def share_of(frame: Places) -> tuple[I64, NDArray[np.uint32]]:
    """Rows in this rank's share of the sequence: their slots within it, and their places in the frame's rows."""
    index, count = frame.split
    size = math.prod(frame.grid) // count
    inside = np.flatnonzero(frame.slot // size == index)
    return frame.slot[inside] - index * size, inside.astype(np.uint32)


def _share(tensor: torch.Tensor, frame: Places) -> RowView | None:
    """The view of a tensor that holds 1 / count of the sequence (sequence parallel): [s / count, b, *] or flat."""
    s, b = frame.grid
    count = frame.split[1]
    shape = tuple(tensor.shape)
    if count == 1 or s % count:
        return None
    if shape[:2] == (s // count, b):
        tensor = tensor.reshape(s // count * b, *shape[2:])
    elif shape[0] != s // count * b:
        return None
    known = frame.cache.get("share")
    if known is None:
        known = frame.cache["share"] = share_of(frame)
    return RowView(tensor, known[0], known[1], tuple(tensor.shape[1:]))


def _view(flat: torch.Tensor, frame: Places, row_shape: tuple[int, ...], batch_first: bool = False) -> RowView:
    """The view of a tensor with one row a slot. Index arrays are made once a frame and shared by all its sites."""
    key = (flat.shape[0], batch_first)
    known: tuple[I64 | None, NDArray[np.uint32]] | None = frame.cache.get(key)
    if known is None:
        s, b = frame.grid
        take = (frame.slot % b) * s + frame.slot // b if batch_first else frame.slot
        whole = len(take) == flat.shape[0] and bool(np.array_equal(take, np.arange(len(take))))
        known = (None if whole else take, np.arange(len(frame.slot), dtype=np.uint32))
        frame.cache[key] = known
    return RowView(flat, known[0], known[1], tuple(row_shape))


def flattened(view: RowView) -> RowView:
    """One dimension a row. Rows with gaps in memory stay as they are: flattening them would copy them."""
    width = math.prod(view.row_shape)
    tensor = view.tensor
    if tensor.is_contiguous() or not tensor.is_cuda:
        tensor = tensor.reshape(tensor.shape[0], width)
    return replace(view, tensor=tensor, row_shape=(width,))


def raw_rows(view: RowView) -> NDArray[np.unsignedinteger]:
    """Copy the rows of a view as unsigned integers of the element size, shape [n, W]. The copy is made now."""
    tensor = view.tensor.detach()
    if view.take is not None:
        tensor = tensor.index_select(0, torch.from_numpy(view.take).to(tensor.device))
    else:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return raw_bits(tensor)


def raw_bits(tensor: torch.Tensor) -> NDArray[np.unsignedinteger]:
    """A tensor's rows as unsigned integers of its element size on the host, shape [n, W]; shares memory if it can."""
    torch_dtype, np_dtype = _UNSIGNED[tensor.element_size()]
    flat = tensor.contiguous().reshape(tensor.shape[0], -1).view(torch_dtype).cpu().numpy()
    return flat.view(np_dtype)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_name(tensor: torch.Tensor) -> str:
    """torch's dtype name without the ``torch.`` prefix."""
    return _name_of(tensor.dtype)
