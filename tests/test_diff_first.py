"""``diff --first``: what it says of itself. It stopped at the first site; of what lies behind it, it knows nothing."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from zkl_debug.diff import diff_captures
from zkl_debug.diff.report import print_report
from zkl_debug.diff.verdict import Verdict
from zkl_debug.viz.html import document as page

REFERENCE = Path(__file__).resolve().parents[1] / "captures/reference"
OFF = REFERENCE / "h200-gpt-te-stack-off"


def told(verdict: Verdict) -> str:
    """The report, its lines not folded."""
    console = Console(file=io.StringIO(), width=400)
    print_report(verdict, console)
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


@pytest.fixture(scope="module", params=["pair", "alone"])
def both(request: pytest.FixtureRequest) -> tuple[Verdict, Verdict]:
    """The full diff, and the one that stops: of both sides, and of one by itself, where rows of one batch differ."""
    other = OFF / "gen" if request.param == "pair" else None
    first = OFF / "train" if request.param == "pair" else OFF / "gen"
    full, short = (diff_captures(first, other, first_only=only) for only in (False, True))
    return full, short


def test_the_answer_is_that_of_the_full_diff(both: tuple[Verdict, Verdict]) -> None:
    full, short = both
    assert full.first is not None
    assert (short.verdict, short.exit_code, short.edge) == (full.verdict, full.exit_code, full.edge)
    assert (short.first, short.affected) == (full.first, full.affected)
    assert short.coverage.looked_at < full.coverage.looked_at


def test_it_says_where_it_stopped(both: tuple[Verdict, Verdict]) -> None:
    full, short = both
    assert short.first is not None
    here = short.first.site
    document, whole = short.to_json(), full.to_json()
    assert document["claim"]["scope"] == "up-to-first"
    assert (document["coverage"]["stopped_at"], whole["coverage"]["stopped_at"]) == (here, None)
    assert {edge["up_to"] for edge in document["edges"].values()} == {here}
    assert {edge["up_to"] for edge in whole["edges"].values()} == {None}
    sites = whole["coverage"]["sites"]
    assert sites["compared"] == sites["matched"] > document["coverage"]["sites"]["compared"]
    text = told(short)
    assert f"stopped at {here}: what lies behind it was not looked at" in text
    assert "sites up to the first that differs" in text
    assert "then      not looked at" in text
    assert f'"stopped_at":"{here}"' in page(short)
    assert "stopped at" not in told(full)
    command = f"zkl-debug diff {OFF / 'train'} {OFF / 'gen'}" if "b" in short.certification else "zkl-debug diff"
    assert any(hint.startswith(command) and "--" not in hint for hint in short.next)


def test_it_says_nothing_of_what_lies_behind(both: tuple[Verdict, Verdict]) -> None:
    """No share of rows, no edge that is equal, no row without a site: all that may lie behind."""
    full, short = both
    rows, whole = (verdict.to_json()["coverage"]["rows"] for verdict in (short, full))
    for share in ("prompt", "generated", "labels"):
        assert rows[share] == {"of": whole[share]["of"], "compared": None, "percent": None}
        assert whole[share]["compared"] is not None
    assert set(rows["crossed"].values()) == {None}
    assert None not in whole["crossed"].values()
    assert not any("no site was recorded" in skip.reason for skip in short.coverage.skipped)
    text = told(short)
    assert "of what both could have run" not in text
    assert "captured on both sides" not in text
    equal = [
        line for line in text.splitlines() if " equal" in line and line.startswith(("  score", "  prefill", "  with"))
    ]
    assert all("equal up to there" in line for line in equal)
    assert "NEVER" not in text


def test_without_a_difference_it_is_the_full_diff() -> None:
    on = REFERENCE / "h200-gpt-te-stack-on"
    full, short = (diff_captures(on / "train", on / "gen", first_only=only) for only in (False, True))
    assert short.to_json() == full.to_json()
    assert short.coverage.stopped_at is None
