"""The zigzag order of context parallel: a sequence cut into 2 * cp chunks, of which rank r has r and 2 * cp - 1 - r."""

from __future__ import annotations

import torch
from torch import Tensor


def whole_order(length: int, size: int) -> Tensor:
    """Positions of each rank's rows, int64 [size, length / size]; ``length`` is a multiple of ``2 * size``."""
    chunks = torch.arange(length).reshape(2 * size, -1)
    return torch.stack([torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)])


def own_slots(length: int, size: int, rank: int) -> Tensor:
    """Positions of one rank's rows, int64 [length / size]."""
    return whole_order(length, size)[rank]
