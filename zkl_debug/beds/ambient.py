"""What surrounds an operator: plain data that code may read without being handed it.

Module globals and what simple objects among them carry, attributes of classes and functions, variables that functions
closed over, environment variables, the random generator and torch's settings. Code is not data: functions, classes and
objects are left alone, so that putting one side's surroundings in place never exchanges the operator itself. Only data
of the program counts; the standard library and installed packages do not, except megatron-core.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

_DEPTH = 3
_ENTRIES = 1000
_TENSOR_BYTES = 1 << 20
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED_TOO = ("megatron.core",)
#: Probe code, and the mode flag of megatron-core that says which phase runs: a row's phase is captured with it.
_NOT = ("zkl_debug.capture", "zkl_debug.store", "zkl_debug.beds.ambient", "zkl_debug.beds.replay", "zkl_debug.cli")
_NOT_NAMES = frozenset({"megatron.core.inference.utils.InferenceMode._is_active"})


@dataclass(frozen=True)
class Place:
    """One datum: how to read it, and how to put another value there."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


@dataclass(frozen=True)
class Surroundings:
    """Copies of the data at one moment, by name."""

    values: Mapping[str, Any]

    def differing(self, other: Surroundings) -> list[str]:
        """Names that both have with unlike values."""
        return sorted(
            name for name, value in self.values.items() if name in other.values and not _same(value, other.values[name])
        )


def observe(roots: Iterable[Any] = ()) -> Surroundings:
    """Copy the surroundings as they are now.

    Args:
        roots: objects whose attributes hold functions worth looking into (modules of a model with a method replaced).
    """
    found = {}
    for name, place in _places(roots).items():
        value = place.read()
        if _is_data(value):
            found[name] = _copy(value)
    return Surroundings(found)


@contextmanager
def surrounded(by: Surroundings, names: Iterable[str], roots: Iterable[Any] = ()) -> Iterator[None]:
    """Inside the block the named data have the values of ``by``; what they were is put back behind it."""
    places = _places(roots)
    before: list[tuple[Place, Any]] = []
    try:
        for name in names:
            place = places.get(name)
            if place is not None:
                before.append((place, _copy(place.read())))
                place.write(_copy(by.values[name]))
        yield
    finally:
        for place, value in reversed(before):
            place.write(value)


# ---- what is data ---------------------------------------------------------------------------------------------------
def _is_data(value: Any, depth: int = _DEPTH) -> bool:
    if type(value) in _SCALARS:  # exactly: subclasses may hold anything
        return True
    if isinstance(value, torch.Tensor):
        return not isinstance(value, torch.nn.Parameter) and value.nbytes <= _TENSOR_BYTES
    if isinstance(value, np.ndarray):
        return value.dtype != object and value.nbytes <= _TENSOR_BYTES
    if isinstance(value, torch.dtype):
        return True
    if depth == 0:
        return False
    if type(value) in (list, tuple, set, frozenset):
        return len(value) <= _ENTRIES and all(_is_data(item, depth - 1) for item in value)
    if type(value) is dict:
        return len(value) <= _ENTRIES and all(_is_data(v, depth - 1) and _is_data(k, 1) for k, v in value.items())
    return False


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and bool(np.array_equal(a, b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b) or (a != a and b != b)


def _refill(old: Any, new: Any) -> bool:
    """Give a mutable object new contents in place, since others may hold it; False where that is not possible."""
    if type(old) is not type(new):
        return False
    if isinstance(old, list):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)
    elif isinstance(old, torch.Tensor) and old.shape == new.shape and old.dtype == new.dtype:
        with torch.no_grad():
            old.copy_(new)
    elif isinstance(old, np.ndarray) and old.shape == new.shape and old.dtype == new.dtype:
        old[...] = new
    else:
        return False
    return True


# ---- where it is ----------------------------------------------------------------------------------------------------
def _places(roots: Iterable[Any]) -> dict[str, Place]:
    places = _settings()
    functions: list[FunctionType] = []
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and _is_program(module):
            _of_namespace(module.__name__, module, places, functions)
    for cls in vars(torch.nn).values():  # methods of torch that somebody replaced
        if isinstance(cls, type):
            functions += [f for f in vars(cls).values() if isinstance(f, FunctionType) and _is_foreign(f)]
    for root in roots:
        functions += _functions_in(vars(root).values())
    _of_closures(functions, places)
    return {name: place for name, place in places.items() if name not in _NOT_NAMES}


def _is_program(module: ModuleType) -> bool:
    name = module.__name__
    if name.startswith(_NOT):
        return False
    if name.startswith(_INSTALLED_TOO):
        return True
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not file.startswith(_INSTALLED)


def _is_foreign(function: FunctionType) -> bool:
    return not (function.__module__ or "").startswith("torch")


def _of_namespace(label: str, owner: Any, places: dict[str, Place], functions: list[FunctionType]) -> None:
    for name, value in list(vars(owner).items()):
        if name.startswith("__"):
            continue
        if isinstance(value, type):
            if value.__module__ == label and not isinstance(owner, type):
                _of_namespace(f"{label}.{name}", value, places, functions)
        elif _is_data(value):
            places[f"{label}.{name}"] = _attribute(owner, name)
        elif _is_record(value):
            _of_record(f"{label}.{name}", value, places)
        else:
            functions += _functions_in([value])


def _is_record(value: Any) -> bool:
    """Whether a global is an object that carries data: of a class of the program, and not code itself."""
    cls = type(value)
    if callable(value) or isinstance(value, ModuleType | torch.nn.Module) or not hasattr(value, "__dict__"):
        return False
    if getattr(getattr(cls, "__dataclass_params__", None), "frozen", False):
        return False
    module = sys.modules.get(cls.__module__)
    return cls is SimpleNamespace or (module is not None and _is_program(module))


def _of_record(label: str, record: Any, places: dict[str, Place]) -> None:
    for name, value in list(vars(record).items()):
        if _is_data(value):
            places[f"{label}.{name}"] = _attribute(record, name)


def _functions_in(values: Iterable[Any], depth: int = 2) -> list[FunctionType]:
    """Functions among values, in partials, bound methods and small containers."""
    found: list[FunctionType] = []
    for value in values:
        if isinstance(value, functools.partial):
            value = value.func
        function = getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            found.append(function)
        elif depth and type(value) in (list, tuple) and len(value) <= _ENTRIES:
            found += _functions_in(value, depth - 1)
        elif depth and type(value) is dict and len(value) <= _ENTRIES:
            found += _functions_in(value.values(), depth - 1)
    return found


def _of_closures(functions: Iterable[FunctionType], places: dict[str, Place]) -> None:
    """Variables that functions closed over, named by the code, which is the same however often the function is made."""
    seen: set[int] = set()
    todo = list(functions)
    while todo:
        function = todo.pop()
        if id(function) in seen or (function.__module__ or "").startswith(_NOT):
            continue
        seen.add(id(function))
        _of_record(f"{function.__module__}.{function.__qualname__}", function, places)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            value = _cell_value(cell)
            if _is_data(value) and value is not None:
                places[f"{function.__module__}.{function.__qualname__}.{name}"] = _cell(cell)
            else:
                todo += _functions_in([value])


def _cell_value(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _attribute(owner: Any, name: str) -> Place:
    def write(value: Any) -> None:
        if not _refill(getattr(owner, name), value):
            setattr(owner, name, value)

    return Place(lambda: getattr(owner, name), write)


def _cell(cell: CellType) -> Place:
    def write(value: Any) -> None:
        if not _refill(cell.cell_contents, value):
            cell.cell_contents = value

    return Place(lambda: cell.cell_contents, write)


def _settings() -> dict[str, Place]:
    def write_environment(values: Mapping[str, str]) -> None:
        os.environ.clear()
        os.environ.update(values)

    def write_threads(count: int) -> None:
        torch.set_num_threads(count)

    return {
        "environment variables": Place(lambda: dict(os.environ), write_environment),
        "torch random generator": Place(torch.get_rng_state, torch.set_rng_state),
        "torch threads": Place(torch.get_num_threads, write_threads),
        "torch default dtype": Place(torch.get_default_dtype, torch.set_default_dtype),
    }
