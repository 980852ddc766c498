"""Config fields of megatron-core as switches: set in every config built inside the block, and read back from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

from zkl_debug.engines.patching import patched

#: switch name -> the configs built while it was on (kept until it is off).
_built: dict[str, list[Any]] = {}


def _config_class(owner: str) -> Any:
    if owner == "TransformerConfig":
        from megatron.core.transformer.transformer_config import TransformerConfig

        return TransformerConfig
    from megatron.core.inference.config import InferenceConfig

    assert owner == "InferenceConfig", owner
    return InferenceConfig


@contextmanager
def config_fields(switch: str, owner: str, values: Mapping[str, Any]) -> Iterator[None]:
    """Set fields of every config of class ``owner`` (or a subclass) built inside the block, before it checks itself.

    Raises:
        ImportError: the installed megatron-core has no such field.
    """
    config_class = _config_class(owner)
    missing = [name for name in values if name not in config_class.__dataclass_fields__]
    if missing:
        raise ImportError(f"the installed megatron-core has no {owner}.{', '.join(missing)}")
    built = _built.setdefault(switch, [])

    def make(original: Any) -> Any:
        def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
            for name, value in values.items():
                setattr(self, name, _as_type(getattr(self, name), value))
            original(self, *args, **kwargs)
            built.append(self)

        return post_init

    with patched(config_class, "__post_init__", make):
        try:
            yield
        finally:
            _built.pop(switch, None)


def read_back(switch: str, owner: str, values: Mapping[str, Any], model: Any = None) -> tuple[bool, str]:
    """Whether the configs built since the switch is on (and the model's own) have the values, and what was found."""
    built = _built.get(switch, [])
    used = _configs_of(model, owner) if model is not None else []
    # A model may hold copies of its config, which no constructor made.
    if not built or (used and all(config is not other for config in used for other in built)):
        return False, f"the {owner} that runs was built before it was set"
    for config in (*built, *used):
        for name, value in values.items():
            found = getattr(config, name)
            if found != _as_type(found, value):
                return False, f"{owner}.{name} is {found!r} instead of {value!r}"
    return True, ""


def _configs_of(model: Any, owner: str) -> list[Any]:
    """The distinct configs of that class which the modules of a model hold."""
    config_class = _config_class(owner)
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
