"""``zkl-debug watch``: a loop under a light monitor that takes the first step that diverges apart at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zkl_debug.cli.bisect_steps import loop_choices, run


@click.command("watch")
@loop_choices
@click.option("--keep", type=click.IntRange(2), default=3, show_default=True, help="Steps held in the ring buffer.")
@click.option("--go-on", is_flag=True, help="Finish the loop, and report then.")
def command(as_json: bool, out: Path | None, keep: int, go_on: bool, **values: Any) -> int:
    """Run a loop with a light monitor: log-probs compared every step, digests of state after every event.

    At the first step that diverges the loop stops, and what the ring buffer holds is enough to run the step again,
    exchange weights, data and engine state, and name the event. The slowdown is part of the report.
    """
    how: dict[str, Any] = {"keep": None if go_on else keep, "stop": not go_on, "light": True}
    return run(values, out, as_json, **how)
