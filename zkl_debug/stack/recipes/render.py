"""The report as text, readable at 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from zkl_debug.stack.recipes.fixer import Fix
from zkl_debug.stack.recipes.model import Report, Severity, Violation
from zkl_debug.stack.recipes.predicates import show
from zkl_debug.stack.recipes.presets import PRESETS, UNSUPPORTED, environment_of, rules_of

_UPSTREAM = {"yes": "", "sets": "NeMo-RL sets it itself", "no": "not checked upstream"}
_LABEL = 10


def print_report(console: Console, report: Report, fix: Fix | None = None) -> None:
    """Print a report; the verdict comes first, then every violation, then what else is worth knowing."""
    _head(console, report)
    if report.violations:
        machine = "" if report.environment is None else ", the recipe and this machine together"
        _section(console, f"{len(report.violations)} violations ({report.rules} rules on the recipe{machine})")
        _findings(console, report.violations)
    if report.by_design:
        _section(console, "Not zero by design (no kernel is to blame)")
        _findings(console, report.by_design)
    if report.advice:
        _section(console, "Advice (does not change the verdict)")
        _findings(console, report.advice)
    _keys(console, report)
    _derived(console, report)
    _beyond(console, report)
    if fix is not None:
        _fix(console, fix)


def _head(console: Console, report: Report) -> None:
    _row(console, "recipe", " <- ".join(Path(f).name for f in reversed(report.files)))
    for missing in report.missing_files:
        _row(console, "missing", f"{missing}: counted as empty", "bold red")
    if report.generation_only:
        _row(console, "mode", "generation only: the merged config of a dedicated generation worker")
    _row(console, "preset", f"{report.preset}, {report.picked}")
    _row(console, "status", report.status)
    others = "; ".join(f"{p.name}: {p.status.value}" for p in PRESETS.values() if p.name != report.preset)
    _row(console, "others", others, "dim")
    _row(console, "verdict", *_verdict(report))


def _verdict(report: Report) -> tuple[str, str]:
    if report.violations:
        fixable = sum(v.fixable for v in report.violations)
        return f"{len(report.violations)} violations, {fixable} of them fixable with --fix OUT.yaml", "bold red"
    if report.missing_files:
        return "cannot be called sound: files of the chain are missing", "bold red"
    if report.by_design:
        return "every rule holds, but this recipe is not zero by design: see below", "bold yellow"
    return f"sound: all {report.rules} rules hold", "bold green"


def _findings(console: Console, findings: Iterable[Violation]) -> None:
    for number, v in enumerate(findings, start=1):
        console.print(Text.assemble((f"{number:3} ", "dim"), (_printable(v.key), "bold")))
        _row(console, "found", v.found + (f"  [{v.file}]" if v.file else ""), indent=4)
        _row(console, "required", v.required, "green", indent=4)
        _row(console, "why", v.why, indent=4)
        upstream = _UPSTREAM.get(v.upstream, v.upstream)
        _row(console, "preset", " · ".join(p for p in (v.preset, v.source, v.rule, upstream) if p), "dim", indent=4)
        if v.hint:
            _row(console, "hint", v.hint, "yellow", indent=4)
        if v.not_fixable and v.severity is Severity.VIOLATION:
            _row(console, "--fix", f"leaves it: {v.not_fixable}", "dim", indent=4)


def _keys(console: Console, report: Report) -> None:
    if report.unknown_keys:
        _section(console, "Keys that no rule and no public recipe knows")
        for key in report.unknown_keys:
            meant = f": did you mean {key.suggestion}?" if key.suggestion else ""
            _item(console, f"{key.path}{meant}  [{key.file}]")
    if report.unresolved:
        _section(console, "Interpolations without a value here")
        for item in report.unresolved:
            _item(console, f"{item.path}: {item.raw}  ({item.reason})")


def _derived(console: Console, report: Report) -> None:
    if report.derived:
        _section(console, "Derived values")
        for value in report.derived:
            _item(console, f"{value.key}: {value.text}")
            if value.warning:
                _item(console, value.warning, "yellow")


def _beyond(console: Console, report: Report) -> None:
    _section(console, "What the recipe cannot show")
    for fact, entry in report.model.items():
        if entry["value"] is None and fact != "moe":
            _item(console, f"Whether the model is {fact.replace('_', ' ')}: {entry['from']}.")
    for text in PRESETS[report.preset].beyond:
        _item(console, text)
    if report.environment is None:
        _item(console, "Packages, GPU and shell variables: add --environment on the node.")


def _fix(console: Console, fix: Fix) -> None:
    _section(console, f"--fix {fix.out}")
    if not fix.written:
        _item(console, "nothing that it can fix: no file written")
    for change in fix.changes:
        _item(console, f"{change.key}: {show(change.value)}  (was {change.was})")
    if fix.remaining:
        _item(console, f"checked again: {len(fix.remaining)} left that it could not fix", "bold red")
        for v in fix.remaining:
            reason = v.not_fixable or "no single value makes it hold"
            _item(console, f"{v.key}: {v.found}, required {v.required}. {reason}", indent=6)
    elif fix.after.sound:
        _item(console, f"checked again: {Path(fix.out).name} is sound", "bold green")
    for v in fix.after.advice:
        if not v.fixable:
            _item(console, f"still yours: {v.key}: {v.why}", "yellow")


def print_presets(console: Console) -> None:
    """Print every preset with its status and the number of its rules."""
    for preset in PRESETS.values():
        console.print(Text(f"{preset.name}: {preset.title}", style="bold"))
        _row(console, "source", preset.source, indent=4)
        _row(console, "status", f"{preset.status.value}: {preset.evidence}", indent=4)
        rules = sum(rule.severity is Severity.VIOLATION for rule in rules_of(preset.name))
        base = f"; builds on {preset.base}" if preset.base else ""
        machine = len(environment_of(preset.name))
        _row(console, "rules", f"{rules} on the recipe, {machine} on the machine{base}", indent=4)
    console.print(Text("not supported", style="bold"))
    for what, why in UNSUPPORTED.items():
        _item(console, f"{what}: {why}")


def _section(console: Console, title: str) -> None:
    console.print()
    console.print(Text(_printable(title), style="bold"))


def _row(console: Console, label: str, text: str, style: str = "", *, indent: int = 0) -> None:
    """A label and its text; the text wraps under itself."""
    lines = _wrap(text, console.width - indent - _LABEL)
    for number, line in enumerate(lines):
        name = label if number == 0 else ""
        console.print(Text.assemble(" " * indent, (f"{name:{_LABEL}}", "dim"), (line, style)))


def _item(console: Console, text: str, style: str = "", *, indent: int = 4) -> None:
    for number, line in enumerate(_wrap(text, console.width - indent - 2)):
        console.print(Text.assemble(" " * indent, "- " if number == 0 else "  ", (line, style)))


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(_printable(text), max(width, 20), break_on_hyphens=False) or [""]


def _printable(text: str) -> str:
    """Text of a recipe without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)
