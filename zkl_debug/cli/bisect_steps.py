"""``zkl-debug bisect steps``: at which step it starts, and whether state or data brought it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from zkl_debug.cli.common import emit_json, stderr, stdout
from zkl_debug.cli.farm import away, ray_choice
from zkl_debug.errors import UsageError

#: What kind of model, and the options it takes.
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {"experts": 4},
    "hybrid": {"hybrid": True, "dtype": "fp32", "prefix_caching": False},
}


def model_choice[F: Callable[..., Any]](function: F) -> F:
    """Add ``--model`` to a click command."""
    choice = click.option(
        "--model", type=click.Choice(list(MODELS)), default="dense", show_default=True, help="Layers."
    )
    return choice(function)


def loop_options(values: dict[str, Any]) -> Any:
    """``GrpoOptions`` of a command's options; those that were not given keep the bed's defaults."""
    from zkl_debug.beds.grpo.options import GrpoOptions

    given = {name: value for name, value in values.items() if value is not None and name not in ("bed", "model")}
    return GrpoOptions(**{**MODELS[values.get("model") or "dense"], **given, "stack": given["stack"] == "on"})


def loop_choices[F: Callable[..., Any]](function: F) -> F:
    """Add the options of a loop to a click command; :func:`loop_options` reads them."""
    for option in reversed(_LOOP):
        function = option(function)
    return model_choice(function)


_LOOP: tuple[Callable[[Any], Any], ...] = (
    click.option("--bed", default="grpo", show_default=True, help="The loop to run."),
    click.option("--fault", default=None, metavar="ID", help="Put a known defect in (see `zkl-debug beds`)."),
    click.option(
        "--layout", type=click.Choice(["colocated-shared", "colocated-inference-model", "dedicated"]), default=None
    ),
    click.option("--steps", type=click.IntRange(1), default=8, show_default=True, help="Steps of the loop."),
    click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default=None),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--stack", type=click.Choice(["on", "off"]), default="on", show_default=True, help="Whole ladder."),
    click.option("--kv", type=click.Choice(["persist", "offload", "recompute"]), default=None, help="KV while asleep."),
    click.option("--groups", type=click.IntRange(1), default=None, help="Prompts a step."),
    click.option("--invalidate/--no-invalidate", default=None, help="Forget cached KV blocks after every refit."),
    click.option("--nap", type=click.IntRange(0), default=None, help="Sleep and wake before this engine step."),
    click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder for what is found."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
)


@click.command("steps", short_help="Find the step at which it starts, the state or data that brings it, and the event.")
@loop_choices
@ray_choice
def command(as_json: bool, out: Path | None, ray: str | None, **values: Any) -> int:
    """Run the loop, compare every step, and take the first step that diverges apart.

    Exit code: 0 clean, or found and repeated; 4 when it does not repeat or cannot be decided.
    """
    if ray is not None:
        check_loop(values, out)
        return away(ray, out)
    return run(values, out, as_json)


def check_loop(values: dict[str, Any], out: Path | None) -> None:
    """Refuse another bed than the loop's, and a folder that is in use."""
    if values["bed"] != "grpo":
        raise UsageError(f"bed {values['bed']} has no loop", "grpo", "zkl-debug bisect steps --bed grpo")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is not empty", "a new folder", f"rm -r {out}, or another --out")


def run(values: dict[str, Any], out: Path | None, as_json: bool, **how: Any) -> int:
    """Run the loop of a command's options and print what was found; ``how`` goes to ``find_drift``."""
    from zkl_debug.beds.grpo.answer import document, exit_code, lines
    from zkl_debug.beds.grpo.drift import find_drift

    check_loop(values, out)
    options = loop_options(values)
    console = stderr()
    with console.status("starting") as status:
        drift = find_drift(options, out, status.update, **how)
    if as_json:
        emit_json(document(drift))
    else:
        for line in lines(drift):
            stdout().print(line, soft_wrap=True)
    return int(exit_code(drift))
