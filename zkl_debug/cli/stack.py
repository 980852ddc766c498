"""``zkl-debug stack``: the ladder of switches, what of it this machine or another can try, and the plan of a search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zkl_debug.cli.common import emit_json, stderr, stdout
from zkl_debug.errors import UsageError
from zkl_debug.stack.needs import TARGETS, Facts, availability
from zkl_debug.stack.switches import Switch

if TYPE_CHECKING:
    from zkl_debug.stack.plan import Plan


@click.command("stack")
@click.option(
    "--target", type=click.Choice(list(TARGETS)), help="A machine to plan for; default: look at this one (slower)."
)
@click.option("--preset", default="", metavar="NAME", help="Only what a recipe preset asks for: bf16, mxfp8 ...")
@click.option("--plan", "planned", is_flag=True, help="The runs of a search over it: order, number, settings, time.")
@click.option("--space", "space_file", type=click.Path(path_type=Path), help="Write the space file of the plan here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(target: str | None, preset: str, planned: bool, space_file: Path | None, as_json: bool) -> int:
    """List the ladder in order: what each switch fixes, who owns it, and whether it can be tried there."""
    from zkl_debug.stack.full import full_ladder, of_preset
    from zkl_debug.stack.render import document, print_ladder, print_plan

    if space_file is not None and space_file.exists():
        raise UsageError(f"{space_file} exists", "a new file", f"rm {space_file}, or another --space")
    switches = of_preset(preset) if preset else full_ladder()
    facts = TARGETS[target] if target else _look(switches)
    available = availability(switches, facts)
    plan = _plan(target, preset, switches, facts) if planned or space_file is not None else None
    if space_file is not None and plan is not None:
        from zkl_debug.stack.space import to_yaml

        _write(space_file, to_yaml(plan.space))
    if as_json:
        emit_json(document(facts, preset, switches, available, plan if planned else None))
        return 0
    console = stdout()
    if planned and plan is not None:
        print_plan(console, plan)
    else:
        print_ladder(console, facts, switches, available)
        chosen = f" --preset {preset}" if preset else ""
        console.print(f"next: zkl-debug stack --target {target or 'sm100'}{chosen} --plan")
    return 0


def _look(switches: Sequence[Switch]) -> Facts:
    from zkl_debug.stack.facts import probe

    with stderr().status("asking megatron-core what it has"):
        return probe(switches)


def _plan(target: str | None, preset: str, switches: Sequence[Switch], facts: Facts) -> Plan:
    from zkl_debug.stack.plan import make_plan

    kind = target or ("cpu" if not facts.sm else "sm100" if facts.sm >= 100 else "sm90")
    bed = kind == "cpu" and not preset
    if bed:
        from zkl_debug.beds.oracle import bed_switches

        switches = bed_switches("tiny-gpt")
    return make_plan(kind, preset, switches, availability(switches, facts), bed)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    stderr().print(f"[dim]space file: {path}[/]", soft_wrap=True)
