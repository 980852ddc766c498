"""``zkl-debug diff A B``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zkl_debug.cli.common import emit_json, stderr, stdout
from zkl_debug.cli.names import MAP_HELP
from zkl_debug.diff.comparison import Progress
from zkl_debug.diff.naming import Family, load_map
from zkl_debug.diff.processes import Processes
from zkl_debug.diff.report import print_report
from zkl_debug.diff.run import diff_captures
from zkl_debug.diff.sitework import Runner
from zkl_debug.diff.verdict import Verdict
from zkl_debug.errors import UsageError

if TYPE_CHECKING:
    from zkl_debug.beds.drill import Drill


@click.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", required=False, type=click.Path(path_type=Path))
@click.option(
    "--json", "as_json", is_flag=True, help="Print the verdict document (zkl-verdict 1) instead of the report."
)
@click.option("--partial", is_flag=True, help="Accept incomplete captures, such as repaired ones. The verdict says so.")
@click.option("--verify-bytes", is_flag=True, help="Recompute digests from the payload and compare raw bytes as well.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the report as one self-contained page.",
)
@click.option(
    "--replay", is_flag=True, help="Call the first operator again on captured inputs (bed captures, payload level)."
)
@click.option(
    "--drill", is_flag=True, help="Run the bed again: raw bits round the first site, then every operator inside it."
)
@click.option(
    "--first", "first_only", is_flag=True, help="Stop at the first site that differs; later ones are not looked at."
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="Processes that compare sites. Default: one a core where there is enough to compare.",
)
@click.option("--map", "maps", type=click.Path(path_type=Path, dir_okay=False), multiple=True, help=MAP_HELP)
@click.option("--ray", metavar="local|ADDRESS", help="Compare on Ray; captures at the same path on every node.")
def command(
    a: Path,
    b: Path | None,
    as_json: bool,
    partial: bool,
    verify_bytes: bool,
    html: Path | None,
    replay: bool,
    drill: bool,
    first_only: bool,
    jobs: int | None,
    maps: tuple[Path, ...],
    ray: str | None,
) -> int:
    """Compare captures A and B and name the first operator that is not bitwise equal.

    A is usually the training side. Rows are joined by token prefix, so batches, request order and padding do not
    matter. Exit code: 0 identical, 1 diverged, 3 refused, 4 inconclusive, 5 identical as far as an incomplete capture
    goes.

    Without B, rows of A are compared with each other: those of one prefix in several batches (batch variance), and
    those that were both prefilled and decoded.
    """
    if b is None and (replay or drill):
        raise UsageError("--replay or --drill with one capture", "two captures", "zkl-debug diff A B --drill")
    own = tuple(load_map(file) for file in maps)
    with _progress() as bar:
        verdict = diff_captures(
            a,
            b,
            partial=partial,
            verify_bytes=verify_bytes,
            progress=bar,
            first_only=first_only,
            maps=own,
            runner=_runner(jobs, ray, own),
        )
    drilled = _drilled(verdict, a, b) if drill and b is not None and verdict.first is not None else None
    if drilled is not None:
        verdict = drilled.verdict
    if replay and b is not None and verdict.replay is None:  # pass 2 has called it again already
        verdict = _replayed(verdict, a, b)
    if html is not None:
        from zkl_debug.viz.html import write_html

        write_html(verdict, html, f"{_label(a)} against {'itself' if b is None else _label(b)}")
        stderr().print(f"wrote {html}")
    if as_json:
        emit_json(verdict.to_json() | ({} if drilled is None else {"drill": drilled.to_json()}))
    else:
        print_report(verdict, stdout())
        if drilled is not None:
            _print_drill(drilled)
    return int(verdict.exit_code)


def _runner(jobs: int | None, ray: str | None, maps: tuple[Family, ...]) -> Runner:
    if ray is None:
        return Processes(jobs)
    from zkl_debug.diff.on_ray import RayRunner

    return RayRunner(ray, jobs, maps)


def _drilled(verdict: Verdict, a: Path, b: Path) -> Drill:
    from zkl_debug.beds.drill import drill

    with stderr().status("pass 2") as status:
        return drill(a, b, verdict, lambda text: status.update(text))


def _print_drill(drilled: Drill) -> None:
    from zkl_debug.cli.zoom import report

    if drilled.note:
        stdout().print(f"drill     {drilled.note}")
    for part in report(drilled.zoom) if drilled.zoom is not None else ():
        stdout().print(part, overflow="fold")


def _replayed(verdict: Verdict, a: Path, b: Path) -> Verdict:
    """The verdict after calling its first operator again, and in float64; unchanged when nothing diverges."""
    if not verdict.by_rows:
        return verdict
    from zkl_debug.beds.replay import replay_first, settle
    from zkl_debug.beds.ruling import rule_first

    with stderr().status("replaying the first operator") as status:
        ruling = rule_first(verdict, a, b)
        settled = settle(verdict, replay_first(verdict, a, b, lambda text: status.update(text)))
    return replace(settled, referee=ruling.to_json())


def _progress() -> AbstractContextManager[Progress | None]:
    """A progress bar on stderr while a person watches, nothing otherwise."""
    console = stderr()
    return _Bar(console) if console.is_terminal else nullcontext()


class _Bar(AbstractContextManager[Progress]):
    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("comparing"), BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"))
        self._view = Progress(*columns, console=console, transient=True)
        self._task = self._view.add_task("", total=None)

    def __enter__(self) -> Progress:
        self._view.start()

        def update(done: int, total: int, name: str) -> None:
            self._view.update(self._task, completed=done, total=total, description=name[-40:])

        return update

    def __exit__(self, *_: object) -> None:
        self._view.stop()


def _label(capture: Path) -> str:
    """The last two parts of a capture's place: its run and its side."""
    return "/".join(capture.resolve().parts[-2:])
