"""Onset, affected rows and their rule, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from zkl_debug.logprobs.affected import Rule, find_affected, find_onset
from zkl_debug.logprobs.table import make_table
from zkl_debug.logprobs.view import View, view_of

Bools = NDArray[np.bool_]


def world(differs: Bools, lengths: list[int] | None = None, steps: int = 1) -> View:
    """View of sequences [steps * n] x positions 10.. in which exactly the marked rows differ."""
    n, width = differs.shape
    lengths = lengths or [width] * n
    keep = np.arange(width)[None, :] < np.asarray(lengths)[:, None]
    values = -1.0 - np.random.default_rng(0).random(differs.shape)
    row, column = np.nonzero(keep)
    per_step = n // steps
    return view_of(
        make_table(
            step=row // per_step,
            sample=row % per_step,
            position=column + 10,
            gen=np.where(differs, values - 0.5, values)[keep],
            train=values[keep],
            generated=column >= 5,
        )
    )


def rule_of(view: View) -> Rule:
    rule = find_affected(view).rule
    assert rule is not None
    return rule


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40))
def test_onset_is_the_first_step_with_a_difference(rows: list[tuple[int, bool]]) -> None:
    step = np.asarray([s for s, _ in rows], np.int64)
    differs = np.asarray([d for _, d in rows], np.bool_)
    bad = sorted({s for s, d in rows if d})
    onset = find_onset(step, differs)
    if not bad:
        assert onset is None
        return
    assert onset is not None
    clean = sorted({s for s, _ in rows} - set(bad))
    assert onset.step == bad[0]
    assert onset.diverged == tuple(bad)
    assert onset.clean_before == len([s for s in clean if s < bad[0]])
    assert onset.clean_after == tuple(s for s in clean if s > bad[0])
    assert onset.last_clean == max((s for s in clean if s < bad[0]), default=None)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(2, 30), st.floats(0, 1))
def test_counts_match_brute_force_and_rules_never_miss_a_row(seed: int, n: int, width: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    differs = rng.random((n, width)) < share
    view = world(differs)
    affected = find_affected(view)
    assert affected.rows == int(differs.sum())
    assert affected.sequences == int(differs.any(axis=1).sum())
    assert affected.samples == tuple(np.flatnonzero(differs.any(axis=1)).tolist())
    counts = differs.sum(axis=1)[differs.any(axis=1)]
    assert affected.per_sequence == ((int(counts.min()), int(counts.max())) if counts.size else (0, 0))
    if affected.rule is not None:
        assert affected.rule.recall == 1.0
        assert affected.rule.precision >= 0.5
    else:
        assert not differs.all()


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.integers(4, 30), st.data())
def test_a_planted_rule_is_found_exactly(seed: int, n: int, width: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    place = np.arange(width)
    start = data.draw(st.integers(1, width - 1))
    samples = rng.permutation(n)[: data.draw(st.integers(1, n - 1))]
    inside = np.isin(np.arange(n), samples)[:, None]
    planted = data.draw(st.sampled_from(["threshold", "samples", "both", "last", "period"]))
    row = {
        "threshold": place >= start,
        "samples": np.ones(width, np.bool_),
        "both": place >= start,
        "last": place == width - 1,
        "period": (place + 10) % 3 == 0,
    }[planted]
    differs = np.broadcast_to(row, (n, width)).copy()
    if planted in ("samples", "both"):
        differs &= inside
    rule = rule_of(world(differs))
    assert rule.is_exact


@pytest.mark.parametrize(
    ("differs", "text"),
    [
        (np.arange(20)[None, :].repeat(6, 0) == 19, "last position of each sequence"),
        (np.arange(20)[None, :].repeat(6, 0) == 0, "first valid position of each sequence"),
        (np.arange(20)[None, :].repeat(6, 0) >= 5, "generated tokens"),
        (np.arange(20)[None, :].repeat(6, 0) >= 8, "position >= 18"),
        (np.arange(20)[None, :].repeat(6, 0) < 3, "position < 13"),
        ((np.arange(6) == 2)[:, None].repeat(20, 1), "sample 2"),
        (np.ones((6, 20), np.bool_), "every valid row"),
        ((np.arange(6) == 2)[:, None] & (np.arange(20) >= 8)[None, :], "position >= 18 and sample 2"),
    ],
)
def test_rules_read_as_they_were_meant(differs: Bools, text: str) -> None:
    rule = rule_of(world(differs))
    assert rule.is_exact
    assert rule.text == text


def test_long_sequences_only() -> None:
    lengths = [8, 12, 20, 9, 18, 7]
    differs = np.asarray([[length >= 18] * 20 for length in lengths], np.bool_)
    rule = rule_of(world(differs, lengths))
    assert rule.is_exact
    assert rule.text.startswith("sequences with >= ")


def test_scattered_rows_have_no_rule() -> None:
    differs = np.random.default_rng(0).random((10, 50)) < 0.3
    assert find_affected(world(differs)).rule is None


def test_a_rule_with_holes_is_given_with_its_precision() -> None:
    differs = np.zeros((10, 50), np.bool_)
    differs[3, 10:] = np.random.default_rng(0).random(40) < 0.8
    differs[3, [10, 49]] = True
    rule = rule_of(world(differs))
    assert not rule.is_exact
    assert rule.recall == 1.0
    assert 0.6 < rule.precision < 1.0


def test_the_clean_steps_are_part_of_the_rule() -> None:
    differs = np.zeros((12, 20), np.bool_)  # 3 steps of 4 samples
    differs[8 + 1, 12:] = True
    rule = rule_of(world(differs, steps=3))
    assert rule.is_exact
    assert rule.text == "position >= 22 and sample 1, from step 2 on"
