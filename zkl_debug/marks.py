"""Marks a program leaves for captures: where a step begins, what happened, which functions to watch.

They may stay in the program. While nothing is captured they cost a dictionary look-up, and torch is not imported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

from zkl_debug.errors import UsageError

#: Captures that are open, in the order in which they were opened.
_open: list[Any] = []
_step: tuple[int, int | None] | None = None

Function = Callable[..., Any]


def opened(capture: Any) -> None:
    """A capture began: it hears of marks from here on, and is told the step that was marked last."""
    _open.append(capture)
    if _step is not None:
        capture.set_step(*_step)


def closed(capture: Any) -> None:
    """A capture ended."""
    if capture in _open:
        _open.remove(capture)


def has_step() -> bool:
    """Whether the program marks its steps itself."""
    return _step is not None


def mark(*, step: int | None = None, weight_version: int | None = None, event: str = "", **detail: Any) -> None:
    """Tell every open capture what the program is at.

    Args:
        step: training step that the following forwards belong to.
        weight_version: version of the weights they run with; needs ``step``, and is taken to be it where left out.
        event: something that happened between forwards: ``refit``, ``optimizer_step``, ``sleep`` ...
        detail: further facts of the event; anything JSON can hold.

    Raises:
        UsageError: when neither a step nor an event is given.
    """
    global _step
    if step is None and not event:
        raise UsageError("a mark without step and event", "zkl_debug.mark(step=3), or zkl_debug.mark(event='refit')")
    if step is not None:
        _step = (int(step), int(step) if weight_version is None else int(weight_version))
    for capture in tuple(_open):
        if step is not None and _step is not None:
            capture.set_step(*_step)
        if event:
            capture.event(event, detail)


@overload
def tap(function: Function) -> Function: ...


@overload
def tap(function: str) -> Callable[[Function], Function]: ...


def tap(function: Function | str) -> Any:
    """Watch a function of the program: its tensors become sites of the module that calls it.

    ``@zkl_debug.tap`` names the operator after the function, ``@zkl_debug.tap("rope")`` as given. Positional tensor
    arguments are ``in.0``, ``in.1`` ..., keyword arguments follow in the order of the call, outputs are ``out.0`` ...
    Only tensors with the token dimensions of the forward are rows; others are listed.
    """
    if isinstance(function, str):
        return functools.partial(_tapped, function)
    return _tapped(getattr(function, "__name__", type(function).__name__), function)


def _tapped(name: str, function: Function) -> Function:
    if not name or any(mark in name for mark in ":/#~ "):
        raise UsageError(f"an operator named {name!r}", "a name without : / # ~ and spaces")

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not _open:
            return function(*args, **kwargs)
        for capture in tuple(_open):
            capture.tapped(name, "in", (*args, *kwargs.values()))
        result = function(*args, **kwargs)
        for capture in tuple(_open):
            capture.tapped(name, "out", result if isinstance(result, tuple | list) else (result,))
        return result

    return watched


def captured(model: Any, out: str | Path, side: str = "train", **options: Any) -> Callable[[Function], Function]:
    """Decorate a function: each call of it is captured, the first into ``out``, others into ``out.call2`` ...

    Args:
        model: the model, or where the function finds it among its arguments: ``"model"``, ``"self.model"``.
        out: folder to create.
        side, options: as for :func:`zkl_debug.capture`.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        calls = 0

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            from zkl_debug.capture.api import Capture

            calls += 1
            found = _find(model, signature.bind(*args, **kwargs).arguments) if isinstance(model, str) else model
            place = Path(out) if calls == 1 else Path(f"{out}.call{calls}")
            with Capture(found, place, side, **options):
                return function(*args, **kwargs)

        return wrapper

    return decorate


def _find(path: str, arguments: dict[str, Any]) -> Any:
    """The object at ``argument.attribute...``.

    Raises:
        UsageError: when the function has no such argument, or the argument no such attribute.
    """
    name, *attributes = path.split(".")
    if name not in arguments:
        raise UsageError(f"no argument {name}", f"one of {', '.join(arguments) or '(it has none)'}")
    value = arguments[name]
    for attribute in attributes:
        if not hasattr(value, attribute):
            raise UsageError(f"{type(value).__name__} of {path} has no {attribute}", "a path to the model")
        value = getattr(value, attribute)
    return value
