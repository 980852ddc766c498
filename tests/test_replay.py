"""Replay: what the operator reads besides its inputs is told apart from what the operator does."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import replay_faults
from replay_faults import TEST_FAULTS

from zkl_debug.beds import BedOptions
from zkl_debug.beds.ambient import observe, surrounded
from zkl_debug.beds.faults import FAULTS
from zkl_debug.beds.operators import scan_operators
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.beds.replay import ReplayAnswer, replay_first, settle, verdict_of_row
from zkl_debug.beds.replay_pages import write_pages
from zkl_debug.beds.replay_probe import Operand, Outcome
from zkl_debug.cli.main import main
from zkl_debug.diff import diff_captures

NORM = "decoder.layers.0.input_layernorm:out"
PAYLOAD = RecordOptions(level="payload", certify=False, strict=True)


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fault in TEST_FAULTS.items():
        monkeypatch.setitem(FAULTS, name, fault)


def captured(out: Path, fault: str, bed: str = "tiny-gpt", dtype: str = "bf16", **options: Any) -> tuple[Path, Path]:
    record_bed(BedOptions(bed=bed, dtype=dtype, fault=fault, **options), out, PAYLOAD)
    return out / "train", out / "gen"


def replayed(out: Path, fault: str, bed: str = "tiny-gpt", dtype: str = "bf16") -> tuple[dict[str, Any], ReplayAnswer]:
    a, b = captured(out, fault, bed, dtype)
    verdict = diff_captures(a, b)
    assert verdict.first is not None
    assert verdict.first.kind.label == "own"  # what a diff can know without a replay
    answer = replay_first(verdict, a, b)
    return settle(verdict, answer).to_json(), answer


def test_global_that_no_capture_holds_is_uncaptured_state_through_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = captured(tmp_path / "run", "test-gain-entry")
    with pytest.raises(SystemExit) as stop:
        main(["diff", str(a), str(b), "--replay", "--json"])
    document = json.loads(capfd.readouterr().out)
    assert stop.value.code == 1
    assert document["first"]["site"] == NORM
    assert document["first"]["kind"] == "uncaptured-state"
    assert document["replay"]["state"] == ["replay_faults.HIDDEN"]
    assert document["replay"]["rows"] > 0
    assert replay_faults.HIDDEN == {"gain": 1.0}  # what was exchanged is put back


@pytest.mark.slow
def test_state_that_moves_with_every_call_is_uncaptured_state(tmp_path: Path) -> None:
    document, answer = replayed(tmp_path / "run", "test-gain-resize", dtype="fp32")
    assert (document["first"]["site"], document["first"]["kind"]) == (NORM, "uncaptured-state")
    assert answer.status == "reproduces"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "bed", "site"),
    [
        ("test-gain-side", "tiny-gpt", NORM),
        ("test-gain-closure", "tiny-gpt", NORM),
        ("test-gain-object", "tiny-moe", "decoder.layers.1.mlp/unpermute:out.0"),
    ],
)
def test_other_places_of_hidden_inputs(fault: str, bed: str, site: str, tmp_path: Path) -> None:
    document, answer = replayed(tmp_path / "run", fault, bed)
    assert (document["first"]["site"], document["first"]["kind"]) == (site, "uncaptured-state")
    assert len(answer.state) == 1


@pytest.mark.slow
def test_an_operator_that_cannot_be_reproduced_stays_own_with_the_remark(tmp_path: Path) -> None:
    document, answer = replayed(tmp_path / "run", "test-gain-iterator", dtype="fp32")
    assert document["first"]["kind"] == "own"
    assert document["replay"]["status"] == answer.status == "replay does not reproduce"
    assert "the kind stays as it was" in document["replay"]["text"]
    assert answer.kind == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "bed", "dtype"),
    [
        ("K1", "tiny-gpt", "fp32"),
        ("K2", "tiny-gpt", "bf16"),
        ("K4", "tiny-gpt", "bf16"),
        ("K5", "tiny-gpt", "fp32"),
        ("K7", "tiny-moe", "bf16"),
        ("K9", "tiny-gpt", "fp32"),
        ("K12", "tiny-gpt", "fp32"),
        ("P1", "tiny-gpt", "fp32"),
        ("P2", "tiny-moe", "bf16"),
        ("P4", "tiny-gpt", "bf16"),
        ("P5", "tiny-gpt", "bf16"),
        ("P7", "tiny-gpt", "bf16"),
        ("R1", "tiny-moe", "fp32"),
        ("L4", "tiny-gpt", "fp32"),
        ("M1", "tiny-gpt", "bf16"),
    ],
)
def test_an_operator_of_its_own_stays_own(fault: str, bed: str, dtype: str, tmp_path: Path) -> None:
    document, answer = replayed(tmp_path / "run", fault, bed, dtype)
    assert document["first"]["kind"] == "own"
    assert (answer.status, answer.kind) == ("reproduces", "own"), answer.text
    assert answer.rows > 0
    if "core_attention" in answer.site:
        assert answer.inputs == ("in", "in.1", "in.2")
    elif "logprobs/label" not in answer.site and "logprobs/selected" not in answer.site:
        assert answer.inputs


def test_without_the_run_or_its_payload_the_replay_says_so(tmp_path: Path) -> None:
    out = tmp_path / "run"
    record_bed(BedOptions(fault="P5", reprefill=False), out, RecordOptions(certify=False, strict=True))
    verdict = diff_captures(out / "train", out / "gen")
    answer = replay_first(verdict, out / "train", out / "gen")
    assert answer.status == "not possible"
    assert "raw bits" in answer.text
    assert settle(verdict, answer).first == verdict.first
    (out / "run.json").unlink()
    assert "run.json" in replay_first(verdict, out / "train", out / "gen").text


def row(*values: float) -> dict[bytes, Any]:
    return {b"k": np.array(values, np.float32).view(np.uint32)}


def outcome(captured_as: float, own: list[float], cross: float | None = None, swapped: float | None = None) -> Outcome:
    made = Outcome(Operand("left", "train", 0, {}, row(captured_as)), row(captured_as), [row(value) for value in own])
    return replace(made, cross={} if cross is None else row(cross), swapped={} if swapped is None else row(swapped))


def test_rows_are_judged_from_what_the_replay_gave() -> None:
    first = outcome(1.0, [1.0, 1.0])
    assert verdict_of_row(first, outcome(2.0, [2.0, 2.0], 2.0), b"k") == 0
    assert verdict_of_row(first, outcome(2.0, [2.0, 2.0], 2.0, 3.0), b"k") == 0  # surroundings matter, but not so
    assert verdict_of_row(first, outcome(2.0, [2.0, 2.0], 2.0, 1.0), b"k") == 1
    assert verdict_of_row(first, outcome(2.0, [1.0, 1.0], 1.0), b"k") == 1
    assert verdict_of_row(outcome(1.0, [2.0, 2.0]), outcome(2.0, [2.0, 2.0], 2.0), b"k") == 1
    assert verdict_of_row(first, outcome(2.0, [3.0, 3.0], 3.0), b"k") == -1  # does not reproduce itself
    assert verdict_of_row(outcome(1.0, [1.0, 5.0]), outcome(2.0, [2.0, 2.0], 2.0), b"k") == -1
    assert verdict_of_row(outcome(1.0, [1.0, 1.0]), outcome(1.0, [1.0, 1.0], 1.0), b"k") == -1  # nothing differs
    assert verdict_of_row(replace(first, error="gone"), outcome(2.0, [2.0, 2.0], 2.0), b"k") == -1


def test_surroundings_are_exchanged_by_name_and_put_back() -> None:
    class Root:
        pass

    cell = [1.0, torch.ones(2)]
    root = Root()
    root.forward = lambda: cell  # type: ignore[attr-defined]
    before = observe([root])
    replay_faults.HIDDEN["gain"], cell[0] = 2.0, 3.0
    cell[1].zero_()  # type: ignore[attr-defined]
    now = observe([root])
    names = now.differing(before)
    assert [name.rsplit(".", 1)[-1] for name in names] == ["HIDDEN", "cell"]
    with surrounded(before, names, [root]):
        assert replay_faults.HIDDEN["gain"] == cell[0] == 1.0
        assert torch.equal(cell[1], torch.ones(2))  # type: ignore[arg-type]
    assert (replay_faults.HIDDEN["gain"], cell[0]) == (2.0, 3.0)
    replay_faults.HIDDEN["gain"] = 1.0


def test_captured_keys_and_values_go_to_the_pages_that_a_call_reads() -> None:
    size, cache = 4, torch.zeros(3, 4, 2, 8)
    values = torch.zeros_like(cache)
    table = torch.tensor([[2, 0], [1, 1]])  # the first request lies in blocks 2, 0, the second in block 1
    names = [bytes([request, position]) for request in (0, 1) for position in range(6)]
    wanted = {name: torch.randn(16) for name in names}
    captured_rows = {name: value.numpy().view(np.uint32) for name, value in wanted.items()}
    history = {names[5]: tuple(names[:6]), names[7]: tuple(names[6:8])}
    args = (None, torch.zeros(2, 2, 8), cache, values, 1, 6, torch.tensor([0, 1, 2]), None, None, table, True)
    tables = (captured_rows, captured_rows)
    assert write_pages(args, {}, [0, 1], [names[5], names[7]], history, tables)
    for position in range(6):
        at = cache[table[0, position // size], position % size]
        assert torch.equal(at.reshape(-1), wanted[names[position]])
    assert torch.equal(values[1, :2].reshape(2, -1), torch.stack([wanted[names[6]], wanted[names[7]]]))
    assert not values[1, 2:].any()
    missing = {name: bits for name, bits in captured_rows.items() if name != names[0]}
    assert not write_pages(args, {}, [0, 1], [names[5], names[7]], history, (missing, captured_rows))
    assert not write_pages(args, {}, [0, 1], [names[5], b"?"], history, tables)


def test_masked_divergence_is_reported_as_hidden(tmp_path: Path) -> None:
    a, b = captured(tmp_path / "run", "test-masked", reprefill=False)
    verdict = diff_captures(a, b)
    document = verdict.to_json()
    assert document["first"]["site"] == "decoder.layers.1.mlp.linear_fc2:out"
    assert document["masked"]["hidden"] is True
    assert document["masked"]["sites"][0]["site"] == "decoder.layers.1/mlp_bda:out.0"
    assert document["masked"]["final"] == {
        "site": "logprobs/selected:out.0",
        "compared": document["masked"]["final"]["compared"],
        "mismatched": 0,
    }
    assert document["masked"]["final"]["compared"] > 100
    kinds = {str(r["site"]): str(r["kind"]) for r in verdict.site_counts if r["edge"] == verdict.edge}
    assert kinds["decoder.layers.1.mlp.linear_fc2:out"] == "own"
    assert kinds["decoder.layers.1/mlp_bda:out.0"] == "masked"


def test_fault_in_layer_3_of_4_with_everything_before_it_clean(tmp_path: Path) -> None:
    a, b = captured(tmp_path / "run", "test-layer-3", reprefill=False)
    verdict = diff_captures(a, b)
    assert verdict.first is not None
    assert (verdict.first.site, verdict.first.name.layer) == ("decoder.layers.3.input_layernorm:out", 3)
    assert verdict.first.kind.label == "own"
    assert not verdict.masked.hidden
    assert all(row["mismatched"] == 0 for row in verdict.site_counts if 0 <= row["layer"] < 3)


def test_two_faults_of_two_layers_are_both_own_and_nothing_else_is() -> None:
    scan = scan_operators(BedOptions(bed="tiny-moe", fault="test-two", reprefill=False))
    assert [(o.site, o.inputs_equal) for o in scan.operators] == [
        ("decoder.layers.2.mlp/unpermute:out.0", True),
        ("decoder.layers.5.input_layernorm:out", True),
    ]
