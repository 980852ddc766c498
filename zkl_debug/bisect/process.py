"""One command in its own process group, with a time limit and a memory cap, leaving nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zkl_debug.bisect.outcome import EXIT_INCONCLUSIVE, EXIT_UNTESTABLE, Cancelled

#: Marks every process of a run, so that what escapes the process group is found all the same.
RUN_ID = "ZKL_RUN_ID"
_TAIL_BYTES = 1 << 16
_PROC = Path("/proc")
# RLIMIT_DATA counts private writable memory only: CUDA's reserved address space does not trip it (RLIMIT_AS would).
# A tied command is killed by the kernel when the process that started it is gone (Linux; 1 is PR_SET_PDEATHSIG).
_SHIM = """
import os, resource, sys
cap, parent = int(sys.argv[1]), int(sys.argv[2])
if cap:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    cap = cap if hard == resource.RLIM_INFINITY else min(cap, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
if parent:
    import ctypes
    try:
        ctypes.CDLL(None).prctl(1, 9)
    except (OSError, AttributeError):
        pass
    if os.getppid() != parent:
        os._exit(137)
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    sys.stderr.write("zkl-debug: cannot run %s: %s\\n" % (sys.argv[3], error.strerror))
    os._exit(127)
"""
_OOM_RE = re.compile(r"\b(MemoryError|OutOfMemoryError|bad_alloc|[Cc]an(no|')t allocate memory|out of memory)\b")
_EXCEPTION_RE = re.compile(r"^[A-Za-z_][\w.]*(:\s.*)?$")
_NO_TRACEBACK_RE = re.compile(r"^(SyntaxError|IndentationError|TabError): |: No module named ")
#: Lines that may follow a final exception (long messages, exit-time warnings).
_AFTER_EXCEPTION = 12


@dataclass(frozen=True)
class Limits:
    """Limits of one run.

    Attributes:
        timeout: wall seconds, or None.
        memory: bytes, or None: per process as RLIMIT_DATA, and for all processes of the run as resident size.
        grace: seconds between asking to end and killing.
    """

    timeout: float | None = None
    memory: int | None = None
    grace: float = 2.0


@dataclass(frozen=True)
class Ended:
    """How a command ended; see :class:`~zkl_debug.bisect.outcome.RawRun`."""

    exit_code: int | None
    signal: int
    timed_out: bool
    out_of_memory: bool
    seconds: float
    peak_bytes: int
    failure: str
    last_line: str


def run_isolated(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdout: Path,
    stderr: Path,
    limits: Limits,
    stop: threading.Event | None = None,
    tied: bool = False,
) -> Ended:
    """Run a command to its end or to a limit; afterwards no process of it is left.

    ``tied``: it must not outlive this process, even one that is killed.

    Raises:
        Cancelled: ``stop`` was set.
    """
    argv = list(command)
    if limits.memory is not None or tied:
        shim = (_SHIM, str(limits.memory or 0), str(os.getpid() if tied else 0))
        argv = [sys.executable, "-I", "-S", "-c", *shim, *argv]
    start = time.monotonic()
    with stdout.open("wb") as out, stderr.open("wb") as err:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd, env=dict(env), start_new_session=True
            )
        except OSError as error:
            failure = f"cannot run {argv[0]}: {error.strerror}"
            return Ended(None, 0, False, False, time.monotonic() - start, 0, failure, "")
        try:
            ended_by, peak = _watch(process, limits, start, stop)
        finally:
            _end(process, env.get(RUN_ID, ""), limits.grace)
    if ended_by == "stop":
        raise Cancelled
    return _describe(process.returncode, ended_by, time.monotonic() - start, peak, tail(stderr))


def _watch(
    process: subprocess.Popen[bytes], limits: Limits, start: float, stop: threading.Event | None
) -> tuple[str, int]:
    """Wait for the end; returns which limit ended it (or "") and the peak resident size seen."""
    pause, peak = 0.002, 0
    while True:
        if _exited(process):
            return "", peak
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
        if stop is not None and stop.is_set():
            return "stop", peak
        if limits.timeout is not None and time.monotonic() - start > limits.timeout:
            return "timeout", peak
        if limits.memory is not None:
            peak = max(peak, resident_bytes(process.pid))
            if peak > limits.memory:
                return "memory", peak


def _describe(code: int, ended_by: str, seconds: float, peak: int, text: str) -> Ended:
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1].strip()[:200] if lines and code else ""
    if ended_by:
        return Ended(None, 0, ended_by == "timeout", ended_by == "memory", seconds, peak, "", last)
    if code < 0:
        return Ended(None, -code, False, False, seconds, peak, "", last)
    failure = final_exception(text) if code == 1 else ""
    memory = bool(code not in (0, EXIT_INCONCLUSIVE, EXIT_UNTESTABLE) and _OOM_RE.search(failure or last))
    return Ended(code, 0, False, memory, seconds, peak, failure, last)


def final_exception(text: str) -> str:
    """The Python exception that ended a program, or "": Python exits with 1 too, which must not pass for a mismatch."""
    lines = text.splitlines()
    filled = [line for line in lines if line.strip()]
    if filled and _NO_TRACEBACK_RE.search(filled[-1]):
        return f"Python exception: {filled[-1].strip()[:300]}"
    starts = [i for i, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]
    if not starts:
        return ""
    prefix = lines[starts[-1]].removesuffix("Traceback (most recent call last):")
    after = [line.removeprefix(prefix) for line in lines[starts[-1] + 1 :]]
    for number, line in enumerate(after):
        if line.strip() and not line[0].isspace():
            rest = [x for x in after[number + 1 :] if x.strip()]
            if _EXCEPTION_RE.match(line) and len(rest) <= _AFTER_EXCEPTION:
                return f"Python exception: {line.strip()[:300]}"
            return ""
    return ""


def tail(path: Path) -> str:
    """The last 64 KiB of a text file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def resident_bytes(pid: int) -> int:
    """Resident size of ``pid``, its session and its descendants together (0 without /proc)."""
    table = _process_table()
    wanted = {p for p, (_, session, _) in table.items() if p == pid or session == pid}
    grown = True
    while grown:
        more = {p for p, (parent, _, _) in table.items() if parent in wanted} - wanted
        wanted |= more
        grown = bool(more)
    return sum(table[p][2] for p in wanted)


def _process_table() -> dict[int, tuple[int, int, int]]:
    """pid -> (parent, session, resident bytes)."""
    page = os.sysconf("SC_PAGE_SIZE")
    table = {}
    for entry in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()
            table[int(entry.name)] = (int(fields[1]), int(fields[3]), int(fields[21]) * page)
    return table


def _end(process: subprocess.Popen[bytes], run_id: str, grace: float) -> None:
    """End the process group and whatever carries the run's mark; waits until all are gone."""
    deadline = time.monotonic() + grace
    if not _exited(process):
        _signal_group(process.pid, signal.SIGTERM)
        while not _exited(process) and time.monotonic() < deadline:
            time.sleep(0.01)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()
    for pid in _marked(run_id):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + grace
    while _marked(run_id) and time.monotonic() < deadline:
        time.sleep(0.01)


def _exited(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process ended, without reaping it: its number, and its group's, cannot be reused meanwhile."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _marked(run_id: str) -> list[int]:
    """Processes whose environment carries the mark of this run."""
    if not run_id:
        return []
    mark, found = f"{RUN_ID}={run_id}".encode(), []
    for entry in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found
