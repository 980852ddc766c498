"""The rule learner on tables of facts: what it must find, how it names it, and that chance gives no rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from zkl_debug.diff.facts import Fact, FactKind, FactTable
from zkl_debug.diff.rules_atoms import atoms
from zkl_debug.diff.rules_learn import GUARD, Rule, learn

SIDES = ("score", "prefill")
SHAPES = {
    # rows in call, longest query, sequences in call, padding rows
    0: (96, 46, 2, 7),
    1: (208, 98, 2, 99),
    2: (33, 33, 1, 0),
    3: (104, 45, 3, 15),
    4: (416, 120, 4, 40),
    5: (16, 8, 2, 0),
}


def table(seed: int = 0, rows: int = 400, samples: int = 12, noise: int = 20) -> FactTable:
    """Rows of some samples scored in calls of several shapes; ``noise`` further flags that mean nothing."""
    rng = np.random.default_rng(seed)
    sample = rng.integers(0, samples, rows)
    call = sample % len(SHAPES)
    position = np.zeros(rows, np.int64)
    for s in range(samples):
        at = np.flatnonzero(sample == s)
        position[at] = np.arange(len(at))
    shape = np.array([SHAPES[int(c)] for c in call])
    last = np.array([position[i] == position[sample == sample[i]].max() for i in range(rows)]).astype(np.int64)
    made: list[tuple[str, str, FactKind, NDArray[Any]]] = [
        ("sample", "", FactKind.NOMINAL, sample),
        ("position", "", FactKind.ORDINAL, position),
        ("token", "", FactKind.NOMINAL, rng.integers(0, 128, rows)),
        ("rows in call", "score", FactKind.ORDINAL, shape[:, 0]),
        ("longest query in call", "score", FactKind.ORDINAL, shape[:, 1]),
        ("sequences in call", "score", FactKind.ORDINAL, shape[:, 2]),
        ("padding rows in call", "score", FactKind.ORDINAL, shape[:, 3]),
        ("micro-batch", "score", FactKind.ORDINAL, call),
        ("last position of its sequence in call", "score", FactKind.FLAG, last),
        ("packed", "score", FactKind.FLAG, (call == 3).astype(np.int64)),
        ("first sequence in call", "score", FactKind.FLAG, (sample < 6).astype(np.int64)),
        ("after cache hit", "prefill", FactKind.FLAG, (sample == 7).astype(np.int64)),
        ("rows in call", "prefill", FactKind.ORDINAL, rng.choice([8, 64, 128], rows)),
        ("longest query in call", "prefill", FactKind.ORDINAL, rng.choice([1, 4, 21, 40], rows)),
        ("sequences in call", "prefill", FactKind.ORDINAL, rng.choice([1, 3, 8], rows)),
        ("micro-batch", "prefill", FactKind.ORDINAL, rng.integers(0, 20, rows)),
    ]
    made += [(f"noise {k}", "", FactKind.FLAG, rng.integers(0, 2, rows)) for k in range(noise)]
    facts = tuple(Fact(name, of, kind, np.asarray(values, np.int64)) for name, of, kind, values in made)
    return FactTable(facts, np.arange(rows), SIDES)


TABLE = table()


def column(name: str, of: str = "", within: FactTable = TABLE) -> NDArray[np.int64]:
    return next(fact.values for fact in within.facts if fact.name == name and fact.of == of)


def named(rule: Rule) -> set[str]:
    """Facts a rule names, and those it says the data cannot tell from them."""
    return {atom.fact for atom in rule.atoms}


def test_every_row() -> None:
    rule = learn(TABLE, np.ones(len(TABLE), np.bool_))
    assert (rule.found, rule.text, rule.precision, rule.recall) == (True, "every row", 1.0, 1.0)


def test_nothing_affected() -> None:
    assert not learn(TABLE, np.zeros(len(TABLE), np.bool_)).found


def test_a_threshold_is_told_with_the_interval_the_data_allow() -> None:
    rule = learn(TABLE, column("rows in call", "score") >= 256, "linear")
    assert rule.text.startswith("rows in call of score >= 416 (the limit lies in 209..416); the same rows: ")
    assert (rule.precision, rule.recall) == (1.0, 1.0)
    assert rule.atoms[0].interval == (209, 416)
    assert rule.to_json()["conditions"][0]["limit"] == [209, 416]
    assert any(text.startswith("longest query in call of score >= 120") for text in rule.same)


@pytest.mark.parametrize(
    ("semantic", "fact"),
    [("linear", "rows in call"), ("core_attention", "longest query in call"), ("log_softmax", "sequences in call")],
)
def test_the_operator_decides_between_facts_that_the_data_cannot_tell_apart(semantic: str, fact: str) -> None:
    rule = learn(TABLE, column("rows in call", "score") >= 256, semantic)
    assert rule.atoms[0].fact == fact
    assert len(rule.same) >= 2


def test_what_explains_other_edges_too_comes_first() -> None:
    affected = column("rows in call", "score") >= 256
    rule = learn(TABLE, affected, "linear", {"sequences in call": 2})
    assert rule.atoms[0].fact == "sequences in call"


def test_a_threshold_inside_the_range() -> None:
    rule = learn(TABLE, column("position") >= 7)
    assert rule.text.startswith("position >= 7")
    assert rule.atoms[0].interval == (7, 7)


def test_few_affected_rows_below_a_limit() -> None:
    rule = learn(TABLE, column("position") <= 0)
    assert rule.text == "position <= 0"


def test_one_sample_of_two_in_the_same_shape_of_call() -> None:
    rule = learn(TABLE, column("sample") == 8)
    assert rule.text == "sample == 8"


def test_a_flag_that_coincides_with_a_sample_is_preferred() -> None:
    rule = learn(TABLE, column("sample") == 7)
    assert rule.text.startswith("after cache hit (prefill)")
    assert "sample == 7" in rule.same


def test_two_conditions() -> None:
    affected = (column("packed", "score") == 1) & (column("first sequence in call", "score") == 0)
    rule = learn(TABLE, affected)
    assert rule.found
    assert (rule.precision, rule.recall) == (1.0, 1.0)
    assert named(rule) == {"packed", "first sequence in call"}
    assert rule.joined == "and"


def test_either_of_two_conditions() -> None:
    affected = (column("position") == 0) | (column("rows in call", "score") == 33)
    rule = learn(TABLE, affected)
    assert (rule.precision, rule.recall, rule.joined) == (1.0, 1.0, "or")
    assert "position" in named(rule)


def test_a_set_of_call_sizes_on_either_side() -> None:
    """A kernel that takes another path for some sizes: rows differ where one of the two calls is of such a size."""
    one, two = (column("rows in call", side) for side in SIDES)
    odd = (33, 8)
    rule = learn(TABLE, np.isin(one, odd) != np.isin(two, odd), "linear")
    assert rule.text.startswith("rows in call in {8, 33} on exactly one of the two rows")
    assert (rule.precision, rule.recall) == (1.0, 1.0)


def test_a_limit_crossed_between_the_two_calls() -> None:
    one, two = (column("rows in call", side) for side in SIDES)
    rule = learn(TABLE, (one >= 100) != (two >= 100), "linear")
    assert rule.atoms[0].operation == "crosses"
    assert rule.atoms[0].interval == (97, 104)
    assert "on exactly one of the two rows" in rule.text


def test_luck_lowers_precision_not_recall() -> None:
    """Two orders of addition often give the same bits: affected rows are a part of those the rule covers."""
    rng = np.random.default_rng(1)
    inside = column("rows in call", "score") >= 256
    rule = learn(TABLE, inside & (rng.random(len(TABLE)) < 0.3), "linear")
    assert rule.atoms[0].fact == "rows in call"
    assert rule.recall == 1.0
    assert rule.precision is not None
    assert 0.15 < rule.precision < 0.5


def test_what_covers_a_part_of_the_affected_rows_is_a_tendency_and_no_rule() -> None:
    """Most rows differ wherever they are, and a little more of them in one place: nothing there is the cause."""
    rng = np.random.default_rng(8)
    cached = column("noise 3") == 1
    rule = learn(TABLE, np.where(cached, True, rng.random(len(TABLE)) < 0.6))
    assert not rule.found
    assert rule.text.startswith("no rule: every row alike")
    assert "more often where noise 3 (100% there, 6" in rule.text


def test_a_few_stray_rows_do_not_hide_the_rule() -> None:
    affected = column("position") >= 7
    affected[np.flatnonzero(~affected)[:2]] = True
    rule = learn(TABLE, affected)
    assert rule.found
    assert "position" in named(rule)
    assert rule.recall is not None
    assert rule.recall < 1.0


def test_a_second_condition_completes_a_rule_where_it_is_then_right_in_every_pair() -> None:
    many = table(2, rows=600, samples=24)
    last = column("last position of its sequence in call", "score", many) == 1
    packed = column("packed", "score", many) == 1
    rule = learn(many, last & packed)
    assert named(rule) == {"last position of its sequence in call", "packed"}
    assert (rule.joined, rule.precision, rule.recall) == ("and", 1.0, 1.0)


def test_a_single_row_is_no_rule() -> None:
    affected = np.zeros(len(TABLE), np.bool_)
    affected[17] = True
    rule = learn(TABLE, affected)
    assert not rule.found
    assert rule.text.startswith("no rule: a single row of 400 differs")
    assert (rule.precision, rule.recall) == (None, None)


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.4, 0.8, 0.97])
def test_random_subsets_are_no_rule(rate: float) -> None:
    """100 random subsets in all (20 a rate): at least 95 of them, here nearly all, must give no rule."""
    rng = np.random.default_rng(int(rate * 1000))
    made = table(9, rows=250, noise=8)
    found = [learn(made, rng.random(len(made)) < rate) for _ in range(20)]
    assert sum(rule.found for rule in found) <= 1
    assert all(rule.text.startswith("no rule") for rule in found if not rule.found)


def test_random_row_keys_are_no_rule() -> None:
    """Each row compared three times: the pairs of a key agree, which must not count as evidence."""
    rng = np.random.default_rng(5)
    facts = tuple(Fact(f.name, f.of, f.kind, np.tile(f.values, 3)) for f in TABLE.facts if f.of != "prefill")
    repeated = FactTable(facts, np.tile(TABLE.unit, 3), SIDES)
    hits = 0
    for _ in range(20):
        hits += learn(repeated, np.tile(rng.random(len(TABLE)) < rng.choice([0.03, 0.2, 0.7]), 3)).found
    assert hits <= 1


def test_costs_are_a_prefix_code() -> None:
    """Over all atoms the sum of 2**-cost is at most 1; the guard against chance rests on it."""
    for seed in range(3):
        made = table(seed, noise=3)
        affected = np.random.default_rng(seed).random(len(made)) < 0.3
        total = sum(2.0**-atom.cost for atom in atoms(made, affected))
        assert 0 < total <= 1.0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 60), st.integers(0, 6))
def test_any_labels_give_an_honest_rule(seed: int, rows: int, noise: int) -> None:
    """Precision and recall are those of the conditions told, and a rule saves more than the guard."""
    rng = np.random.default_rng(seed)
    made = table(seed, rows=rows, samples=4, noise=noise)
    affected = rng.random(rows) < rng.random()
    rule = learn(made, affected)
    if not rule.found or not rule.atoms:
        assert rule.precision in (None, 1.0)
        return
    assert rule.saved >= GUARD
    parts = [atom.covered for atom in rule.atoms]
    covered = parts[0] if len(parts) == 1 else (parts[0] & parts[1] if rule.joined == "and" else parts[0] | parts[1])
    assert rule.precision == pytest.approx((covered & affected).sum() / covered.sum())
    assert rule.recall == pytest.approx((covered & affected).sum() / affected.sum())


def test_many_rows_are_sampled_for_the_search_and_judged_in_full() -> None:
    large = table(3, rows=9000, samples=40)
    affected = column("position", "", large) >= 100
    affected[:3] = True
    rule = learn(large, affected)
    assert rule.text.startswith("position >= ")
    assert rule.precision == 1.0
