"""The other end of the fork server: starts it, sends it runs, waits for their ends. Several threads may use it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from zkl_debug.beds.observe import Spec
from zkl_debug.bisect.outcome import Cancelled, RawRun
from zkl_debug.bisect.process import Limits
from zkl_debug.errors import UsageError

_COMMAND = (sys.executable, "-m", "zkl_debug.beds.server")
_START_SECONDS = 600.0
_GRACE_SECONDS = 10.0


class ForkServer:
    """A running fork server.

    Args:
        stop: set when the oracle is closed: waiting runs then end as cancelled.
        command: what to start; default the server of beds.
        env: variables of the server and of its runs; default those of this process.

    Raises:
        UsageError: it does not start, with what it said.
    """

    def __init__(
        self, stop: threading.Event, command: Sequence[str] = _COMMAND, env: Mapping[str, str] | None = None
    ) -> None:
        variables = dict(os.environ if env is None else env)
        self._stop = stop
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._answers: dict[int, dict[str, Any]] = {}
        self._next = 0
        self._gone = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # A child must not meet a thread pool that a fork cannot carry over.
            env={**variables, "OMP_NUM_THREADS": variables.get("OMP_NUM_THREADS", "1")},
            start_new_session=True,
        )
        self._ready = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        self._ready.wait(_START_SECONDS)
        if not self.alive:
            said = self._said()
            self.close()
            raise UsageError(f"the process that runs the beds did not start: {said}", "a bed that runs here")

    @property
    def alive(self) -> bool:
        """Whether it can take runs."""
        return self._ready.is_set() and not self._gone

    def run(self, spec: Spec, limits: Limits) -> RawRun:
        """Make one run and wait for its end.

        Raises:
            Cancelled: the oracle was closed meanwhile.
        """
        request = {"spec": spec.to_json(), "timeout": limits.timeout, "memory": limits.memory}
        with self._changed:
            number, self._next = self._next, self._next + 1
            self._send({"id": number, **request})
            while number not in self._answers and not self._gone and not self._stop.is_set():
                self._changed.wait(0.5)
            answer = self._answers.pop(number, None)
        if answer is not None:
            return RawRun(
                exit_code=answer["exit_code"],
                signal=answer["signal"],
                timed_out=answer["timed_out"],
                out_of_memory=answer["out_of_memory"],
                seconds=answer["seconds"],
                peak_bytes=answer["peak_bytes"],
            )
        if self._stop.is_set():
            raise Cancelled
        raise RuntimeError(f"the process that runs the beds ended: {self._said()}")

    def close(self) -> None:
        """End the server; it kills what it still runs."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            self._gone = True

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._changed:
                if "ready" in answer:
                    self._ready.set()
                else:
                    self._answers[answer["id"]] = answer
                self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()
        self._ready.set()

    def _said(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            self._errors.seek(0)
            lines = [x for x in self._errors.read().decode(errors="replace").splitlines() if x.strip()]
            return lines[-1].strip()[:300] if lines else "no output"
        return "no output"
