"""The commands of blackwell.md exist as they are written there, and its figures are those of the planner."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

import zkl_debug
from zkl_debug.bisect.space import Space
from zkl_debug.cli.main import group
from zkl_debug.stack.full import of_preset
from zkl_debug.stack.needs import TARGETS, availability
from zkl_debug.stack.space import command_space

TEXT = (Path(zkl_debug.__file__).parent / "stack" / "blackwell.md").read_text()
COMMANDS = [
    part.strip()
    for block in re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    for part in line.split("#")[0].split("&&")
    if part.strip()
]


def _resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    command: click.Command = group
    while isinstance(command, click.Group) and words:
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, words
        command, words = found, words[1:]
    return command, words


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_and_its_options_exist(line: str) -> None:
    program, *words = shlex.split(line)
    assert program == "zkl-debug"
    command, rest = _resolve(words)
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    used = {word for word in rest[: rest.index("--") if "--" in rest else None] if word.startswith("--")}
    assert used <= known


def _space(preset: str) -> Space:
    switches = of_preset(preset)
    return command_space(switches, availability(switches, TARGETS["sm100"]))


@pytest.mark.parametrize("preset", ["bf16", "mxfp8", "nvfp4-flashinfer", "mxfp8-flashinfer"])
def test_the_number_of_switches_is_that_of_the_planner(preset: str) -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{preset}` |"))
    space = _space(preset)
    assert int(row.split("|")[3]) == len(space.sort(space.top - space.bottom))
