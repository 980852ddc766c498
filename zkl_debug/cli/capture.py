"""``zkl-debug capture``: run a bed and write what both sides did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zkl_debug.cli.bedopts import bed_options, make_options
from zkl_debug.cli.common import SIZE, emit_json, stderr, stdout
from zkl_debug.errors import ExitCode, UsageError

_SIDES = {"train": ("train",), "gen": ("gen",), "both": ("gen", "train")}


def parse_layers(text: str | None) -> tuple[int, int] | None:
    """``3-5`` or ``3`` as an inclusive range.

    Raises:
        UsageError: anything else.
    """
    if text is None:
        return None
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
        raise UsageError(f"--layers {text}", "a layer or an ascending range: 3 or 3-5")
    return int(first), int(last if dash else first)


@click.command("capture")
@click.option("--bed", required=True, help="Workload to run (see `zkl-debug beds`).")
@click.option("--side", type=click.Choice(list(_SIDES)), default="both", show_default=True)
@bed_options
@click.option("--level", type=click.Choice(["digest", "payload"]), default="digest", show_default=True)
@click.option("--sites", multiple=True, metavar="GLOB", help="Record only these sites; repeatable.")
@click.option("--layers", default=None, metavar="N-M", help="Record only these layers.")
@click.option("--budget", type=SIZE, default=None, help="Cap on payload bytes a side, e.g. 4GiB.")
@click.option("--strict", is_flag=True, help="Stop when the probe fails instead of going on without it.")
@click.option("--no-certify", is_flag=True, help="Skip the plain runs A0 and A1 that prove the probe changed nothing.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to create; gets train/ and gen/.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    bed: str,
    side: str,
    level: str,
    sites: tuple[str, ...],
    layers: str | None,
    budget: int | None,
    strict: bool,
    no_certify: bool,
    out: Path,
    as_json: bool,
    **values: Any,
) -> int:
    """Run a bed and capture its sides into DIR/train and DIR/gen."""
    from zkl_debug.beds.record import RecordOptions, record_bed

    options = make_options(bed, values, _SIDES[side])
    record = RecordOptions(level, sites, parse_layers(layers), budget, strict, not no_certify)
    console = stderr()
    with console.status("starting") as status:
        done = record_bed(options, out, record, lambda text: status.update(text))
    document = _document(done, out)
    if as_json:
        emit_json(document)
    else:
        _print(document)
    return int(_exit_code(document))


def _document(done: Any, out: Path) -> dict[str, Any]:
    from zkl_debug.store.reader import open_capture

    sides = {}
    for name, folder in done.folders.items():
        with open_capture(folder, partial=True) as capture:
            manifest = capture.manifest
            sides[name] = {
                "path": str(folder),
                "frames": len(capture.frames),
                "rows": len(capture.rows),
                "sites": len(capture.sites),
                "bytes": sum(p.stat().st_size for p in folder.iterdir()),
                "probe": manifest.get("probe"),
                "self_repeat": done.certification.get(name),
            }
    return {"format": "zkl-capture-run", "version": 1, "out": str(out), "sides": sides}


def _exit_code(document: dict[str, Any]) -> ExitCode:
    for side in document["sides"].values():
        if not (side["probe"] or {}).get("ok", False):
            return ExitCode.REFUSED
        repeat = side["self_repeat"]
        if repeat and not (repeat["a0_a1"]["equal"] and repeat["a0_a2"]["equal"]):
            return ExitCode.INCONCLUSIVE
    return ExitCode.OK


def certification_text(repeat: Any) -> str:
    """One line: what the plain and the probed runs proved of each other."""
    if not repeat:
        return "not certified (no plain runs were made)"
    again, probed = repeat["a0_a1"], repeat["a0_a2"]
    first = "A0 = A1" if again["equal"] else f"A0 != A1 in {again['mismatched']} values: the side does not repeat"
    second = (
        "A0 = A2" if probed["equal"] else f"A0 != A2 in {probed['mismatched']} values: the probe changed the result"
    )
    return f"{first}, {second} ({again['values']} final values, bitwise)"


def _print(document: dict[str, Any]) -> None:
    console = stdout()
    for name, side in document["sides"].items():
        size = side["bytes"] / (1 << 20)
        console.print(
            f"[bold]{name}[/]: {side['frames']} frames, {side['rows']} rows, {side['sites']} sites, "
            f"{size:.1f} MiB in {side['path']}"
        )
        console.print(f"  {certification_text(side['self_repeat'])}")
        if not (side["probe"] or {}).get("ok", False):
            console.print(f"  [red]the probe failed[/]: {(side['probe'] or {}).get('errors')}")
    if len(document["sides"]) == 2:
        out = document["out"]
        console.print(f"next: zkl-debug diff {out}/train {out}/gen")
