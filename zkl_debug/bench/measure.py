"""Running a command and watching it: seconds, processor seconds, and memory of it and of all it starts."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zkl_debug.bench.children import child
from zkl_debug.errors import UsageError

_EVERY_S = 0.05


@dataclass(frozen=True)
class Measured:
    """What a command took.

    Attributes:
        code: exit status.
        output: its standard output.
        seconds, cpu_seconds: wall and processor time, of the command and of the processes it waited for.
        peak_rss: largest sum of resident memory over the command and its descendants, bytes; sampled, and pages that
            they share are counted for each of them.
    """

    code: int
    output: str
    seconds: float
    cpu_seconds: float
    peak_rss: int


def run_measured(command: Sequence[str]) -> Measured:
    """Run a command to its end.

    Raises:
        UsageError: when it ends with a status other than 0 or 1, which are the answers of a diff.
    """
    before = os.times()
    start = time.perf_counter()
    peak = [0]
    over = threading.Event()
    with child(command) as process:
        watcher = threading.Thread(target=_watch, args=(process.pid, peak, over), daemon=True)
        watcher.start()
        try:
            output, errors = process.communicate()
        finally:
            over.set()
        seconds = time.perf_counter() - start
        watcher.join()
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    if process.returncode not in (0, 1):
        raise UsageError(f"{' '.join(command)} ended with status {process.returncode}: {_why(errors)}")
    return Measured(process.returncode, output, seconds, cpu, peak[0])


def _why(errors: str) -> str:
    """The end of what a command said, of a traceback the last line."""
    said = errors.strip()
    return said.splitlines()[-1] if "Traceback" in said else said[-400:]


def zkl_command(*args: object) -> list[str]:
    """The command line of this package in this Python."""
    return [sys.executable, "-m", "zkl_debug.cli.main", *map(str, args)]


def _watch(pid: int, peak: list[int], over: threading.Event) -> None:
    while not over.wait(_EVERY_S):
        peak[0] = max(peak[0], sum(_rss(member) for member in _tree(pid)))


def _tree(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        here = waiting.pop()
        found.append(here)
        for listing in Path(f"/proc/{here}/task").glob("*/children"):
            try:
                waiting += [int(child) for child in listing.read_text().split()]
            except (OSError, ValueError):
                continue
    return found


def _rss(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
