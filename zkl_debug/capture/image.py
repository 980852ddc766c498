"""Copies of what live objects hold, to be put back in place later: tensors, counters, tables.

This is what lets a step be run again from the very state it met: the same tensors at the same addresses, cached
values and stale flags included.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

_SCALARS = (str, bytes, int, float, bool, type(None), torch.dtype, torch.Size)
_CONTAINERS = (dict, list, set, collections.deque)
_MODULE_OWN = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class _Slot:
    """One attribute: what it referred to, and a copy of the contents where they can change in place."""

    value: Any
    content: Any


class Image:
    """What ``objects`` hold at the moment of construction.

    Attributes of other types than tensors, plain values and containers of these are kept by reference only.

    Args:
        objects: modules (their own parameters, buffers and attributes; submodules must be listed too) and others.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        with torch.no_grad():
            self._held = [(obj, {name: _slot(v) for name, v in _vars(obj).items()}) for obj in objects]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor copies."""
        return sum(_nbytes(slot.content) for _, slots in self._held for slot in slots.values())

    def restore(self) -> None:
        """Put everything back; attributes that did not exist then and hold plain values or tensors are removed."""
        with torch.no_grad():
            for obj, slots in self._held:
                for name in [n for n in _vars(obj) if n not in slots]:
                    if _is_content(_vars(obj)[name]):
                        _remove(obj, name)
                for name, slot in slots.items():
                    _put_back(obj, name, slot)


def module_objects(*models: nn.Module) -> list[Any]:
    """Every module of the models, each once."""
    return list({id(m): m for model in models for m in model.modules()}.values())


def _vars(obj: Any) -> dict[str, Any]:
    if not isinstance(obj, nn.Module):
        return vars(obj)
    own = {name: value for name, value in vars(obj).items() if name not in _MODULE_OWN}
    return {**own, **obj._parameters, **obj._buffers}


def _is_content(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, *_SCALARS)) or _is_plain_container(value)


def _is_plain_container(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_content(v) for v in value.values()) and all(isinstance(k, _SCALARS + (tuple,)) for k in value)
    return isinstance(value, (*_CONTAINERS, tuple)) and all(_is_content(v) for v in value)


def _slot(value: Any) -> _Slot:
    if isinstance(value, torch.Tensor):
        return _Slot(value, _copy(value))
    if isinstance(value, np.ndarray) or (isinstance(value, _CONTAINERS) and _is_plain_container(value)):
        return _Slot(value, copy.deepcopy(value))
    return _Slot(value, None)


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy, or None where the storage is not allocated."""
    needed = tensor.numel() * tensor.element_size()
    return tensor.detach().clone() if tensor.untyped_storage().nbytes() >= needed else None


def _put_back(obj: Any, name: str, slot: _Slot) -> None:
    value, content = slot.value, slot.content
    if isinstance(value, torch.Tensor):
        if content is not None:
            storage = value.untyped_storage()
            if storage.nbytes() < content.numel() * content.element_size():
                storage.resize_(content.numel() * content.element_size())
            value.copy_(content)
        else:
            value.untyped_storage().resize_(0)
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, dict) and content is not None:
        value.clear()
        value.update(copy.deepcopy(content))
    elif isinstance(value, list) and content is not None:
        value[:] = copy.deepcopy(content)
    elif isinstance(value, set | collections.deque) and content is not None:
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(copy.deepcopy(content))
    if _vars(obj).get(name, obj) is not value:
        setattr(obj, name, value)


def _remove(obj: Any, name: str) -> None:
    if isinstance(obj, nn.Module) and (name in obj._parameters or name in obj._buffers):
        return
    delattr(obj, name)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, dict):
        return sum(_nbytes(v) for v in value.values())
    if isinstance(value, list | tuple | set | collections.deque):
        return sum(_nbytes(v) for v in value)
    return 0
