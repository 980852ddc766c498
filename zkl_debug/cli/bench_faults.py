"""``zkl-debug bench faults``: the scoreboard."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from zkl_debug.cli.common import emit_json, stderr, stdout, teller
from zkl_debug.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from zkl_debug.bench.scoreboard import Clean, Score

_WRONG_LINES = 20


@click.command("faults")
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Seeds a fault and dtype.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "both"]), default="both", show_default=True)
@click.option("--fault", "faults", multiple=True, metavar="ID", help="Only this fault; repeatable.")
@click.option("--clean", type=click.IntRange(0), default=0, show_default=True, help="Runs with nothing broken.")
@click.option("--loop", "of_loop", is_flag=True, help="The faults of the GRPO loop instead, with step and event.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Runs side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    seeds: int, dtype: str, faults: tuple[str, ...], clean: int, of_loop: bool, jobs: int, as_json: bool
) -> int:
    """Put every known fault in, diagnose it, and compare with its known answer.

    Exit code 0 when all goals are met, else 1; 5 when it was interrupted, after the scores so far.
    """
    if of_loop:
        from zkl_debug.cli import bench_loop

        return bench_loop.run(seeds, faults, as_json)
    from zkl_debug.bench import faults_bench, scoreboard

    started = time.monotonic()
    dtypes = ("fp32", "bf16") if dtype == "both" else (dtype,)
    chosen = faults_bench.cases(faults, dtypes, seeds)
    if not chosen and not clean:
        raise UsageError("Z0 is the run with nothing broken", "a fault, or --clean", "zkl-debug bench faults --clean 4")
    scores: list[Score] = []
    runs: list[Clean] = []
    console = stderr()
    with console.status("starting") as status:
        say = teller(console, status)
        whole = False
        with suppress(KeyboardInterrupt):
            for done in faults_bench.run_all(chosen, clean, dtypes, say, jobs):
                scores.append(done) if isinstance(done, scoreboard.Score) else runs.append(done)
            whole = True
    document = {**scoreboard.document(scores, runs, time.monotonic() - started), "complete": whole}
    if as_json:
        emit_json(document)
    else:
        _print(scores, document)
    if not whole:
        console.print(f"interrupted after {len(scores)} of {len(chosen)} faults and {len(runs)} of {clean} clean runs")
        return int(ExitCode.BUDGET)
    return int(ExitCode.OK if document["passed"] else ExitCode.DIVERGED)


def _print(scores: Sequence[Score], document: dict[str, Any]) -> None:
    from rich.table import Table

    console = stdout()
    columns = list(document["totals"])
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("fault")
    table.add_column("runs", justify="right")
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("told first", overflow="fold")
    groups: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        groups[score.fault].append(score)
    for fault, group in groups.items():
        table.add_row(fault, str(len(group)), *(_share(group, name) for name in columns), _told(group[0]))
    totals = document["totals"]
    table.add_row("all", str(len(scores)), *(_percent(totals[name]) for name in columns), style="bold")
    table.add_row("goal", "", *(f"{100 * totals[name]['goal']:.0f} %" for name in columns))
    console.print(table)
    for score in [s for s in scores if _wrong(s)][:_WRONG_LINES]:
        console.print(f"  wrong: {_case(score)}", overflow="fold")
    clean = document["clean"]
    if clean["runs"]:
        console.print(f"clean runs: {clean['runs']}, false blame in {clean['false_blame']}")
    for run in clean["blamed"]:
        console.print(f"  blamed: {run['bed']} {run['dtype']} seed {run['seed']}: {run['verdict']} {run['blamed']}")
    if not scores and not clean["runs"]:
        console.print("nothing was run to its end")
        return
    word = "[green]within the goals[/]" if document["passed"] else "[red]not within the goals[/]"
    console.print(f"{word}  ({document['seconds']:.0f} s)")


def _share(group: Sequence[Score], name: str) -> str:
    """``5/5``, in red where something is wrong, a dash where the answer has nothing to compare with."""
    values = [False if s.told is None else s.right.get(name) for s in group]
    judged = [value for value in values if value is not None]
    if not judged:
        return "-"
    text = f"{sum(judged)}/{len(judged)}"
    return text if all(judged) else f"[red]{text}[/]"


def _percent(total: dict[str, Any]) -> str:
    return "-" if total["share"] is None else f"{100 * total['share']:.1f} %"


def _told(score: Score) -> str:
    said = score.told
    if said is None:
        return score.failure
    return " · ".join(part for part in (said.site or said.verdict, said.kind, said.explanation) if part)


def _wrong(score: Score) -> bool:
    return score.told is None or score.edge_right is False or False in score.right.values()


def _case(score: Score) -> str:
    where = f"{score.fault} {score.bed} {score.dtype} seed {score.seed}"
    said = score.told
    if said is None:
        return f"{where}: failed: {score.failure}"
    columns = [name for name, value in score.right.items() if value is False]
    columns += ["edge"] if score.edge_right is False else []
    return (
        f"{where}: {', '.join(columns)}: {said.edge} {said.site} {said.kind} | {said.rule[:160]} | {said.explanation}"
    )
