"""The report as text, readable at 100 columns."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zkl_debug.stack.recipes.fixer import Fix
from zkl_debug.stack.recipes.model import Report, Severity, Violation
from zkl_debug.stack.recipes.predicates import show
from zkl_debug.stack.recipes.presets import PRESETS, UNSUPPORTED, environment_of, rules_of

_UPSTREAM = {"yes": "", "sets": "NeMo-RL sets it itself", "no": "not checked upstream"}


def print_report(console: Console, report: Report, fix: Fix | None = None) -> None:
    """Print a report; the verdict comes first, then every violation, then what else is worth knowing."""
    console.print(_head(report))
    if report.violations:
        _section(console, f"{len(report.violations)} of {report.rules} rules do not hold" + _environment_note(report))
        _findings(console, report.violations)
    if report.by_design:
        _section(console, "Not zero by design (no kernel is to blame)")
        _findings(console, report.by_design)
    if report.advice:
        _section(console, "Advice (does not change the verdict)")
        _findings(console, report.advice)
    _notes(console, report)
    if fix is not None:
        _print_fix(console, fix)


def _environment_note(report: Report) -> str:
    return "" if report.environment is None else " on this recipe and this machine"


def _head(report: Report) -> RenderableType:
    grid = _grid()
    chain = " <- ".join(Path(f).name for f in reversed(report.files))
    grid.add_row("recipe", _text(chain))
    for missing in report.missing_files:
        grid.add_row("missing", _text(f"{missing}: counted as empty", "bold red"))
    if report.generation_only:
        grid.add_row("mode", _text("generation only: the merged config of a dedicated generation worker"))
    grid.add_row("preset", _text(f"{report.preset}, {report.picked}"))
    grid.add_row("status", _text(report.status))
    others = "; ".join(f"{p.name}: {p.status.value}" for p in PRESETS.values() if p.name != report.preset)
    grid.add_row("others", _text(others, "dim"))
    grid.add_row("verdict", _verdict(report))
    return grid


def _verdict(report: Report) -> Text:
    if report.violations:
        fixable = sum(v.fixable for v in report.violations)
        return _text(f"{len(report.violations)} violations, {fixable} of them fixable with --fix OUT.yaml", "bold red")
    if report.missing_files:
        return _text("cannot be called sound: files of the chain are missing", "bold red")
    if report.by_design:
        return _text("every rule holds, but this recipe is not zero by design: see below", "bold yellow")
    return _text(f"sound: all {report.rules} rules hold", "bold green")


def _findings(console: Console, findings: Iterable[Violation]) -> None:
    for number, v in enumerate(findings, start=1):
        console.print(Text.assemble((f"{number:3} ", "dim"), (v.key, "bold")), soft_wrap=False)
        grid = _grid()
        grid.add_row("found", _text(v.found + (f"  [{v.file}]" if v.file else "")))
        grid.add_row("required", _text(v.required, "green"))
        grid.add_row("why", _text(v.why))
        grid.add_row("preset", _text(_source(v), "dim"))
        if v.hint:
            grid.add_row("hint", _text(v.hint, "yellow"))
        if v.not_fixable and v.severity is Severity.VIOLATION:
            grid.add_row("--fix", _text(f"leaves it: {v.not_fixable}", "dim"))
        console.print(Padding(grid, (0, 0, 0, 4)))


def _source(v: Violation) -> str:
    upstream = _UPSTREAM.get(v.upstream, v.upstream)
    return " · ".join(part for part in (v.preset, v.source, v.rule, upstream) if part)


def _notes(console: Console, report: Report) -> None:
    if report.unknown_keys:
        _section(console, "Keys that no rule and no public recipe knows")
        for key in report.unknown_keys:
            meant = f": did you mean {key.suggestion}?" if key.suggestion else ""
            console.print(_text(f"    {key.path}{meant}  [{key.file}]"))
    if report.unresolved:
        _section(console, "Interpolations without a value here")
        for item in report.unresolved:
            console.print(Padding(_text(f"{item.path}: {item.raw}  ({item.reason})"), (0, 0, 0, 4)))
    if report.derived:
        _section(console, "Derived values")
        for value in report.derived:
            console.print(Padding(Group(_text(value.key), _text("  " + value.text)), (0, 0, 0, 4)))
            if value.warning:
                console.print(Padding(_text("  " + value.warning, "yellow"), (0, 0, 0, 4)))
    _section(console, "What the recipe cannot show")
    for fact, entry in report.model.items():
        if entry["value"] is None and fact != "moe":
            text = f"whether the model is {fact.replace('_', ' ')}: {entry['from']}"
            console.print(Padding(_text("- " + text), (0, 0, 0, 4)))
    for text in PRESETS[report.preset].beyond:
        console.print(Padding(_text("- " + text), (0, 0, 0, 4)))
    if report.environment is None:
        console.print(
            Padding(_text("- Packages, GPU and shell variables: add --environment on the node."), (0, 0, 0, 4))
        )


def _print_fix(console: Console, fix: Fix) -> None:
    _section(console, f"--fix {fix.out}")
    if not fix.written:
        console.print(_text("    nothing that can be fixed: no file written"))
    for change in fix.changes:
        console.print(Padding(_text(f"{change.key}: {show(change.value)}  (was {change.was})"), (0, 0, 0, 4)))
    if fix.remaining:
        console.print(_text(f"    checked again: {len(fix.remaining)} left that it could not fix", "bold red"))
        for v in fix.remaining:
            reason = v.not_fixable or "no value makes it hold"
            console.print(Padding(_text(f"- {v.key}: {v.found}, required {v.required}. {reason}"), (0, 0, 0, 4)))
    elif fix.after.sound:
        console.print(_text(f"    checked again: {os.path.basename(fix.out)} is sound", "bold green"))  # noqa: PTH119
    for v in fix.after.advice:
        if not v.fixable:
            console.print(Padding(_text(f"- still yours: {v.key}: {v.why}", "yellow"), (0, 0, 0, 4)))


def print_presets(console: Console) -> None:
    """Print every preset with its status and the number of its rules."""
    for preset in PRESETS.values():
        console.print(_text(f"{preset.name}: {preset.title}", "bold"))
        grid = _grid()
        grid.add_row("source", _text(preset.source))
        grid.add_row("status", _text(f"{preset.status.value}: {preset.evidence}"))
        rules = sum(rule.severity is Severity.VIOLATION for rule in rules_of(preset.name))
        machine = len(environment_of(preset.name))
        base = f", on top of {preset.base}" if preset.base else ""
        grid.add_row("rules", _text(f"{rules} on the recipe, {machine} on the machine{base}"))
        console.print(Padding(grid, (0, 0, 0, 4)))
    console.print(_text("not supported", "bold"))
    for what, why in UNSUPPORTED.items():
        console.print(Padding(_text(f"{what}: {why}"), (0, 0, 0, 4)))


def _section(console: Console, title: str) -> None:
    console.print()
    console.print(_text(title, "bold"))


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=8)
    grid.add_column(overflow="fold")
    return grid


def _text(text: str, style: str = "") -> Text:
    """Text from a recipe: no markup, no control characters."""
    return Text("".join(c if c.isprintable() else "?" for c in text), style=style, overflow="fold")
