"""Figures of a verdict: what is drawn, not how it looks."""

from __future__ import annotations

import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from test_diff_edges import ATTENTION, TRAIN, decode_only, gen
from test_diff_world import plant

from zkl_debug.diff import Verdict, diff_captures
from zkl_debug.errors import UsageError
from zkl_debug.viz import row_map, site_bars, ulp_histogram


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    return diff_captures(TRAIN, gen(plant(ATTENTION, decode_only)))


def drawn(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg")
    return out.getvalue()


def test_site_bars_start_before_the_first_site(verdict: Verdict) -> None:
    figure = site_bars(verdict)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels.index(ATTENTION) == 3
    assert len(labels) == 40
    assert "prefill-decode" in figure.axes[0].get_title()
    assert len(drawn(figure)) > 1000
    assert figure._repr_png_().startswith(b"\x89PNG"), "what a notebook shows"  # type: ignore[attr-defined]


def test_row_map_draws_every_row(verdict: Verdict) -> None:
    figure = row_map(verdict, ATTENTION, "score-decode")
    axes = figure.axes[0]
    points = sum(len(np.asarray(dots.get_offsets())) for dots in axes.collections)
    assert points == len(verdict.row_table(ATTENTION, "score-decode"))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2", "3"]
    assert drawn(figure)


def test_ulp_histogram_counts_differing_rows(verdict: Verdict) -> None:
    axes = ulp_histogram(verdict, ATTENTION).axes[0]
    rows = verdict.row_table(ATTENTION, verdict.edge)
    heights = [float(bar.get_height()) for bar in axes.containers[0]]
    assert sum(heights) == rows["mismatch"].sum() > 0
    bare = diff_captures(TRAIN, gen(plant(ATTENTION), payload=False))
    assert "without a known distance" in ulp_histogram(bare, ATTENTION).axes[0].get_title()


def test_clean_verdicts_can_be_drawn_and_refused_ones_cannot() -> None:
    clean = diff_captures(TRAIN, gen())
    assert drawn(site_bars(clean))
    assert drawn(ulp_histogram(clean, ATTENTION))
    refused = diff_captures(TRAIN, gen(feed=lambda _, p: p + 1))
    with pytest.raises(UsageError):
        site_bars(refused)
    with pytest.raises(UsageError):
        row_map(clean, ATTENTION, "no-such-edge")
