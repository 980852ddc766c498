"""How models and engines of megatron-core are found in a program that was not written for it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

_MODELS = ("GPTModel", "HybridModel")


def watch(module: ModuleType, program: Any) -> None:
    """Watch a freshly imported module of megatron-core.

    A model is captured from its first call, or from when an engine is built over it: requests are known only to a
    capture that was there when they were added.
    """
    for name in _MODELS:
        cls = getattr(module, name, None)
        if cls is not None and cls.__module__ == module.__name__:
            program.watch_calls(cls)
    engine = getattr(module, "DynamicInferenceEngine", None)
    if engine is not None and engine.__module__ == module.__name__:
        original = engine.__init__

        def __init__(self: Any, controller: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            program.ensure(_unwrapped(controller.inference_wrapped_model.model))
            original(self, controller, *args, **kwargs)

        engine.__init__ = __init__


def _unwrapped(model: Any) -> Any:
    """The model inside wrappers such as Float16Module and DDP."""
    while hasattr(model, "module") and type(model).__name__ not in _MODELS:
        model = model.module
    return model
