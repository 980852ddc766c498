"""Workers of Ray are ended from outside when the program is done: captures rest after every piece of work."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any


def watch(module: ModuleType, program: Any) -> None:
    """Watch Ray's module that makes the functions which a worker runs."""
    manager = module.FunctionActorManager
    original = manager._make_actor_method_executor

    def make(self: Any, method_name: str, method: Any) -> Any:
        run = original(self, method_name, method)

        @functools.wraps(run)
        def executor(*args: Any, **kwargs: Any) -> Any:
            try:
                result = run(*args, **kwargs)
            except BaseException:
                program.rest()
                raise
            if inspect.iscoroutine(result):
                return _then_rest(result, program)
            program.rest()
            return result

        executor.name = method_name  # type: ignore[attr-defined]
        executor.method = method  # type: ignore[attr-defined]
        return executor

    manager._make_actor_method_executor = make
    loaded = manager.get_execution_info

    def get_execution_info(self: Any, *args: Any, **kwargs: Any) -> Any:
        info = loaded(self, *args, **kwargs)
        function = info.function
        if getattr(function, "zkl_debug", False) or hasattr(function, "method"):
            return info

        @functools.wraps(function)
        def task(*a: Any, **k: Any) -> Any:
            try:
                return function(*a, **k)
            finally:
                program.rest()

        task.zkl_debug = True  # type: ignore[attr-defined]
        return info._replace(function=task)

    manager.get_execution_info = get_execution_info


async def _then_rest(work: Any, program: Any) -> Any:
    try:
        return await work
    finally:
        program.rest()
