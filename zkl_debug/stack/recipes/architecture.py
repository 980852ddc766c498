"""What a recipe says about the resolved model: MLA, experimental attention, hybrid, MoE; or that it does not say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from zkl_debug.schema import Json
from zkl_debug.stack.recipes.families import CONFIG_FACTS, FAMILIES, OVERRIDE_FACTS
from zkl_debug.stack.recipes.model import TRAIN_ROOT, Found, Side, State

if TYPE_CHECKING:
    from zkl_debug.stack.recipes.view import View

FACTS = ("mla", "experimental_attention", "hybrid", "moe")
TITLES = {
    "mla": "multi-latent attention",
    "experimental_attention": "experimental attention variant",
    "hybrid": "SSM / Mamba hybrid",
    "moe": "mixture of experts",
}
_MAX_CONFIG_BYTES = 1 << 20


def model_facts(view: View) -> dict[str, Found]:
    """Facts from explicit keys first, then from a local checkpoint's ``config.json``, then from the model's name."""
    name = view.find(Side.RECIPE, "policy.model_name").effective
    facts = _from_name(name) if isinstance(name, str) else {}
    facts.update(_from_checkpoint(name) if isinstance(name, str) else {})
    facts.update(_from_keys(view))
    return {fact: facts.get(fact) or _open(fact, name) for fact in FACTS}


def _fact(fact: str, value: bool, evidence: str) -> Found:
    return Found(f"resolved model: {TITLES[fact]}", State.VALUE, value, value, detail=evidence)


def _open(fact: str, name: Json) -> Found:
    said = f"policy.model_name {name!r} says nothing" if name else "policy.model_name is not set"
    return Found(f"resolved model: {TITLES[fact]}", State.ABSENT, None, detail=said)


def _from_name(name: str) -> dict[str, Found]:
    for family in FAMILIES:
        if re.search(family.pattern, name, re.IGNORECASE):
            evidence = f"policy.model_name {name!r}: {family.title}"
            return {fact: _fact(fact, getattr(family, fact), evidence) for fact in FACTS}
    return {}


def _from_checkpoint(name: str) -> dict[str, Found]:
    """Facts from ``config.json`` where the model is a folder on this machine; a bad file says nothing."""
    file = Path(name) / "config.json"
    try:
        if not file.is_file() or file.stat().st_size > _MAX_CONFIG_BYTES:
            return {}
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(config, dict):
        return {}
    facts = {fact: _fact(fact, False, f"{file}: no key that says so") for fact in FACTS}
    for key, fact in CONFIG_FACTS.items():
        if config.get(key):
            facts[fact] = _fact(fact, True, f"{file}: {key}")
    return facts


def _from_keys(view: View) -> dict[str, Found]:
    facts: dict[str, Found] = {}
    for key, fact in OVERRIDE_FACTS.items():
        for path in (f"{TRAIN_ROOT}.{key}", f"{TRAIN_ROOT}.model_overrides.{key}", f"policy.hf_config_overrides.{key}"):
            found = view.find(Side.RECIPE, path)
            if found.effective:
                facts[fact] = _fact(fact, True, f"{path}: {found.effective!r}")
        if view.overridden(key) and view.find(Side.GENERATION, key).effective:
            facts[fact] = _fact(fact, True, view.find(Side.GENERATION, key).path)
    return facts
