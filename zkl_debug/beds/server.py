"""The fork server of bed runs: imports once, then forks a process for every run and watches it to its end.

``python -m zkl_debug.beds.server`` speaks JSON lines: it prints ``{"ready": pid}``, reads
``{"id": n, "spec": {...}, "timeout": s, "memory": bytes}`` and answers ``{"id": n, "exit_code": ..., "signal": ...,
"timed_out": ..., "out_of_memory": ..., "seconds": ..., "peak_bytes": ...}``. The server itself runs no model and no
tensor operation, so every run starts from the same untouched process. Each run has its own session, output files and
limits; when the server's input ends, whatever still runs is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zkl_debug.bisect.process import resident_bytes

_PAUSE = 0.02
_RSS_EVERY = 0.2
_PR_SET_PDEATHSIG = 1


@dataclass
class _Child:
    """A run that goes on."""

    number: int
    pid: int
    started: float
    timeout: float | None
    memory: int | None
    peak: int = 0
    looked: float = 0.0
    ended_by: str = ""


class Server:
    """The loop; see the module's text.

    Args:
        requests: file descriptor the requests come from.
        answers: file descriptor the answers go to.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = requests
        self._answers = answers
        self._buffer = b""
        self._children: dict[int, _Child] = {}

    def serve(self) -> None:
        """Until the requests end."""
        self._say({"ready": os.getpid()})
        try:
            while self._read(_PAUSE if self._children else None):
                self._watch()
        finally:
            for child in self._children.values():
                _kill(child.pid)
                os.waitpid(child.pid, 0)

    def _say(self, answer: dict[str, Any]) -> None:
        os.write(self._answers, json.dumps(answer).encode() + b"\n")

    def _read(self, wait: float | None) -> bool:
        """Take in what arrived; false at the end of the requests."""
        ready, _, _ = select.select([self._requests], [], [], wait)
        if ready:
            data = os.read(self._requests, 1 << 16)
            if not data:
                return False
            self._buffer += data
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                self._start(json.loads(line))
        return True

    def _start(self, request: dict[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _run_and_exit(request, (self._requests, self._answers))
        self._children[pid] = _Child(
            request["id"], pid, time.monotonic(), request.get("timeout"), request.get("memory")
        )

    def _watch(self) -> None:
        for child in list(self._children.values()):
            # Not reaped yet, so that neither its number nor its group's can be reused while the rest is killed.
            if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                _kill(child.pid)
                _, status = os.waitpid(child.pid, 0)
                del self._children[child.pid]
                self._say(_ended(child, status))
            elif not child.ended_by:
                child.ended_by = _limit_reached(child)
                if child.ended_by:
                    _kill(child.pid)


def _limit_reached(child: _Child) -> str:
    now = time.monotonic()
    if child.timeout is not None and now - child.started > child.timeout:
        return "timeout"
    if child.memory is not None and now - child.looked > _RSS_EVERY:
        child.looked = now
        child.peak = max(child.peak, resident_bytes(child.pid))
        if child.peak > child.memory:
            return "memory"
    return ""


def _ended(child: _Child, status: int) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(status)
    return {
        "id": child.number,
        "exit_code": code if code >= 0 and not child.ended_by else None,
        "signal": -code if code < 0 and not child.ended_by else 0,
        "timed_out": child.ended_by == "timeout",
        "out_of_memory": child.ended_by == "memory",
        "seconds": time.monotonic() - child.started,
        "peak_bytes": child.peak,
    }


def _kill(pid: int) -> None:
    """Kill the session's process group of a run."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _run_and_exit(request: dict[str, Any], inherited: tuple[int, ...]) -> None:
    """What the forked process does; never returns."""
    code = 70
    try:
        os.setsid()
        _die_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        from zkl_debug.beds.observe import Spec, observe

        spec = Spec.from_json(request["spec"])
        _redirect(spec.folder, inherited)
        if request.get("memory"):
            _cap(request["memory"])
        code = observe(spec)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """The kernel kills this process when the server is killed (Linux; elsewhere the server's own end has to do)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect(folder: Path, inherited: tuple[int, ...]) -> None:
    """Own output files and working folder; the server's pipes are closed."""
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open("stdout.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    err = os.open("stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    for descriptor in inherited:
        if descriptor > 2:
            os.close(descriptor)


def _cap(memory: int) -> None:
    """A hard stop above the watched cap: private writable memory beyond what the server had already."""
    have = 0
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        have = int(next(line for line in lines if line.startswith("VmData:")).split()[1]) << 10
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = have + memory
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def main() -> None:
    """Serve on standard input and output; what libraries print goes to standard error."""
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from zkl_debug.engines.megatron.preload import preload

    preload()
    Server(requests, answers).serve()


if __name__ == "__main__":
    main()
