"""How switches of the catalogue get ``apply``, ``effective`` and ``read``: bodies are imported when first used."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from zkl_debug.stack.needs import Need, NeedKind
from zkl_debug.stack.switches import Reading, Switch, SwitchUnavailable

Body = Callable[[], AbstractContextManager[None]]

_CONFIG_FIELDS = "zkl_debug.engines.megatron.config_fields"
_on: dict[str, int] = {}


def is_marked(name: str) -> bool:
    """Whether the body of switch ``name`` is entered now."""
    return _on.get(name, 0) > 0


def _marked(name: str, body: Body) -> Body:
    @contextmanager
    def apply() -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(body())
            except ImportError as error:
                raise SwitchUnavailable(f"switch {name} cannot be applied here: {error}") from error
            _on[name] = _on.get(name, 0) + 1
            try:
                yield
            finally:
                _on[name] -= 1

    return apply


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def by_function(name: str, path: str, effective: str = "", **fields: Any) -> Switch:
    """A switch whose body is the context manager ``module:function``.

    Args:
        name: name of the switch.
        path: ``module:function``, a function without arguments that returns a context manager.
        effective: ``module:function`` that tells whether it is on; default: whether the body is entered.
        fields: the other fields of :class:`Switch`.
    """

    def body() -> AbstractContextManager[None]:
        entered: AbstractContextManager[None] = _imported(path)()
        return entered

    def is_on() -> bool:
        return is_marked(name) and (not effective or bool(_imported(effective)()))

    return Switch(name=name, apply=_marked(name, body), effective=is_on, **fields)


def by_kernels(name: str, path: str, *kernels: str, **fields: Any) -> Switch:
    """Like :func:`by_function`; on in effect while these ATen CPU kernels are replaced."""

    def is_on() -> bool:
        replaced = sys.modules.get("zkl_debug.engines.patching")
        return replaced is not None and set(kernels) <= set(replaced.replaced_kernels())

    made = by_function(name, path, **fields)
    return Switch(**{**vars(made), "effective": is_on})


def by_config(name: str, config_class: str, values: Mapping[str, Any], **fields: Any) -> Switch:
    """A switch that sets fields of every ``TransformerConfig`` or ``InferenceConfig`` built while it is on.

    In effect only when such a config was built since, and all of those (and the model's) have the values: a switch that
    is set after the model is built does nothing, and reads as off. It needs the fields to exist.

    Args:
        name: name of the switch.
        config_class: name of the config class.
        values: field -> value; enum members by name or value.
        fields: the other fields of :class:`Switch`.
    """

    def body() -> AbstractContextManager[None]:
        entered: AbstractContextManager[None] = _imported(f"{_CONFIG_FIELDS}:config_fields")(name, config_class, values)
        return entered

    def read(model: Any) -> Reading:
        if not is_marked(name):
            return Reading(False, "it is not applied")
        on, text = _imported(f"{_CONFIG_FIELDS}:read_back")(name, config_class, values, model)
        return Reading(on, text)

    needs = (*(Need(NeedKind.FIELD, (field,), owner=config_class) for field in values), *fields.pop("needs", ()))
    fields.setdefault("target", ", ".join(f"{config_class}.{field}" for field in values))
    effective = lambda: read(None).on  # noqa: E731
    return Switch(name=name, apply=_marked(name, body), effective=effective, read=read, needs=needs, **fields)


@contextmanager
def variables_put_back(names: Iterable[str]) -> Iterator[None]:
    """Environment variables are afterwards what they were before, set or not."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def by_variables(name: str, values: Mapping[str, str], read_by: str, **fields: Any) -> Switch:
    """A switch that sets environment variables.

    Args:
        name: name of the switch.
        values: variable -> value.
        read_by: what reads them, once: a module (in effect only when it was not imported yet), ``cuda`` (only when
            CUDA was not initialised yet), or empty when they are read at every use.
        fields: the other fields of :class:`Switch`.
    """
    late: dict[str, str] = {}

    @contextmanager
    def body() -> Iterator[None]:
        already = all(os.environ.get(key) == value for key, value in values.items())
        late["text"] = "" if already else _read_already(read_by)
        with variables_put_back(values):
            os.environ.update(values)
            yield

    def read(_model: Any) -> Reading:
        if not is_marked(name):
            return Reading(False, "it is not applied")
        wrong = [f"{k} is {os.environ.get(k)!r}" for k, v in values.items() if os.environ.get(k) != v]
        text = "; ".join(wrong) or late.get("text", "")
        return Reading(not text, text)

    return Switch(name=name, apply=_marked(name, body), effective=lambda: read(None).on, read=read, **fields)


def _read_already(read_by: str) -> str:
    """Why it is too late to set a variable, or empty."""
    if read_by == "cuda":
        torch = sys.modules.get("torch")
        started = torch is not None and torch.cuda.is_initialized()
        return "CUDA was initialised before it was set, and reads it only once" if started else ""
    return f"{read_by} was imported before it was set, and reads it only once" if read_by in sys.modules else ""


def elsewhere(name: str, **fields: Any) -> Switch:
    """A switch this project carries no code for: a harness that has the patch is told by its name or its settings."""

    @contextmanager
    def body() -> Iterator[None]:
        raise SwitchUnavailable(f"switch {name} cannot be applied here: this project carries no code for it")
        yield

    return Switch(name=name, apply=body, effective=lambda: False, carried=False, stacked=False, **fields)
