"""Why a program left no capture, or another one than was asked for. Pure decisions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import PurePath

from zkl_debug.attach import told
from zkl_debug.attach.settings import Settings
from zkl_debug.errors import Refused

_FRAMEWORKS = {"megatron": "megatron-core", "transformers": "transformers", "zkl_debug": ""}
_INSIDE = "zkl_debug.capture(model, OUT) in the program"


def unresolved_model(settings: Settings, facts: Sequence[str]) -> Refused | None:
    """What is wrong with ``--model``, where an attached program ended and never had that class."""
    if not settings.model or told.FOUND in facts or told.ATTACHED not in facts:
        return None
    lacks = next((fact.removeprefix(told.LACKS) for fact in facts if fact.startswith(told.LACKS)), "")
    module, _, name = settings.model.partition(":")
    why = lacks or f"the program never imported a module {module}"
    return Refused(
        f"--model {settings.model}: {why}",
        f"the module and the class as the program imports them: from MODULE import {name}",
        f"name it right, or use {_INSIDE}",
    )


def nothing(command: Sequence[str], settings: Settings, facts: Sequence[str], status: int) -> Refused:
    """Why nothing was captured; of several reasons the one that the processes themselves told comes first.

    Args:
        command: of the program.
        settings: it ran under.
        facts: what its processes told (:mod:`zkl_debug.attach.told`).
        status: it ended with.
    """
    ended = f"the program ended with status {status}, and until then " if status else ""
    head = f"nothing was captured: {ended}"
    wrong = unresolved_model(settings, facts)
    if wrong is not None:
        return Refused(head + wrong.found, wrong.expected, wrong.next_step)
    failed = next((fact.removeprefix(told.FAILED) for fact in facts if fact.startswith(told.FAILED)), "")
    if failed:
        return Refused(f"{head}a model ran, but its capture could not begin: {failed}", "a capture that can be written")
    if told.ATTACHED not in facts:
        return Refused(
            f"{head}{_not_python(command)}",
            "a program run by a Python that has zkl-debug installed and reads PYTHONPATH (without -I or -S)",
            "try that Python: python -c 'import zkl_debug'",
        )
    if settings.model:
        return Refused(f"{head}no {settings.model} was called", "a forward of it", f"use {_INSIDE}")
    modules = [fact.removeprefix(told.IMPORTED) for fact in facts if fact.startswith(told.IMPORTED)]
    names = dict.fromkeys(_FRAMEWORKS.get(module.split(".")[0], "") for module in modules)
    found = " and ".join(name for name in names if name)
    what = f"{found} was imported, but no model of it was called" if found else "no model that is known was imported"
    return Refused(
        f"{head}{what}",
        "a model of megatron-core or transformers, which are found by themselves",
        f"name the class of another with --model MODULE:CLASS, or use {_INSIDE}",
    )


def _not_python(command: Sequence[str]) -> str:
    """What is known of a command none of whose processes took the start-up hook."""
    for word, following in itertools.pairwise(command):
        flags = following[1:] if following.startswith("-") and not following.startswith("--") else ""
        flag = next((letter for letter in flags if letter in "IS"), "")
        if PurePath(word).name.startswith("python") and flag:
            return f"python -{flag} leaves the start-up hook out"
    return f"{command[0]} started no Python that took the start-up hook"
