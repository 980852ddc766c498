"""``zkl-debug logprobs``: exit codes, one JSON document, one screen of text, and the public golden set."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zkl_debug.cli.main import COMMANDS, main

HERE = Path(__file__).resolve().parent
EXCERPT = HERE / "data/megatron_golden"
PUBLIC = HERE.parent.parent / "shared/data/megatron_golden"
CHUNKED, PLAIN, CACHED = "tp1_pp1_583m_chunked_prefill", "tp1_pp1_583m_flashinfer", "tp1_pp1_583m_prefix_caching"
CHUNKED2, CACHED2 = "tp2_pp2_583m_chunked_prefill", "tp2_pp2_583m_prefix_caching"


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["logprobs", *map(str, args)])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert isinstance(stop.value.code, int)
    return stop.value.code, out, err


def run_json(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, Any]:
    code, out, _ = run(capsys, *args, "--json")
    return code, json.loads(out)


def golden_sets() -> list[Path]:
    return [EXCERPT, *([PUBLIC] if PUBLIC.is_dir() else [])]


def golden(folder: Path, name: str) -> Path:
    """A golden file under a name that says nothing."""
    found = [path for path in folder.iterdir() if path.name.endswith(f"{name}.json")]
    return found[0]


@pytest.fixture(params=golden_sets(), ids=lambda folder: folder.parent.name)
def blind(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Path]:
    """The golden files, copied to names that give nothing away."""
    out = {}
    for place, name in enumerate((CHUNKED, PLAIN, CACHED, CHUNKED2, CACHED2)):
        out[name] = tmp_path / f"file{place}.json"
        shutil.copyfile(golden(request.param, name), out[name])
    return out


@pytest.mark.parametrize(
    ("a", "b", "suspect", "rows", "exact"),
    [
        (CHUNKED, PLAIN, "A", 117, 0),
        (PLAIN, CHUNKED, "B", 117, 0),
        (CHUNKED, CACHED, "A", 88, 0),
        (CHUNKED2, CACHED2, "A", 117, 116),
        (CHUNKED2, PLAIN, "A", 117, 0),
    ],
)
def test_golden_chunk_edge_is_one_label_fault(
    capsys: pytest.CaptureFixture[str], blind: dict[str, Path], a: str, b: str, suspect: str, rows: int, exact: int
) -> None:
    code, verdict = run_json(capsys, blind[a], blind[b])
    assert code == 1
    assert verdict["verdict"] == "diverged"
    assert (verdict["metrics"]["tokens"], verdict["metrics"]["exact"]) == (rows, exact)
    faults = [e for e in verdict["explanations"] if e["name"] == "label-fault"]
    assert len(faults) == 1
    evidence = faults[0]["evidence"]
    assert (evidence["place"], evidence["positions"], evidence["logits_rows"]) == ("chunk-edge", [64], [63])
    assert (evidence["chunk"], evidence["suspect"], evidence["explains"]) == (64, suspect, 1)
    assert evidence["more_engine_steps_in_a"] == {"0": 1 if suspect == "A" else -1}
    assert evidence["largest_elsewhere"] < 0.12
    others = {e["name"] for e in verdict["explanations"]} - {"label-fault"}
    assert others == (set() if exact else {"numerics-throughout"})


@pytest.mark.parametrize(("a", "b"), [(CHUNKED, CHUNKED2), (PLAIN, CACHED2), (CACHED, CACHED2)])
def test_golden_pairs_without_a_chunk_edge_blame_none(
    capsys: pytest.CaptureFixture[str], blind: dict[str, Path], a: str, b: str
) -> None:
    code, verdict = run_json(capsys, blind[a], blind[b])
    assert code == 1
    assert [e["name"] for e in verdict["explanations"]] == ["numerics-throughout"]


def test_golden_runs_that_part_ways_are_compared_up_to_there(
    capsys: pytest.CaptureFixture[str], blind: dict[str, Path]
) -> None:
    code, verdict = run_json(capsys, blind[PLAIN], blind[CACHED])
    assert code == 0
    assert verdict["metrics"]["tokens"] == 88
    skip = verdict["coverage"]["skipped"][0]
    assert skip["count"] == 29
    assert "position 89" in skip["reason"]
    assert (verdict["metrics"]["token_mult_prob_error"], verdict["metrics"]["gen_kl_error"]) == (1.0, 0.0)


def test_golden_text_fits_one_screen(capsys: pytest.CaptureFixture[str], blind: dict[str, Path]) -> None:
    code, out, err = run(capsys, blind[CHUNKED], blind[PLAIN])
    assert (code, err) == (1, "")
    assert "exactly one prompt position (64, scored by the logits of token 63)" in out
    assert "a label fault, not numerics" in out
    assert "next" in out
    assert len(out.splitlines()) < 40


def test_other_prompts_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = json.loads((EXCERPT / f"{PLAIN}.json").read_text())
    document["0"]["input_prompt"] = "Another prompt"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(document))
    code, out, err = run(capsys, EXCERPT / f"{PLAIN}.json", other)
    assert (code, out) == (3, "")
    assert "prompt text of sample 0 differs" in err
    code, verdict = run_json(capsys, EXCERPT / f"{PLAIN}.json", other)
    assert (code, verdict["verdict"]) == (3, "refused")


# NeMo-RL ----------------------------------------------------------------------------------------------------------


def dump(folder: Path, step: int, bad: tuple[int, ...] = (), tokens: int = 0) -> Path:
    """32 sequences of 64 tokens, prompts of 24; the generated part of the bad ones is wrong."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(step)
    rows = []
    for index in range(32):
        train = -np.random.default_rng([step, index]).exponential(2, 64).astype(np.float32)
        gen = train.copy()
        gen[:24] = 0
        if index in bad:
            gen[24:] -= rng.exponential(3, 40).astype(np.float32)
        ids = np.random.default_rng([step, index]).integers(1, 999, 64)
        ids[-1] += tokens
        rows.append(
            {
                "token_ids": [ids.tolist()],
                "token_loss_mask": [[0] * 24 + [1] * 40],
                "sample_loss_mask": [1.0],
                "generation_logprobs": [gen.tolist()],
                "prev_logprobs": [train.tolist()],
                "idx": index,
            }
        )
    path = folder / f"train_data_step{step}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_step_4_drift_from_the_dumps_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = [dump(tmp_path, step, bad=(5, 20) if step >= 4 else ()) for step in range(1, 6)]
    code, verdict = run_json(capsys, tmp_path)
    assert code == 1
    assert verdict["format"] == "zkl-logprobs"
    assert verdict["onset"] == {
        "step": 4,
        "clean_before": 3,
        "last_clean": 3,
        "diverged_steps": [4, 5],
        "clean_after": [],
    }
    affected = verdict["affected"]
    assert (affected["sequences"], affected["samples"], affected["rows"]) == (4, [5, 20], 160)
    assert affected["rule"]["text"] == "samples {5, 20}, from step 4 on"
    assert (affected["rule"]["precision"], affected["rule"]["recall"]) == (1.0, 1.0)
    assert [step["gen_kl_error"] == 0 for step in verdict["steps"]] == [True, True, True, False, False]
    assert verdict["explanations"][0]["name"] == "carried-forward"
    assert verdict["next"]
    known = set(COMMANDS) | {"capture"}
    assert {command.split()[1] for command in verdict["next"]} <= known
    assert run(capsys, *paths)[0] == 1
    assert run(capsys, *paths[:3])[0] == 0
    assert run_json(capsys, tmp_path, "--step", "2")[1]["verdict"] == "identical"
    code, out, _ = run(capsys, tmp_path)
    assert "onset: step 4 (the 3 step(s) before it are bit-exact)" in out
    assert "masked by the loss" in out
    assert len(out.splitlines()) < 45
    assert "masked by the loss" not in run(capsys, tmp_path, "--valid-only")[1]


def test_one_side_of_two_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, two = dump(tmp_path / "a", 1, bad=(3,)), dump(tmp_path / "b", 1)
    assert run(capsys, one, two, "--column", "train")[0] == 0
    code, verdict = run_json(capsys, one, two, "--column", "gen")
    assert (code, verdict["affected"]["samples"], verdict["sides"]) == (1, [3], ["A", "B"])
    code, _, err = run(capsys, one, two)
    assert (code, "two files of step 1" in err) == (3, True)


def test_retokenised_files_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, two = dump(tmp_path / "a", 1), dump(tmp_path / "b", 1, tokens=1)
    code, verdict = run_json(capsys, one, two, "--column", "train")
    assert (code, verdict["verdict"]) == (3, "refused")
    assert "step 1, sample 0, position 63" in verdict["reason"]


def test_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = EXCERPT / f"{PLAIN}.json"
    assert run(capsys)[0] == 2
    assert run(capsys, tmp_path / "absent.json")[0] == 2
    assert run(capsys, path)[0] == 2  # one run needs a second file
    assert run(capsys, path, path, path)[0] == 2
    assert run(capsys, dump(tmp_path, 1), "--column", "gen")[0] == 2
    assert run(capsys, "--format", "yaml", path)[0] == 2
    assert run(capsys, "--help")[0] == 0


def test_a_damaged_dump_is_never_identical(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = dump(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-300])
    code, verdict = run_json(capsys, path)
    assert (code, verdict["verdict"]) == (3, "refused")
    assert verdict["coverage"]["skipped"][0]["damage"] is True
    code, out, _ = run(capsys, path)
    assert code == 3
    assert "damaged" in out


def test_no_torch_and_no_megatron_is_imported() -> None:
    code = (
        "import sys, zkl_debug.cli.logprobs\n"
        "assert not {'torch', 'megatron', 'h5py'} & {name.split('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
