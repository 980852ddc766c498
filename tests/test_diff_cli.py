"""`zkl-debug diff`: one JSON document, exit codes, a report that fits a screen; the tables notebooks read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from test_diff_edges import ATTENTION, TRAIN, WORLD, decode_only, gen
from test_diff_world import Options, generation, memory, plant, scoring, write

from zkl_debug.cli.diff import command
from zkl_debug.diff import Verdict, diff_captures
from zkl_debug.diff.report import print_report
from zkl_debug.errors import UsageError

KEYS = ["format", "version", "verdict", "claim", "coverage", "edge", "first", "affected", "explanations", "next"]
FIRST = ["site", "layer", "module", "operator", "port", "phase", "step", "sample", "position", "token", "kind"]
FIRST += ["max_ulp", "max_abs", "mismatched_elements", "elements"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("cli")
    broken = Options(tweak=plant(ATTENTION, decode_only), drop=("decoder.layers.1*",))
    clean = Options(drop=("decoder.layers.1*",))
    return {
        "train": write(root / "train", WORLD, "train", scoring(WORLD), clean),
        "gen": write(root / "gen", WORLD, "gen", generation(WORLD), clean),
        "broken": write(root / "broken", WORLD, "gen", generation(WORLD), broken),
    }


def run(*args: object) -> Result:
    runner = CliRunner()
    return runner.invoke(command, [str(arg) for arg in args], standalone_mode=False)


def test_json_is_one_document_with_the_promised_keys(folders: dict[str, Path]) -> None:
    result = run(folders["train"], folders["broken"], "--json")
    document = json.loads(result.stdout)
    assert result.return_value == 1
    assert list(document)[: len(KEYS)] == KEYS
    assert list(document["first"])[: len(FIRST)] == FIRST
    assert (document["format"], document["version"], document["verdict"]) == ("zkl-verdict", 1, "diverged")
    assert document["claim"] == {"equality": "digest", "scope": "all-sites", "repeats": 1}
    assert list(document["coverage"]) == ["sites", "rows", "skipped", "stopped_at"]
    assert document["coverage"]["sites"] == {"expected": 46, "captured": 46, "matched": 46, "compared": 46}
    assert {"a", "b", "compared"} <= set(document["coverage"]["rows"])
    assert all(skip["what"] and skip["reason"] for skip in document["coverage"]["skipped"])
    first = document["first"]
    assert (document["edge"], first["site"], first["layer"]) == ("prefill-decode", ATTENTION, 0)
    assert (first["module"], first["operator"]) == (ATTENTION.removesuffix(":out"), "core_attention")
    assert (first["port"], first["phase"], first["kind"], first["max_ulp"]) == ("out", "decode", "own", 1)
    assert document["affected"]["rule"]["text"].startswith("phase decode (score-prefill is equal at this site")
    assert document["affected"]["samples"] == [0, 1, 2, 3]
    assert {"within-a", "within-b", "score-prefill", "score-decode"} <= set(document["edges"])
    assert {entry["site"] for entry in document["sites"]} >= {ATTENTION}


@pytest.mark.parametrize(
    ("a", "b", "code", "word"),
    [("train", "gen", 0, "IDENTICAL"), ("train", "broken", 1, "DIVERGED"), ("train", "nowhere", 3, "REFUSED")],
)
def test_exit_codes_and_headline(folders: dict[str, Path], a: str, b: str, code: int, word: str) -> None:
    result = run(folders[a], folders.get(b, Path("/nowhere")))
    assert result.return_value == code
    assert result.stdout.startswith(word)


def test_verify_bytes_through_the_command(folders: dict[str, Path]) -> None:
    document = json.loads(run(folders["train"], folders["gen"], "--json", "--verify-bytes").stdout)
    assert document["claim"]["equality"] == "bytes"


def screen(verdict: Verdict) -> list[str]:
    console = Console(width=100, record=True, file=io.StringIO())
    print_report(verdict, console)
    return console.export_text().splitlines()


def _trap() -> Verdict:
    return diff_captures(TRAIN, gen(plant(ATTENTION), drop=("*core_attention:*",)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: diff_captures(TRAIN, gen()),
        lambda: diff_captures(TRAIN, gen(plant(ATTENTION))),
        lambda: diff_captures(TRAIN, gen(plant(ATTENTION), payload=False)),
        _trap,
        lambda: diff_captures(TRAIN, gen(feed=lambda s, p: p + s)),
    ],
)
def test_the_report_fits_a_screen(make: Callable[[], Verdict]) -> None:
    lines = screen(make())
    assert 3 <= len(lines) <= 42
    assert max(map(len, lines)) <= 100


def test_the_report_says_what_matters() -> None:
    text = " ".join(screen(diff_captures(TRAIN, gen(plant(ATTENTION, decode_only)))))
    for part in ("prefill-decode", ATTENTION, "sample 2 position 4", "own: every captured input", "within-a"):
        assert part in text
    trap = " ".join(" ".join(screen(_trap())).split())
    assert "no operator is blamed" in trap
    assert "captured by A only" in trap
    refused = " ".join(screen(diff_captures(TRAIN, gen(feed=lambda s, p: p + s))))
    assert "positions-differ" in refused
    assert "nothing is said of any layer" in refused
    assert "core_attention" not in refused


def test_next_commands_name_these_captures(folders: dict[str, Path], tmp_path: Path) -> None:
    clean = diff_captures(folders["train"], folders["gen"])
    assert clean.next == (f"zkl-debug diff {folders['train']} {folders['gen']} --verify-bytes",)
    bare = write(tmp_path / "bare", WORLD, "gen", generation(WORLD), Options(plant(ATTENTION), payload=False))
    first = diff_captures(folders["train"], bare).next[0]
    assert first.startswith("zkl-debug capture ")
    assert "--level payload" in first


def test_the_next_capture_of_a_bed_is_of_the_run_that_was_told() -> None:
    def following(**bed: object) -> str:
        other = memory(WORLD, "gen", generation(WORLD), Options(plant(ATTENTION), payload=False))
        return diff_captures(TRAIN, replace(other, manifest={**other.manifest, "bed": bed})).next[0]

    told = following(bed="gpt-te", seed=3, dtype="bf16", stack=False, size="small", graphs=True)
    assert told.startswith("zkl-debug capture --bed gpt-te --stack off --graphs --seed 3 --size small --level payload ")
    usual = following(bed="tiny-gpt", stack=True, size="full", graphs=False)
    assert usual.startswith("zkl-debug capture --bed tiny-gpt --level payload ")


def test_site_table_counts_rows_per_edge() -> None:
    verdict = diff_captures(TRAIN, gen(plant(ATTENTION, decode_only)))
    table = verdict.site_table
    assert list(dict.fromkeys(table["site"])) == [pair.name for pair in _pairs(verdict)]
    row = table[(table["site"] == ATTENTION) & (table["edge"] == "prefill-decode")][0]
    assert (row["own"], row["mismatched"], row["compared"]) == (7, 7, 7)
    assert (row["propagated"], row["masked"], row["max_ulp"]) == (0, 0, 1)
    clean = table[(table["site"] == ATTENTION) & (table["edge"] == "score-prefill")][0]
    assert (clean["mismatched"], clean["kind"]) == (0, "equal")
    cheap = verdict.site_counts
    assert np.array_equal(cheap["mismatched"], table["mismatched"])


def _pairs(verdict: Verdict) -> Any:
    assert verdict.comparison is not None
    return verdict.comparison.sites


def test_tables_of_a_refused_verdict_say_why() -> None:
    verdict = diff_captures(TRAIN, memory(WORLD, "gen", generation(WORLD), Options(feed=lambda _, p: p + 1)))
    with pytest.raises(UsageError, match="position"):
        _ = verdict.site_table


def test_progress_is_reported() -> None:
    seen: list[tuple[int, int]] = []
    diff_captures(TRAIN, gen(), progress=lambda done, total, _: seen.append((done, total)))
    assert seen == [(i, len(TRAIN.sites)) for i in range(len(TRAIN.sites))]
