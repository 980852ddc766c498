"""Judges a recipe by the rules of a preset. Every rule is looked at; the report lists all that do not hold."""

from __future__ import annotations

from dataclasses import replace

from zkl_debug.errors import UsageError
from zkl_debug.schema import Json
from zkl_debug.stack.recipes import keys
from zkl_debug.stack.recipes.derived import max_tokens_per_rank
from zkl_debug.stack.recipes.loader import Recipe
from zkl_debug.stack.recipes.model import (
    GENERATION_ROOT,
    TRAIN_ROOT,
    Derived,
    Found,
    Key,
    Kind,
    Report,
    Rule,
    Severity,
    Side,
    State,
    UnknownKey,
    Violation,
)
from zkl_debug.stack.recipes.names import unknown_keys
from zkl_debug.stack.recipes.predicates import condition, describe, fixed_value, holds, required_text, show
from zkl_debug.stack.recipes.presets import PICKS, PRESETS, rules_of
from zkl_debug.stack.recipes.rules_common import RENAMED
from zkl_debug.stack.recipes.view import View, unresolved

_NO_VALUE = (State.UNRESOLVED, State.MISSING)


def check(recipe: Recipe, *, preset: str = "", generation_only: bool = False) -> Report:
    """Judge a recipe.

    Args:
        recipe: from :func:`~zkl_debug.stack.recipes.loader.load_recipe`.
        preset: name of the preset, or empty to pick it from the recipe.
        generation_only: judge the merged config of a dedicated generation worker.

    Raises:
        UsageError: a key has a value of the wrong type.
    """
    view = View(recipe, generation_only=generation_only)
    check_types(view)
    name, picked = (preset, "named with --preset") if preset else pick(view)
    rules = rules_in_force(name, view)
    unknown = unknown_keys(recipe)
    findings = [v for rule in rules for v in judge(rule, view, unknown)]
    return Report(
        recipe=str(recipe.path),
        files=tuple(str(layer.path) for layer in recipe.layers),
        missing_files=recipe.missing,
        preset=name,
        picked=picked,
        status=status_text(name, view),
        generation_only=generation_only,
        rules=sum(rule.severity is Severity.VIOLATION for rule in rules),
        violations=tuple(v for v in findings if v.severity is Severity.VIOLATION),
        by_design=tuple(v for v in findings if v.severity is Severity.BY_DESIGN),
        advice=(*(v for v in findings if v.severity is Severity.ADVICE), *_renamed(view)),
        unknown_keys=unknown,
        unresolved=unresolved(recipe),
        derived=_derived(name, view),
        model={fact: {"value": found.effective, "from": found.detail} for fact, found in view.model().items()},
    )


def pick(view: View) -> tuple[str, str]:
    """The preset a recipe asks for, and why."""
    for step in PICKS:
        if all(condition(when, view) is True for when in step.when):
            return step.preset, "picked: " + step.reason
    raise AssertionError("the last step has no condition")


def rules_in_force(name: str, view: View) -> tuple[Rule, ...]:
    """The rules of a preset for this recipe: wildcards written out, training-only rules dropped for generation."""
    rules: list[Rule] = []
    for rule in rules_of(name):
        if view.generation_only and (rule.training_only or rule.kind is Kind.AGREE):
            continue
        if rule.key.endswith("*"):
            named = {other.key for other in rules_of(name)}
            prefix = rule.key[:-1]
            extra = [k for k in view.generation_keys() if k.startswith(prefix) and k not in named]
            rules += [replace(rule, id=f"agree-{key.replace('_', '-')}", key=key) for key in extra]
        else:
            rules.append(rule)
    return tuple(rules)


def judge(rule: Rule, view: View, unknown: tuple[UnknownKey, ...] = ()) -> list[Violation]:
    """The finding of one rule: none if it holds or is not in force, else exactly one."""
    states = [condition(when, view) for when in rule.when]
    if any(state is False for state in states):
        return []
    open_keys = [state for state in states if isinstance(state, Found)]
    if open_keys and rule.severity is Severity.VIOLATION:
        open_violation = _violation(rule, open_keys[0], "a value, to tell whether this rule is in force")
        return [replace(open_violation, fixable=False, not_fixable="give the interpolation a value")]
    if open_keys or (rule.unless and all(condition(when, view) is True for when in rule.unless)):
        return []
    if rule.kind is Kind.FAMILY:
        return _judge_family(rule, view)
    if rule.kind is Kind.AGREE:
        return _judge_agreement(rule, view)
    found = view.find(rule.side, rule.key)
    if rule.side is Side.MODEL and found.effective is None:
        return []
    missing = rule.explicit and found.state in (State.ABSENT, State.NULL)
    if found.state not in _NO_VALUE and not missing and holds(rule.kind, found.effective, rule.required):
        return []
    return [_violation(rule, found, required_text(rule, view), _hint(found, unknown))]


def _judge_agreement(rule: Rule, view: View) -> list[Violation]:
    train, generation = view.find(Side.TRAIN, rule.key), view.find(Side.GENERATION, rule.key)
    if generation.inherited:
        return []
    for found in (train, generation):
        if found.state in _NO_VALUE:
            return [_violation(rule, found, "a value, equal on both sides")]
    if holds(Kind.EQUALS, generation.effective, train.effective):
        return []
    return [_violation(rule, generation, required_text(rule, view))]


def _judge_family(rule: Rule, view: View) -> list[Violation]:
    names = [view.find(rule.side, name) for name in rule.names]
    written = [found for found in names if found.state is not State.ABSENT]
    values = {bool(found.effective) for found in written if found.state not in _NO_VALUE}
    if values == {True} and not any(found.state in _NO_VALUE for found in written):
        return []
    required = required_text(rule, view)
    if not written:
        absent = names[-1]
        others = ", ".join(rule.names[:-1])
        return [replace(_violation(rule, absent, required), hint=f"older megatron-core calls it {others}")]
    shown = "; ".join(f"{found.path.rpartition('.')[2]}: {describe(found)}" for found in written)
    return [replace(_violation(rule, written[-1], required), found=shown)]


def _violation(rule: Rule, found: Found, required: str, hint: str = "") -> Violation:
    return Violation(
        rule=rule.id,
        severity=rule.severity,
        key=found.path,
        found=describe(found),
        required=required,
        why=rule.why,
        preset=rule.preset,
        source=rule.source,
        upstream=rule.upstream,
        side=rule.side,
        fixable=rule.fixable,
        not_fixable=rule.not_fixable,
        hint=hint,
        state=found.state,
        file=found.file,
    )


def fix_of(rule: Rule, view: View) -> tuple[str, Json]:
    """The recipe path and value that make a rule hold."""
    value = fixed_value(rule, view)
    if rule.kind is Kind.FAMILY:
        written = [n for n in rule.names if view.find(rule.side, n).state is not State.ABSENT]
        return f"{TRAIN_ROOT}.{written[-1] if written else rule.key}", value
    if rule.side is Side.RECIPE:
        return rule.key, value
    generation = rule.side is Side.GENERATION or rule.kind is Kind.AGREE
    if view.generation_only:
        generation = rule.key in keys.GENERATION_KEYS or rule.side is Side.GENERATION or view.overridden(rule.key)
    return f"{GENERATION_ROOT if generation else TRAIN_ROOT}.{rule.key}", value


def _hint(found: Found, unknown: tuple[UnknownKey, ...]) -> str:
    """A misspelt or misplaced key that probably meant this one."""
    if found.state is not State.ABSENT and not found.inherited:
        return ""
    near = [key.path for key in unknown if key.suggestion == found.path]
    return f"did you mean this key with {near[0]}?" if near else ""


def _renamed(view: View) -> tuple[Violation, ...]:
    """Advice for settings that are written under an older name."""
    advice = []
    for old, new in RENAMED.items():
        found = view.find(Side.TRAIN, old)
        if found.state is State.ABSENT:
            continue
        advice.append(
            Violation(
                rule="renamed-key",
                severity=Severity.ADVICE,
                key=found.path,
                found=describe(found),
                required=f"{TRAIN_ROOT}.{new}",
                why="The setting was renamed; a megatron-core that knows only the other name drops or refuses it",
                preset="every preset",
                source="NeMo-RL #4791",
                upstream="no",
                side=Side.TRAIN,
                fixable=False,
                not_fixable="which name is right depends on the installed megatron-core (--environment tells)",
                state=found.state,
                file=found.file,
            )
        )
    return tuple(advice)


def status_text(name: str, view: View) -> str:
    """The status of a preset, and whether its evidence covers the recipe's model."""
    preset = PRESETS[name]
    text = f"{preset.status.value}: {preset.evidence}"
    model = view.find(Side.RECIPE, "policy.model_name").effective
    if preset.verified_model and not holds(Kind.MATCHES, model, preset.verified_model):
        text += f"; this recipe's model {show(model)} is not that one: for it the preset is enforced only"
    return text


def _derived(name: str, view: View) -> tuple[Derived, ...]:
    return (max_tokens_per_rank(view),) if name.endswith("flashinfer") and not view.generation_only else ()


def check_types(view: View) -> None:
    """Refuse values of the wrong type, all of them in one error."""
    wrong = [_type_error(view.find(Side.RECIPE, path), key) for path, key in keys.RECIPE_KEYS.items()]
    for root, table in ((TRAIN_ROOT, keys.TRAIN_KEYS), (GENERATION_ROOT, {**keys.TRAIN_KEYS, **keys.GENERATION_KEYS})):
        wrong += [_type_error(view.find(Side.RECIPE, f"{root}.{name}"), key) for name, key in table.items()]
    problems = [text for text in wrong if text]
    if problems:
        raise UsageError(
            f"{view.recipe.path}: {len(problems)} value(s) of the wrong type\n  " + "\n  ".join(problems),
            "values of the types named above",
        )


def _type_error(found: Found, key: Key) -> str:
    if found.state not in (State.VALUE, State.INTERPOLATED) or found.effective is None or key.type == "any":
        return ""
    if _is_type(found.effective, key.type):
        return ""
    where = f" ({found.file})" if found.file else ""
    return f"{found.path}{where}: {describe(found)} is a {type(found.effective).__name__}, not {_TYPE_NAMES[key.type]}"


_TYPE_NAMES = {
    "bool": "true or false",
    "int": "a whole number",
    "number": "a number",
    "str": "text",
    "list": "a list",
    "map": "a mapping",
}


def _is_type(value: Json, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "int":
        return _is_type(value, "number") and float(value).is_integer()
    return isinstance(value, {"str": str, "list": list, "map": dict}[kind])
