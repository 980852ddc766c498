"""Config fields of megatron-core as switches: set in every config built inside the block, and read back from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

from zkl_debug.engines.patching import patched

#: switch name -> the configs built while it was on, with the values they were given (kept until it is off).
_built: dict[str, list[tuple[Any, dict[str, Any]]]] = {}


@contextmanager
def config_fields(switch: str, class_name: str, values: Mapping[str, Any]) -> Iterator[None]:
    """Set fields of every config of a class (or a subclass) built inside the block, before it checks itself.

    Args:
        switch: whose configs these are, for :func:`read_back`.
        class_name: ``TransformerConfig`` or ``InferenceConfig``.
        values: field -> value, an enum member by name or value, or a function of the config. ``"a|b"`` is one setting
            under the first of its names that the installed megatron-core knows.

    Raises:
        ImportError: the installed megatron-core has no such field.
    """
    config_class = _config_class(class_name)
    fields = {_existing(config_class, names): value for names, value in values.items()}
    built = _built.setdefault(switch, [])

    def make(original: Any) -> Any:
        def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
            given = {name: value(self) if callable(value) else value for name, value in fields.items()}
            for name, value in given.items():
                setattr(self, name, _as_type(getattr(self, name), value))
            original(self, *args, **kwargs)
            built.append((self, given))

        return post_init

    with patched(config_class, "__post_init__", make):
        try:
            yield
        finally:
            _built.pop(switch, None)


def read_back(switch: str, class_name: str, values: Mapping[str, Any], model: Any = None) -> tuple[bool, str]:
    """Whether the configs built since the switch is on (and the model's own) have the values, and what was found."""
    built = _built.get(switch, [])
    used = _configs_of(model, class_name) if model is not None else []
    # A model may hold copies of its config, which no constructor made.
    if not built or (used and all(config is not other for config in used for other, _ in built)):
        return False, f"the {class_name} that runs was built before it was set"
    config_class = _config_class(class_name)
    fixed = {_existing(config_class, names): value for names, value in values.items() if not callable(value)}
    for config, given in (*built, *((config, fixed) for config in used)):
        for name, value in given.items():
            found = getattr(config, name)
            if found != _as_type(found, value):
                return False, f"{class_name}.{name} is {found!r} instead of {value!r}"
    return True, ""


def _config_class(class_name: str) -> Any:
    if class_name == "TransformerConfig":
        from megatron.core.transformer.transformer_config import TransformerConfig

        return TransformerConfig
    from megatron.core.inference.config import InferenceConfig

    assert class_name == "InferenceConfig", class_name
    return InferenceConfig


def _existing(config_class: Any, names: str) -> str:
    for name in names.split("|"):
        if name in config_class.__dataclass_fields__:
            return name
    raise ImportError(f"the installed megatron-core has no {config_class.__name__}.{names.replace('|', ' or ')}")


def _configs_of(model: Any, class_name: str) -> list[Any]:
    """The distinct configs of that class which the modules of a model hold."""
    config_class = _config_class(class_name)
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, config_class):
            found[id(config)] = config
    return list(found.values())


def _as_type(current: Any, value: Any) -> Any:
    """``value`` as a member of the enum that ``current`` belongs to, or as it is."""
    if not isinstance(current, Enum) or isinstance(value, Enum):
        return value
    kind = type(current)
    return kind[value] if value in kind.__members__ else kind(value)
