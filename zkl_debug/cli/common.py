"""What every command shares: one JSON document on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.status import Status

from zkl_debug.attach.settings import parse_size

#: Documents printed by this process: a command prints one, or leaves it to the entry point to print its error.
documents = 0


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the command end as any other that cannot write: rich would exit with the code of a divergence."""
        raise BrokenPipeError


def stdout() -> Console:
    """Console for a command's answer."""
    return _Console(file=sys.stdout, soft_wrap=False, highlight=False)


def stderr() -> Console:
    """Console for logs and progress."""
    return Console(file=sys.stderr, highlight=False)


def teller(console: Console, status: Status) -> Callable[[str], None]:
    """How long work tells where it is: in the status line for a person, line by line in a log."""

    def say(text: str) -> None:
        status.update(text)
        if not console.is_terminal:
            console.print(text)

    return say


def emit_json(document: Any) -> None:
    """Print exactly one JSON document on stdout (non-finite floats become null)."""
    global documents
    documents += 1
    json.dump(_finite(document), sys.stdout, indent=2, sort_keys=False, allow_nan=False)
    sys.stdout.write("\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


class Size(click.ParamType[int]):
    """Bytes with an optional binary suffix: ``4GiB``, ``512MiB``, ``1000``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = Size()
