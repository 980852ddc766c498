"""Marks a program leaves for captures: where a step begins, what happened, which functions to watch.

They may stay in the program. While nothing is captured they cost a dictionary look-up, and torch is not imported.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

from zkl_debug.errors import UsageError

#: Captures that are open, in the order in which they were opened.
_open: list[Any] = []
_step: tuple[int, int | None] | None = None
#: Why the last step that was marked could not be taken, for captures that are opened after it.
_refused: UsageError | None = None

#: What a capture can hold: a step in 32 bits, a weight version in 64, both signed.
STEPS, VERSIONS = range(1 << 31), range(1 << 63)

Function = Callable[..., Any]


def whole(name: str, value: Any, known: range) -> int:
    """A number of the program as a capture holds it; integers of numpy and torch are as good as Python's.

    Args:
        name: what it is, for the message.
        value: anything.
        known: numbers that can be held.

    Raises:
        UsageError: no whole number, or out of range.
    """
    try:
        number = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or number not in known:
        plain = isinstance(value, float | str) or (isinstance(value, int) and value.bit_length() < 100)
        shown = repr(value)[:40] if plain else f"of type {type(value).__name__}"
        raise UsageError(f"{name} {shown}", f"a whole number from 0 to {known[-1]}", f"zkl_debug.mark({name}=3)")
    return number


def opened(capture: Any) -> None:
    """A capture began: it hears of marks from here on, and is told the step that was marked last."""
    _open.append(capture)
    if _step is not None:
        capture.set_step(*_step)
    if _refused is not None:
        capture.misused(_refused, stop=False)  # it began with no fault of its own


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

    A mark that cannot be taken (neither a step nor an event, a step that is no whole number, is negative or too large)
    is left out; the captures say so on stderr and in their manifests. It never stops the program.

    Raises:
        UsageError: instead of that, from a capture with ``strict=True``.
    """
    global _step, _refused
    try:
        if step is None and not event:
            raise UsageError(
                "a mark without step and event", "zkl_debug.mark(step=3), or zkl_debug.mark(event='refit')"
            )
        if step is None and weight_version is not None:
            raise UsageError(
                f"a mark of weight_version {weight_version} without a step", "both", "zkl_debug.mark(step=3)"
            )
        if step is not None:
            number = whole("step", step, STEPS)
            version = number if weight_version is None else whole("weight_version", weight_version, VERSIONS)
            _step, _refused = (number, version), None
    except UsageError as error:
        # A capture that is opened later would take the step before it for the one that runs.
        _refused = error if step is not None else _refused
        for capture in tuple(_open):
            capture.misused(error)
        step = None
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
