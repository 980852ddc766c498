"""Views of rows: their place in the whole row where a rank has a part of it, and their digests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.layout import RowView
from zkl_debug.schema import Shard, SiteMeta

if TYPE_CHECKING:
    from zkl_debug.capture.frame import OpenFrame

#: (site name, semantic, row shape, bytes of an element) -> what of the whole row the rank has; None for all of it
ShardOf = Callable[[str, str, tuple[int, ...], int], Shard | None]

#: (tensor, rows[, lane offset]) -> digests [rows, 2]
Digest = Callable[..., NDArray[np.uint64]]

_ALIAS_KEEP = 24  # tensors whose digests are kept for the next hooks of the same frame


def sharded(shard_of: ShardOf | None, name: str, view: RowView, semantic: str) -> RowView:
    """The view with what is known of its place in the whole row."""
    if shard_of is None or view.shard is not None:
        return view
    shard = shard_of(name, semantic, view.row_shape, view.tensor.element_size())
    return view if shard is None else replace(view, shard=shard)


def digest_view(
    frame: OpenFrame, view: RowView, source: torch.Tensor | None, digest_tensor: Digest
) -> NDArray[np.uint64]:
    """Digests [n, 2] of the rows of a view by ``digest_tensor``; those of the frame's last tensors not made twice."""
    tensor = view.tensor.detach()
    n_view = tensor.shape[0]
    if view.shard is not None and view.shard.pieces:
        if view.take is not None:
            tensor = tensor.index_select(0, torch.from_numpy(view.take).to(tensor.device))
        return digest_shard(tensor, view.shard, digest_tensor)
    if view.take is not None and 2 * len(view.take) < n_view:
        picked = tensor.index_select(0, torch.from_numpy(view.take).to(tensor.device))
        return digest_tensor(picked, len(view.take))
    key = _reuse_key(source, tensor)
    if key is not None:
        hit = frame.alias.get(key)
        if hit is not None:
            return hit[1] if view.take is None else hit[1][view.take]
    digest = digest_tensor(tensor, n_view)
    if key is not None:
        assert source is not None
        frame.alias[key] = (source, digest)  # the reference keeps the object from being replaced by another
        if len(frame.alias) > _ALIAS_KEEP:
            frame.alias.popitem(last=False)
    return digest if view.take is None else digest[view.take]


def with_shard(meta: SiteMeta, view: RowView) -> SiteMeta:
    """The meta of a site with what its view knows of the whole row."""
    if view.shard is None:
        return meta
    lanes = view.shard.lanes(view.tensor.element_size())
    return replace(meta, shard=view.shard, lane_offset=lanes[0][0] if lanes else 0)


def digest_shard(tensor: torch.Tensor, shard: Shard, digest_tensor: Digest) -> NDArray[np.uint64]:
    """Digest [n, 2] of rows [n, *] of which this is a part: each piece at its place in the whole row."""
    rows, at = tensor.reshape(tensor.shape[0], -1), 0
    total = np.zeros((tensor.shape[0], 2), np.uint64)
    for first, count in shard.pieces:
        lane = first * tensor.element_size() // 4
        total += digest_tensor(rows[:, at : at + count], len(rows), lane)
        at += count
    assert at == rows.shape[1], (at, tuple(tensor.shape), shard)
    return total


def _reuse_key(source: torch.Tensor | None, rows: torch.Tensor) -> tuple[Any, ...] | None:
    """Key under which digests of ``source`` may be used again in this frame; None where a write could go unnoticed.

    The same object, storage, version and number of rows are all needed. Storage and version alone are not enough:
    assigning ``.data`` gives a new tensor the old storage with a version counter of its own. Inference tensors have no
    counter, and kernels on a GPU may write without touching it.
    """
    if source is None or source.is_inference() or source.device.type != "cpu":
        return None
    return (id(source), source.data_ptr(), source._version, rows.shape[0])
