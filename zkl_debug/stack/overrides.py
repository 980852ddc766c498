"""For a program under ``bisect switches -- COMMAND``: which switches are on, and what that means for it.

``python -m zkl_debug.stack.overrides`` prints the recipe overrides of the configuration that ``ZKL_SWITCHES`` holds,
one after the other, for the command line of a NeMo-RL run; in Python, ``with applied(from_environment()):`` puts the
switches in place that this project carries.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping

from zkl_debug.errors import UsageError
from zkl_debug.stack.full import full_ladder
from zkl_debug.stack.switches import Switch

VARIABLE = "ZKL_SWITCHES"


def states(environ: Mapping[str, str] | None = None) -> dict[str, bool]:
    """The configuration as the command oracle hands it over: switch name -> on.

    Raises:
        UsageError: the variable is missing or is not a JSON object of booleans.
    """
    text = (os.environ if environ is None else environ).get(VARIABLE)
    expected = f"{VARIABLE} as `zkl-debug bisect switches` sets it, a JSON object of true and false"
    if text is None:
        raise UsageError(f"{VARIABLE} is not set", expected)
    try:
        body = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{VARIABLE} is not JSON: {error}", expected) from error
    if not isinstance(body, dict) or not all(isinstance(value, bool) for value in body.values()):
        raise UsageError(f"{VARIABLE} holds {text[:80]!r}", expected)
    return body


def from_environment(environ: Mapping[str, str] | None = None) -> tuple[Switch, ...]:
    """The switches that are on and that this project can apply, in ladder order; names it does not know are yours."""
    on = states(environ)
    return tuple(s for s in full_ladder() if on.get(s.name, False) and s.carried)


def recipe_overrides(on: Mapping[str, bool], switches: Iterable[Switch] | None = None) -> tuple[str, ...]:
    """Overrides of a NeMo-RL recipe for a configuration; what is on has the last word on a shared key.

    Args:
        on: switch name -> state; switches that are not named are left alone.
        switches: the ladder, default the full one.
    """
    found: dict[str, str] = {}
    for wanted in (False, True):
        for s in switches if switches is not None else full_ladder():
            if on.get(s.name) is wanted:
                for setting in s.settings:
                    value = setting.on if wanted else setting.off
                    if setting.where == "recipe" and value is not None:
                        found[setting.key] = value
    return tuple(key if key.startswith("~") else f"++{key}={value}" for key, value in found.items())


def variables(on: Mapping[str, bool], switches: Iterable[Switch] | None = None) -> dict[str, str]:
    """Environment variables of the switches that are on."""
    ladder = switches if switches is not None else full_ladder()
    return {x.key: x.on for s in ladder if on.get(s.name) for x in s.settings if x.where == "env"}


if __name__ == "__main__":
    print(" ".join(shlex.quote(text) for text in recipe_overrides(states())))
