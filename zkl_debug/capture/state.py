"""Digests of what a model holds: parameters and buffers, persistent or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from zkl_debug.capture.layout import dtype_name
from zkl_debug.digest_torch import digest_tensor, digest_wholes
from zkl_debug.schema import Json, StateRecord


def tensor_digest(tensor: torch.Tensor) -> tuple[int, int]:
    """Multilinear-128 of a whole tensor's bytes in row-major order."""
    flat = tensor.detach().contiguous().reshape(1, -1)
    if flat.numel() == 0:
        return (0, 0)
    digest = digest_tensor(flat, 1)
    return int(digest[0, 0]), int(digest[0, 1])


@dataclass(frozen=True)
class TensorPart:
    """A rank's part of a tensor of the whole model.

    Attributes:
        name: name in the whole model.
        shape: of the whole tensor, or None where the rank has all of it.
        axis, spans: the axis that is cut, and (first, count) of each piece of it that the rank has.
        index, count: place in the group that shares it, and the group's size.
    """

    name: str
    shape: tuple[int, ...] | None = None
    axis: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    index: int = 0
    count: int = 1


#: (local name, parameter) -> its part of the whole model
PartOf = Callable[[str, torch.Tensor], TensorPart]


def model_state(model: nn.Module, part_of: PartOf | None = None) -> list[StateRecord]:
    """One record per parameter and buffer, by canonical name; those without memory of their own now are left out.

    Tied tensors appear under every name they have, with the same ``data_ptr``. A rank's part of a tensor has the digest
    of its pieces at their places in the whole, so that those of the ranks add up to the digest of the whole tensor.

    Args:
        model: the model, or this rank's part of it.
        part_of: tells name and place of a parameter or buffer in the whole model.
    """
    with torch.no_grad(), _disable_current_modes():
        named = [entry for entry in _named(model) if allocated(entry[2])]
        # A model's tensors, one digest each, tied ones once; a rank's parts lie at places of their own in the whole.
        parts = [TensorPart(local) if part_of is None else part_of(local, tensor) for local, _, tensor in named]
        whole = {id(tensor): tensor for (_, _, tensor), part in zip(named, parts, strict=True) if part.shape is None}
        digests = dict(zip(whole, digest_wholes(list(whole.values())), strict=True))
        return [
            _part(part, kind, tensor)
            if part.shape is not None
            else _record(part.name, kind, tensor, digests[id(tensor)])
            for (_, kind, tensor), part in zip(named, parts, strict=True)
        ]


def allocated(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are there: not on the meta device, not resized away (offloaded, sharded)."""
    if tensor.is_meta:
        return False
    return not tensor.numel() or extent(tensor) <= tensor.untyped_storage().nbytes()


def extent(tensor: torch.Tensor) -> int:
    """Bytes of storage up to the tensor's last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + int(last) + 1) * tensor.element_size()


def _part(part: TensorPart, kind: str, tensor: torch.Tensor) -> StateRecord:
    assert part.shape is not None
    shard: dict[str, Json] = {"index": part.index, "count": part.count, "shape": list(part.shape)}
    inner = math.prod(part.shape[part.axis + 1 :])
    width = part.shape[part.axis] * inner  # elements between two rows of the axis
    bounds = [n * inner * tensor.element_size() for span in part.spans for n in span] + [width * tensor.element_size()]
    if any(n % 4 for n in bounds):
        return replace(
            _record(part.name, kind, tensor, tensor_digest(tensor)), detail={"shard": shard | {"adds": False}}
        )
    rows = tensor.detach().cpu().contiguous().reshape(math.prod(part.shape[: part.axis]), -1)
    low = high = 0
    for i in range(rows.shape[0]):
        at = 0
        for first, count in part.spans:
            lane = (i * width + first * inner) * tensor.element_size() // 4
            digest = digest_tensor(rows[i : i + 1, at : at + count * inner], 1, lane)
            low, high = low + int(digest[0, 0]), high + int(digest[0, 1])
            at += count * inner
    record = _record(part.name, kind, tensor, (low % (1 << 64), high % (1 << 64)))
    return replace(record, detail={"shard": shard | {"adds": True}})


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


def _record(name: str, kind: str, tensor: torch.Tensor, digest: tuple[int, int]) -> StateRecord:
    return StateRecord(name, kind, dtype_name(tensor), tuple(tensor.shape), digest, data_ptr=tensor.data_ptr())
