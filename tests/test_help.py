"""Help that one can work from: every command has examples, and each of them is a command line that parses."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from zkl_debug.cli.examples import EXAMPLES
from zkl_debug.cli.main import COMMANDS, group


def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that can be run, with its words."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        yield from walk(child, (*path, name))


ALL = {" ".join(path): command for path, command in walk(group, ())}


def help_of(path: str) -> str:
    command = ALL[path]
    return command.get_help(click.Context(command, info_name=f"zkl-debug {path}", max_content_width=200))


def examples_of(path: str) -> list[str]:
    """Lines of the help's examples that start with the program, comments taken off, continued lines joined."""
    text = help_of(path).partition("Examples:")[2].replace("\\\n", " ")
    found = re.findall(r"^\s*(zkl-debug .*)$", text, flags=re.MULTILINE)
    return [re.split(r"\s+#\s|\s{3,}", line)[0] for line in found]


@pytest.mark.parametrize("path", sorted(ALL))
def test_every_command_has_examples_that_parse(path: str) -> None:
    lines = examples_of(path)
    assert lines, f"no example of '{path}' in its help: add some to zkl_debug/cli/examples.py"
    mine = 0
    for line in lines:
        words = shlex.split(line)[1:]
        command: click.Command = group
        context = click.Context(group)
        taken = []
        while isinstance(command, click.Group):
            taken.append(words[0])
            child = command.get_command(context, words.pop(0))
            assert child is not None, line
            command = child
        command.make_context(" ".join(taken), words)  # raises where an option or a value does not exist
        mine += " ".join(taken) == path
    assert mine, f"no example in the help of '{path}' is of '{path}'"


def test_examples_are_of_commands_that_exist() -> None:
    assert set(EXAMPLES) <= set(ALL), sorted(set(EXAMPLES) - set(ALL))


def test_the_list_of_commands_says_what_each_is_for() -> None:
    text = group.get_help(click.Context(group, info_name="zkl-debug"))
    for name, (_, _, line) in COMMANDS.items():
        assert re.search(rf"^  {name}\s", text, flags=re.MULTILINE), name
        assert line.endswith("."), line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str) -> None:
    program = Path(sys.executable).with_name("zkl-debug")
    if not program.exists():
        pytest.skip("not installed as a program")
    script = subprocess.run(
        [program],
        env=os.environ | {"_ZKL_DEBUG_COMPLETE": f"{shell}_source"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert script.returncode == 0, script.stderr
    assert "zkl-debug" in script.stdout


def test_completion_offers_commands_and_options() -> None:
    from click.shell_completion import BashComplete

    complete = BashComplete(group, {}, "zkl-debug", "_ZKL_DEBUG_COMPLETE")
    assert {item.value for item in complete.get_completions([], "in")} == {"inspect", "ingest"}
    assert "--verify-bytes" in {item.value for item in complete.get_completions(["diff"], "--ver")}
    assert {item.value for item in complete.get_completions(["bisect"], "s")} == {"switches", "steps"}
    assert "payload" in {item.value for item in complete.get_completions(["capture", "--level"], "p")}
