"""Drift in the loop: found at its step, told as state or data, with the event, from the loop alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from zkl_debug.beds.grpo import scoreboard
from zkl_debug.beds.grpo.affected import SequenceRule
from zkl_debug.beds.grpo.answer import document, exit_code, lines
from zkl_debug.beds.grpo.drift import Drift, find_drift
from zkl_debug.beds.grpo.faults_loop import LOOP_FAULTS, LoopAnswer, loop_fault
from zkl_debug.beds.grpo.options import LAYOUTS, GrpoOptions
from zkl_debug.cli.main import main
from zkl_debug.errors import ExitCode, UsageError


def cli(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return int(stop.value.code or 0), capfd.readouterr().out


# ---- the flagship --------------------------------------------------------------------------------------------------


def test_a_prefix_cache_kept_over_refits_is_found_at_step_4(tmp_path: Path) -> None:
    drift = find_drift(GrpoOptions(fault="S1", steps=4), tmp_path / "out", stop=True, light=True)
    found: Any = document(drift)
    assert drift.onset == 4
    assert drift.repeats
    assert found["onset"]["last_zero"] == 3
    record = drift.records[-1]
    assert record.diverged == (6, 7)
    assert drift.rule is not None
    assert drift.rule.is_exact
    assert "KV blocks of old weights" in drift.rule.text
    # State, not data: the very same weights and data are zero on an engine that had kept nothing.
    cells = {(c.engine, c.state, c.data): c.outcome.value for c in drift.cells}
    assert cells["fresh", 4, 4] == "zero"
    assert cells["carried", 4, 4] == "mismatch"
    assert {f.path.split("/")[0] for f in drift.state} == {"kv"}
    assert all(f.strength == "bytes" and f.lag == 3 for f in drift.state)
    operator = found["operator"]
    assert operator["first"]["site"] == "decoder.layers.0.self_attention.core_attention:out"
    assert operator["first"]["kind"] == "uncaptured-state"
    assert "version v-3" in operator["read"][0]
    assert exit_code(drift) is ExitCode.OK
    text = "\n".join(lines(drift))
    assert "stale-kv-cache" in text
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["gen", "logprobs.npz", "loop", "onset.npz", "train"]


def test_longer_prompts_alone_are_told_as_data() -> None:
    drift = find_drift(GrpoOptions(fault="D1", steps=4), keep=3, stop=True, light=True)
    assert scoreboard.judge(loop_fault("D1").answer, document(drift)) == dict.fromkeys(scoreboard.COLUMNS, True)
    assert drift.rule == SequenceRule("its prompt was split over prefill chunks", 1.0, 1.0)
    assert drift.event is None


def test_a_mamba_cache_that_outlives_the_refit_is_found_in_mcore_as_it_is() -> None:
    drift = find_drift(GrpoOptions(fault="S7", steps=4, groups=4), keep=3, stop=True, light=True)
    assert scoreboard.judge(loop_fault("S7").answer, document(drift)) == dict.fromkeys(scoreboard.COLUMNS, True)
    assert drift.state[0].match.form == "negative exponential"
    operator: Any = document(drift)["operator"]
    assert operator["first"]["phase"] == "decode"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOOP_FAULTS if name != "Z0"])
@pytest.mark.parametrize("light", [True, False])
def test_every_fault_of_the_loop(name: str, light: bool) -> None:
    layout = loop_fault(name).layouts[0]
    how: dict[str, Any] = {"keep": 3, "stop": True, "light": True} if light else {}
    drift = find_drift(GrpoOptions(layout=layout, fault=name, steps=5), **how)
    assert scoreboard.judge(loop_fault(name).answer, document(drift)) == dict.fromkeys(scoreboard.COLUMNS, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["S1", "S7", "W1", "W3"])
def test_faults_in_the_engines_own_process(name: str) -> None:
    drift = find_drift(GrpoOptions(layout="dedicated", fault=name, steps=5), keep=3, stop=True, light=True)
    assert scoreboard.judge(loop_fault(name).answer, document(drift)) == dict.fromkeys(scoreboard.COLUMNS, True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_clean_steps_blame_nobody(layout: str) -> None:
    drift = find_drift(GrpoOptions(layout=layout, steps=20), keep=3, light=True)
    assert (drift.onset, drift.state, len(drift.records)) == (None, [], 20)


# ---- the judge -----------------------------------------------------------------------------------------------------


def told(**changes: Any) -> dict[str, Any]:
    tensor = {"path": "a.weight", "text": "a.weight: version v-1; left as it was by refit of step 2"}
    base: dict[str, Any] = {
        "verdict": "found",
        "kind": "state",
        "onset": {"step": 2},
        "event": {"name": "refit"},
        "explanations": [{"name": "weights-not-updated", "text": "", "tensors": [tensor]}],
        "table": [],
        "affected": {"sequences": [1]},
    }
    return base | changes


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, set()),
        ({"onset": {"step": 3}}, {"step"}),
        ({"event": None}, {"event"}),
        ({"kind": "data"}, {"kind"}),
        ({"explanations": []}, {"explanation"}),
        ({"explanations": [{"tensors": [{"path": "b.weight", "text": "version v-1"}]}]}, {"explanation"}),
        ({"explanations": [{"tensors": [{"path": "a.weight", "text": "version v-2"}]}]}, {"explanation"}),
        ({"verdict": "undecided"}, set(scoreboard.COLUMNS)),
    ],
)
def test_the_judge_sees_what_is_wrong(changes: dict[str, Any], wrong: set[str]) -> None:
    answer = LoopAnswer("state", 2, "refit", "version v-1", ("a.*",))
    right = scoreboard.judge(answer, told(**changes))
    assert {name for name, value in right.items() if not value} == wrong


def test_the_judge_counts_any_blame_of_a_clean_loop() -> None:
    assert scoreboard.judge(LoopAnswer(), told(verdict="clean")) == {"detected": True}
    assert scoreboard.judge(LoopAnswer(), told()) == {"detected": False}


# ---- commands ------------------------------------------------------------------------------------------------------


def test_watch_stops_at_the_first_bad_step_and_prints_one_document(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("watch", "--fault", "W3", "--layout", "colocated-inference-model", "--groups", "4", "--json")
    code, out = cli(capfd, *words)
    found = json.loads(out)
    assert code == 0
    assert (found["format"], found["verdict"], found["onset"]["step"]) == ("zkl-steps", "found", 2)
    assert len(found["metrics"]) == 2
    assert found["event"]["name"] == "refit"
    assert found["cost"]["watch"]["snapshots"] > 0


def test_captures_of_the_onset_step_leave_no_folder_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from zkl_debug.beds.grpo.drift import _folder

    with _folder(None, 3) as folder:
        (folder / "gen").mkdir()
    assert not folder.exists()
    assert capsys.readouterr().err == ""
    made: list[Path] = []

    def fails() -> None:
        with _folder(None, 3) as folder:
            (folder / "gen").mkdir()
            made.append(folder)
            raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        fails()
    (folder,) = made
    assert (folder / "gen").exists()
    assert f"step 3 is kept in {folder}" in capsys.readouterr().err
    shutil.rmtree(folder)
    with _folder(tmp_path, 3) as folder:
        (folder / "gen").mkdir()
    assert (tmp_path / "gen").exists()


def test_bisect_steps_of_a_clean_loop(capfd: pytest.CaptureFixture[str]) -> None:
    code, out = cli(capfd, "bisect", "steps", "--steps", "2", "--groups", "4")
    assert code == 0
    assert "clean" in out
    assert "every generated token bitwise equal" in out


def test_beds_lists_the_loop(capfd: pytest.CaptureFixture[str]) -> None:
    code, out = cli(capfd, "beds", "--json")
    listed = json.loads(out)
    assert code == 0
    assert next(b for b in listed["beds"] if b["name"] == "grpo")["faults"] == list(LOOP_FAULTS)
    layouts = {f["id"]: f["layouts"] for f in listed["loop_faults"]}
    assert layouts["S1"] == list(LAYOUTS)
    assert layouts["S6"] == ["colocated-inference-model"]


def test_usage_errors_name_what_can_be_asked_for() -> None:
    with pytest.raises(UsageError, match="no loop fault 'S99'"):
        loop_fault("S99")
    assert Drift(GrpoOptions()).event is None
