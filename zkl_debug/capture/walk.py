"""Find every tensor that an object holds, wherever it is: by walking objects, not by a list of names.

Caches derived from a parameter are usually plain attributes: no buffer, no name in a state dict, and no refit touches
them. What cannot be looked into (``functools.lru_cache``) is listed as opaque, never passed over in silence.
"""

from __future__ import annotations

import collections
import enum
import functools
import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

_MAX_OBJECTS = 50_000
_MAX_DEPTH = 24
_MAX_ITEMS = 4096
#: Objects of these packages hold no state of a model (or hold handles only).
_SKIPPED = ("torch", "asyncio", "threading", "concurrent", "logging", "_thread", "multiprocessing", "zkl_debug")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, enum.Enum, types.ModuleType, range, slice)
#: Types of most attributes: passed over before a path is made for them.
_COMMON = frozenset({str, bytes, int, float, bool, type(None)})
_MODULE_OWN = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Found:
    """One tensor.

    Attributes:
        path: dotted path from the root.
        kind: ``parameter``, ``buffer``, or ``cache`` for anything held in another attribute.
        tensor: the live tensor.
        owner: path of the innermost ``nn.Module`` that holds it, empty when there is none.
        persistent: whether a state dict has it (parameters and persistent buffers).
    """

    path: str
    kind: str
    tensor: torch.Tensor
    owner: str = ""
    persistent: bool = False


@dataclass
class Walk:
    """What a walk found.

    Attributes:
        found: tensors in the order they were met; a tied parameter or buffer appears under each of its names.
        opaque: what could not be looked into, with the reason.
        objects: objects visited.
        truncated: whether a limit was reached, so that tensors may be missing.
    """

    found: list[Found] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    objects: int = 0
    truncated: bool = False


def walk(root: Any, max_objects: int = _MAX_OBJECTS) -> Walk:
    """All tensors reachable from ``root`` through modules, attributes, containers and closures."""
    return _Walker(max_objects).run(root)


class _Walker:
    def __init__(self, max_objects: int) -> None:
        self.result = Walk()
        self.max_objects = max_objects
        self.seen: set[int] = set()
        self.types: set[type] = set()
        self.keep: list[Any] = []  # temporaries stay alive, so that an id is never used twice

    def run(self, root: Any) -> Walk:
        todo: collections.deque[tuple[Any, str, str, int]] = collections.deque([(root, "", "", 0)])
        while todo:
            value, path, owner, depth = todo.popleft()
            if isinstance(value, torch.Tensor):
                self._tensor(value, path, owner)
                continue
            if isinstance(value, np.ndarray):
                if value.dtype.kind in "fiub" and value.size:
                    self._tensor(torch.from_numpy(np.ascontiguousarray(value)), path, owner)
                continue
            if isinstance(value, _PLAIN) or id(value) in self.seen:
                continue
            self.seen.add(id(value))
            self.keep.append(value)
            self.result.objects += 1
            if self.result.objects > self.max_objects or depth > _MAX_DEPTH:
                self.result.truncated = True
                continue
            todo.extend((child, name, held, depth + 1) for child, name, held in self._children(value, path, owner))
        return self.result

    def _tensor(self, tensor: torch.Tensor, path: str, owner: str) -> None:
        if id(tensor) not in self.seen:
            self.seen.add(id(tensor))
            self.keep.append(tensor)
            self.result.found.append(Found(path, "cache", tensor, owner))

    def _children(self, value: Any, path: str, owner: str) -> Iterable[tuple[Any, str, str]]:
        self._class_caches(value)
        if isinstance(value, nn.Module):
            return self._module(value, path)
        if isinstance(value, dict | types.MappingProxyType):
            held = ((k, v) for k, v in value.items() if type(v) not in _COMMON)
            return _limited(((v, f"{path}[{k!r}]", owner) for k, v in held), self.result)
        if isinstance(value, list | tuple | set | frozenset | collections.deque):
            numbered = ((i, v) for i, v in enumerate(value) if type(v) not in _COMMON)
            return _limited(((v, f"{path}[{i}]", owner) for i, v in numbered), self.result)
        if isinstance(value, functools.partial):
            return [(value.args, f"{path}.args", owner), (value.keywords, f"{path}.keywords", owner)]
        if isinstance(value, types.FunctionType):
            return self._closure(value, path, owner)
        if isinstance(value, types.MethodType | types.BuiltinFunctionType | weakref.ref):
            return []
        if type(value).__module__.split(".")[0] in _SKIPPED:
            return []
        return [
            (v, f"{path}.{name}" if path else name, owner) for name, v in _attributes(value) if type(v) not in _COMMON
        ]

    def _module(self, module: nn.Module, path: str) -> Iterator[tuple[Any, str, str]]:
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self._named(parameter, f"{prefix}{name}", "parameter", path, True)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kept = name not in module._non_persistent_buffers_set
                self._named(buffer, f"{prefix}{name}", "buffer", path, kept)
        for name, child in module._modules.items():
            if child is not None:
                yield child, f"{prefix}{name}", f"{prefix}{name}"
        for name, value in vars(module).items():
            if type(value) not in _COMMON and name not in _MODULE_OWN:
                yield value, f"{prefix}{name}", path

    def _named(self, tensor: torch.Tensor, path: str, kind: str, owner: str, persistent: bool) -> None:
        self.seen.add(id(tensor))
        self.keep.append(tensor)
        self.result.found.append(Found(path, kind, tensor, owner, persistent))

    @staticmethod
    def _closure(function: types.FunctionType, path: str, owner: str) -> Iterator[tuple[Any, str, str]]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield cell.cell_contents, f"{path}<{name}>", owner
            except ValueError:  # not filled yet
                continue

    def _class_caches(self, value: Any) -> None:
        for cls in type(value).__mro__:
            if cls in self.types:
                continue
            self.types.add(cls)
            for name, attribute in vars(cls).items():
                info = getattr(attribute, "cache_info", None)
                if callable(info) and info().currsize:
                    text = f"{cls.__module__}.{cls.__qualname__}.{name}: lru_cache with {info().currsize} entries"
                    self.result.opaque.append(text)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    found = list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        found.extend(
            (n, getattr(value, n)) for n in names if n not in ("__dict__", "__weakref__") and hasattr(value, n)
        )
    return found


def _limited(items: Iterator[tuple[Any, str, str]], result: Walk) -> Iterator[tuple[Any, str, str]]:
    for number, item in enumerate(items):
        if number >= _MAX_ITEMS:
            result.truncated = True
            return
        yield item
