"""Rules are never read into chance: random subsets of the affected rows of a real capture give none."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from zkl_debug.diff import diff_captures
from zkl_debug.diff.facts import build_facts
from zkl_debug.diff.rules_learn import learn

FOLDER = Path(__file__).parent.parent / "captures" / "reference" / "h200-gpt-te-stack-off"
SITE = "decoder.layers.0.mlp.linear_fc2:out"


def test_random_subsets_of_affected_rows_of_a_real_capture_are_no_rule() -> None:
    comparison = diff_captures(FOLDER / "train", FOLDER / "gen").comparison
    assert comparison is not None
    site = next(i for i, pair in enumerate(comparison.sites) if pair.name == SITE)
    part = comparison.pairs.slices["score-decode"]
    affected = part.start + np.flatnonzero(comparison.done[site].differs[part])
    assert len(affected) > 100
    table = build_facts(comparison, site, affected)
    assert learn(table, np.ones(len(table), np.bool_), "linear").text == "every row"
    units = np.unique(table.unit)
    rng = np.random.default_rng(7)
    none = 0
    for trial in range(100):
        rate = (0.03, 0.1, 0.3, 0.6, 0.9)[trial % 5]
        subset = np.isin(table.unit, units[rng.random(len(units)) < rate])
        rule = learn(table, subset, "linear")
        none += not rule.found
        assert rule.found or rule.text.startswith("no rule")
    assert none >= 95
