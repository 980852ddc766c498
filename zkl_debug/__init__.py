"""zkl-debug: names the first layer and operator where training and generation log-probs stop being bitwise equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zkl_debug.marks import captured, mark, tap

__all__ = ["captured", "mark", "tap"]
__version__ = "0.1.0"

_MARKS = ("mark", "tap", "captured")


def __getattr__(name: str) -> object:
    """Load ``capture``, ``diff`` and the marks on first use, so that importing the package costs nothing."""
    if name in _MARKS:
        from zkl_debug import marks

        return getattr(marks, name)
    if name in ("capture", "diff", "viz"):
        import importlib

        return importlib.import_module(f"zkl_debug.{name}")
    raise AttributeError(f"module 'zkl_debug' has no attribute {name!r}")
