"""Did-you-mean: keys that nothing knows, the key that was probably meant, and names that have changed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from zkl_debug.schema import Json
from zkl_debug.stack.recipes.known_names import SECTIONS
from zkl_debug.stack.recipes.loader import OVERRIDE_MARK, Recipe
from zkl_debug.stack.recipes.model import GENERATION_ROOT, TRAIN_ROOT, UnknownKey

_NEAR = 0.8
_FAR = 0.88


def unknown_keys(recipe: Recipe) -> tuple[UnknownKey, ...]:
    """Keys of the known sections that neither a rule nor a public recipe knows, each with the likeliest name."""
    found = {}
    for layer in recipe.layers:
        for section, name in _keys(layer.data, ""):
            path = f"{section}.{name}" if section else name
            if name not in SECTIONS[section] and name != OVERRIDE_MARK and path not in found:
                found[path] = UnknownKey(path, suggest(section, name), recipe.origin(tuple(path.split("."))))
    return tuple(found.values())


def _keys(node: Json, section: str) -> Iterator[tuple[str, str]]:
    if not isinstance(node, Mapping) or section not in SECTIONS:
        return
    for name, child in node.items():
        yield section, str(name)
        yield from _keys(child, f"{section}.{name}" if section else str(name))


def suggest(section: str, name: str) -> str:
    """The path that was probably meant, or an empty string."""
    near = difflib.get_close_matches(name, sorted(SECTIONS[section]), n=1, cutoff=_NEAR)
    if near:
        return f"{section}.{near[0]}" if section else near[0]
    for other in _order(section):
        if name in SECTIONS[other]:
            return f"{other}.{name}" if other else name
    for other in _order(section):
        far = difflib.get_close_matches(name, sorted(SECTIONS[other]), n=1, cutoff=_FAR)
        if far:
            return f"{other}.{far[0]}" if other else far[0]
    return ""


def _order(section: str) -> list[str]:
    """Other sections, the ones a key most easily slips into first."""
    first = [GENERATION_ROOT, TRAIN_ROOT] if section.startswith("policy.generation") else [TRAIN_ROOT, GENERATION_ROOT]
    if section == TRAIN_ROOT:
        first = [GENERATION_ROOT]
    return [other for other in [*first, *SECTIONS] if other != section]
