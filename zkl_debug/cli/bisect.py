"""``zkl-debug bisect``: which switch, which commit."""

from __future__ import annotations

import contextlib
import itertools
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from zkl_debug.bisect.criterion import parse_criterion
from zkl_debug.bisect.on_ray import Farmed, RayOracle
from zkl_debug.bisect.outcome import Observation, Oracle, RawRun, Request
from zkl_debug.bisect.replay import Policy
from zkl_debug.bisect.space import Space
from zkl_debug.cli.bisect_operators import command as operators_command
from zkl_debug.cli.bisect_steps import command as steps_command
from zkl_debug.cli.common import SIZE, emit_json, stderr, stdout
from zkl_debug.errors import UsageError

_COMMAND_HELP = """
The command is run once per configuration in its own process group. Its exit code is the verdict: 0 zero,
1 mismatch, 125 cannot be tested, 4 does not repeat itself (tried again); everything else, timeouts, signals, running
out of memory and Python exceptions included, is an error of the run and never a mismatch. A zkl-verdict printed last
on stdout, or written to $ZKL_VERDICT_FILE, says more than the exit code.
"""


@click.group("bisect", context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Find which switch makes the mismatch go away, or which commit brought it."""


@group.command(
    "switches", epilog=_COMMAND_HELP, short_help="Find the minimal set of switches that makes the mismatch go away."
)
@click.option("--space", "space_file", type=click.Path(path_type=Path), help="Space file (YAML), for a COMMAND.")
@click.option("--bed", metavar="NAME", help="Run this bed instead of a COMMAND, over the switches of its stack.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="bf16", show_default=True, help="Of the bed.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the bed: weights and prompts.")
@click.option("--fault", metavar="ID", help="A defect put into the bed.")
@click.option("--size", type=click.Choice(["small", "full"]), default="full", show_default=True, help="Of a GPU bed.")
@click.option("--graphs/--no-graphs", default=False, show_default=True, help="CUDA graphs of a GPU bed.")
@click.option("--hold", "held", multiple=True, metavar="NAME=on|off", help="A switch of the bed that is not varied.")
@click.option("--keep", is_flag=True, help="Keep the captures of the bed's runs.")
@click.option("--journal", type=click.Path(path_type=Path), help="File of finished runs: resumes, repeats nothing.")
@click.option("--rejudge", "rejudged", metavar="CRITERION", help="Judge the journal's runs again; runs nothing.")
@click.option("--criterion", default="auto", show_default=True, help="auto, exit, verdict, or PATH OP NUMBER.")
@click.option(
    "--jobs", type=click.IntRange(1, 256), help="Runs at once. Default: 1, or with --ray as many as there are workers."
)
@click.option("--ray", metavar="local|ADDRESS", help="Make the runs on Ray; folders at the same path on every node.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="Time limit of a run.")
@click.option("--memory", type=SIZE, help="Memory cap of a run, for example 8GiB.")
@click.option(
    "--visibility",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    metavar="P",
    help="Chance that one run shows a mismatch that is there; sizes the repeats.",
)
@click.option(
    "--calibrate",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Measure the visibility from N runs of all-off.",
)
@click.option(
    "--error-bound",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.01,
    show_default=True,
    help="Chance of any false zero, at most.",
)
@click.option("--attempts", type=click.IntRange(1), default=2, show_default=True, help="Tries of an unrepeatable run.")
@click.option("--max-runs", type=click.IntRange(1), help="Stop with a partial result (exit 5) after so many runs.")
@click.option("--confirm/--no-confirm", default=True, show_default=True, help="Run the answer with the wider probe.")
@click.option("--scan-harm", is_flag=True, help="Also turn each removable switch on alone over the answer.")
@click.option("--same-signature", is_flag=True, help="A mismatch with another signature than all-off's is untestable.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the outputs of the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def switches(**given: Any) -> int:
    """Find the minimal set of switches that makes the mismatch go away, and what each switch is worth.

    With --bed, a bed is run over the switches of its stack. Otherwise COMMAND is run over those of a space file; it
    learns which switches are on from ZKL_SWITCHES (JSON), ZKL_SWITCHES_FILE, ZKL_SWITCH_<NAME>=0|1 and the variables
    the space file binds.
    """
    from zkl_debug.bisect.driver import rejudge
    from zkl_debug.bisect.report import print_switches

    space = _space(given)
    policy = Policy(
        visibility=given["visibility"],
        error_bound=given["error_bound"],
        calibrate=given["calibrate"],
        confirm=given["confirm"],
        same_signature=given["same_signature"],
        scan_harm=given["scan_harm"],
    )
    if given["rejudged"] is not None:
        if given["journal"] is None:
            raise UsageError("--rejudge has no journal to judge", "--journal FILE")
        criterion = parse_criterion(given["rejudged"])
        result = rejudge(space, given["journal"], criterion, policy=policy, attempts=given["attempts"])
    else:
        result = _run_switches(space, policy, given)
    if given["as_json"]:
        emit_json(result.to_json())
    else:
        print_switches(stdout(), result)
    return int(result.exit_code)


def _space(given: dict[str, Any]) -> Space:
    """The space of a bed, or the one of a space file.

    Raises:
        UsageError: neither is given, or both are, or a bed and a command.
    """
    if (given["bed"] is None) == (given["space_file"] is None):
        raise UsageError("what is searched is not clear", "either --bed NAME, or --space FILE with a COMMAND")
    if given["bed"] is None:
        from zkl_debug.bisect.load import load_space

        return load_space(given["space_file"])
    if given["command"]:
        raise UsageError("a bed runs no COMMAND", "--bed NAME alone, or --space FILE -- COMMAND")
    from zkl_debug.beds.oracle import bed_space, bed_switches, parse_held

    return bed_space(bed_switches(given["bed"], given["graphs"]), parse_held(given["held"]))


def _oracle(space: Space, given: dict[str, Any], out: Path) -> Farmed:
    from zkl_debug.bisect.process import Limits

    if given["bed"] is None:
        from zkl_debug.bisect.oracle import CommandOracle

        return CommandOracle(space, given["command"], out, limits=Limits(given["timeout"], given["memory"]))
    from zkl_debug.beds.bed import BedOptions
    from zkl_debug.beds.oracle import DEFAULT_LIMITS, BedOracle

    options = BedOptions(
        bed=given["bed"],
        dtype=given["dtype"],
        seed=given["seed"],
        fault=given["fault"],
        size=given["size"],
        graphs=given["graphs"],
    )
    # CUDA maps far more address space than it uses: a cap on it would stop every run of a GPU bed.
    cap = given["memory"] or (None if options.on_gpu else DEFAULT_LIMITS.memory)
    limits = Limits(given["timeout"] or DEFAULT_LIMITS.timeout, cap)
    return BedOracle(space, options, out, limits=limits, keep=given["keep"])


def _gpus(bed: str | None) -> int:
    """GPUs of one run: a command says itself what it takes."""
    if bed is None:
        return 0
    from zkl_debug.beds.bed import bed as known_bed

    return int(known_bed(bed).on_gpu)


def _run_switches(space: Space, policy: Policy, given: dict[str, Any]) -> Any:
    from zkl_debug.bisect.driver import bisect_switches
    from zkl_debug.bisect.report import progress_line

    console, numbers = stderr(), itertools.count(1)
    criterion = parse_criterion(given["criterion"])
    out = given["out"]
    if out is None:
        out = (
            given["journal"].with_name(given["journal"].name + ".runs")
            if given["journal"]
            else Path(tempfile.mkdtemp(prefix="zkl-bisect-"))
        )
    local = _oracle(space, given, out)
    oracle: Oracle = local
    console.print(f"[dim]outputs of the runs: {out}[/]", soft_wrap=True)
    jobs = given["jobs"] or 1
    if given["ray"] is not None:
        farm = RayOracle(local, given["ray"], given["jobs"], gpus=_gpus(given["bed"]))
        oracle, jobs = farm, given["jobs"] or farm.workers

    def progress(request: Request, raw: RawRun, seen: Observation, stored: bool) -> None:
        console.print(progress_line(next(numbers), space, request, raw, seen, stored), soft_wrap=True)

    with _terminable():
        return bisect_switches(
            space,
            oracle,
            journal=given["journal"],
            policy=policy,
            criterion=criterion,
            jobs=jobs,
            attempts=given["attempts"],
            max_runs=given["max_runs"],
            progress=progress,
        )


@group.command("commits", epilog=_COMMAND_HELP, short_help="Find the first commit that mismatches.")
@click.option("--good", required=True, metavar="REV", help="Revision that is zero; an ancestor of the bad one.")
@click.option("--bad", required=True, metavar="REV", help="Revision that mismatches.")
@click.option("--repo", type=click.Path(path_type=Path), default=Path(), show_default="this folder", help="Repository.")
@click.option("--build", default="", metavar="SHELL", help="Run before the command; when it fails, skip the commit.")
@click.option("--criterion", default="auto", show_default=True, help="auto, exit, verdict, or PATH OP NUMBER.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="Time limit of a run.")
@click.option("--memory", type=SIZE, help="Memory cap of a run, for example 8GiB.")
@click.option(
    "--visibility",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    metavar="P",
    help="Chance that one run shows a mismatch that is there; sizes the repeats.",
)
@click.option("--first-parent", is_flag=True, help="Follow the first parent of merges only.")
@click.option("--keep-files", is_flag=True, help="Keep untracked files (build outputs) between commits.")
@click.option("--stop-on-error", is_flag=True, help="Stop at a commit whose run fails instead of skipping it.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the outputs of the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def commits(**given: Any) -> int:
    """Find the first commit that mismatches, in a work tree of its own; yours is never touched.

    COMMAND runs in the temporary work tree with ZKL_COMMIT set. Both ends are run first; the commit that is found and
    its parents are run again before it is named.
    """
    from zkl_debug.bisect.commit_step import CommitRun
    from zkl_debug.bisect.commits import CommitOptions, bisect_commits
    from zkl_debug.bisect.report import commit_line, print_commits

    parse_criterion(given["criterion"])
    console = stderr()
    names = ("build", "criterion", "timeout", "memory", "visibility", "first_parent", "keep_files", "stop_on_error")

    def progress(run: CommitRun) -> None:
        console.print(commit_line(run), soft_wrap=True)

    with _terminable():
        result = bisect_commits(
            given["repo"],
            given["good"],
            given["bad"],
            given["command"],
            options=CommitOptions(**{n: given[n] for n in names}),
            out=given["out"],
            progress=progress,
        )
    if given["as_json"]:
        emit_json(result.to_json())
    else:
        print_commits(stdout(), result)
    return int(result.exit_code)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind like Ctrl-C, so that whatever runs is ended and cleaned up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


group.add_command(operators_command)
group.add_command(steps_command)
