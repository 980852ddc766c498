"""Replacing attributes and ATen kernels for a while, and putting back exactly what was there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch

_MISSING = object()


@dataclass
class PatchSet:
    """A reversible set of attribute replacements.

    Attributes are restored in reverse order. One that an instance did not carry itself (it came from the class) is
    deleted again, so that the instance's ``__dict__`` is what it was.
    """

    _undo: list[tuple[Any, str, Any]] = field(default_factory=list)

    def set(self, owner: Any, name: str, value: Any, *, create: bool = False) -> Any:
        """Replace ``owner.name`` and return what it was.

        Raises:
            AttributeError: when there is no such attribute and ``create`` is false.
        """
        before = getattr(owner, name) if not create else getattr(owner, name, None)
        own = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else before
        self._undo.append((owner, name, own))
        setattr(owner, name, value)
        return before

    def undo(self) -> None:
        """Put everything back, last replacement first."""
        while self._undo:
            owner, name, own = self._undo.pop()
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    @property
    def touched(self) -> list[tuple[Any, str]]:
        """The (owner, attribute) pairs that are replaced now, in order."""
        return [(owner, name) for owner, name, _ in self._undo]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[Any]:
    """Replace ``owner.name`` by ``make(original)`` inside the block; yields the original."""
    with PatchSet() as patches:
        original = getattr(owner, name)
        patches.set(owner, name, make(original))
        yield original


@contextmanager
def aten_cpu_kernels(kernels: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace ATen kernels of the CPU (``{"mm": fn}``) in every thread of the process inside the block.

    A replacement reaches the original arithmetic through the operator's ``out=`` overload, which is not replaced.
    Replacements of one operator nest: the innermost wins, and leaving it brings back the one before.
    """
    with ExitStack() as stack:
        for name, fn in kernels.items():
            stack.enter_context(_aten_cpu_kernel(name, fn))
        yield


_active: dict[str, list[Callable[..., Any]]] = {}
_libraries: dict[str, torch.library.Library] = {}


@contextmanager
def _aten_cpu_kernel(name: str, fn: Callable[..., Any]) -> Iterator[None]:
    chain = _active.setdefault(name, [])
    chain.append(fn)
    if len(chain) == 1:
        _libraries[name] = _install(name, chain)
    try:
        yield
    finally:
        chain.remove(fn)
        if not chain:
            library = _libraries.pop(name)
            library._destroy()  # type: ignore[no-untyped-call]


def _install(name: str, chain: list[Callable[..., Any]]) -> torch.library.Library:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return chain[-1](*args, **kwargs)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, kernel, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
    return library


def replaced_kernels() -> tuple[str, ...]:
    """Names of the ATen operators whose CPU kernel is replaced now."""
    return tuple(sorted(name for name, chain in _active.items() if chain))
