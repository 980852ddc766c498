"""``zkl-debug logprobs``: what a table of generation and training log-probs says by itself."""

from __future__ import annotations

from pathlib import Path

import click

from zkl_debug.cli.common import emit_json, stdout
from zkl_debug.errors import ExitCode, Refused, UsageError
from zkl_debug.ingest import FORMATS, is_step_dump, load_logprobs, load_steps
from zkl_debug.logprobs.pair import COLUMNS, pair
from zkl_debug.logprobs.report import FORMAT, VERSION, Report, analyse
from zkl_debug.logprobs.table import LogprobTable
from zkl_debug.logprobs.text import lines

EPILOG = """\b
Examples:
  zkl-debug logprobs logs/exp_001                          all steps of a NeMo-RL run
  zkl-debug logprobs logs/exp_001/train_data_step4.jsonl   one step
  zkl-debug logprobs chunked.json unchunked.json           two Megatron golden files
  zkl-debug logprobs run0/train_data_step1.jsonl run1/train_data_step1.jsonl --column train
                                                           does training repeat itself?
\b
Exit codes: 0 bit-identical, 1 diverged, 2 usage, 3 refused (nothing compared, tokens differ, damaged file)."""


@click.command(epilog=EPILOG)
@click.argument("paths", nargs=-1, required=True, metavar="FILE [FILE_B]", type=click.Path(path_type=Path))
@click.option("--format", "kind", type=click.Choice(["auto", *FORMATS]), default="auto", help="What the files are.")
@click.option("--step", type=int, help="Look at this step only.")
@click.option("--column", type=click.Choice(COLUMNS), help="Compare this side of two files that hold both sides.")
@click.option("--valid-only", is_flag=True, help="Ignore masked rows altogether (by default they are counted).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    paths: tuple[Path, ...], kind: str, step: int | None, column: str | None, valid_only: bool, as_json: bool
) -> None:
    """Compare log-probs bit by bit, recompute NeMo-RL's metrics and say which rows differ and how.

    FILE holds both sides (NeMo-RL train_data_stepN.jsonl, several of them or their folder, or a CSV / NPZ table with
    columns step, sample, position, token, gen, train, mask), or one run, to be compared with FILE_B.
    """
    from zkl_debug.cli.main import COMMANDS

    try:
        table = load(paths, kind, column)
        report = analyse(table, step=step, valid_only=valid_only, commands=frozenset(COMMANDS))
    except Refused as error:
        if as_json:
            emit_json(_refusal(error))
            raise click.exceptions.Exit(int(error.exit_code)) from None
        raise
    _print(report, as_json)
    raise click.exceptions.Exit(int(report.exit_code))


def load(paths: tuple[Path, ...], kind: str, column: str | None = None) -> LogprobTable:
    """The table to analyse: of one file or folder, of several step dumps, or of two runs joined.

    Raises:
        UsageError: when the files do not make one table.
        Refused: when their content must not be compared.
    """
    if len(paths) > 1 and column is None and all(is_step_dump(path, kind) for path in paths):
        return load_steps(paths)
    if len(paths) > 2:
        raise UsageError(f"{len(paths)} files", "one file, two runs to compare, or several train_data_stepN.jsonl")
    tables = [load_logprobs(path, kind) for path in paths]
    if len(tables) == 2:
        return pair(tables[0], tables[1], column)
    if tables[0].train is None:
        raise UsageError(
            f"{paths[0]} holds one run", "a second file with the other side", "zkl-debug logprobs FILE FILE_B"
        )
    if column is not None:
        raise UsageError("--column with one file", "two files that hold both sides")
    return tables[0]


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        emit_json(report.to_json())
        return
    console = stdout()
    for line in lines(report):
        console.print(line, soft_wrap=True)


def _refusal(error: Refused) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "verdict": "refused",
        "reason": error.found,
        "expected": error.expected,
        "next": [error.next_step] if error.next_step else [],
        "exit_code": int(ExitCode.REFUSED),
    }
