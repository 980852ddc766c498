"""The part of ``zkl-debug capture`` that runs a program."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zkl_debug.attach.launch import run_attached
from zkl_debug.attach.settings import Settings
from zkl_debug.cli.common import stderr
from zkl_debug.errors import ExitCode


def run_program(command: Sequence[str], settings: Settings) -> int:
    """Run it and return its exit status; 3 where it succeeded but nothing was captured.

    A summary goes to stderr only while a person watches: the program's streams stay its own.
    """
    status, folders = run_attached(command, settings)
    console = stderr()
    if not folders:
        console.print(
            f"zkl-debug: nothing was captured: {_ended(status)}no model of megatron-core or transformers was called\n"
            "expected: a program run by a Python that has zkl-debug installed, without -I or -S\n"
            "next: name the class with --model MODULE:CLASS, or use zkl_debug.capture(...) in the program",
            markup=False,
        )
        return status or int(ExitCode.REFUSED)
    if sys.stderr.isatty():
        for folder in folders:
            console.print(f"captured {folder}", markup=False)
    return status


def _ended(status: int) -> str:
    return f"the program ended with status {status}, and until then " if status else ""
