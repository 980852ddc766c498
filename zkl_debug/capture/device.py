"""Digests and payloads of tensors on an accelerator: computed where the tensor is, read out once a frame.

Nothing here waits for the device while the model runs. The digest kernel and the clone are issued on the current stream
right behind the kernel that made the tensor, so a later write in place cannot reach them; the copies to the host happen
together when the frame ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.layout import RowView, raw_bits


@dataclass
class Pending:
    """What a site still has on the device: its digests [m, 2] (int64) and its rows, if payload is taken."""

    digest: torch.Tensor | None
    take: NDArray[np.int64] | None
    payload: torch.Tensor | None


def launch(view: RowView, payload: bool) -> Pending | None:
    """Issue digest and clone of the view's rows; None when the device has no kernel for this tensor."""
    tensor = view.tensor.detach()
    if tensor.device.type != "cuda":
        return None
    try:
        from zkl_debug.digest_triton import digest_device
    except ImportError:
        return None
    take = view.take
    if take is not None and (payload or 2 * len(take) < tensor.shape[0]):
        tensor = tensor.index_select(0, torch.from_numpy(take).to(tensor.device, non_blocking=True))
        take = None
    digest = digest_device(tensor, tensor.shape[0])
    if digest is None:
        return None
    return Pending(digest, take, tensor.clone(memory_format=torch.contiguous_format) if payload else None)


def read_out(pending: list[Pending]) -> list[tuple[NDArray[np.uint64], NDArray[Any] | None]]:
    """Bring everything to the host: one copy for all digests, one for each payload."""
    digests = [p.digest for p in pending if p.digest is not None]
    if not digests:
        return []
    host = torch.cat(digests).cpu().numpy().view(np.uint64)
    found: list[tuple[NDArray[np.uint64], NDArray[Any] | None]] = []
    start = 0
    for p in pending:
        assert p.digest is not None
        part = host[start : start + p.digest.shape[0]]
        start += p.digest.shape[0]
        rows = part if p.take is None else part[p.take]
        found.append((np.ascontiguousarray(rows), raw_bits(p.payload) if p.payload is not None else None))
    return found
