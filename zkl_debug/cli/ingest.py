"""``zkl-debug ingest``: other tools' dumps as a capture, or as a table of log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from zkl_debug.cli.common import emit_json, stdout
from zkl_debug.errors import ExitCode, Refused, UsageError
from zkl_debug.schema import Phase

KINDS = ("auto", "sglang", "files", "logprobs", "trace")
EPILOG = """\b
Examples:
  zkl-debug ingest dump_20260101 --side gen --out captures/gen        # a folder of SGLang's dumper
  zkl-debug ingest acts --pattern '{layer}.{name}_{step}.npy' --pattern '{name}_{step}.npy' \\
      --order embed,qkv,attn,mlp,norm --side train --out train
  zkl-debug ingest acts --pattern 'step{step}.npz::{layer}.{name}' --ids tokens.npy --side gen --out gen
  zkl-debug ingest rollout_0.pt --out gen.npz                         # slime or miles: log-probs
  zkl-debug ingest eager.log compiled.log                             # two DebugMode logs: a hint, no verdict
\b
What it writes is read by zkl-debug diff (a folder) or zkl-debug logprobs (an .npz table).
Exit codes: 0 written, 2 usage, 3 refused (no row keys, shards, not plain data, damaged), 4 a log (no verdict)."""


_PATTERN_HELP = (
    "What the names of files mean: {layer} {name} {port} {step} {frame} {sample} {rank} {index} {any}; file::key for "
    "arrays inside a file. Repeatable: the first that fits."
)


@click.command("ingest", epilog=EPILOG)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Capture folder, or .npz table, to create.")
@click.option("--kind", type=click.Choice(KINDS), default="auto", help="What SOURCE is; default by what it holds.")
@click.option("--side", default="", help="Label of the system that was dumped: train, gen ...")
@click.option("--level", type=click.Choice(["digest", "payload"]), default="payload", show_default=True)
@click.option("--pattern", "patterns", multiple=True, metavar="TEXT", help=_PATTERN_HELP)
@click.option("--ids", default="", metavar="NAME|FILE", help="Array of token ids, by name or in a file (file::key).")
@click.option("--order", default="", metavar="NAMES", help="Names in order of execution, separated by commas; globs.")
@click.option("--phase", type=click.Choice(["score", "prefill"]), default="score", help="What whole sequences are.")
@click.option("--dtype", default="", help="What unsigned integers of a .npy stand for, e.g. bfloat16.")
@click.option("--rank", type=click.IntRange(0), help="Read this rank of a dump of several.")
@click.option("--step", "steps", type=click.IntRange(0), multiple=True, help="Read this step only; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(sources: tuple[Path, ...], out: Path | None, kind: str, as_json: bool, **values: Any) -> int:
    """Read what another tool wrote, and write it as a capture or as a table of log-probs.

    Tensors need row keys: the token ids must be in the dump. Files of torch.save are read as plain data by a process
    of its own with limits on memory and time; nothing in them is run. What cannot be trusted is refused with a reason.
    """
    for source in sources:
        if not source.exists():
            raise UsageError(f"{source} does not exist", "a file or folder that another tool wrote")
    what = detect(sources, bool(values["patterns"])) if kind == "auto" else kind
    if what == "trace":
        return _trace(sources, as_json)
    if out is None:
        raise UsageError("no --out", "where to write", "add --out captures/gen, or --out table.npz for log-probs")
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise UsageError(f"{out} exists", "a new folder or file", f"choose another --out, or remove {out}")
    document = _table(sources, out) if what == "logprobs" else _capture(sources, what, out, values)
    document = {"format": "zkl-ingest", "version": 1, "kind": what, "out": str(out)} | document
    if as_json:
        emit_json(document)
    else:
        _print(document)
    return int(ExitCode.OK)


def detect(sources: tuple[Path, ...], has_pattern: bool) -> str:
    """What the sources are.

    Raises:
        UsageError: when it cannot be told.
    """
    from zkl_debug.ingest import sglang_names, tracelog

    first = sources[0]
    if has_pattern:
        return "files"
    if first.is_dir():
        if sglang_names.looks_like(first):
            return "sglang"
        if any(first.rglob("*.safetensors")) or any(first.rglob("*.np[yz]")):
            raise UsageError(
                f"{first} holds arrays, but no --pattern says what their names mean",
                "a pattern such as {layer}.{name}_{step}.npy",
                f"zkl-debug ingest {first} --pattern '{{layer}}.{{name}}_{{step}}.npy' --side SIDE --out DIR",
            )
        return "logprobs"
    return "trace" if first.suffix in (".log", ".txt") and tracelog.looks_like(first) else "logprobs"


def _capture(sources: tuple[Path, ...], what: str, out: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    if len(sources) != 1 or not sources[0].is_dir():
        raise UsageError(f"{len(sources)} sources", "one folder", "zkl-debug ingest FOLDER --side SIDE --out DIR")
    if not values["side"]:
        raise UsageError("no --side", "which system was dumped", "add --side train or --side gen")
    folder, payload = sources[0], values["level"] == "payload"
    if what == "sglang":
        from zkl_debug.ingest import sglang

        summary = sglang.ingest(
            folder, out, values["side"], payload=payload, rank=values["rank"], steps=frozenset(values["steps"])
        )
    else:
        from zkl_debug.ingest import pattern

        if not values["patterns"]:
            raise UsageError("no --pattern", "what the names of the files mean", "zkl-debug ingest --help")
        options = pattern.Options(
            values["patterns"],
            values["side"],
            payload,
            values["ids"],
            tuple(filter(None, values["order"].split(","))),
            Phase.PREFILL if values["phase"] == "prefill" else Phase.SCORE,
            values["dtype"],
            values["rank"],
            frozenset(values["steps"]),
        )
        summary = pattern.ingest(folder, out, options)
    other = "train" if values["side"] == "gen" else "gen"
    return {"side": values["side"], **summary, "next": [f"zkl-debug diff {out} {out.parent / other}"]}


def _table(sources: tuple[Path, ...], out: Path) -> dict[str, Any]:
    from zkl_debug.cli.logprobs import load
    from zkl_debug.ingest import load_logprobs
    from zkl_debug.logprobs.files import write_npz

    if out.suffix != ".npz":
        raise UsageError(f"--out {out}", "a .npz file: what SOURCE holds are log-probs, not activations")
    table = load_logprobs(sources[0]) if len(sources) == 1 else load(sources, "auto")
    if table.is_damaged:
        damage = next(skip for skip in table.skipped if skip.damage)
        raise Refused(
            f"part of it cannot be read: {damage.reason}",
            "whole files",
            f"zkl-debug logprobs {sources[0]} shows the rest",
        )
    write_npz(out, table)
    follow = f"zkl-debug logprobs {out}" + (" OTHER" if table.train is None else "")
    return {"rows": len(table), "sides": 1 if table.train is None else 2, "notes": list(table.notes), "next": [follow]}


def _trace(sources: tuple[Path, ...], as_json: bool) -> int:
    from zkl_debug.ingest import tracelog

    if len(sources) > 2:
        raise UsageError(f"{len(sources)} logs", "one log, or two to compare")
    logs = [tracelog.read(source) for source in sources]
    found = tracelog.compare(*logs) if len(logs) == 2 else {"differs": "", "a": len(logs[0])}
    document = {"format": "zkl-trace-log", "version": 1, "verdict": "inconclusive", **found}
    document["why"] = "sums over whole tensors: equal sums are not equal bits, and no row can be named"
    if as_json:
        emit_json(document)
        return int(ExitCode.INCONCLUSIVE)
    console = stdout()
    for source, log in zip(sources, logs, strict=True):
        console.print(f"{source}: {len(log)} operators", markup=False, soft_wrap=True)
    if found["differs"]:
        console.print(f"hint: {found['differs']}", markup=False, soft_wrap=True)
        for name in ("a", "b"):
            side = found.get(name)
            if isinstance(side, dict):
                console.print(f"  {name}  line {side['line']}  {side['operator']}  {side['values']}", markup=False)
    elif len(logs) == 2:
        console.print("no logged value differs, which does not say that the tensors are equal", soft_wrap=True)
    console.print(f"no verdict: {document['why']}\nnext: zkl-debug capture --help", markup=False, soft_wrap=True)
    return int(ExitCode.INCONCLUSIVE)


def _print(document: Mapping[str, Any]) -> None:
    console = stdout()
    if "frames" in document:
        console.print(
            f"{document['side']}: {document['frames']} frames, {document['rows']} rows in {document['out']}",
            markup=False,
            soft_wrap=True,
        )
    else:
        console.print(f"{document['rows']} log-probs in {document['out']}", markup=False, soft_wrap=True)
    for what, count in document.get("left_out", {}).items():
        console.print(f"left out  {count} {what}", markup=False, soft_wrap=True)
    for what, count in document.get("unkeyed", {}).items():
        console.print(f"no key    {count} rows: {what}", markup=False, soft_wrap=True)
    for note in document.get("notes", []):
        console.print(f"note      {note}", markup=False, soft_wrap=True)
    for line in document["next"]:
        console.print(f"next: {line}", markup=False, soft_wrap=True)
