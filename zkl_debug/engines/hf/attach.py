"""How models of transformers are found in a program that was not written for it."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def watch(module: ModuleType, program: Any) -> None:
    """Watch a freshly imported module of transformers.

    A model is captured from its first outermost call, or from its first ``generate``, whichever comes first: the
    frames of a generation can only be told apart from inside it.
    """
    if hasattr(module, "PreTrainedModel"):
        program.watch_calls(module.PreTrainedModel)
    if hasattr(module, "GenerationMixin"):
        original = module.GenerationMixin.generate

        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            if program.ensure(model):
                return model.generate(*args, **kwargs)  # the capture has tapped it by now
            return original(model, *args, **kwargs)

        module.GenerationMixin.generate = generate
