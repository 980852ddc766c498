"""Observing a running program.

The package is callable: ``with zkl_debug.capture(model, out, side="train") as cap:`` is
:func:`zkl_debug.capture.api.capture`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, model: Any, out: Any, side: str = "train", **options: Any) -> Any:
        """See :func:`zkl_debug.capture.api.capture`."""
        from zkl_debug.capture.api import capture

        return capture(model, out, side, **options)


sys.modules[__name__].__class__ = _CallablePackage
