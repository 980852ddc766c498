"""Copies of what live objects hold, to be put back in place later: tensors, counters, tables.

This is what lets a step be run again from the very state it met: the same tensors at the same addresses, cached
values and stale flags included.
"""

from __future__ import annotations

import collections
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
    """One value: the object, and a copy of its contents where they can change in place.

    ``content`` of a container is made of slots, so that a tensor it holds is put back into the same tensor: it may
    share its storage with a parameter.
    """

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
        return sum(_nbytes(slot) for _, slots in self._held for slot in slots.values())

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
        found: dict[str, Any] = vars(obj)
        return found
    own = {name: value for name, value in vars(obj).items() if name not in _MODULE_OWN}
    return {**own, **obj._parameters, **obj._buffers}


def _is_content(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, *_SCALARS)) or _is_plain_container(value)


def _is_plain_container(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_content(v) for v in value.values()) and all(isinstance(k, (*_SCALARS, tuple)) for k in value)
    return isinstance(value, (*_CONTAINERS, tuple)) and all(_is_content(v) for v in value)


def _slot(value: Any) -> _Slot:
    if isinstance(value, torch.Tensor):
        return _Slot(value, _copy(value))
    if isinstance(value, np.ndarray):
        return _Slot(value, value.copy())
    if isinstance(value, dict) and _is_plain_container(value):
        return _Slot(value, {k: _slot(v) for k, v in value.items()})
    if isinstance(value, set) and _is_plain_container(value):
        return _Slot(value, set(value))
    if isinstance(value, list | tuple | collections.deque) and _is_plain_container(value):
        return _Slot(value, [_slot(v) for v in value])
    return _Slot(value, None)


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy, or None where the storage is not allocated."""
    needed = tensor.numel() * tensor.element_size()
    return tensor.detach().clone() if tensor.untyped_storage().nbytes() >= needed else None


def _put_back(obj: Any, name: str, slot: _Slot) -> None:
    _fill(slot)
    if _vars(obj).get(name, obj) is not slot.value:
        setattr(obj, name, slot.value)


def _fill(slot: _Slot) -> Any:
    """Put the contents back into the object; returns the object."""
    value, content = slot.value, slot.content
    if isinstance(value, torch.Tensor):
        _fill_tensor(value, content)
    elif content is None:
        pass
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, dict):
        items = {k: _fill(v) for k, v in content.items()}
        value.clear()
        value.update(items)
    elif isinstance(value, set):
        value.clear()
        value.update(content)
    elif isinstance(value, list):
        value[:] = [_fill(v) for v in content]
    elif isinstance(value, collections.deque):
        filled = [_fill(v) for v in content]
        value.clear()
        value.extend(filled)
    else:
        for inner in content:
            _fill(inner)
    return value


def _fill_tensor(tensor: torch.Tensor, content: torch.Tensor | None) -> None:
    storage = tensor.untyped_storage()
    if content is None:
        storage.resize_(0)
        return
    nbytes = content.numel() * content.element_size()
    if storage.nbytes() < nbytes:
        storage.resize_(nbytes)
    # A tensor made in inference mode can be written there only; inference_mode(False) would turn gradients on.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        tensor.copy_(content)


def _remove(obj: Any, name: str) -> None:
    if isinstance(obj, nn.Module) and (name in obj._parameters or name in obj._buffers):
        return
    delattr(obj, name)


def _nbytes(slot: _Slot) -> int:
    content = slot.content
    if isinstance(content, torch.Tensor | np.ndarray):
        return int(content.nbytes)
    if isinstance(content, dict):
        return sum(_nbytes(s) for s in content.values())
    if isinstance(content, list):
        return sum(_nbytes(s) for s in content)
    return 0
