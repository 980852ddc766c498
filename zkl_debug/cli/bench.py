"""``zkl-debug bench``: measured costs, each a ratio to a baseline of the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zkl_debug.cli import bench_faults
from zkl_debug.cli.common import SIZE, emit_json, stderr, stdout
from zkl_debug.errors import UsageError

FOLDER = click.Path(path_type=Path, file_okay=False, exists=True, writable=True)
HISTORY = click.option(
    "--history",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append the run to this JSON lines file, and tell what changed since the last one in it.",
)


class _Bench(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """Run a bench; SIGTERM leaves nothing behind either."""
        from zkl_debug.bench.children import unwinding

        with unwinding():
            return super().invoke(ctx)


@click.group("bench", cls=_Bench)
def command() -> None:
    """Measure what zkl-debug costs on this machine."""


command.add_command(bench_faults.command)


@command.command("capture")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--hidden", type=int, default=1024, show_default=True)
@click.option("--layers", type=int, default=8, show_default=True)
@click.option("--tokens", type=int, default=512, show_default=True)
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@HISTORY
def capture_command(
    rounds: int, hidden: int, layers: int, tokens: int, dtype: str, as_json: bool, history: Path | None
) -> int:
    """Scoring forward of a CPU model: plain, attached but off, digest, payload."""
    from zkl_debug.bench.capture_bench import CaptureBench, bench_capture
    from zkl_debug.bench.store_bench import bench_store

    size = CaptureBench(layers=layers, hidden=hidden, heads=max(1, hidden // 64), tokens=tokens, rounds=rounds)
    size = CaptureBench(**{**size.__dict__, "dtype": dtype})
    console = stderr()
    with console.status("starting") as status:
        capture = bench_capture(size, lambda text: status.update(text))
        status.update("payload writing against raw file writing")
        store = bench_store(256 << 20)
    return _finish({"format": "zkl-bench", "version": 1, "capture": capture, "store": store}, as_json, history)


@command.command("gpu")
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option("--size", type=click.Choice(["small", "full"]), default="full", show_default=True)
@click.option("--part", "parts", type=click.Choice(["kernel", "scoring", "decode"]), multiple=True, help="Only these.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@HISTORY
def gpu_command(rounds: int, size: str, parts: tuple[str, ...], as_json: bool, history: Path | None) -> int:
    """On a GPU: digest kernel, scoring forward of 16k tokens, decoding in CUDA graphs; beside a naive hook."""
    from zkl_debug.bench.gpu_bench import PARTS, bench_gpu

    console = stderr()
    with console.status("starting") as status:
        found = bench_gpu(lambda text: status.update(text), size, rounds, parts or PARTS)
    return _finish({"format": "zkl-bench", "version": 1, "gpu": found}, as_json, history)


@command.command("diff")
@click.option(
    "--rows",
    "sizes",
    type=float,
    multiple=True,
    default=(1e6, 1e7),
    show_default=True,
    help="Digests of a side (rows times sites); several times for several sizes. 1e8 takes 4.3 GB of disk.",
)
@click.option("--ranks", type=click.IntRange(2), default=64, show_default=True, help="Files of a side.")
@click.option("--rank-rows", type=float, default=0, help="Digests of a file: smaller sizes then have fewer files.")
@click.option("--layers", type=click.IntRange(1), default=48, show_default=True)
@click.option("--trials", type=click.IntRange(0), default=20, show_default=True, help="Flipped bits to look for.")
@click.option("--trial-rows", type=float, default=0, help="Digests of their captures. Default: the smallest size.")
@click.option("--jobs", type=click.IntRange(1), help="Processes. Default: one a core where there is enough.")
@click.option("--folder", type=FOLDER, help="Where to write; it must be there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@HISTORY
def diff_command(
    sizes: tuple[float, ...],
    ranks: int,
    rank_rows: float,
    layers: int,
    trials: int,
    trial_rows: float,
    jobs: int | None,
    folder: Path | None,
    as_json: bool,
    history: Path | None,
) -> int:
    """Diff of synthetic captures: time, memory, growth, flipped bits found; join beside sort, payload beside memcmp."""
    from zkl_debug.bench.diff_bench import DiffBench, bench_diff
    from zkl_debug.bench.linear import describe

    if any(size < 1 for size in sizes):
        raise UsageError(f"--rows {min(sizes):g}", "at least one row")
    what = DiffBench(
        sizes=tuple(sorted(int(size) for size in sizes)),
        ranks=ranks,
        layers=layers,
        rank_size=int(rank_rows),
        trials=trials,
        trial_size=int(trial_rows),
        jobs=jobs,
    )
    with stderr().status("starting") as status:
        found = bench_diff(what, folder, lambda text: status.update(text))
    code = _finish({"format": "zkl-bench", "version": 1, "diff": found}, as_json, history)
    for unit, line in found["growth"].items():
        if line is not None and not as_json:
            stdout().print(f"growth of {unit}: {describe(line)}", soft_wrap=True)
    return code


@command.command("peers")
@click.option("--tool", "tools", multiple=True, help="Only these.")
@click.option("--folder", type=FOLDER, help="Where to write; it must be there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@HISTORY
def peers_command(tools: tuple[str, ...], folder: Path | None, as_json: bool, history: Path | None) -> int:
    """Beside other tools that are installed: cost, bytes, and whether each finds K2, K4, K7 and two changed results."""
    from zkl_debug.bench.peer_tools import TOOLS
    from zkl_debug.bench.peers_bench import bench_peers, table

    unknown = sorted(set(tools) - set(TOOLS))
    if unknown:
        raise UsageError(f"no tool {', '.join(unknown)}", f"one of {', '.join(TOOLS)}")
    with stderr().status("starting") as status:
        found = bench_peers(tools or tuple(TOOLS), folder, lambda text: status.update(text))
    code = _finish({"format": "zkl-bench", "version": 1, "peers": found}, as_json, history, quiet=True)
    if not as_json:
        for row in table(found):
            stdout().print(" | ".join(row), soft_wrap=True)
        stdout().print("K2, K4, K7: scoring against generation / one side against a run without it", soft_wrap=True)
    return code


@command.command("store")
@click.option("--size", type=SIZE, default="256MiB", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@HISTORY
def store_command(size: int, as_json: bool, history: Path | None) -> int:
    """Payload writing speed against raw file writing of the same bytes."""
    from zkl_debug.bench.store_bench import bench_store

    return _finish({"format": "zkl-bench", "version": 1, "store": bench_store(size)}, as_json, history)


def _finish(document: dict[str, Any], as_json: bool, history: Path | None, quiet: bool = False) -> int:
    if history is not None:
        from zkl_debug.bench.history import record

        for line in record(history, document):
            stderr().print(line, soft_wrap=True)
    if as_json:
        emit_json(document)
    if as_json or quiet:
        return 0
    console = stdout()
    for name, part in document.items():
        if not isinstance(part, dict):
            continue
        console.print(f"[bold]{name}[/]")
        for key, value in part.items():
            console.print(f"  {key}: {value}")
    return 0
