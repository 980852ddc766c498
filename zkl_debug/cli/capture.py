"""``zkl-debug capture``: run a bed and write what both sides did."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from zkl_debug.attach.settings import Settings
from zkl_debug.cli.bedopts import bed_options, make_options
from zkl_debug.cli.capture_program import run_program
from zkl_debug.cli.common import SIZE, emit_json, stderr, stdout
from zkl_debug.cli.layoutopts import layout_options, take_layouts
from zkl_debug.errors import ExitCode, UsageError

#: Options that both kinds of run have; those of a program alone. All others are of a bed alone.
_COMMON = frozenset({"side", "level", "sites", "layers", "budget", "strict", "at_once", "out", "program", "bed"})
_PROGRAM = frozenset({"steps", "requests", "model"})
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


def _check_given(context: click.Context, wrong: Iterable[str], what: str) -> None:
    """Refuse options that would do nothing.

    Raises:
        UsageError: naming them, and the same command without them.
    """
    source = click.core.ParameterSource.DEFAULT
    given = [p for p in context.command.params if context.get_parameter_source(p.name or "") is not source]
    refused = [option for option in given if option.name in wrong]
    if not refused:
        return
    words = ["zkl-debug", "capture"]
    for option in given:
        if option in refused or not isinstance(option, click.Option):
            continue
        value = context.params[option.name or ""]
        if option.is_flag:
            words += [(option.opts if value else option.secondary_opts)[0]]
            continue
        for each in value if option.multiple else (value,):
            words += [option.opts[0], str(each)]
    program = context.params["program"]
    names = ", ".join(option.opts[0] for option in refused)
    raise UsageError(
        f"{names}: does nothing for {'a program' if program else 'a bed'}",
        f"options of {what} only with {what}",
        shlex.join([*words, *(["--", *program] if program else [])]),
    )


@click.command("capture")
@click.option("--bed", default=None, help="Workload to run (see `zkl-debug beds`).")
@click.option("--side", default="both", show_default=True, help="train, gen or both; any label for a program.")
@bed_options
@layout_options
@click.option("--level", type=click.Choice(["digest", "payload"]), default="digest", show_default=True)
@click.option("--sites", multiple=True, metavar="GLOB", help="Record only these sites; repeatable.")
@click.option("--layers", default=None, metavar="N-M", help="Record only these layers.")
@click.option("--budget", type=SIZE, default=None, help="Cap on payload bytes a side, e.g. 4GiB.")
@click.option("--strict", is_flag=True, help="Stop when the probe fails instead of going on without it.")
@click.option("--at-once", is_flag=True, help="On a GPU, read each site when it is passed, never a little later.")
@click.option("--no-certify", is_flag=True, help="Skip the plain runs A0 and A1 that prove the probe changed nothing.")
@click.option("--steps", type=click.IntRange(0), default=0, help="Of a program: stop after so many optimizer steps.")
@click.option("--requests", type=click.IntRange(0), default=0, help="Of a program: record the first so many requests.")
@click.option("--model", default="", metavar="MODULE:CLASS", help="Of a program: a model class it builds itself.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to create; gets train/ and gen/.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- PROGRAM ARGS...]")
@click.pass_context
def command(
    context: click.Context,
    /,
    bed: str | None,
    side: str,
    level: str,
    sites: tuple[str, ...],
    layers: str | None,
    budget: int | None,
    strict: bool,
    at_once: bool,
    no_certify: bool,
    steps: int,
    requests: int,
    model: str,
    out: Path,
    as_json: bool,
    program: tuple[str, ...],
    **values: Any,
) -> int:
    """Run a bed and capture its sides into DIR/train and DIR/gen; or run a program and capture its models into DIR.

    A program needs no change: models of megatron-core and transformers are found when they first run, in every process
    it starts. Its streams and its exit status stay its own.
    """
    if program:
        if bed is not None:
            raise UsageError("both --bed and a program", "one of them")
        own = {option.name or "" for option in context.command.params} - _COMMON - _PROGRAM
        _check_given(context, own, "a bed")
        settings = Settings(
            str(out),
            side,
            level,
            sites,
            parse_layers(layers),
            budget,
            steps,
            model=model,
            strict=strict,
            requests=requests,
            at_once=at_once,
        )
        return run_program(program, settings)
    if bed is None:
        raise UsageError("neither --bed nor a program after --", "one of them", "zkl-debug capture --help")
    _check_given(context, _PROGRAM, "a program")
    if side not in _SIDES:
        raise UsageError(f"--side {side}", f"one of {', '.join(_SIDES)} for a bed")
    from zkl_debug.beds.record import RecordOptions, record_bed

    layouts = take_layouts(values)
    options = replace(make_options(bed, values, _SIDES[side]), **layouts)
    record = RecordOptions(level, sites, parse_layers(layers), budget, strict, not no_certify, at_once)
    console = stderr()
    with console.status("starting") as status:
        done = record_bed(options, out, record, lambda text: status.update(text))
    document = _document(done, out, record.layers)
    document["fault"] = options.fault
    if as_json:
        emit_json(document)
    else:
        _print(document)
    return int(_exit_code(document))


def _document(done: Any, out: Path, layers: tuple[int, int] | None) -> dict[str, Any]:
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
                "no_layer": layers is not None and not any(s.meta.layer >= 0 for s in capture.sites.values()),
                "probe": manifest.get("probe"),
                "self_repeat": done.certification.get(name),
            }
    return {"format": "zkl-capture-run", "version": 1, "out": str(out), "sides": sides}


def _exit_code(document: dict[str, Any]) -> ExitCode:
    for side in document["sides"].values():
        if not side["sites"] or side["no_layer"]:
            return ExitCode.REFUSED
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
    if not again["equal"]:
        return f"{first}; nothing can be said of the probe ({again['values']} final values, bitwise)"
    second = (
        "A0 = A2" if probed["equal"] else f"A0 != A2 in {probed['mismatched']} values: the probe changed the result"
    )
    return f"{first}, {second} ({again['values']} final values, bitwise)"


def _print(document: dict[str, Any]) -> None:
    console = stdout()
    if document["fault"]:
        console.print(f"with fault {document['fault']}", markup=False)
    for name, side in document["sides"].items():
        size = side["bytes"] / (1 << 20)
        console.print(
            f"[bold]{name}[/]: {side['frames']} frames, {side['rows']} rows, {side['sites']} sites, "
            f"{size:.1f} MiB in {escape(side['path'])}"
        )
        if not side["sites"] or side["no_layer"]:
            console.print(
                "  [red]no site of a layer was recorded[/]: no --sites pattern or no --layers range fits; "
                "zkl-debug inspect of a full capture lists the names"
            )
        console.print(f"  {certification_text(side['self_repeat'])}")
        if not (side["probe"] or {}).get("ok", False):
            console.print(f"  [red]the probe failed[/]: {(side['probe'] or {}).get('errors')}")
    whole = all(side["sites"] and not side["no_layer"] for side in document["sides"].values())
    if len(document["sides"]) == 2 and whole:
        out = document["out"]
        console.print(f"next: zkl-debug diff {out}/train {out}/gen", markup=False)
