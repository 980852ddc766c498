"""Call back when a module of the program has been imported. Standard library only."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """The module's own loader, and a call when it is done."""

    def __init__(self, loader: importlib.abc.Loader, callback: Callback) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the module's own loader does, then the callback."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # what the module and pickles see is its own loader
        self._loader.exec_module(module)
        try:
            self._callback(module)
        except Exception as error:
            print(f"zkl-debug: cannot observe {module.__name__}: {type(error).__name__}: {error}", file=sys.stderr)


class ImportWatch(importlib.abc.MetaPathFinder):
    """Finds the watched modules by the other finders and wraps their loaders.

    Args:
        callbacks: module name -> what to call with the module when it has been imported.
    """

    def __init__(self, callbacks: dict[str, Callback]) -> None:
        self._callbacks = dict(callbacks)

    def install(self) -> None:
        """Watch from here on; modules that are there already are reported at once."""
        sys.meta_path.insert(0, self)
        for name in [name for name in self._callbacks if name in sys.modules]:
            self._callbacks.pop(name)(sys.modules[name])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec the other finders give, for a watched module; None (not mine) for any other."""
        if fullname not in self._callbacks:
            return None
        callback = self._callbacks.pop(fullname)
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, callback)
                return spec
        return None
