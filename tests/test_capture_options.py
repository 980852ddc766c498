"""Options of ``zkl-debug capture`` that cannot have an effect are refused before anything runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from zkl_debug.cli.capture import command
from zkl_debug.errors import UsageError

PROGRAM = ["--", "no-such-program", "--stack", "a b"]


def refused(*words: str) -> UsageError:
    done = CliRunner().invoke(command, [*words])
    assert isinstance(done.exception, UsageError), done.output
    return done.exception


@pytest.mark.parametrize(
    "option",
    [
        "--stack off",
        "--stack on",
        "--dtype fp32",
        "--switch a=on",
        "--fault K1",
        "--seed 1",
        "--permute 1",
        "--no-packing",
        "--packing",
        "--no-prefix-caching",
        "--size small",
        "--tp 1",
        "--sp",
        "--gen-dp 2",
        "--no-certify",
        "--json",
    ],
)
def test_options_of_a_bed_do_nothing_for_a_program(option: str, tmp_path: Path) -> None:
    out = str(tmp_path / "c")
    own = ["--side", "gen", "--sites", "a*", "--sites", "b c", "--layers", "1-2", "--budget", "1GiB", "--requests", "3"]
    error = refused(*own, *option.split(), "--out", out, *PROGRAM)
    assert error.found.startswith(option.split()[0].replace("--no-p", "--p"))
    again = shlex.split(error.next_step)
    assert again[:2] == ["zkl-debug", "capture"]
    assert again[-len(PROGRAM) :] == PROGRAM
    cannot_start = refused(*again[2:])
    assert "cannot start no-such-program" in cannot_start.found, "what is proposed is taken"
    assert set(own) - {"1GiB"} <= set(again)


@pytest.mark.parametrize("option", ["--steps 3", "--requests 2", "--model a:B"])
def test_options_of_a_program_do_nothing_for_a_bed(option: str, tmp_path: Path) -> None:
    error = refused("--bed", "tiny-gpt", *option.split(), "--no-packing", "--out", str(tmp_path / "c"))
    assert option.split()[0] in error.found
    assert shlex.split(error.next_step)[2:] == ["--bed", "tiny-gpt", "--no-packing", "--out", str(tmp_path / "c")]


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ("-5", "less than nothing"),
        ("-1GiB", "less than nothing"),
        ("10EiB", "more than any disk"),
        ("1e400", "more than any disk"),
        ("much", "is not a size"),
        ("3XiB", "is not a size"),
        ("", "is not a size"),
    ],
)
def test_budgets_that_are_none(size: str, why: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["--budget", size, "--out", str(tmp_path / "c"), *PROGRAM])
    assert done.exit_code == 2
    assert why in done.output
