"""Captures of real GPU kernels, compared on whatever machine the tests run on."""

from __future__ import annotations

from pathlib import Path

from zkl_debug.diff import diff_captures

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
    assert document["coverage"]["sites"] == {"expected": 77, "captured": 77, "matched": 77}
    assert document["edges"]["score-decode"]["compared"] == 276


def test_greedy_tokens_part_between_the_two_runs_and_that_is_said_first() -> None:
    on, off = (REFERENCE / f"h200-gpt-te-stack-{name}" / "train" for name in ("on", "off"))
    verdict = diff_captures(on, off)
    document = verdict.to_json()
    assert verdict.exit_code == 3
    assert document["refusal"]["code"] == "token-ids-differ"
    assert document["first"] is None
