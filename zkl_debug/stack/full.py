"""The full ladder, in order, and the parts of it that a preset asks for."""

from __future__ import annotations

from functools import cache

from zkl_debug.errors import UsageError
from zkl_debug.stack.switches import Switch


@cache
def full_ladder() -> tuple[Switch, ...]:
    """Every switch there is, in ladder order: what must be set first comes first, CPU stand-ins come last."""
    from zkl_debug.stack.catalogue.cpu import CPU_LADDER
    from zkl_debug.stack.catalogue.engine_keys import ENGINE_KEYS
    from zkl_debug.stack.catalogue.kernels import KERNELS
    from zkl_debug.stack.catalogue.lifecycle import LIFECYCLE
    from zkl_debug.stack.catalogue.mamba import MAMBA_LADDER
    from zkl_debug.stack.catalogue.model_keys import MODEL_KEYS
    from zkl_debug.stack.catalogue.patches import PATCHES
    from zkl_debug.stack.catalogue.recipe_keys import RECIPE_KEYS
    from zkl_debug.stack.catalogue.variables import VARIABLES

    parts = (VARIABLES, MODEL_KEYS, KERNELS, PATCHES, ENGINE_KEYS, RECIPE_KEYS, LIFECYCLE, CPU_LADDER, MAMBA_LADDER)
    return tuple({s.name: s for part in parts for s in part}.values())


def of_preset(name: str) -> tuple[Switch, ...]:
    """The switches a preset asks for, in ladder order.

    Raises:
        UsageError: there is no such preset.
    """
    from zkl_debug.stack.recipes.presets import PRESETS

    if name not in PRESETS:
        raise UsageError(f"no preset named {name!r}", f"one of {', '.join(PRESETS)}")
    return tuple(s for s in full_ladder() if name in s.presets)
