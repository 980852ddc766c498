"""``zkl-debug demo``: the same bed with the stack on and off, captured, compared, told in one screen."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from zkl_debug.cli.capture import certification_text
from zkl_debug.cli.common import emit_json, stderr, stdout
from zkl_debug.errors import ExitCode, UsageError

_MARK = ".zkl-demo"


@click.command("demo")
@click.option("--bed", default="tiny-gpt", show_default=True)
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="bf16", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("captures/demo"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(bed: str, dtype: str, seed: int, out: Path, as_json: bool) -> int:
    """Capture and compare a bed with its batch-invariant stack on (identical) and off (diverged)."""
    begin = time.monotonic()
    _make_room(out)
    results = {}
    console = stderr()
    with console.status("starting") as status:
        for name, stack in (("on", True), ("off", False)):
            results[name] = _one(bed, dtype, seed, stack, out / f"stack-{name}", name, status)
    seconds = time.monotonic() - begin
    document = {
        "format": "zkl-demo",
        "version": 1,
        "bed": bed,
        "dtype": dtype,
        "seconds": round(seconds, 1),
        "runs": {name: {"folder": r["folder"], "verdict": r["verdict"].to_json()} for name, r in results.items()},
    }
    if as_json:
        emit_json(document)
    else:
        _print(bed, dtype, results, seconds)
    told = results["on"]["verdict"].to_json()["verdict"], results["off"]["verdict"].to_json()["verdict"]
    return int(ExitCode.OK if told == ("identical", "diverged") else ExitCode.DIVERGED)


def _make_room(out: Path) -> None:
    """Remove the captures of an earlier demo, and nothing else.

    Raises:
        UsageError: when the folder holds something the demo did not write.
    """
    if out.exists() and any(out.iterdir()) and not (out / _MARK).exists():
        raise UsageError(f"{out} holds something the demo did not write", "a new folder", "zkl-debug demo --out DIR")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / _MARK).write_text("written by zkl-debug demo; removed by the next one\n")


def _one(bed: str, dtype: str, seed: int, stack: bool, folder: Path, name: str, status: Any) -> dict[str, Any]:
    from zkl_debug.beds.bed import BedOptions
    from zkl_debug.beds.record import RecordOptions, record_bed
    from zkl_debug.diff import diff_captures

    options = BedOptions(bed=bed, dtype=dtype, seed=seed, stack=stack)
    record = RecordOptions(level="payload")
    done = record_bed(options, folder, record, lambda text: status.update(f"stack {name}: {text}"))
    status.update(f"stack {name}: comparing")
    verdict = diff_captures(folder / "train", folder / "gen")
    return {"folder": str(folder), "verdict": verdict, "certification": done.certification}


def _print(bed: str, dtype: str, results: dict[str, Any], seconds: float) -> None:
    console = stdout()
    console.print(
        f"[bold]zkl-debug demo[/]: {bed}, {dtype}. A real megatron-core model scores tokens through its training "
        "forward and generates the same tokens through the real dynamic inference engine, on this CPU."
    )
    for name, result in results.items():
        verdict = result["verdict"].to_json()
        colour = "green" if verdict["verdict"] == "identical" else "red"
        console.print()
        console.print(f"[bold]Stack {name}[/]  ->  [bold {colour}]{verdict['verdict']}[/]")
        for side, repeat in result["certification"].items():
            console.print(f"  {side}: {certification_text(repeat)}")
        sites = verdict["coverage"]["sites"]
        console.print(f"  {sites['matched']} of {sites['expected']} sites matched")
        console.print(_edges(verdict))
        first = verdict["first"]
        if first:
            console.print(
                f"  first: [bold]{first['site']}[/] ({first['kind']})\n"
                f"  layer {first['layer']}, sample {first['sample']}, "
                f"position {first['position']}: {first['mismatched_elements']} of {first['elements']} elements, "
                f"up to {first['max_ulp']} ulp"
            )
    console.print()
    folders = [r["folder"] for r in results.values()]
    console.print(f"captures: {', '.join(folders)}  ({seconds:.0f} s)")
    console.print(f"next: zkl-debug diff {folders[-1]}/train {folders[-1]}/gen")


def _edges(verdict: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=True, header_style="dim")
    for column in ("  edge", "rows", "differ", "kind", "first site that differs"):
        table.add_column(column, justify="right" if column in ("rows", "differ") else "left", overflow="fold")
    for name, edge in verdict["edges"].items():
        first = edge["first"] or {}
        table.add_row(
            f"  {name}", str(edge["compared"]), str(edge["mismatched"]), first.get("kind", ""), first.get("site", "-")
        )
    return table
