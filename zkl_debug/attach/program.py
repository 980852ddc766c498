"""The attached process: models are captured from the first time they run, until the program ends."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

from zkl_debug import marks
from zkl_debug.attach import told
from zkl_debug.attach.imports import Callback, ImportWatch
from zkl_debug.attach.settings import Settings, from_environment, model_parts

#: Module of a program -> module with ``watch(module, program)`` that knows how its models are found.
WATCHED = {
    "megatron.core.models.gpt.gpt_model": "zkl_debug.engines.megatron.attach",
    "megatron.core.models.hybrid.hybrid_model": "zkl_debug.engines.megatron.attach",
    "megatron.core.inference.engines.dynamic_engine": "zkl_debug.engines.megatron.attach",
    "transformers.modeling_utils": "zkl_debug.engines.hf.attach",
    "transformers.generation.utils": "zkl_debug.engines.hf.attach",
    "ray._private.function_manager": "zkl_debug.attach.ray_tasks",
}


class Program:
    """Captures of one process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._pid = os.getpid()
        self._captures: list[Any] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._depth = threading.local()
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._step = 0
        self._over = False
        self._thread = 0  # that ran a model last

    # ---- for the engines ------------------------------------------------------------------------------------------
    def watch_calls(self, cls: Any) -> None:
        """Capture instances of a module class from their first outermost call on."""
        original = cls.__call__
        program = self

        def __call__(model: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            depth = getattr(program._depth, "value", 0)
            if depth == 0:
                program.wake()
                program.ensure(model)
            program._depth.value = depth + 1
            try:
                return original(model, *args, **kwargs)
            finally:
                program._depth.value = depth

        cls.__call__ = __call__

    def ensure(self, model: Any) -> bool:
        """Start capturing a model unless it is captured already; whether it was started now."""
        if self._over or os.getpid() != self._pid or model in self._known:
            return False
        self._known.add(model)
        if len(self._captures) >= self.settings.models:
            return False
        try:
            self._captures.append(self._start(model))
        except Exception as error:
            if self.settings.strict:
                raise
            print(f"zkl-debug: {type(model).__name__} is not captured: {error}", file=sys.stderr)
            told.tell(f"{told.FAILED}{type(model).__name__}: {error}")
            return False
        return True

    # ---- capture --------------------------------------------------------------------------------------------------
    def _start(self, model: Any) -> Any:
        from zkl_debug.capture.api import Capture

        s = self.settings
        world = int(os.environ.get("WORLD_SIZE", "1") or 1)
        rank = int(os.environ.get("RANK", "0") or 0)
        name = s.out if not self._captures else f"{s.out}.model{len(self._captures) + 1}"
        if world <= 1:
            rank, world = 0, 1
            name = _claim(name)
        capture = Capture(
            model,
            name,
            s.side,
            level=s.level,
            sites=s.sites,
            layers=s.layers,
            budget=s.budget,
            strict=s.strict,
            requests=s.requests,
            at_once=s.at_once,
            rank=rank,
            world=world,
            meta={"attached": {"pid": self._pid, "program": Path(sys.argv[0]).name if sys.argv else ""}},
        )
        capture.__enter__()
        if not marks.has_step():
            capture.set_step(self._step, self._step)
        return capture

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """An optimizer stepped: frames from here on belong to the next step. Chained optimizers step once each."""
        if os.getpid() != self._pid:
            return
        self._optimizers[optimizer] = self._optimizers.get(optimizer, 0) + 1
        step = max(self._optimizers.values())
        if step == self._step:
            return
        self._step = step
        for capture in self._captures:
            if not marks.has_step():
                capture.set_step(step, step)
        if self.settings.steps and step >= self.settings.steps:
            self.close()

    def wake(self) -> None:
        """A model runs: captures that rested do not any more."""
        self._thread = threading.get_ident()
        for capture in self._captures:
            capture.wake()

    def rest(self) -> None:
        """A piece of work is done. Captures rest, unless a model may be running in another thread just now."""
        if self._over or os.getpid() != self._pid or self._thread != threading.get_ident():
            return
        for capture in self._captures:
            capture.rest()

    def close(self) -> None:
        """End every capture; the hooks are gone afterwards."""
        if os.getpid() != self._pid or self._over:
            return
        self._over = True
        error = getattr(sys, "last_exc", None)  # what ended the program, when nothing in it caught that
        for capture in self._captures:
            capture.__exit__(None if error is None else type(error), error, None)


def _claim(name: str) -> str:
    """A folder of this name that no other process of the program has: the name itself, or with a number."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        candidate = name if number == 1 else f"{name}.process{number}"
        try:
            Path(candidate).mkdir()
        except FileExistsError:
            continue
        return candidate
    raise FileExistsError(f"{name} and 998 others like it exist")


def start() -> Program | None:
    """Watch the imports of this process, if its environment asks for it."""
    settings = from_environment()
    if settings is None:
        return None
    told.tell(told.ATTACHED)
    program = Program(settings)
    callbacks: dict[str, Callback] = {name: _watcher(target, program) for name, target in WATCHED.items()}
    callbacks["torch.optim.optimizer"] = lambda module: module.register_optimizer_step_post_hook(program.stepped)
    if settings.model:
        name, attribute = model_parts(settings.model)
        callbacks[name] = lambda module: _watch_class(module, attribute, program)
    ImportWatch(callbacks).install()
    atexit.register(program.close)
    return program


def _watch_class(module: ModuleType, name: str, program: Program) -> None:
    """Watch the class that ``--model`` names."""
    found = getattr(module, name, None)
    if not isinstance(found, type):
        why = f"module {module.__name__} has no class {name}"
        told.tell(f"{told.LACKS}{why}")
        raise TypeError(why)
    told.tell(told.FOUND)
    program.watch_calls(found)


def _watcher(target: str, program: Program) -> Callback:
    def imported(module: ModuleType) -> None:
        told.tell(f"{told.IMPORTED}{module.__name__}")
        importlib.import_module(target).watch(module, program)

    return imported
