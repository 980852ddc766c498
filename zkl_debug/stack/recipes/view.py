"""Reads one key of a recipe and says in which way it is there: absent, null, written, interpolated, unresolvable.

The generation side is what NeMo-RL builds for a dedicated generation worker: ``mcore_generation_config`` laid over
``policy.megatron_cfg`` key by key (shallow: a section given for generation replaces the training section whole).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from zkl_debug.schema import Json
from zkl_debug.stack.recipes import keys
from zkl_debug.stack.recipes.architecture import model_facts
from zkl_debug.stack.recipes.loader import Recipe, first_line
from zkl_debug.stack.recipes.model import (
    GENERATION_ROOT,
    TRAIN_ROOT,
    Found,
    Key,
    Side,
    State,
    Unresolved,
)


@dataclass(frozen=True)
class _Step:
    """One key reached: ``VALUE`` with its node, or why it is not. ``through``: the interpolation it was reached by."""

    state: State
    node: Any = None
    raw: Json = None
    through: str = ""
    reason: str = ""


class View:
    """Looks up the keys of one recipe.

    Args:
        recipe: the loaded recipe.
        generation_only: the training side is the merged config of a dedicated generation worker, whose
            training-only flags NeMo-RL clears.
    """

    def __init__(self, recipe: Recipe, *, generation_only: bool = False) -> None:
        self.recipe = recipe
        self.generation_only = generation_only
        self._cache: dict[str, Found] = {}
        self._sections: dict[str, _Step] = {"": _Step(State.VALUE, recipe.config)}

    def find(self, side: Side, key: str) -> Found:
        """The value of a key on one side; never raises for what a recipe may hold."""
        if side is Side.RECIPE:
            return self._read(key, keys.recipe_key(key))
        if side is Side.MODEL:
            return self.model()[key]
        if side is Side.GENERATION or self.generation_only:
            return self._generation(key)
        return self._read(f"{TRAIN_ROOT}.{key}", keys.train_key(key))

    def overridden(self, key: str) -> bool:
        """Whether the generation config sets the key (its first segment) itself."""
        return self._node(f"{GENERATION_ROOT}.{key.split('.')[0]}")[0] is not State.ABSENT

    def generation_keys(self) -> tuple[str, ...]:
        """Names the generation config sets."""
        section = self._section(GENERATION_ROOT).node
        return tuple(str(name) for name in section) if isinstance(section, DictConfig) else ()

    def model(self) -> dict[str, Found]:
        """What is known of the resolved model: ``mla``, ``experimental_attention``, ``hybrid``, ``moe``."""
        if not hasattr(self, "_model"):
            self._model = model_facts(self)
        return self._model

    def _generation(self, key: str) -> Found:
        if self.generation_only and key in keys.TRAINING_FORWARD:
            return Found(f"{TRAIN_ROOT}.{key}", State.ABSENT, False, origin="cleared for generation workers")
        if self.overridden(key):
            return self._read(f"{GENERATION_ROOT}.{key}", keys.train_key(key))
        found = self._read(f"{TRAIN_ROOT}.{key}", keys.train_key(key))
        return Found(
            f"{GENERATION_ROOT}.{key}",
            found.state,
            found.effective,
            found.raw,
            found.origin,
            found.file,
            inherited=True,
            detail=found.detail,
        )

    def _read(self, path: str, key: Key) -> Found:
        if path not in self._cache:
            self._cache[path] = self._look(path, key)
        return self._cache[path]

    def _look(self, path: str, key: Key) -> Found:
        state, value, raw, detail = self._node(path)
        file = "" if state is State.ABSENT else self.recipe.origin(tuple(path.split(".")))
        if state is State.ABSENT:
            return Found(path, state, key.default, None, key.origin)
        if value is None and state in (State.NULL, State.INTERPOLATED):
            default = key.default if key.null_is_default else None
            return Found(path, state, default, raw, key.origin if key.null_is_default else "", file)
        return Found(path, state, value, raw, "", file, detail=detail)

    def _node(self, path: str) -> tuple[State, Json, Json, str]:
        """State, resolved value, text as written, and why it does not resolve."""
        parent, _, name = path.rpartition(".")
        step = self._step(parent, name)
        if step.state is not State.VALUE:
            return step.state, None, step.raw, step.reason
        return self._leaf(step.node, step.raw, step.through)

    def _step(self, parent: str, name: str) -> _Step:
        """One key of a section, the section itself found the same way (and remembered)."""
        above = self._section(parent)
        if above.state is not State.VALUE:
            return above
        node = above.node
        if not isinstance(node, DictConfig) or name not in node.keys():  # noqa: SIM118 - `in` hides unresolved keys
            return _Step(State.ABSENT)
        if OmegaConf.is_missing(node, name):
            return _Step(State.MISSING, raw="???", reason="mandatory and not given")
        raw = _raw(node, name)
        value, reason = resolve(node, name)
        if reason:
            return _Step(State.UNRESOLVED, raw=raw, reason=reason)
        through = above.through or (str(raw) if OmegaConf.is_interpolation(node, name) else "")
        return _Step(State.VALUE, value, raw, through)

    def _section(self, path: str) -> _Step:
        if path not in self._sections:
            parent, _, name = path.rpartition(".")
            self._sections[path] = self._step(parent, name)
        return self._sections[path]

    @staticmethod
    def _leaf(value: Any, raw: Json, through: str) -> tuple[State, Json, Json, str]:
        plain, reason = plain_value(value)
        if reason:
            return State.UNRESOLVED, None, raw, reason
        if through:
            return State.INTERPOLATED, plain, through, ""
        return (State.NULL if plain is None else State.VALUE), plain, raw, ""


def resolve(node: Any, part: Any) -> tuple[Any, str]:
    """A child of a config node with its interpolation resolved, or the reason it cannot be."""
    try:
        return node[part], ""
    except UnsupportedInterpolationType as error:
        return None, first_line(error)
    except (InterpolationKeyError, InterpolationToMissingValueError) as error:
        return None, first_line(error)
    except RecursionError:
        return None, "the interpolation refers to itself"
    except (OmegaConfBaseException, ValueError, TypeError, ArithmeticError, LookupError) as error:
        return None, first_line(error)


def plain_value(value: Any) -> tuple[Json, str]:
    """A config node as plain data, or the reason something inside it cannot be resolved."""
    if not isinstance(value, DictConfig | ListConfig):
        return value, ""
    try:
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=False), ""
    except RecursionError:
        return None, "an interpolation inside refers to itself"
    except (OmegaConfBaseException, ValueError, TypeError, ArithmeticError, LookupError) as error:
        return None, first_line(error)


def _raw(node: Any, part: Any) -> Json:
    """An interpolation as it is written; anything else as it is."""
    return node._get_node(part)._value() if OmegaConf.is_interpolation(node, part) else node[part]


def unresolved(recipe: Recipe) -> tuple[Unresolved, ...]:
    """Every interpolation of the recipe that has no value here, in the order of the file."""
    found: list[Unresolved] = []
    for path, node, part in _walk(recipe.config, ""):
        if OmegaConf.is_missing(node, part) or not OmegaConf.is_interpolation(node, part):
            continue
        value, reason = resolve(node, part)
        reason = reason or plain_value(value)[1]
        if reason:
            found.append(Unresolved(path, str(_raw(node, part)), reason))
    return tuple(found)


def _walk(node: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    parts = list(node.keys()) if isinstance(node, DictConfig) else list(range(len(node)))
    for part in parts:
        path = f"{prefix}.{part}" if prefix else str(part)
        yield path, node, part
        if OmegaConf.is_missing(node, part) or OmegaConf.is_interpolation(node, part):
            continue
        child = node[part]
        if isinstance(child, DictConfig | ListConfig) and not child._is_none():
            yield from _walk(child, path)
