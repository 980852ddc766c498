"""Driver and journal: resume after a kill anywhere, re-judging, foreign and damaged journals, parallel runs."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from zkl_debug.bisect.criterion import AUTO, Criterion, judge, parse_criterion
from zkl_debug.bisect.driver import bisect_switches, rejudge
from zkl_debug.bisect.journal import Identity, Journal
from zkl_debug.bisect.outcome import Observation, Oracle, Outcome, RawRun, Request, Trial
from zkl_debug.bisect.replay import Policy
from zkl_debug.bisect.result import Role, SearchResult, Status
from zkl_debug.bisect.space import Config, Space, Switch
from zkl_debug.errors import Refused, UsageError

SPACE = Space(tuple(Switch(f"s{i:02d}") for i in range(12)))
CAUSES = frozenset({"s03", "s08"})


class Killed(BaseException):
    """Stands for kill -9: nothing below may catch it."""


@dataclass
class Synthetic:
    """An oracle over a known truth that can be killed before or after a run."""

    causes: Config = CAUSES
    kill_at: int = -1
    after: bool = False
    probe_hash: str = "probe"
    environment_hash: str = "environment"
    delay: float = 0.0
    ran: list[Trial] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, trial: Trial) -> RawRun:
        if len(self.ran) == self.kill_at:
            raise Killed
        with self.lock:
            assert trial not in self.ran, "a run was repeated"
            self.ran.append(trial)
        time.sleep(self.delay)
        missing = len(self.causes - trial.request.config)
        document = {"metrics": {"gen_kl_error": 0.25 * missing}, "signature": f"missing {missing}"}
        return RawRun(exit_code=int(missing > 0), document=document, seconds=0.5)

    def close(self) -> None:
        """Nothing to end."""


def test_oracle_protocol_is_met() -> None:
    oracle: Oracle = Synthetic()
    assert bisect_switches(SPACE, oracle).minimal == ("s03", "s08")


def serial(path: Path | None = None) -> tuple[SearchResult, int]:
    oracle = Synthetic()
    result = bisect_switches(SPACE, oracle, journal=path)
    assert result.status is Status.FOUND
    assert result.minimal == ("s03", "s08")
    return result, len(oracle.ran)


def test_kill_at_every_run_and_resume(tmp_path: Path) -> None:
    expected, total = serial()
    assert total > 12
    for index in range(total):
        path = tmp_path / f"{index}.jsonl"
        first = Synthetic(kill_at=index)
        with pytest.raises(Killed):
            bisect_switches(SPACE, first, journal=path)
        second = Synthetic()
        assert bisect_switches(SPACE, second, journal=path) == expected
        assert not set(first.ran) & set(second.ran)
        assert len(first.ran) + len(second.ran) == total
    third = Synthetic(kill_at=0)
    assert bisect_switches(SPACE, third, journal=path) == expected


def test_kill_at_every_byte_of_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    expected, total = serial(path)
    data = path.read_bytes()
    cuts = [*range(0, 400, 29), *range(401, len(data), 397), len(data) - 1]
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in sorted({*cuts, *ends[:4], *(e - 1 for e in ends[:4])}):
        path.write_bytes(data[:cut])
        oracle = Synthetic()
        assert bisect_switches(SPACE, oracle, journal=path) == expected
        whole = max(0, sum(e <= cut for e in ends) - 1)
        assert len(oracle.ran) == total - whole
        assert len(path.read_bytes().splitlines()) == total + 1


def test_resume_in_parallel_and_twice_killed(tmp_path: Path) -> None:
    expected, _ = serial()
    path = tmp_path / "journal.jsonl"
    ran: list[Trial] = []
    for index in (3, 2, 4):
        oracle = Synthetic(kill_at=index)
        with pytest.raises(Killed):
            bisect_switches(SPACE, oracle, journal=path)
        ran += oracle.ran
    last = Synthetic()
    assert bisect_switches(SPACE, last, journal=path, jobs=3) == expected
    assert not set(ran) & set(last.ran)


@pytest.mark.parametrize("jobs", [2, 4])
def test_parallel_equals_serial_and_overlaps(jobs: int) -> None:
    expected, _ = serial()
    slow = Synthetic(delay=0.02)
    assert bisect_switches(SPACE, slow, jobs=jobs) == expected


def test_budget_stops_with_a_partial_result_and_continues(tmp_path: Path) -> None:
    expected, total = serial()
    path = tmp_path / "journal.jsonl"
    for jobs in (1, 2):
        oracle = Synthetic()
        partial = bisect_switches(SPACE, oracle, journal=path, max_runs=4, jobs=jobs)
        assert partial.status is Status.INCOMPLETE
        assert partial.exit_code == 5
        assert len(oracle.ran) == 4
        assert "budget of 4 runs" in partial.reason
    rest = Synthetic()
    assert bisect_switches(SPACE, rest, journal=path) == expected
    assert len(rest.ran) <= total - 4


def test_rejudge_needs_no_run(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    expected, _ = serial(path)
    assert rejudge(SPACE, path, AUTO) == expected
    strict = rejudge(SPACE, path, parse_criterion("metrics.gen_kl_error == 0"))
    assert strict.minimal == expected.minimal
    # With a looser criterion either cause alone is enough, so all-off still mismatches but one switch will do; the
    # runs that would need are not all there, and that is said instead of guessed.
    loose = rejudge(SPACE, path, parse_criterion("metrics.gen_kl_error <= 0.25"), policy=Policy(confirm=False))
    assert loose.status in (Status.FOUND, Status.INCOMPLETE)
    if loose.status is Status.INCOMPLETE:
        assert loose.exit_code == 5
        assert "needs a run" in loose.next_steps[0]
    nothing = rejudge(SPACE, path, parse_criterion("metrics.gen_kl_error < 1"))
    assert nothing.status is Status.NOTHING
    missing = rejudge(SPACE, path, parse_criterion("metrics.no_such >= 0"))
    assert missing.status is Status.UNTESTABLE
    assert "no number at 'metrics.no_such'" in missing.reason


def test_foreign_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    serial(path)
    before = path.read_bytes()
    other = Space((*SPACE.switches, Switch("more")))
    for space, oracle, what in (
        (other, Synthetic(), "space"),
        (SPACE, Synthetic(probe_hash="x"), "probe"),
        (SPACE, Synthetic(environment_hash="x"), "environment"),
    ):
        with pytest.raises(Refused, match=f"belongs to another {what}") as caught:
            bisect_switches(space, oracle, journal=path)
        assert caught.value.exit_code == 3
        assert not oracle.ran
    with pytest.raises(Refused, match="belongs to another space"):
        rejudge(other, path, AUTO)
    assert path.read_bytes() == before


def test_damaged_or_strange_journals_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    serial(path)
    lines = path.read_bytes().splitlines(keepends=True)
    flipped = lines[3].replace(b'"exit_code": 1', b'"exit_code": 0').replace(b'"exit_code": 0', b'"exit_code": 2', 1)
    for data in (b"".join([*lines[:3], flipped, *lines[4:]]), b"".join(lines[1:]), b"notes\nmore\n", b"notes"):
        path.write_bytes(data)
        with pytest.raises(Refused):
            bisect_switches(SPACE, Synthetic(), journal=path)
        assert path.read_bytes() == data
    path.write_bytes(lines[0].replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(Refused):
        bisect_switches(SPACE, Synthetic(), journal=path)
    with pytest.raises(UsageError, match="cannot use the journal"):
        bisect_switches(SPACE, Synthetic(), journal=tmp_path)
    with pytest.raises(UsageError, match="cannot use the journal"):
        rejudge(SPACE, tmp_path / "missing.jsonl", AUTO)


def test_journal_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    identity = Identity(SPACE.digest(), "probe", "environment")
    with Journal(path, identity) as journal:
        with pytest.raises(Refused, match="in use"):
            Journal(path, identity)
        assert len(journal) == 0


def test_raw_runs_survive_the_journal(tmp_path: Path) -> None:
    raw = RawRun(3, 9, True, True, 1.5, 7, {"a": [None, "é\n"], "x": float("inf")}, "f", "d", Outcome.ERROR, "s", "r")
    trial = Trial(Request(frozenset({"s01"}), 2, True), 1)
    identity = Identity("a", "b", "c")
    with Journal(tmp_path / "j", identity) as journal:
        journal.put(trial, raw)
    with Journal(tmp_path / "j", identity) as journal:
        assert journal.get(trial) == raw
        assert journal.get(Trial(Request(frozenset({"s01"}), 2, True), 0)) is None
    first = json.loads((tmp_path / "j").read_text().splitlines()[0])["body"]
    assert first == {
        "format": "zkl-bisect-journal",
        "version": 1,
        "space": "a",
        "probe": "b",
        "environment": "c",
    }


def test_exceptions_of_an_oracle_are_errors_not_mismatches() -> None:
    @dataclass
    class Crashing(Synthetic):
        def run(self, trial: Trial) -> RawRun:
            if "s05" in trial.request.config:
                raise ImportError("No module named 'flash_attn'")
            return super().run(trial)

    result = bisect_switches(SPACE, Crashing())
    assert result.minimal == ("s03", "s08")
    assert result.with_role(Role.UNTESTED) == ("s05",)
    assert "ImportError: No module named 'flash_attn'" in result.finding("s05").reason


def test_inconclusive_runs_are_retried_then_untestable(tmp_path: Path) -> None:
    @dataclass
    class Unstable(Synthetic):
        """all-on needs a second attempt; anything with s05 but not all on never repeats itself."""

        def run(self, trial: Trial) -> RawRun:
            raw = super().run(trial)
            unstable = trial.request.config == SPACE.top and trial.attempt == 0
            return RawRun(exit_code=4) if unstable else raw

    seen: list[Observation] = []
    path = tmp_path / "journal.jsonl"
    oracle = Unstable()
    result = bisect_switches(SPACE, oracle, journal=path, progress=lambda _r, _raw, o, _j: seen.append(o))
    assert result.minimal == ("s03", "s08")
    assert sum(o.retry for o in seen) == 1
    again = Unstable(kill_at=0)
    assert bisect_switches(SPACE, again, journal=path) == result
    once = bisect_switches(SPACE, Unstable(), attempts=1)
    assert "inconclusive" in once.finding("s11").reason


def zkl(verdict: str, **more: object) -> RawRun:
    code = {"identical": 0, "diverged": 1, "refused": 3, "inconclusive": 4}.get(verdict, 0)
    return RawRun(exit_code=code, document={"format": "zkl-verdict", "version": 1, "verdict": verdict, **more})


VERDICT = {"first": {"site": "decoder.layers.3.mlp/router.topk:out.0"}, "edge": "prefill-decode"}


@pytest.mark.parametrize(
    ("raw", "criterion", "outcome"),
    [
        (RawRun(exit_code=0), "auto", Outcome.ZERO),
        (RawRun(exit_code=1), "auto", Outcome.MISMATCH),
        (RawRun(exit_code=125), "auto", Outcome.UNTESTABLE),
        (RawRun(exit_code=4), "auto", Outcome.UNTESTABLE),
        *((RawRun(exit_code=c), "auto", Outcome.ERROR) for c in (2, 3, 5, 126, 127, 134, 137, 139)),
        (RawRun(), "auto", Outcome.ERROR),
        (RawRun(exit_code=0, timed_out=True), "auto", Outcome.ERROR),
        (RawRun(exit_code=0, out_of_memory=True), "auto", Outcome.ERROR),
        (RawRun(signal=11), "auto", Outcome.ERROR),
        (RawRun(exit_code=1, failure="Python exception: KeyError"), "auto", Outcome.ERROR),
        (zkl("identical"), "auto", Outcome.ZERO),
        (zkl("diverged", **VERDICT), "auto", Outcome.MISMATCH),
        (zkl("refused"), "auto", Outcome.UNTESTABLE),
        (zkl("inconclusive"), "auto", Outcome.UNTESTABLE),
        (zkl("nonsense"), "auto", Outcome.ERROR),
        (zkl("identical", version=2), "auto", Outcome.ERROR),
        (zkl("identical", coverage={"rows": {"compared": 0}}), "auto", Outcome.UNTESTABLE),
        (RawRun(exit_code=1, document=zkl("identical").document), "auto", Outcome.ERROR),
        (RawRun(exit_code=0, document=zkl("diverged").document), "auto", Outcome.MISMATCH),
        (RawRun(exit_code=139, document=zkl("identical").document), "auto", Outcome.ERROR),
        (RawRun(exit_code=0, document=zkl("diverged").document), "exit", Outcome.ZERO),
        (RawRun(exit_code=0), "verdict", Outcome.UNTESTABLE),
        (RawRun(outcome=Outcome.MISMATCH), "auto", Outcome.MISMATCH),
        (RawRun(exit_code=0, document={"a": {"b": 2}}), "a.b > 1", Outcome.ZERO),
        (RawRun(exit_code=0, document={"a": {"b": 2}}), "a.b != 2", Outcome.MISMATCH),
        (RawRun(exit_code=0, document={"a": {"b": float("nan")}}), "a.b <= 2", Outcome.MISMATCH),
        (RawRun(exit_code=0, document={"a": True}), "a == 1", Outcome.UNTESTABLE),
        (RawRun(exit_code=9), "a == 1", Outcome.ERROR),
        (RawRun(exit_code=125, document={"a": 1}), "a == 1", Outcome.UNTESTABLE),
    ],
)
def test_judge(raw: RawRun, criterion: str, outcome: Outcome) -> None:
    seen = judge(raw, parse_criterion(criterion))
    assert seen.outcome is outcome
    if outcome in (Outcome.ERROR, Outcome.UNTESTABLE) and raw.outcome is None:
        assert seen.reason


def test_signature_and_bad_criteria() -> None:
    seen = judge(zkl("diverged", **VERDICT))
    assert seen.signature == "decoder.layers.3.mlp/router.topk:out.0 @ prefill-decode"
    assert judge(RawRun(exit_code=1, document={"signature": "x"})).signature == "x"
    assert judge(zkl("inconclusive")).retry
    for text in ("", "sometimes", "a.b =< 3", "a == nan", "a == b", "1 < 2"):
        with pytest.raises(UsageError):
            parse_criterion(text)
    assert parse_criterion("a-b.c<=1e-6") == Criterion("a-b.c<=1e-6", ("a-b.c", "<=", 1e-6))
