"""``zkl-debug bench``: measured costs, each a ratio to a baseline of the same run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from zkl_debug.cli import bench_faults, bench_print
from zkl_debug.cli.common import SIZE, emit_json, stderr, stdout, teller
from zkl_debug.errors import UsageError

_CAPTURE_STORE = 256 << 20  # bytes of the store bench that goes with the one of captures


class _Bench(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """Run a bench; SIGTERM leaves nothing behind either."""
        from zkl_debug.bench.children import unwinding

        with unwinding():
            return super().invoke(ctx)


class _Digests(click.ParamType[int]):
    name = "digests"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            option = param.opts[0] if param is not None else "this option"
            following = f"{'zkl-debug bench diff' if ctx is None else ctx.command_path} {option} 3e5"
            raise UsageError(f"{option} {value}", "a number of digests, such as 3e5", following)
        return int(number)


def _looked_at(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """A history that cannot be used is told before minutes are spent."""
    if path is not None:
        from zkl_debug.bench.history import check

        check(path)
    return path


DIGESTS = _Digests()
FOLDER_TYPE = click.Path(path_type=Path, file_okay=False, exists=True, writable=True)
FOLDER = click.option("--folder", type=FOLDER_TYPE, help="Where to write; it must be there. Default: temporary files.")
HISTORY = click.option(
    "--history",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_looked_at,
    help="Append the run to this JSON lines file, in a folder that is there, and tell what changed since the last run "
    "of the same bench and settings in it.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group("bench", cls=_Bench)
def command() -> None:
    """Measure what zkl-debug costs on this machine."""


command.add_command(bench_faults.command)


@command.command("capture")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--hidden", type=click.IntRange(64, 1 << 14), default=1024, show_default=True, help="A multiple of 64.")
@click.option("--layers", type=click.IntRange(1, 256), default=8, show_default=True)
@click.option("--tokens", type=click.IntRange(2, 1 << 16), default=512, show_default=True)
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@FOLDER
@JSON
@HISTORY
def capture_command(
    rounds: int,
    hidden: int,
    layers: int,
    tokens: int,
    dtype: str,
    folder: Path | None,
    as_json: bool,
    history: Path | None,
) -> int:
    """Scoring forward of a CPU model: plain, attached but off, digest, payload.

    Then what ``bench store`` measures, of 256 MiB.
    """
    from zkl_debug.bench.capture_bench import CaptureBench, bench_capture
    from zkl_debug.bench.store_bench import bench_store

    if hidden % 64:
        raise UsageError(
            f"--hidden {hidden}", "a multiple of 64: heads have 64 channels", f"--hidden {hidden // 64 * 64}"
        )
    size = CaptureBench(layers=layers, hidden=hidden, heads=hidden // 64, tokens=tokens, rounds=rounds, dtype=dtype)
    with _measuring() as say:
        capture = bench_capture(size, say, folder)
        say("payload writing against raw file writing")
        store = bench_store(_CAPTURE_STORE, folder=folder)
    document = {"format": "zkl-bench", "version": 1, "capture": capture, "store": store}

    def show() -> None:
        bench_print.print_times(stdout(), "capture", capture)
        bench_print.print_store(stdout(), store)

    return _finish(document, as_json, history, show)


@command.command("gpu")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--size", type=click.Choice(["small", "full"]), default="full", show_default=True)
@click.option("--part", "parts", type=click.Choice(["kernel", "scoring", "decode"]), multiple=True, help="Only these.")
@FOLDER
@JSON
@HISTORY
def gpu_command(
    rounds: int, size: str, parts: tuple[str, ...], folder: Path | None, as_json: bool, history: Path | None
) -> int:
    """On a GPU: digest kernel, scoring forward of 16k tokens, decoding in CUDA graphs; beside a naive hook."""
    from zkl_debug.bench.gpu_bench import PARTS, bench_gpu

    with _measuring() as say:
        found = bench_gpu(say, size, rounds, parts or PARTS, folder)
    document = {"format": "zkl-bench", "version": 1, "gpu": found}
    return _finish(document, as_json, history, lambda: bench_print.print_gpu(stdout(), found))


@command.command("diff")
@click.option(
    "--rows",
    "sizes",
    type=DIGESTS,
    multiple=True,
    default=(300_000, 1_000_000, 3_000_000),
    show_default=True,
    help="Digests of a side (rows times sites); several times for several sizes: growth is judged from three on.",
)
@click.option("--ranks", type=click.IntRange(2), default=8, show_default=True, help="Files of a side.")
@click.option("--rank-rows", type=DIGESTS, help="Digests of a file: smaller sizes then have fewer files.")
@click.option("--layers", type=click.IntRange(1), default=48, show_default=True, help="Of thirty sites each.")
@click.option("--trials", type=click.IntRange(0), default=20, show_default=True, help="Flipped bits to look for.")
@click.option("--trial-rows", type=DIGESTS, help="Digests of their captures. Default: the smallest size.")
@click.option("--jobs", type=click.IntRange(1), help="Processes. Default: one a core where there is enough.")
@click.option(
    "--folder",
    type=FOLDER_TYPE,
    help="Where to write; it must be there. Default: temporary files. At one time 40 bytes a digest of the largest "
    "size and 9 MB a rank of 48 layers (1e8 on 64 ranks: 4.7 GB); before that 1.6 GB for the comparison of "
    "payload, 0.2 GB where no size has a million.",
)
@JSON
@HISTORY
def diff_command(
    sizes: tuple[int, ...],
    ranks: int,
    rank_rows: int | None,
    layers: int,
    trials: int,
    trial_rows: int | None,
    jobs: int | None,
    folder: Path | None,
    as_json: bool,
    history: Path | None,
) -> int:
    """Diff of synthetic captures: time, memory, growth, flipped bits found; join beside sort, payload beside memcmp."""
    from zkl_debug.bench.diff_bench import DiffBench, bench_diff

    for option, given in (("--rank-rows", rank_rows), ("--trial-rows", trial_rows)):
        if given is not None and given < 1:
            least = 30 * layers * (1 if option == "--rank-rows" else ranks)
            raise UsageError(
                f"{option} {given}",
                f"at least {least:,}: one row at each site",
                f"zkl-debug bench diff {option} {least}",
            )
    what = DiffBench(
        sizes=tuple(sorted(sizes)),
        ranks=ranks,
        layers=layers,
        rank_size=rank_rows or 0,
        trials=trials,
        trial_size=trial_rows or 0,
        jobs=jobs,
    )
    with _measuring() as say:
        found = bench_diff(what, folder, say)
    document = {"format": "zkl-bench", "version": 1, "diff": found}
    return _finish(document, as_json, history, lambda: bench_print.print_diff(stdout(), found))


@command.command("peers")
@click.option("--tool", "tools", multiple=True, help="Only these.")
@FOLDER
@JSON
@HISTORY
def peers_command(tools: tuple[str, ...], folder: Path | None, as_json: bool, history: Path | None) -> int:
    """Beside other tools that are installed: cost, bytes, and whether each finds K2, K4, K7 and two changed results.

    K2, K4 and K7 are faults that add up in another order: a linear layer for some numbers of rows, attention when it
    decodes, the experts of a token. ``zkl-debug beds`` lists them.
    """
    from zkl_debug.bench.peer_tools import TOOLS
    from zkl_debug.bench.peers_bench import bench_peers

    unknown = sorted(set(tools) - set(TOOLS))
    if unknown:
        raise UsageError(f"no tool {', '.join(unknown)}", f"one of {', '.join(TOOLS)}")
    with _measuring() as say:
        found = bench_peers(tools or tuple(TOOLS), folder, say)
    document = {"format": "zkl-bench", "version": 1, "peers": found}
    return _finish(document, as_json, history, lambda: bench_print.print_peers(stdout(), found))


@command.command("store")
@click.option("--size", type=SIZE, default="256MiB", show_default=True, help="Rounded up to whole frames of 32 MiB.")
@FOLDER
@JSON
@HISTORY
def store_command(size: int, folder: Path | None, as_json: bool, history: Path | None) -> int:
    """Payload writing speed against raw file writing of the same bytes."""
    from zkl_debug.bench.store_bench import bench_store

    with _measuring() as say:
        say(f"{size:,} bytes, store and plain file in turn")
        found = bench_store(size, folder=folder)
    document = {"format": "zkl-bench", "version": 1, "store": found}
    return _finish(document, as_json, history, lambda: bench_print.print_store(stdout(), found))


@contextlib.contextmanager
def _measuring() -> Iterator[Callable[[str], None]]:
    """Progress on stderr, and what helps where the disk is full."""
    from zkl_debug.bench.space import room

    console = stderr()
    with console.status("starting") as status, room():
        yield teller(console, status)


def _finish(document: dict[str, Any], as_json: bool, history: Path | None, show: Callable[[], None]) -> int:
    """Print what was measured, then keep it: a history that fails must not take minutes of work with it."""
    if as_json:
        emit_json(document)
    else:
        show()
    if history is not None:
        from zkl_debug.bench.history import record

        params = click.get_current_context().params
        apart = ("as_json", "history", "folder")
        settings = {
            name: sorted(value) if isinstance(value, tuple) else value
            for name, value in sorted(params.items())
            if name not in apart
        }
        for line in record(history, document, settings):
            stderr().print(line, soft_wrap=True)
    return 0
