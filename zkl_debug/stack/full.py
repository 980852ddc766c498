"""The full ladder, in order."""

from __future__ import annotations

from zkl_debug.stack.switches import Switch


def full_ladder() -> tuple[Switch, ...]:
    """Every switch there is, in ladder order."""
    from zkl_debug.stack.catalogue.cpu import BED_ENGINE_KEYS, CPU_LADDER

    return (*CPU_LADDER, *BED_ENGINE_KEYS)
