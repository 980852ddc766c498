"""What ``zkl-debug stack`` prints: the ladder and the plan, as text and as one JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zkl_debug.bisect.space import env_name
from zkl_debug.stack.needs import Availability, Facts
from zkl_debug.stack.plan import Plan
from zkl_debug.stack.switches import Switch

_NEEDS = {
    "gpu": "on every rank",
    "packages": "packages",
    "fields": "fields of megatron-core's configs",
    "functions": "functions",
    "machine": "",
}
#: Abbreviations of the plan's table.
_SHORT = {"policy.megatron_cfg.": "T.", "policy.generation.mcore_generation_config.": "G."}


def document(
    facts: Facts, preset: str, switches: Sequence[Switch], available: Mapping[str, Availability], plan: Plan | None
) -> dict[str, Any]:
    """The document of ``zkl-debug stack --json``."""
    body: dict[str, Any] = {
        "format": "zkl-stack",
        "version": 1,
        "machine": {"name": facts.name, "sm": facts.sm, "gpus": list(facts.gpus), "problem": facts.problem or None},
        "preset": preset or None,
        "switches": [_switch_json(i, s, available[s.name]) for i, s in enumerate(switches, start=1)],
    }
    if plan is not None:
        body["plan"] = plan.to_json()
    return body


def _switch_json(number: int, switch: Switch, available: Availability) -> dict[str, Any]:
    return {
        "number": number,
        "name": switch.name,
        "patch": switch.patch or None,
        "fixes": switch.fixes,
        "mechanism": switch.mechanism,
        "owner": switch.owner,
        "group": switch.group,
        "kind": switch.kind,
        "target": switch.target,
        "requires": list(switch.requires),
        "conflicts": list(switch.conflicts),
        "alternatives": list(switch.alternatives),
        "needs": [need.text for need in switch.needs],
        "presets": list(switch.presets),
        "settings": [asdict(setting) for setting in switch.settings],
        "carried": switch.carried,
        "stacked": switch.stacked,
        "availability": {
            "available": available.available,
            "reason": available.reason or None,
            "assumes": list(available.assumes),
        },
    }


def print_ladder(
    console: Console, facts: Facts, switches: Sequence[Switch], available: Mapping[str, Availability]
) -> None:
    """The ladder in order, with what can be tried there."""
    gpus = f": {', '.join(facts.gpus)}" if facts.gpus else ""
    table = Table(title=f"The ladder on {facts.name}{gpus}", title_justify="left", header_style="bold")
    for column in ("#", "patch", "switch", "fixes", "owner", "there"):
        table.add_column(column, overflow="fold", justify="right" if column == "#" else "left")
    for number, s in enumerate(switches, start=1):
        table.add_row(str(number), s.patch, escape(s.name), escape(s.fixes), s.owner, _state(s, available[s.name]))
    console.print(table)
    ready = sum(a.available for a in available.values())
    own = sum(s.carried and available[s.name].available for s in switches)
    console.print(
        f"{ready} of {len(switches)} can be tried there, {own} of them by zkl-debug itself (the others by a program "
        "that has the code: `bisect switches --space FILE -- COMMAND`)."
    )
    assumed = sorted({text for a in available.values() for text in a.assumes})
    if assumed:
        console.print(f"[dim]taken as present, nobody looked: {escape(', '.join(assumed))}[/]")


def _state(switch: Switch, available: Availability) -> str:
    if not available.available:
        return f"[yellow]untestable[/]: {escape(available.reason)}"
    return "[green]available[/]" if switch.carried else "[green]available[/] to a program"


def print_plan(console: Console, plan: Plan) -> None:
    """The plan: requirements, settings, order, runs, commands."""
    chosen = f", preset {plan.preset}" if plan.preset else ""
    console.print(f"[bold]Plan for {plan.target}{chosen}[/]: {len(plan.searched)} switches are varied")
    for kind, texts in plan.requirements.items():
        head = f"{_NEEDS[kind]}: " if _NEEDS[kind] else ""
        console.print(f"  needs {head}{escape(', '.join(texts))}", soft_wrap=True)
    for s in plan.space.switches:
        if s.untestable:
            console.print(f"  [yellow]left out[/] {s.name}: {escape(s.untestable)}", soft_wrap=True)
    console.print(_settings(plan))
    _print_order(console, plan)
    _print_runs(console, plan)
    console.print("[bold]Commands[/]")
    for command in plan.commands:
        console.print(f"  {escape(command)}", soft_wrap=True)


def _settings(plan: Plan) -> Table:
    legend = ", ".join(f"{short} = {full}" for full, short in _SHORT.items())
    table = Table(title=f"Ladder, and how a run is told ({legend})", title_justify="left", header_style="bold")
    for column in ("#", "patch", "switch", "on", "off", "requires"):
        table.add_column(column, overflow="fold", justify="right" if column == "#" else "left")
    by_name = {s.name: s for s in plan.switches}
    for number, name in enumerate(plan.searched, start=1):
        s = by_name[name]
        on = [_assignment(x.key, x.on) for x in s.settings] or [f"{env_name(name)}=1"]
        off = [_assignment(x.key, x.off) for x in s.settings if x.off is not None]
        left = "[dim]variable unset[/]" if any(x.where == "env" for x in s.settings) else "[dim]as it is[/]"
        unset = f"{env_name(name)}=0" if not s.settings else left
        table.add_row(str(number), s.patch, name, "\n".join(on), "\n".join(off) or unset, ", ".join(s.requires))
    return table


def _assignment(key: str, value: str | None) -> str:
    for full, short in _SHORT.items():
        key = key.replace(full, short)
    return escape(f"{key}={value}" if value else key)


def _print_order(console: Console, plan: Plan) -> None:
    console.print("[bold]Order of the search[/] (what follows depends on the outcomes)")
    for step in plan.steps:
        when = f"after {step.after}: " if step.after else ""
        console.print(f"  run {step.number} [dim]{step.purpose}[/]  {when}{escape(_on(plan, step.on))}", soft_wrap=True)


def _on(plan: Plan, on: tuple[str, ...]) -> str:
    if not on:
        return "all off (must mismatch)"
    if on == plan.searched:
        return "all on (must be zero)"
    if on == plan.searched[: len(on)]:
        return f"the first {len(on)}, up to {on[-1]}"
    return ", ".join(on)


def _print_runs(console: Console, plan: Plan) -> None:
    place = plan.place
    console.print("[bold]Expected number of runs[/] (ends, search, minimality, confirmation, necessity)")
    for e in plan.expected:
        time = f", about {_duration(e.mean * place.seconds)}" if place.seconds is not None else ""
        word = "switch is" if e.causes == 1 else "switches are"
        console.print(f"  when {e.causes} {word} necessary: {e.mean:.0f} on average, {e.worst} at most seen{time}")
    each = _duration(place.seconds) if place.seconds is not None else "not measured"
    console.print(f"  one run: {each}; {place.machine}; {place.memory}", soft_wrap=True)
    console.print(f"  [dim]rough, from: {escape(place.basis)}[/]", soft_wrap=True)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
