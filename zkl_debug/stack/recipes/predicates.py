"""What each kind of requirement means, as pure functions of a value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from zkl_debug.schema import Json
from zkl_debug.stack.recipes.model import Found, Kind, Rule, Side, State, When
from zkl_debug.stack.recipes.view import View


def _equal(value: Json, required: Json) -> bool:
    if isinstance(value, bool) != isinstance(required, bool):
        return False
    return bool(value == required)


def _greater(value: Json, limit: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > limit


def _multiple(value: Json, factor: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and value % factor == 0


def _each(value: Json, required: Json) -> bool:
    return bool(value) and all(v == required for v in value) if isinstance(value, list) else _equal(value, required)


def env_text(value: Json) -> str | None:
    """A value of ``env_vars`` as the process would see it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


_TESTS: dict[Kind, Callable[[Json, Json], bool]] = {
    Kind.EQUALS: _equal,
    Kind.EACH_EQUALS: _each,
    Kind.ONE_OF: lambda value, options: any(_equal(value, option) for option in options),
    Kind.NOT_EQUALS: lambda value, other: not _equal(value, other),
    Kind.MULTIPLE_OF: _multiple,
    Kind.GREATER: _greater,
    Kind.NULL: lambda value, _: value is None,
    Kind.NOT_NULL: lambda value, _: value is not None,
    Kind.OFF: lambda value, _: not value,
    Kind.CONTAINS: lambda value, item: isinstance(value, list) and item in value,
    Kind.MATCHES: lambda value, pattern: isinstance(value, str) and bool(re.search(pattern, value, re.IGNORECASE)),
    Kind.TEXT: lambda value, text: env_text(value) == text,
    Kind.IS_TEXT: lambda value, _: value is None or isinstance(value, str),
}


def holds(kind: Kind, value: Json, required: Json) -> bool:
    """Whether an effective value meets a requirement of one key."""
    return _TESTS[kind](value, required)


def condition(when: When, view: View) -> bool | Found:
    """Whether a condition holds; the key itself where it cannot be told."""
    if when.kind is Kind.OVERRIDDEN:
        return view.overridden(when.key) and not view.generation_only
    found = view.find(when.side, when.key)
    if found.state in (State.UNRESOLVED, State.MISSING):
        return found
    return holds(when.kind, found.effective, when.value)


def show(value: Json) -> str:
    """A value as it would be written in a recipe, on one line, printable, shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= 120 else text[:117] + "..."


def describe(found: Found) -> str:
    """How the key is there and what is effective, in words."""
    inherited = ", inherited from policy.megatron_cfg" if found.inherited else ""
    if found.path.startswith("resolved model"):
        return f"{'yes' if found.effective else 'no' if found.effective is False else 'not known'} ({found.detail})"
    if found.state in (State.ABSENT, State.NULL):
        word = f"{found.state.value} for training and generation" if found.inherited else found.state.value
        if not found.origin:
            return f"{word} (no default)" if found.state is State.ABSENT else word
        if found.state is State.NULL and found.effective is None:
            return word
        if found.origin == "unset":
            return f"{word}, so the variable is not set"
        return f"{word}, so effectively {show(found.effective)} ({found.origin})"
    if found.state is State.MISSING:
        return f"??? ({found.detail}{inherited})"
    if found.state is State.UNRESOLVED:
        return f"{show(found.raw)}, which has no value here: {found.detail}{inherited}"
    if found.state is State.INTERPOLATED:
        default = f" ({found.origin})" if found.origin else ""
        return f"{show(found.effective)}{default} from {show(found.raw)}{inherited}"
    return show(found.effective) + inherited


def required_text(rule: Rule, view: View) -> str:
    """The requirement in words."""
    if rule.required_text:
        return rule.required_text
    if rule.kind is Kind.AGREE:
        train = view.find(Side.TRAIN, rule.key)
        return f"{show(train.effective)}, as policy.megatron_cfg has it"
    texts: dict[Kind, Callable[[], str]] = {
        Kind.EACH_EQUALS: lambda: show(rule.required),
        Kind.ONE_OF: lambda: " or ".join(show(option) for option in rule.required),
        Kind.NOT_EQUALS: lambda: f"anything but {show(rule.required)}",
        Kind.MULTIPLE_OF: lambda: f"a multiple of {rule.required}",
        Kind.NULL: lambda: "null",
        Kind.OFF: lambda: "false",
        Kind.CONTAINS: lambda: f"a list that contains {show(rule.required)}",
        Kind.IS_TEXT: lambda: "text, in quotes",
        Kind.FAMILY: lambda: "true (one setting, one name)",
    }
    text = texts[rule.kind]() if rule.kind in texts else show(rule.required)
    return text + (", written out" if rule.explicit else "")


def fixed_value(rule: Rule, view: View) -> Json:
    """What ``--fix`` writes so that the rule holds."""
    found = view.find(rule.side, rule.key)
    if rule.kind is Kind.AGREE:
        return view.find(Side.TRAIN, rule.key).effective
    if rule.fix is not None:
        return rule.fix
    if rule.kind is Kind.IS_TEXT:
        return env_text(found.effective)
    if rule.kind is Kind.MULTIPLE_OF:
        now = found.effective
        usable = isinstance(now, int) and not isinstance(now, bool) and now > 0
        return math.lcm(now, rule.required) if usable else rule.required
    if rule.kind is Kind.CONTAINS:
        kept = found.effective if found.state in (State.VALUE, State.INTERPOLATED) else []
        return [*(kept or []), rule.required]
    return rule.required
