"""Digests of what a model holds: parameters and buffers, persistent or not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from zkl_debug.capture.layout import dtype_name
from zkl_debug.digest_torch import digest_tensor
from zkl_debug.schema import StateRecord


def tensor_digest(tensor: torch.Tensor) -> tuple[int, int]:
    """Multilinear-128 of a whole tensor's bytes in row-major order."""
    flat = tensor.detach().contiguous().reshape(1, -1)
    if flat.numel() == 0:
        return (0, 0)
    digest = digest_tensor(flat, 1)
    return int(digest[0, 0]), int(digest[0, 1])


def model_state(model: nn.Module) -> list[StateRecord]:
    """One record per parameter and buffer, by canonical name; those without memory of their own now are left out.

    Tied tensors appear under every name they have, with the same ``data_ptr``.
    """
    with torch.no_grad(), _disable_current_modes():
        return [_record(name, kind, tensor) for name, kind, tensor in _named(model) if allocated(tensor)]


def allocated(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are there: not on the meta device, not resized away (offloaded, sharded)."""
    if tensor.is_meta:
        return False
    return not tensor.numel() or extent(tensor) <= tensor.untyped_storage().nbytes()


def extent(tensor: torch.Tensor) -> int:
    """Bytes of storage up to the tensor's last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + int(last) + 1) * tensor.element_size()


def notices_mutation() -> bool:
    """Self-test: whether flipping one bit of a tensor in place, and flipping it back, shows in its digest both times.

    A checker that looks at an alias, or at something it remembered, never sees a difference.
    """
    with torch.no_grad(), _disable_current_modes():
        tensor = torch.arange(64, dtype=torch.int32)
        seen = []
        for _ in range(3):
            seen.append(tensor_digest(tensor))
            tensor[37] ^= 1
    return seen[0] == seen[2] != seen[1]


def _named(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, "parameter", parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, "buffer", buffer


def _record(name: str, kind: str, tensor: torch.Tensor) -> StateRecord:
    return StateRecord(
        name, kind, dtype_name(tensor), tuple(tensor.shape), tensor_digest(tensor), data_ptr=tensor.data_ptr()
    )
