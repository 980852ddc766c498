"""What a bench leaves behind however it ends: nothing. Child processes, folders, and the signals that end it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zkl_debug.errors import Ended
from zkl_debug.store.writer import CaptureWriter

_REMOVE_TRIES = 50
_REMOVE_WAIT_S = 0.1


@contextlib.contextmanager
def child(command: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a process whose output is read as text; it is killed, with all it started, if it still runs at the end.

    It has a session of its own: Ctrl-C at the terminal reaches this process alone, which then ends the others.
    """
    with subprocess.Popen(
        list(command),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def scratch(folder: Path | None, prefix: str) -> Iterator[Path]:
    """A new folder in ``folder`` (default: that for temporary files), removed at the end."""
    root = Path(tempfile.mkdtemp(dir=folder, prefix=prefix))
    try:
        yield root
    finally:
        for _ in range(_REMOVE_TRIES):  # a thread of a writer that was interrupted may still make a file
            shutil.rmtree(root, ignore_errors=True)
            if not root.exists():
                break
            time.sleep(_REMOVE_WAIT_S)


@contextlib.contextmanager
def writing(writer: CaptureWriter) -> Iterator[CaptureWriter]:
    """Close a writer at the end, or stop it at once where the block did not come to its end."""
    try:
        yield writer
        writer.close(manifest={})
    except BaseException:
        writer.abort("interrupted")
        raise


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP unwind like Ctrl-C, by :class:`~zkl_debug.errors.Ended`.

    Only the first signal counts, Ctrl-C included: a second one would leave behind what the first has cleaned up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else Ended(number)

    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            if before[number] is not signal.SIG_IGN:  # nohup
                signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
