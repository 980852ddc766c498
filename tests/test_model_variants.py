"""Small beds of other model features: identical with the stack on, the right blame for a defect of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zkl_debug.beds import BedOptions
from zkl_debug.beds.faults import FAULTS
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.bench.scoreboard import judge, told
from zkl_debug.diff import diff_captures
from zkl_debug.store.reader import open_capture

VARIANTS = ("tiny-tied", "tiny-window", "tiny-yarn", "tiny-mtp")


def document_of(out: Path, level: str = "digest", **options: Any) -> dict[str, Any]:
    record_bed(BedOptions(**options), out, RecordOptions(level=level, certify=False, strict=True))
    document: dict[str, Any] = diff_captures(out / "train", out / "gen").to_json()
    return document


@pytest.mark.parametrize("bed", VARIANTS)
def test_stack_on_is_identical(bed: str, tmp_path: Path) -> None:
    document = document_of(tmp_path / "run", bed=bed, dtype="bf16")
    assert document["verdict"] == "identical"
    assert document["claim"]["scope"] == "all-sites"
    for name in ("score-prefill", "score-decode", "prefill-decode", "within-a", "within-b"):
        assert document["edges"][name]["compared"] > 0, name
    crossed = document["coverage"]["rows"]["crossed"]
    assert crossed["chunk_edge"] > 3
    assert crossed["after_cache_hit"] > 3
    if bed == "tiny-mtp":  # its rows read tokens behind them: listed, not recorded
        with open_capture(tmp_path / "run" / "train") as capture:
            assert not any(site.startswith("mtp") or "#1" in site for site in capture.sites)
            assert any(name.startswith("mtp.layers.0") for name in capture.manifest["not_rows"])


@pytest.mark.slow
@pytest.mark.parametrize("bed", VARIANTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_stack_on_is_identical_in_fp32_and_other_seeds(bed: str, seed: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "fp32", "seed": seed, "permute": seed, "neighbours": 2}
    assert document_of(tmp_path / "run", bed=bed, **options)["verdict"] == "identical"


def test_sliding_window_ignored_by_one_side_is_named(tmp_path: Path) -> None:
    document = document_of(tmp_path / "run", "payload", bed="tiny-window", dtype="fp32", fault="M14")
    right, edge = judge(FAULTS["M14"].answer, told(document))
    assert set(right.values()) <= {True, None}, told(document)
    assert edge is True
    explanation = document["explanations"][0]
    assert explanation["evidence"]["mask"] == "no-window"
    assert "entered" not in explanation["text"]  # of its own sequence, whatever request ran it


def test_two_windowed_sides_that_only_round_differently_are_not_blamed_for_their_keys(tmp_path: Path) -> None:
    switches = {"attention-reference": False}
    document = document_of(tmp_path / "run", "payload", bed="tiny-window", dtype="fp32", switches=switches)
    said = told(document)
    assert said.site == "decoder.layers.0.self_attention.core_attention:out"
    assert said.explanation == "reduction-order"
    assert "over the same keys" in said.text
