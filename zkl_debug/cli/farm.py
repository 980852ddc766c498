"""A command of this program made by a worker of a Ray cluster, word for word, without its ``--ray``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

_OPTION = "--ray"


def ray_choice[F: Callable[..., Any]](function: F) -> F:
    """Add ``--ray`` to a click command that runs as one piece."""
    text = "Run on a worker of a Ray cluster; folders at the same path on every node."
    return click.option(_OPTION, metavar="local|ADDRESS", help=text)(function)


def without_ray(words: Sequence[str]) -> list[str]:
    """The words of a command line without the option and its value."""
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and not word.startswith(f"{_OPTION}=") and word != _OPTION:
            kept.append(word)
        skip = word == _OPTION
    return kept


def away(address: str, out: Path | None = None, gpus: int = 0) -> int:
    """Have the command line of this process run by a worker, and pass on what it prints.

    Args:
        address: ``local`` or the address of a cluster.
        out: the folder it fills, which is empty.
        gpus: GPUs it needs.

    Returns:
        Its exit code.
    """
    from zkl_debug.bisect.on_ray import WholeCommand, command_on_ray

    words = (sys.executable, "-m", "zkl_debug.cli.main", *without_ray(sys.argv[1:]))
    whole = WholeCommand(words, dict(os.environ), Path.cwd(), None if out is None else out.resolve())
    code, output, errors = command_on_ray(address, whole, gpus)
    sys.stdout.buffer.write(output)
    sys.stdout.flush()
    if code not in (0, 1):
        sys.stderr.write(errors)
    return code
