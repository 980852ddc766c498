"""The scoreboard: what counts as right, what as wrong, and that one real fault goes through the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zkl_debug.beds.faults import FAULTS, Answer
from zkl_debug.bench.faults_bench import cases, run_clean
from zkl_debug.bench.scoreboard import GOALS, Clean, Score, Told, document, judge, told, totals, within_goals
from zkl_debug.cli.main import main
from zkl_debug.errors import UsageError

ANSWER = Answer(
    ("a.*:out",), "score-prefill|within-b", "own", rule_says=("^every row",), names=("eps",), says=("1e-06",)
)
TOLD = Told("diverged", "a.b:out", "within-b", "own", "every row", "eps", "as if eps were 1e-06")


def score(**right: bool | None) -> Score:
    full: dict[str, bool | None] = {**dict.fromkeys(GOALS, True), **right}
    return Score("K1", "tiny-gpt", "fp32", 0, TOLD, full)


def test_all_right() -> None:
    right, edge = judge(ANSWER, TOLD)
    assert right == dict.fromkeys(GOALS, True)
    assert edge is True


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"site": "b:out"}, {"site"}),
        ({"kind": "propagated"}, {"kind"}),
        ({"rule": "position >= 1; the same rows: every row"}, {"rule"}),
        ({"explanation": "reduction-order"}, {"explanation"}),
        ({"text": "as if eps were 1e-05"}, {"explanation"}),
        ({"verdict": "identical"}, set(GOALS)),
    ],
)
def test_what_is_wrong(changed: dict[str, str], wrong: set[str]) -> None:
    right, _ = judge(ANSWER, Told(**{**vars(TOLD), **changed}))
    assert {name for name, value in right.items() if value is False} == wrong


def test_a_refusal_is_scored_by_its_code_alone() -> None:
    answer = Answer(verdict="refused", names=("token-ids-differ",), says=("position 7",))
    refusal = {"code": "token-ids-differ", "text": "token ids differ at position 7", "detail": {}}
    right, edge = judge(answer, told({"verdict": "refused", "refusal": refusal}))
    assert right == {"detected": True, "site": None, "kind": None, "rule": None, "explanation": True}
    assert edge is None


def test_an_identical_verdict_tells_what_was_never_crossed() -> None:
    rows = {"crossed": {"chunk_edge": 0, "first_decode": 3}}
    said = told({"verdict": "identical", "refusal": None, "first": None, "coverage": {"rows": rows}})
    assert said.text == "never crossed: chunk_edge"


def test_goals() -> None:
    good = [score() for _ in range(40)]
    assert within_goals(good, [Clean("tiny-gpt", "fp32", 0, "identical")])
    assert not within_goals(good, [Clean("tiny-gpt", "fp32", 0, "diverged", "x:out")])
    assert within_goals([*good, score(site=False)], [])
    assert not within_goals([*good, score(detected=False)], [])
    assert not within_goals([*good, *[score(kind=False)] * 2], [])


def test_a_case_that_failed_counts_as_wrong() -> None:
    failed = Score("K1", "tiny-gpt", "fp32", 0, None, failure="ValueError: no")
    assert totals([score(rule=None), failed])["rule"] == (0, 1)
    made = document([failed], [], 1.0)
    assert not made["passed"]
    assert json.dumps(made)


def test_cases() -> None:
    chosen = cases(("K7", "P1"), ("fp32", "bf16"), 2)
    assert [(c.fault.id, c.bed, c.dtype, c.seed) for c in chosen] == [
        ("K7", "tiny-moe", "fp32", 0),
        ("K7", "tiny-moe", "fp32", 1),
        ("K7", "tiny-moe", "bf16", 0),
        ("K7", "tiny-moe", "bf16", 1),
        ("P1", "tiny-gpt", "fp32", 0),
        ("P1", "tiny-moe", "fp32", 1),
    ]
    with pytest.raises(UsageError, match="no fault 'K99'"):
        cases(("K99",))


def test_a_fault_that_a_dtype_has_not_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing was run is not the same as all goals met."""
    assert FAULTS["K1"].dtypes == ("fp32",)
    for more in ((), ("--fault", "K2")):
        with pytest.raises(SystemExit) as stop:
            main(["bench", "faults", "--fault", "K1", *more, "--dtype", "bf16"])
        told = capfd.readouterr().err
        assert stop.value.code == 2
        assert "K1 is not there in bf16" in told
        assert "expected: fp32, in tiny-gpt" in told
        assert "next: zkl-debug bench faults --fault K1 --dtype fp32" in told
    with pytest.raises(SystemExit) as stop:
        main(["bench", "faults", "--fault", "Z0"])
    assert stop.value.code == 2
    assert "--clean" in capfd.readouterr().err


def test_clean_runs_take_turns_over_the_beds_that_faults_are_put_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zkl_debug.bench.faults_bench._diagnose", lambda *_args: 1 / 0)
    runs = [run_clean(number, tmp_path) for number in range(14)]
    assert {(run.bed, run.dtype) for run in runs} == {(b, d) for b in FAULTS["Z0"].beds for d in ("fp32", "bf16")}
    assert all(run.false_blame and "ZeroDivisionError" in run.blamed for run in runs)


def test_every_answer_can_be_scored() -> None:
    for fault in FAULTS.values():
        answer = fault.answer
        assert answer.verdict != "diverged" or (answer.sites and answer.kind and answer.names and answer.rule_says)
        assert answer.verdict != "refused" or answer.names


def test_interrupted_it_tells_what_is_done(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run_all(*_args: object) -> Iterator[Score]:
        yield score()
        raise KeyboardInterrupt

    monkeypatch.setattr("zkl_debug.bench.faults_bench.run_all", run_all)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "faults", "--json"])
    made = json.loads(capfd.readouterr().out)
    assert stop.value.code == 5
    assert not made["complete"]
    assert len(made["cases"]) == 1


def test_the_command_on_one_fault(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "faults", "--fault", "P1", "--dtype", "fp32", "--clean", "1", "--json"])
    made: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert stop.value.code == 0
    assert made["format"] == "zkl-scoreboard"
    assert made["passed"]
    assert made["clean"] == {"runs": 1, "false_blame": 0, "blamed": []}
    (case,) = made["cases"]
    assert case["told"]["site"] == "output_layer:out"
    assert case["told"]["explanation"] == "extra-rounding"
