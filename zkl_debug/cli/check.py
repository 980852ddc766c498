"""``zkl-debug check RECIPE.yaml``: does the recipe say what zero train / generation mismatch requires?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from zkl_debug.cli.common import emit_json, stdout
from zkl_debug.errors import ExitCode, UsageError
from zkl_debug.stack.recipes.document import presets_document, report_document
from zkl_debug.stack.recipes.engine import check
from zkl_debug.stack.recipes.environment import as_json, judge_environment, probe
from zkl_debug.stack.recipes.fixer import check_target, fix
from zkl_debug.stack.recipes.loader import Recipe, load_recipe
from zkl_debug.stack.recipes.model import Report
from zkl_debug.stack.recipes.presets import PRESETS
from zkl_debug.stack.recipes.render import print_presets, print_report
from zkl_debug.stack.recipes.view import View


@click.command("check")
@click.argument("recipe", required=False, type=click.Path(path_type=Path))
@click.option("--preset", type=click.Choice(list(PRESETS)), help="Rules to judge by; default: picked from the recipe.")
@click.option("--json", "as_document", is_flag=True, help="Print one JSON document.")
@click.option("--environment", is_flag=True, help="Also judge this machine: packages, GPU, variables, megatron-core.")
@click.option("--generation-only", is_flag=True, help="Judge the merged config of a dedicated generation worker.")
@click.option(
    "--fix", "out", type=click.Path(path_type=Path), metavar="OUT.yaml", help="Write an overlay that corrects it."
)
@click.option("--partial", is_flag=True, help="Count missing files of the defaults chain as empty (never sound).")
@click.option("--list", "list_presets", is_flag=True, help="Show the presets, their status and rules instead.")
def command(
    recipe: Path | None,
    preset: str | None,
    as_document: bool,
    environment: bool,
    generation_only: bool,
    out: Path | None,
    partial: bool,
    list_presets: bool,
) -> int:
    """Check a NeMo-RL recipe against the rules of zero train / generation mismatch.

    Exit code 0: every rule holds. 1: at least one does not. 2: the recipe cannot be read.
    """
    if list_presets:
        emit_json(presets_document()) if as_document else print_presets(stdout())
        return ExitCode.OK
    if recipe is None:
        raise UsageError("no recipe given", "zkl-debug check RECIPE.yaml", "zkl-debug check --list")
    loaded = load_recipe(recipe, partial=partial)
    if out is not None:
        check_target(loaded, out)
    report = check(loaded, preset=preset or "", generation_only=generation_only)
    fixed = fix(loaded, report, out, partial=partial) if out is not None else None
    sound = fixed.after.sound if fixed is not None else report.sound
    if environment:
        report = _with_environment(loaded, report)
        sound = sound and not any(v.side == "environment" for v in report.violations)
    if as_document:
        emit_json(report_document(report, fixed))
    else:
        print_report(stdout(), report, fixed)
    return ExitCode.OK if sound else ExitCode.DIVERGED


def _with_environment(recipe: Recipe, report: Report) -> Report:
    view = View(recipe, generation_only=report.generation_only)
    machine = probe(report.preset)
    found = judge_environment(report.preset, view, machine)
    return replace(report, violations=(*report.violations, *found), environment=as_json(machine))
