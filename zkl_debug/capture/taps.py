"""Patch functions at their binding site, and put everything back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MISSING = object()


@dataclass
class _Patch:
    owner: Any
    name: str
    original: Any  # _MISSING when the owner had no attribute of its own
    replacement: Any


class TapSet:
    """Attribute patches that are undone in reverse order.

    Functions imported by value must be patched where they are looked up, not where they are defined; the caller
    names that place as ``(owner, attribute)``.
    """

    def __init__(self) -> None:
        self._patches: list[_Patch] = []
        self.left_in_place: list[str] = []

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``wrapper(owner.name)``.

        Raises:
            AttributeError: when the attribute does not exist.
        """
        current = getattr(owner, name)
        original = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else current
        replacement = wrapper(current)
        setattr(owner, name, replacement)
        self._patches.append(_Patch(owner, name, original, replacement))

    def remove(self) -> None:
        """Undo every patch. A patch that somebody else patched over is left in place and reported."""
        for patch in reversed(self._patches):
            now = vars(patch.owner).get(patch.name, _MISSING) if hasattr(patch.owner, "__dict__") else _MISSING
            if now is not patch.replacement:
                label = getattr(patch.owner, "__name__", type(patch.owner).__name__)
                self.left_in_place.append(f"{label}.{patch.name}")
                print(
                    f"zkl-debug: {label}.{patch.name} was patched again after the tap; left as it is", file=sys.stderr
                )
                continue
            if patch.original is _MISSING:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.original)
        self._patches.clear()

    def __len__(self) -> int:
        return len(self._patches)
