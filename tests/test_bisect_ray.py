"""Bisect runs made on Ray: the same answer and the same journal, whatever becomes of the workers."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ray_workers import alive, children, descendants, killing, title, two_workers  # noqa: F401

from zkl_debug.bench.measure import run_measured, zkl_command
from zkl_debug.bisect.driver import bisect_switches
from zkl_debug.bisect.on_ray import RayOracle, WholeCommand, command_on_ray, make_run
from zkl_debug.bisect.oracle import CommandOracle
from zkl_debug.bisect.outcome import Outcome, RawRun, Request, Trial
from zkl_debug.bisect.space import Space, Switch
from zkl_debug.cli.bisect import group
from zkl_debug.cli.farm import without_ray
from zkl_debug.errors import UsageError

PROGRAM = Path(__file__).parent / "programs" / "switch_check.py"
SPACE = Space(tuple(Switch(f"s{i}") for i in range(5)))
COMMAND = (sys.executable, str(PROGRAM))


def journal(path: Path, root: Path) -> list[dict[str, Any]]:
    """Lines of a journal without what a clock, or the folder of the test, put into them."""
    lines = []
    for line in path.read_text().replace(str(root), "ROOT").splitlines():
        body = json.loads(line)["body"]
        if "raw" in body:
            body["raw"] |= {"seconds": 0, "peak_bytes": 0}
        lines.append(body)
    return lines


def local(root: Path) -> Any:
    oracle = CommandOracle(SPACE, COMMAND, root / "runs")
    return bisect_switches(SPACE, oracle, journal=root / "journal.jsonl")


def trial() -> Trial:
    return Trial(Request(frozenset({"s1"})))


def test_a_job_is_the_run(tmp_path: Path) -> None:
    """What a worker is asked and what it answers, without Ray; what a lost worker left is not taken for an answer."""
    oracle = CommandOracle(SPACE, COMMAND, tmp_path)
    job = pickle.loads(pickle.dumps(oracle.job(trial())))
    (job.folder / "verdict.json").write_text('{"verdict": "identical"}')
    raw = make_run(job, oracle.environment_hash, 0)
    assert isinstance(raw, RawRun)
    assert raw.exit_code == 1
    assert raw.document == {"missing": ["s3"]}
    assert raw.document == oracle.run(trial()).document


def test_a_worker_on_another_machine_refuses(tmp_path: Path) -> None:
    oracle = CommandOracle(SPACE, COMMAND, tmp_path)
    job = oracle.job(trial())
    assert isinstance(make_run(job, "other", 0), UsageError)
    assert not (job.folder / "stdout.txt").exists()


def test_a_tied_command_ends_with_its_parent(tmp_path: Path) -> None:
    """A worker that is killed leaves nothing that still writes."""
    oracle = CommandOracle(SPACE, (sys.executable, "-c", "import time; time.sleep(60)"), tmp_path)
    job = oracle.job(trial())
    pid = os.fork()
    if pid == 0:
        try:
            job.make({})
        finally:
            os._exit(0)
    deadline = time.monotonic() + 20
    while not (started := children(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)  # until it has tied itself
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert started
    while any(alive(child) for child in started) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(child) for child in started)


def test_without_ray_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "space.yaml").write_text("switches:\n  - name: a\n")
    given = ["switches", "--space", str(tmp_path / "space.yaml"), "--ray", "local", "--", sys.executable, "-c", "0"]
    result = CliRunner().invoke(group, given, standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert "ray is not installed" in str(result.exception)


def test_the_words_of_a_command_without_ray() -> None:
    words = ["bisect", "steps", "--ray", "local", "--steps", "5", "--ray=auto", "--json"]
    assert without_ray(words) == ["bisect", "steps", "--steps", "5", "--json"]


# With Ray: slow to start.


@pytest.mark.slow
@pytest.mark.usefixtures("two_workers")
def test_same_answer_and_same_journal(tmp_path: Path) -> None:
    expected = local(tmp_path / "local")
    assert expected.minimal == ("s1", "s3")
    away = tmp_path / "ray"
    oracle = RayOracle(CommandOracle(SPACE, COMMAND, away / "runs"), "local")
    found = bisect_switches(SPACE, oracle, journal=away / "journal.jsonl")
    assert json.dumps(found.to_json()) == json.dumps(expected.to_json())
    one, two = (journal(root / "journal.jsonl", root) for root in (tmp_path / "local", away))
    assert one == two
    several = RayOracle(CommandOracle(SPACE, COMMAND, tmp_path / "two"), "local")
    assert several.workers == 2
    assert bisect_switches(SPACE, several, jobs=2) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("two_workers")
def test_a_killed_worker_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = local(tmp_path / "local")
    seen = tmp_path / "seen"
    seen.mkdir()
    monkeypatch.setenv("SLOW", str(seen))

    def running() -> list[int]:
        noted = [int(note.read_text() or 0) for note in list(seen.iterdir())]
        return [worker for worker in noted if worker and alive(worker)]

    away = tmp_path / "ray"
    with killing(running, most=2) as killed:
        oracle = RayOracle(CommandOracle(SPACE, COMMAND, away / "runs"), "local")
        found = bisect_switches(SPACE, oracle, journal=away / "journal.jsonl")
    assert len(killed) == 2
    assert found == expected
    stripped = [
        [line for line in journal(root / "journal.jsonl", root) if "raw" in line] for root in (tmp_path / "local", away)
    ]
    assert stripped[0] == stripped[1]


@pytest.mark.slow
@pytest.mark.usefixtures("two_workers")
def test_a_whole_command(tmp_path: Path) -> None:
    """It starts again from the beginning, in an empty folder, when its worker is lost."""
    script = (
        "import os, pathlib, signal, sys; out = pathlib.Path('out'); assert not out.exists(); out.mkdir();"
        "seen = pathlib.Path('seen'); first = not seen.exists(); seen.touch();"
        "first and os.kill(os.getppid(), signal.SIGKILL); print('whole', os.environ['MARK']); sys.exit(4)"
    )
    whole = WholeCommand((sys.executable, "-c", script), {**os.environ, "MARK": "x"}, tmp_path, tmp_path / "out")
    assert command_on_ray("local", whole) == (4, b"whole x\n", "")


@pytest.mark.slow
@pytest.mark.usefixtures("two_workers")
def test_workers_that_are_always_lost_are_no_outcome(tmp_path: Path) -> None:
    """Nothing goes into the journal for a run that nobody could make."""
    command = (sys.executable, "-c", "import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    oracle = RayOracle(CommandOracle(SPACE, command, tmp_path / "runs"), "local")
    with pytest.raises(UsageError, match="Ray gave up on a run"):
        bisect_switches(SPACE, oracle, journal=tmp_path / "journal.jsonl")
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 1
    assert Outcome.ERROR.value not in (tmp_path / "journal.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("bisect", "steps", "--fault", "S1", "--steps", "4", "--json"),
        ("bisect", "operators", "--bed", "tiny-gpt", "--stack", "off", "--json"),
    ],
)
def test_steps_and_operators_say_the_same(words: tuple[str, ...], tmp_path: Path) -> None:
    """Also where Ray loses the worker, and says so on stdout if it can: there the document stays alone."""
    pytest.importorskip("ray")
    found = []

    def running() -> list[int]:
        return [pid for pid in descendants(os.getpid()) if "ray::make" in title(pid)]

    for more in ((), ("--ray", "local")):
        folder = ("--out", str(tmp_path / "out")) if "steps" in words else ()
        with killing(running, most=len(more) // 2, wait=2.0) as killed:
            found.append(run_measured(zkl_command(*words, *folder, *more)))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert killed
    here, away = found
    assert away.code == here.code
    assert _untimed(away.output) == _untimed(here.output)


def _untimed(text: str) -> Any:
    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if "seconds" not in k and k != "cost"}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return strip(json.loads(text))
