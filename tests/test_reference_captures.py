"""Captures of real GPU kernels, compared on whatever machine the tests run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from zkl_debug.diff import diff_captures
from zkl_debug.store.reader import open_capture

REFERENCE = Path(__file__).parent.parent / "captures" / "reference"


def test_kernels_off_differ_in_the_decode_gemm_only() -> None:
    folder = REFERENCE / "h200-gpt-te-stack-off"
    document = diff_captures(folder / "train", folder / "gen").to_json()
    assert document["verdict"] == "diverged"
    assert document["edges"]["score-prefill"]["mismatched"] == 0
    assert document["edges"]["score-decode"]["mismatched"] == 236
    assert document["first"]["site"] == "decoder.layers.0.mlp.linear_fc2:out"
    assert document["first"]["kind"] == "own"
    assert document["edge"] == "prefill-decode"


def test_batch_invariant_kernels_are_identical_on_every_site() -> None:
    folder = REFERENCE / "h200-gpt-te-stack-on"
    document = diff_captures(folder / "train", folder / "gen").to_json()
    assert document["verdict"] == "identical"
    assert document["claim"]["scope"] == "all-sites"
    assert document["coverage"]["sites"] == {"expected": 77, "captured": 77, "matched": 77, "compared": 77}
    assert document["edges"]["score-decode"]["compared"] == 276


def test_greedy_tokens_part_between_the_two_runs_and_that_is_said_first() -> None:
    on, off = (REFERENCE / f"h200-gpt-te-stack-{name}" / "train" for name in ("on", "off"))
    verdict = diff_captures(on, off)
    document = verdict.to_json()
    assert verdict.exit_code == 3
    assert document["refusal"]["code"] == "token-ids-differ"
    assert document["first"] is None


@pytest.mark.parametrize(("name", "slots"), [("on", [1, 8]), ("off", [1, 2, 4, 8])])
def test_decode_in_cuda_graphs_was_recorded_at_every_site(name: str, slots: list[int]) -> None:
    with open_capture(REFERENCE / f"h200-gpt-te-graphs-{name}" / "gen") as capture:
        facts = capture.manifest["graphs"]
        decode = capture.frames["phase"] == 2
        assert set(capture.frames["graph"][decode].tolist()) <= set(slots)
        assert (capture.frames["graph"][~decode] == -1).all()
    assert facts["slots"] == slots
    assert facts["replays"] == 2 * int(decode.sum())  # a graph a layer
    assert facts["replays_out_of_reach"] == facts["replays_without_rows"] == 0
    assert facts["sites_graph"] == facts["sites_eager"] == 77
    assert facts["only_eager"] == facts["out_of_reach"] == {}


def test_with_cuda_graphs_the_stack_is_identical_and_without_it_the_gemm_differs() -> None:
    on, off = (REFERENCE / f"h200-gpt-te-graphs-{name}" for name in ("on", "off"))
    document = diff_captures(on / "train", on / "gen").to_json()
    assert document["verdict"] == "identical"
    assert document["claim"] == {"equality": "digest", "scope": "all-sites", "repeats": 2}
    assert document["edges"]["prefill-decode"] == {**document["edges"]["prefill-decode"], "compared": 126}
    document = diff_captures(off / "train", off / "gen").to_json()
    assert document["verdict"] == "diverged"
    assert document["first"]["site"] == "decoder.layers.0.mlp.linear_fc2:out"
    assert document["edges"]["score-prefill"]["mismatched"] == 240
    assert document["edges"]["prefill-decode"]["mismatched"] == 0


def test_a_flash_attention_that_does_not_know_the_window_is_found_in_core_attention_on_every_row() -> None:
    folder = REFERENCE / "h200-gpt-te-t1"
    document = diff_captures(folder / "train", folder / "gen").to_json()
    assert document["verdict"] == "diverged"
    assert document["first"]["site"] == "decoder.layers.0.self_attention.core_attention:out"
    assert document["first"]["kind"] == "own"
    assert document["edges"]["score-prefill"]["mismatched"] == document["edges"]["score-prefill"]["compared"] == 567
    assert document["edges"]["prefill-decode"]["mismatched"] == 0  # generation agrees with itself: training is alone
    assert document["affected"]["rule"]["text"] == "every row"
