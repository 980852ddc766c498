"""``zkl-debug bench faults --loop``: the scoreboard of the loop's faults."""

from __future__ import annotations

import time
from typing import Any

from zkl_debug.cli.common import emit_json, stderr, stdout, teller
from zkl_debug.errors import ExitCode


def run(seeds: int, faults: tuple[str, ...], as_json: bool) -> int:
    """Run every fault of the loop for ``seeds`` seeds and print what was right; exit code 0 when everything was."""
    from zkl_debug.beds.grpo.scoreboard import Row, document_of, rows

    started = time.monotonic()
    done: list[Row] = []
    console = stderr()
    with console.status("starting") as status:
        say = teller(console, status)
        done.extend(rows(range(seeds), faults, say))
    document: dict[str, Any] = document_of(done, time.monotonic() - started)
    if as_json:
        emit_json(document)
    else:
        _print(document)
    return int(ExitCode.OK if document["passed"] else ExitCode.DIVERGED)


def _print(document: dict[str, Any]) -> None:
    from rich.table import Table

    console = stdout()
    columns = list(document["totals"])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("fault", "seed", *columns):
        table.add_column(name)
    table.add_column("told", overflow="fold")
    for case in document["cases"]:
        marks = (_mark(case["right"].get(name)) for name in columns)
        told = case["told"]
        text = (
            f"step {told['step']}, {told['event'] or told['kind']}: {told['explanation']}" if told["step"] else "clean"
        )
        table.add_row(case["fault"], str(case["seed"]), *marks, text)
    totals = document["totals"]
    table.add_row("all", "", *(f"{totals[n]['right']}/{totals[n]['of']}" for n in columns), style="bold")
    console.print(table)
    clean = document["clean"]
    console.print(f"clean loops: {clean['runs']}, false blame in {clean['false_blame']}  ({document['seconds']:.0f} s)")


def _mark(value: bool | None) -> str:
    return {True: "[green]yes[/]", False: "[red]NO[/]"}.get(value, "-") if value is not None else "-"
