"""The ladder as a space that ``bisect switches`` searches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from zkl_debug.bisect.space import EnvBinding, Space
from zkl_debug.bisect.space import Switch as SpaceSwitch
from zkl_debug.stack.needs import Availability
from zkl_debug.stack.switches import Switch


def command_space(switches: Iterable[Switch], available: Mapping[str, Availability]) -> Space:
    """The space for a program that is told its configuration from outside.

    Args:
        switches: in ladder order.
        available: their availability on the machine; what is untestable there stays in the space, with the reason.
    """
    chosen = tuple(switches)
    names = {s.name for s in chosen}
    return Space(
        tuple(
            SpaceSwitch(
                s.name,
                requires=tuple(r for r in s.requires if r in names),
                conflicts=tuple(c for c in s.conflicts if c in names),
                alternatives=tuple(a for a in s.alternatives if a in names),
                env=tuple(EnvBinding(x.key, x.on, x.off) for x in s.settings if x.where == "env"),
                untestable=available[s.name].reason or s.not_searched,
                doc=s.fixes,
            )
            for s in chosen
        )
    )


def to_yaml(space: Space) -> str:
    """The space file that ``bisect switches --space`` reads."""
    body = {"format": "zkl-space", "version": 1, "switches": [_entry(s) for s in space.switches]}
    text: str = yaml.safe_dump(body, sort_keys=False, width=120)
    return text


def _entry(switch: SpaceSwitch) -> dict[str, Any]:
    env = [{"name": b.name, "when_on": b.when_on, "when_off": b.when_off} for b in switch.env]
    parts: dict[str, Any] = {
        "name": switch.name,
        "env": env,
        "requires": list(switch.requires),
        "conflicts": list(switch.conflicts),
        "alternatives": list(switch.alternatives),
        "untestable": switch.untestable,
        "doc": switch.doc,
    }
    return {key: value for key, value in parts.items() if value}
