"""``--fix``: an overlay recipe whose ``defaults`` name the original (never written to); then it is judged again."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zkl_debug.errors import UsageError
from zkl_debug.schema import Json
from zkl_debug.stack.recipes.engine import check, fix_of, judge, rules_in_force
from zkl_debug.stack.recipes.loader import Recipe, load_recipe
from zkl_debug.stack.recipes.model import Kind, Report, Rule, Severity, Violation
from zkl_debug.stack.recipes.view import View

HEADER = "# Written by `zkl-debug check --fix`."
_ROUNDS = 6


@dataclass(frozen=True)
class Change:
    """One key the overlay sets."""

    key: str
    value: Json
    was: str
    rule: str


@dataclass(frozen=True)
class Fix:
    """What ``--fix`` did: the overlay, and the judgement of the overlay as read back from disk."""

    out: str
    written: bool
    changes: tuple[Change, ...]
    after: Report

    @property
    def remaining(self) -> tuple[Violation, ...]:
        return self.after.violations


def fix(recipe: Recipe, before: Report, out: Path, *, partial: bool = False) -> Fix:
    """Write the overlay for the preset of ``before`` and judge it.

    Raises:
        UsageError: the target is a file of the recipe, or a file that ``--fix`` has not written.
    """
    check_target(recipe, out)
    changes = plan(recipe, before)
    if not changes:
        return Fix(str(out), False, (), before)
    _write(out, render(recipe, before, changes, out))
    after = check(load_recipe(out, partial=partial), preset=before.preset, generation_only=before.generation_only)
    return Fix(str(out), True, changes, after)


def check_target(recipe: Recipe, out: Path) -> None:
    """Refuse to write over the recipe, its chain, or a stranger's file."""
    for layer in recipe.layers:
        if out.resolve() == layer.path.resolve() or (out.exists() and layer.path.exists() and out.samefile(layer.path)):
            raise UsageError(
                f"--fix {out} is a file of the recipe itself", "another path: the original is never changed"
            )
    if not out.parent.is_dir():
        raise UsageError(f"--fix {out}: the folder {out.parent} does not exist", "a path in an existing folder")
    if out.is_dir():
        raise UsageError(f"--fix {out} is a folder", "the path of a YAML file")
    if out.exists() and not _written_by_us(out):
        raise UsageError(f"--fix {out} exists and was not written by --fix", "a new path")


def _written_by_us(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline(len(HEADER)) == HEADER
    except (OSError, UnicodeDecodeError):
        return False


def plan(recipe: Recipe, before: Report) -> tuple[Change, ...]:
    """The keys to set, found by judging the patched recipe until nothing fixable is left.

    Advice is followed only where following the rules brought it up: a recipe's own habits are left alone.
    """
    known_advice = {v.rule for v in before.advice}
    changes: dict[str, Change] = {}
    current = recipe
    for _ in range(_ROUNDS):
        view = View(current, generation_only=before.generation_only)
        found = _fixable(before.preset, view, known_advice)
        # Agreement is judged last, when the training side has the value it will keep.
        round_ = [f for f in found if f[0].kind is not Kind.AGREE] or found
        new = [_change(rule, violation, view, changes) for rule, violation in round_]
        if not new:
            break
        changes.update({change.key: change for change in new})
        current = recipe.with_overlay(
            nested({c.key: c.value for c in changes.values()}), recipe.path.with_name("overlay")
        )
    return tuple(changes.values())


def _fixable(preset: str, view: View, known_advice: set[str]) -> list[tuple[Rule, Violation]]:
    found = []
    for rule in rules_in_force(preset, view):
        wanted = rule.severity is Severity.VIOLATION or (
            rule.severity is Severity.ADVICE and rule.id not in known_advice
        )
        if wanted and rule.fixable:
            found += [(rule, violation) for violation in judge(rule, view) if violation.fixable]
    return found


def _change(rule: Rule, violation: Violation, view: View, earlier: Mapping[str, Change]) -> Change:
    key, value = fix_of(rule, view)
    was = earlier[key].was if key in earlier else violation.found
    return Change(key, value, was, rule.id)


def nested(values: Mapping[str, Json]) -> dict[str, Json]:
    """Dotted paths as nested mappings."""
    tree: dict[str, Json] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def render(recipe: Recipe, before: Report, changes: tuple[Change, ...], out: Path) -> str:
    """The overlay as YAML, each value with what it replaces and the rule that asks for it."""
    defaults = os.path.relpath(recipe.path.resolve(), out.parent.resolve())
    lines = [
        HEADER,
        f"# Preset {before.preset}. Lays the keys below over the recipe named under `defaults`, which is unchanged.",
        f"defaults: {json.dumps(defaults, ensure_ascii=False)}",
    ]
    notes = {c.key: f"# {c.rule}; was {c.was}" for c in changes}
    _emit(nested({c.key: c.value for c in changes}), "", 0, notes, lines)
    return "\n".join(lines) + "\n"


def _emit(tree: Mapping[str, Json], prefix: str, depth: int, notes: Mapping[str, str], lines: list[str]) -> None:
    for name, value in tree.items():
        path = f"{prefix}.{name}" if prefix else name
        indent = "  " * depth
        if path in notes:
            lines.append(f"{indent}{name}: {json.dumps(value, ensure_ascii=False)}  {notes[path]}")
        else:
            lines.append(f"{indent}{name}:")
            _emit(value, path, depth + 1, notes, lines)


def _write(out: Path, text: str) -> None:
    """Write whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(out)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise UsageError(f"--fix {out} cannot be written: {error.strerror}") from error
