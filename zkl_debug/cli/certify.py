"""``zkl-debug certify``: the fast gate. Exit code 0 means zero, over every edge that the configuration has."""

from __future__ import annotations

from typing import Any

import click

from zkl_debug.cli.bisect_steps import loop_options, model_choice
from zkl_debug.cli.common import emit_json, stderr, stdout
from zkl_debug.errors import UsageError


@click.command("certify")
@click.option("--bed", default="grpo", show_default=True, help="The loop to certify.")
@click.option(
    "--layout",
    "layouts",
    type=click.Choice(["colocated-shared", "colocated-inference-model", "dedicated"]),
    multiple=True,
    help="Only this layout; repeatable. Default: all.",
)
@model_choice
@click.option("--fault", default=None, metavar="ID", help="Put a known defect in (see `zkl-debug beds`).")
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Steps of the longest loop.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default=None)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--stack", type=click.Choice(["on", "off"]), default="on", show_default=True, help="Whole ladder.")
@click.option("--kv", type=click.Choice(["persist", "offload", "recompute"]), default=None, help="KV while asleep.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=None, help="Tokens of the shortest prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(layouts: tuple[str, ...], as_json: bool, **values: Any) -> int:
    """Loops in several batch mixes, compared bit by bit at every step, with the edges they crossed.

    Exit code: 0 zero, 1 mismatch (with its cause), 3 when an edge that the configuration has was not crossed.
    """
    from zkl_debug.beds.grpo.gate import certificate, certify
    from zkl_debug.beds.grpo.options import LAYOUTS

    if values["bed"] != "grpo":
        raise UsageError(f"bed {values['bed']} has no loop", "grpo", "zkl-debug certify --bed grpo")
    options = loop_options(values)
    console = stderr()
    with console.status("starting") as status:
        found = certify(options, layouts or LAYOUTS, status.update)
    if not found.runs:
        raise UsageError(f"fault {options.fault} in layout {', '.join(layouts)}", "a layout it can be put into")
    document = certificate(found, options)
    if as_json:
        emit_json(document)
    else:
        _print(document)
    return int(found.exit_code)


def _print(document: dict[str, Any]) -> None:
    console = stdout()
    for run in document["runs"]:
        word = "[green]zero[/]" if run["zero"] else f"[red]mismatch[/] from step {run['onset'] or 'alone'}"
        console.print(f"{run['layout']:<26} {run['mix']:<6} {run['steps']} steps  {word}", soft_wrap=True)
    console.print("")
    for edge in document["edges"]["crossed"]:
        console.print(f"  crossed {edge['crossed']:>6} x  {edge['name']}", soft_wrap=True)
    for edge in document["edges"]["not_crossed"]:
        console.print(f"  [red]NOT crossed[/]       {edge['name']}: {edge['hint']}", soft_wrap=True)
    for edge in document["edges"]["absent"]:
        console.print(f"  [dim]not there         {edge['name']}: {edge['absent']}[/]", soft_wrap=True)
    console.print("")
    for cause in document["causes"][:4]:
        console.print(f"[bold]{cause['name']}[/]: {cause['text']}", soft_wrap=True)
    colour = "green" if document["verdict"] == "zero" else "red"
    claim = document["claim"]
    console.print(
        f"[bold {colour}]{document['verdict']}[/]: {claim['tokens']} generated tokens in {claim['steps']} steps "
        f"({document['seconds']:.0f} s)"
    )
    for line in document["next"]:
        console.print(f"next: {line}", soft_wrap=True)
