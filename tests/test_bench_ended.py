"""A bench that is ended from outside: within seconds, with the right status, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zkl_debug.bench.children import child, scratch, unwinding
from zkl_debug.errors import Ended

DIFF = ("diff", "--rows", "3e5", "--ranks", "8", "--trials", "1")


def processes(word: str) -> list[int]:
    """Processes with a word in their command line, zombies apart."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_for(what: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "did not come about"
        time.sleep(0.05)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "zkl_debug.cli.main", "bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def end(process: subprocess.Popen[str], number: int, group: bool) -> tuple[str, float]:
    begin = time.monotonic()
    (os.killpg if group else os.kill)(process.pid, number)
    try:
        _, errors = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return errors, time.monotonic() - begin


@pytest.mark.parametrize(
    ("number", "group", "status"),
    [(signal.SIGINT, True, 130), pytest.param(signal.SIGTERM, False, 143, marks=pytest.mark.slow)],
)
def test_a_diff_bench_is_ended_while_its_files_are_written(
    number: int, group: bool, status: int, tmp_path: Path
) -> None:
    process = start(tmp_path, *DIFF, "--folder", str(tmp_path))
    wait_for(lambda: list(tmp_path.glob("zkl-bench-*/size/gen/*")))
    assert len(processes(str(tmp_path))) >= 3
    errors, seconds = end(process, number, group)
    assert process.returncode == status
    assert seconds < 10
    assert "Traceback" not in errors
    assert "next: zkl-debug bench diff" in errors
    assert not list(tmp_path.iterdir())
    wait_for(lambda: not processes(str(tmp_path)), 2)


def test_a_bench_of_peers_is_ended_with_the_tool_it_runs(tmp_path: Path) -> None:
    process = start(tmp_path, "peers", "--tool", "pt-hooks")
    wait_for(lambda: processes(f"{tmp_path}/zkl-peers-"))
    errors, seconds = end(process, signal.SIGTERM, False)
    assert (process.returncode, "Traceback" in errors) == (143, False)
    assert "ended by SIGTERM" in errors
    assert seconds < 10
    assert not list(tmp_path.glob("zkl-peers-*"))
    wait_for(lambda: not processes(f"{tmp_path}/zkl-peers-"), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 5), (signal.SIGTERM, 143)])
def test_a_scoreboard_of_several_processes_is_ended(number: int, status: int, tmp_path: Path) -> None:
    process = start(tmp_path, "faults", "--jobs", "2", "--seeds", "2", "--fault", "K2", "--fault", "K4")
    wait_for(lambda: list(tmp_path.glob("zkl-scoreboard-*/*/*")), 120)
    errors, seconds = end(process, number, True)
    assert (process.returncode, "Traceback" in errors) == (status, False), errors
    assert seconds < 10
    assert not list(tmp_path.glob("zkl-scoreboard-*"))
    with pytest.raises(ProcessLookupError):
        wait_for(lambda: os.killpg(process.pid, 0), 3)


@pytest.mark.slow
def test_a_bench_of_captures_is_ended(tmp_path: Path) -> None:
    process = start(tmp_path, "capture", "--layers", "1", "--hidden", "64", "--tokens", "64", "--rounds", "100000")
    wait_for(lambda: list(tmp_path.glob("zkl-bench-*/*")), 120)
    errors, seconds = end(process, signal.SIGTERM, False)
    assert (process.returncode, "Traceback" in errors) == (143, False), errors
    assert seconds < 10
    assert not list(tmp_path.glob("zkl-bench-*"))


def test_a_child_does_not_outlive_its_block() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    code = f"import subprocess; p = subprocess.Popen({sleep!r}); print(p.pid, flush=True); p.wait()"
    pids: list[int] = []

    def interrupted() -> None:
        with child([sys.executable, "-c", code]) as process:
            assert process.stdout is not None
            pids.extend([process.pid, int(process.stdout.readline())])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(pids) == 2
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and alive(pid) for pid in pids), 5)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_only_the_first_signal_unwinds(number: signal.Signals, tmp_path: Path) -> None:
    """A second one must not stop what is cleaned up; afterwards everything is as it was."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    kept = []

    def ended() -> None:
        with unwinding(), scratch(tmp_path, "x-") as root:
            try:
                (root / "file").write_text("x")
                os.kill(os.getpid(), number)
                time.sleep(5)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGINT)
                kept.append(root.exists())

    with pytest.raises((Ended, KeyboardInterrupt)) as stop:
        ended()
    if number == signal.SIGTERM:
        assert isinstance(stop.value, Ended)
        assert stop.value.code == 143
    else:
        assert isinstance(stop.value, KeyboardInterrupt)
    assert kept == [True]
    assert not list(tmp_path.iterdir())
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
