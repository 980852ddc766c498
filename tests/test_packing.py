"""Packed (thd) against padded scoring of the same sequences: identical under the stack; faults of packs are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from zkl_debug.beds import BedOptions
from zkl_debug.beds.faults import FAULTS
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.diff import diff_captures
from zkl_debug.store.reader import open_capture

PAYLOAD = RecordOptions(level="payload", certify=False, strict=True)


def scored(out: Path, **options: Any) -> Path:
    record_bed(BedOptions(sides=("train",), longest_prompt=24, **options), out, PAYLOAD)
    return out / "train"


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-gpt bf16: every sequence in padded batches."""
    return scored(tmp_path_factory.mktemp("padded") / "run", packing=False)


def compared(packed: Path, padded: Path) -> dict[str, Any]:
    document: dict[str, Any] = diff_captures(packed, padded).to_json()
    with open_capture(packed) as one, open_capture(padded) as two:
        widths = [{(int(f["n_seqs"]), int(f["n_padded"])) for f in capture.frames} for capture in (one, two)]
    assert widths[0] != widths[1]  # the forwards really were of another shape
    assert any(seqs == 3 for seqs, _ in widths[0])
    return document


def assert_identical(document: dict[str, Any]) -> None:
    assert document["verdict"] == "identical"
    assert document["claim"]["scope"] == "all-sites"
    assert document["edges"]["score-score"]["compared"] > 250
    assert document["coverage"]["rows"]["prompt"]["percent"] == 100


@pytest.mark.parametrize("multiple", [8, 1])
def test_packed_and_padded_scoring_are_identical(padded: Path, tmp_path: Path, multiple: int) -> None:
    """With padding behind each packed sequence (cu_seqlens and padded cu_seqlens differ), and without."""
    assert_identical(compared(scored(tmp_path / "run", pack_multiple=multiple), padded))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_packed_and_padded_scoring_of_experts_are_identical(tmp_path: Path, dtype: str) -> None:
    folders = [scored(tmp_path / str(on), bed="tiny-moe", dtype=dtype, packing=on) for on in (True, False)]
    assert_identical(compared(*folders))


@pytest.mark.parametrize("fault", ["M1", "M12"])
def test_faults_of_packs_are_named_against_padded_scoring(padded: Path, tmp_path: Path, fault: str) -> None:
    document = compared(scored(tmp_path / "run", fault=fault), padded)
    answer = FAULTS[fault].answer
    assert (document["verdict"], document["edge"]) == ("diverged", "score-score")
    assert any(Path(document["first"]["site"]).match(pattern) for pattern in answer.sites)
    assert document["first"]["kind"] == answer.kind
    assert document["explanations"][0]["name"] in answer.names
    rule = document["affected"]["rule"]
    assert any(re.search(pattern, rule["text"]) for pattern in answer.rule_says)
    assert (rule["precision"], rule["recall"]) == (1.0, 1.0)
    if fault == "M1":
        assert document["affected"]["samples"] == [4, 6, 7]  # each packed sequence's last position
        assert document["affected"]["rows"] == 3
    else:
        assert document["affected"]["samples"] == [6, 7]  # not the first of the pack
