"""The bed oracle: isolation, limits, how a run becomes an outcome, and the answer over recorded real runs."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ray_workers import alive

from zkl_debug.beds.bed import BedOptions
from zkl_debug.beds.client import ForkServer
from zkl_debug.beds.job import collect
from zkl_debug.beds.observe import RUN, VERDICT, Spec
from zkl_debug.beds.oracle import BedOracle, Probe, bed_space, bed_switches, parse_held
from zkl_debug.bisect.criterion import judge
from zkl_debug.bisect.driver import bisect_switches
from zkl_debug.bisect.outcome import Cancelled, Outcome, RawRun, Request, Trial
from zkl_debug.bisect.process import Limits
from zkl_debug.bisect.result import Role, SearchResult, Status
from zkl_debug.bisect.space import Config
from zkl_debug.cli.bisect import group
from zkl_debug.errors import UsageError

TABLE = json.loads((Path(__file__).parent / "data" / "bed_oracle_tiny_gpt_bf16.json").read_text())
RUNS = {frozenset(r["on"]): (Outcome(r["outcome"]), r["signature"]) for r in TABLE["runs"]}
#: The switches that matter on the machine the table comes from: the table holds every subset of them.
MATTER = frozenset({"attention-reference", "log-softmax", "chunk-edge-labels", "no-chunked-prefill"})


# --- the answer, over real runs that were recorded --------------------------------------------------------------------


class TableOracle:
    """Answers from the recorded table: a configuration by itself, or by the switches that matter alone."""

    probe_hash = environment_hash = "table"

    def __init__(self) -> None:
        self.asked: list[Config] = []

    def run(self, trial: Trial) -> RawRun:
        """The recorded outcome."""
        config = trial.request.config
        self.asked.append(config)
        outcome, signature = RUNS[config] if config in RUNS else RUNS[config & MATTER]
        return RawRun(outcome=outcome, signature=signature)

    def close(self) -> None:
        """Nothing runs."""


@pytest.fixture(scope="module")
def answer() -> SearchResult:
    return bisect_switches(bed_space(bed_switches("tiny-gpt")), TableOracle())


def test_the_table_is_a_brute_force() -> None:
    space = bed_space(bed_switches("tiny-gpt"))
    rest = space.top - MATTER
    for mask in range(1 << len(MATTER)):
        on = frozenset(name for i, name in enumerate(sorted(MATTER)) if mask >> i & 1)
        assert RUNS[on][0] is RUNS[on | rest][0], sorted(on)  # the others change nothing, all off or all on
    for config, (outcome, _) in RUNS.items():
        assert outcome is RUNS[config & MATTER][0], sorted(config)


def test_minimal_set_core_removable_and_alternatives(answer: SearchResult) -> None:
    assert answer.status is Status.FOUND
    assert answer.confirmed
    assert answer.minimal == ("attention-reference", "log-softmax", "chunk-edge-labels")
    zeros = [config for config, (outcome, _) in RUNS.items() if outcome is Outcome.ZERO]
    assert min(len(config) for config in zeros) == 3
    assert frozenset(answer.with_role(Role.CORE)) == frozenset.intersection(*zeros)
    assert answer.finding("chunk-edge-labels").replaced_by == (("no-chunked-prefill",),)
    assert answer.finding("no-chunked-prefill").role is Role.REPLACEABLE
    assert answer.with_role(Role.REMOVABLE) == tuple(s.name for s in bed_switches("tiny-gpt") if s.name not in MATTER)
    assert {"reseed-sides", "mamba-version-pinned", "fresh-rope-cache"} <= set(answer.with_role(Role.REMOVABLE))
    assert [w.kind for w in answer.witnesses] == ["or"]
    assert sum(answer.runs.values()) <= 26


def test_each_member_names_what_it_fixes(answer: SearchResult) -> None:
    first = {name: answer.finding(name).fixes.split(" @ ")[0] for name in answer.minimal}
    assert first == {
        "attention-reference": "decoder.layers.0.self_attention.core_attention:out",
        "log-softmax": "logprobs/log_softmax:out.0",
        "chunk-edge-labels": "logprobs/label:out.0",
    }
    assert {seen.signature.split(" @ ")[0] for seen in answer.slippage} == {
        "logprobs/log_softmax:out.0",
        "logprobs/label:out.0",
    }


def test_held_switches_are_not_varied() -> None:
    space = bed_space(bed_switches("tiny-gpt"), parse_held(["no-chunked-prefill=on", "attention-reference=on"]))
    oracle = TableOracle()
    result = bisect_switches(space, oracle)
    assert result.minimal == ("log-softmax",)
    assert all({"no-chunked-prefill", "attention-reference"} <= config for config in oracle.asked)
    for text in ("nonsense", "log-softmax=1"):
        with pytest.raises(UsageError):
            parse_held([text])
    with pytest.raises(UsageError, match="no switch 'x' to hold"):
        bed_space(bed_switches("tiny-gpt"), {"x": True})


# --- from files to an outcome -----------------------------------------------------------------------------------------


def _verdict(verdict: str, **more: Any) -> dict[str, Any]:
    return {"format": "zkl-verdict", "version": 1, "verdict": verdict, "coverage": {"rows": {"compared": 9}}, **more}


def _left(folder: Path, report: dict[str, Any] | None, verdict: dict[str, Any] | None = None) -> RawRun:
    for name, body in ((RUN, report), (VERDICT, verdict)):
        if body is not None:
            (folder / name).write_text(json.dumps(body))
    code = report["exit_code"] if report else 70
    return collect(RawRun(exit_code=code, seconds=1.0), folder)


def _report(code: int, failure: str = "", untestable: str = "") -> dict[str, Any]:
    return {"exit_code": code, "failure": failure, "untestable": untestable}


def test_verdicts_become_outcomes(tmp_path: Path) -> None:
    first = {"site": "decoder.layers.1.mlp:out", "operator": "mlp"}
    cases: dict[str, tuple[int, dict[str, Any], Outcome, str]] = {
        "identical": (0, {}, Outcome.ZERO, ""),
        "diverged": (1, {"first": first, "edge": "prefill-decode"}, Outcome.MISMATCH, ""),
        "refused": (3, {"reason": "token ids differ"}, Outcome.UNTESTABLE, "refused: token ids differ"),
        "inconclusive": (4, {}, Outcome.UNTESTABLE, "inconclusive: it does not repeat itself"),
    }
    for name, (code, more, outcome, reason) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        raw = _left(folder, _report(code), _verdict(name, sites=["large"], **more))
        assert raw.document is not None
        assert "sites" not in raw.document  # the journal keeps the answer, the folder keeps everything
        seen = judge(raw)
        assert (seen.outcome, seen.reason) == (outcome, reason)
    assert judge(_left(tmp_path / "diverged", _report(1))).signature == "decoder.layers.1.mlp:out @ prefill-decode"


def test_failures_are_errors_and_never_mismatches(tmp_path: Path) -> None:
    broken = judge(_left(tmp_path, _report(70, failure="RuntimeError: boom")))
    assert (broken.outcome, broken.reason) == (Outcome.ERROR, "RuntimeError: boom")
    memory = judge(_left(tmp_path, _report(70, failure="RuntimeError: DefaultCPUAllocator: can't allocate memory")))
    assert (memory.outcome, memory.reason) == (Outcome.ERROR, "out of memory")
    contradiction = judge(_left(tmp_path, _report(0, failure="the captures are identical, but"), _verdict("identical")))
    assert contradiction.outcome is Outcome.ERROR
    off = judge(_left(tmp_path, _report(125, untestable="switch x cannot be applied here")))
    assert (off.outcome, off.reason) == (Outcome.UNTESTABLE, "exit code 125: switch x cannot be applied here")
    (tmp_path / RUN).unlink()
    (tmp_path / "stderr.txt").write_text("noise\nlast words\n")
    silent = judge(_left(tmp_path, None))
    assert (silent.outcome, silent.reason) == (Outcome.ERROR, "the run wrote no report: last words")


def test_an_answer_of_a_killed_run_does_not_count(tmp_path: Path) -> None:
    _left(tmp_path, _report(0), _verdict("identical"))
    for ended in (RawRun(timed_out=True), RawRun(signal=9), RawRun(out_of_memory=True)):
        assert judge(collect(ended, tmp_path)).outcome is Outcome.ERROR


def test_the_wider_probe_covers_more_of_the_same() -> None:
    probe = Probe.of(BedOptions(dtype="fp32", seed=3, stack=True, switches={"log-softmax": False}))
    assert (probe.narrow.stack, probe.narrow.switches, probe.narrow.reprefill) == (False, {}, False)
    same = {"bed", "seed", "dtype", "fault", "stack", "packing", "chunked_prefill"}
    assert {name for name in same if getattr(probe.wide, name) != getattr(probe.narrow, name)} == set()
    assert probe.wide.reprefill
    assert probe.wide.neighbours > probe.narrow.neighbours


def test_a_journal_belongs_to_a_bed_its_options_and_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = bed_space(bed_switches("tiny-gpt"))
    hashes = {BedOracle(space, o, tmp_path).probe_hash for o in (BedOptions(), BedOptions(seed=1), BedOptions())}
    assert len(hashes) == 2
    monkeypatch.setattr("zkl_debug.beds.oracle._PROBE_PARTS", ("beds",))
    assert BedOracle(space, BedOptions(), tmp_path).probe_hash not in hashes
    assert not BedOracle(space, BedOptions(), tmp_path).fresh


# --- processes --------------------------------------------------------------------------------------------------------

_STUB = """
import os, signal, subprocess, sys, time
import zkl_debug.beds.observe as observe
from zkl_debug.beds.server import Server

def fake(spec):
    kind = spec.options.fault
    print("hello from", kind)
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "sleep":
        child = subprocess.Popen(["sleep", "600"])
        (spec.folder / "pids").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    if kind == "eat":
        kept = []
        while True:
            kept.append(bytearray(os.urandom(1 << 20)) * 8)
            time.sleep(0.01)
    if kind == "marked":
        (spec.folder / "seen").write_text(str(getattr(observe, "mark", None)))
        observe.mark = "left by another run"
    return 0

observe.observe = fake
requests, answers = os.dup(0), os.dup(1)
os.dup2(2, 1)
Server(requests, answers).serve()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    stub = tmp_path / "stub.py"
    stub.write_text(_STUB)
    made = ForkServer(threading.Event(), (sys.executable, str(stub)))
    yield made
    made.close()


def _spec(tmp_path: Path, kind: str, name: str = "") -> Spec:
    folder = tmp_path / (name or kind)
    folder.mkdir()
    return Spec(BedOptions(fault=kind), folder)


def _pids(folder: Path) -> list[int]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        text = (folder / "pids").read_text() if (folder / "pids").exists() else ""
        if len(text.split()) == 2:
            return [int(word) for word in text.split()]
        time.sleep(0.02)
    raise AssertionError("the run did not start")


def _gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def test_runs_are_isolated_and_their_ends_are_told_apart(server: ForkServer, tmp_path: Path) -> None:
    done = server.run(_spec(tmp_path, "ok"), Limits())
    assert (done.exit_code, done.signal) == (0, 0)
    assert (tmp_path / "ok" / "stdout.txt").read_text() == "hello from ok\n"
    crashed = server.run(_spec(tmp_path, "crash"), Limits())
    assert (crashed.exit_code, crashed.signal) == (None, 11)
    for name in ("first", "second"):  # what one run leaves in memory is not there in the next
        server.run(_spec(tmp_path, "marked", name), Limits())
        assert (tmp_path / name / "seen").read_text() == "None"
    assert server.alive


def test_a_run_over_its_time_is_killed_with_all_it_started(server: ForkServer, tmp_path: Path) -> None:
    ended = server.run(_spec(tmp_path, "sleep"), Limits(timeout=3.0))
    assert ended.timed_out
    assert ended.exit_code is None
    assert _gone(_pids(tmp_path / "sleep"))
    assert server.run(_spec(tmp_path, "ok"), Limits()).exit_code == 0


def test_a_run_over_its_memory_is_killed(server: ForkServer, tmp_path: Path) -> None:
    ended = server.run(_spec(tmp_path, "eat"), Limits(timeout=120.0, memory=200 << 20))
    assert ended.out_of_memory or ended.exit_code == 70  # seen by the watcher, or refused by the hard stop
    assert not ended.timed_out


def test_closing_ends_what_runs(tmp_path: Path) -> None:
    stub = tmp_path / "stub.py"
    stub.write_text(_STUB)
    stop = threading.Event()
    server = ForkServer(stop, (sys.executable, str(stub)))
    ended: list[BaseException] = []

    def work() -> None:
        try:
            server.run(_spec(tmp_path, "sleep"), Limits())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    pids = _pids(tmp_path / "sleep")
    assert server.run(_spec(tmp_path, "ok"), Limits()).exit_code == 0  # runs go on side by side
    stop.set()
    server.close()
    thread.join(20)
    assert isinstance(ended[0], Cancelled)
    assert _gone(pids)


def test_a_server_that_dies_is_an_error_of_the_run_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = tmp_path / "stub.py"
    stub.write_text(_STUB)
    command = (sys.executable, str(stub))
    monkeypatch.setattr("zkl_debug.beds.oracle.ForkServer", lambda stop: ForkServer(stop, command))
    oracle = BedOracle(bed_space(bed_switches("tiny-gpt")), BedOptions(fault="sleep"), tmp_path / "runs")
    failures: list[str] = []

    def work() -> None:
        try:
            oracle.run(Trial(Request(frozenset())))
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    pids = _pids(tmp_path / "runs" / "run0001")
    assert oracle._server is not None
    os.kill(oracle._server._process.pid, 9)
    thread.join(30)
    assert failures[0].startswith("the process that runs the beds ended")
    assert _gone(pids[:1])
    os.kill(pids[1], 9)
    oracle.probe = Probe(replace(oracle.probe.narrow, fault="ok"), oracle.probe.wide)
    again = oracle.run(Trial(Request(frozenset())))
    oracle.close()
    assert again.failure == "the run wrote no report: no output"  # the stub writes none; the server was a new one


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(UsageError, match=r"did not start: .*boom"):
        ForkServer(threading.Event(), (sys.executable, "-c", "raise SystemExit('boom')"))


# --- command line -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "either --bed NAME, or --space FILE"),
        (["--bed", "tiny-gpt", "--space", "x.yaml"], "either --bed NAME, or --space FILE"),
        (["--bed", "tiny-gpt", "--", "true"], "a bed runs no COMMAND"),
        (["--bed", "nonsense"], "no bed named 'nonsense'"),
        (["--bed", "tiny-gpt", "--hold", "log-softmax"], "does not hold a switch"),
    ],
)
def test_command_refuses_what_is_not_clear(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(group, ["switches", *arguments], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert text in str(done.exception)
