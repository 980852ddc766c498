"""Which edge, which site, which row: planted faults with known answers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_diff_world import (
    Call,
    Ctx,
    MemoryCapture,
    Options,
    Part,
    Tweak,
    World,
    default_world,
    generation,
    memory,
    plant,
    scoring,
)

from zkl_debug.diff import Verdict, diff_captures
from zkl_debug.diff.model import Kind
from zkl_debug.digest import digest_array
from zkl_debug.schema import Phase, parse_site

WORLD = default_world()
TRAIN = memory(WORLD, "train", scoring(WORLD))
_CLEAN = memory(WORLD, "gen", generation(WORLD))
ATTENTION = "decoder.layers.0.self_attention.core_attention:out"
QKV = "decoder.layers.0.self_attention.linear_qkv:out"
OUTPUTS = [name for name in TRAIN.sites if not parse_site(name).is_input and not name.startswith("logprobs/sel")]
# Outputs of modules that only hand on what an operator inside them gave.
CONTAINERS = [f"decoder.layers.{i}{tail}:out" for i in (0, 1) for tail in ("", ".mlp", ".self_attention")]
OPERATORS = [name for name in OUTPUTS if name not in CONTAINERS and "layers.0" not in name]


def gen(tweak: Tweak | None = None, calls: Sequence[Call] | None = None, **options: Any) -> MemoryCapture:
    """A run of the engine; the clean one is computed once and copied."""
    if tweak is None and calls is None and not options:
        return copy.deepcopy(_CLEAN)
    return memory(WORLD, "gen", generation(WORLD) if calls is None else calls, Options(tweak=tweak, **options))


def decode_only(ctx: Ctx) -> bool:
    return ctx.phase is Phase.DECODE


def answer(verdict: Verdict) -> tuple[str | None, str | None, str | None]:
    first = verdict.first
    return (verdict.edge, first.site, first.kind.label) if first is not None else (verdict.edge, None, None)


def test_clean_is_identical() -> None:
    verdict = diff_captures(TRAIN, gen())
    assert (verdict.verdict, verdict.exit_code, verdict.edge, verdict.first) == ("identical", 0, None, None)
    assert verdict.claim.scope == "all-sites"
    coverage = verdict.coverage
    assert coverage.matched == coverage.expected == coverage.captured == len(TRAIN.sites)
    for share in (coverage.prompt, coverage.generated, coverage.labels):
        assert share.compared == share.of > 0
    assert all(edge.compared > 0 and edge.mismatched == 0 for edge in verdict.edges.values())


@pytest.mark.parametrize("site", OPERATORS)
def test_fault_in_any_operator_of_the_engine_is_own_there(site: str) -> None:
    verdict = diff_captures(TRAIN, gen(plant(site)))
    assert verdict.verdict == "diverged"
    assert answer(verdict) == ("score-prefill", site, "own")
    assert verdict.first is not None
    assert verdict.first.stats.max_ulp == 1
    assert verdict.first.stats.mismatched_elements == 1
    table = verdict.site_table
    own = set(table["site"][table["own"] > 0])
    assert own == {site}, "everything later is a consequence"


def test_decode_alone_is_prefill_decode() -> None:
    verdict = diff_captures(TRAIN, gen(plant(ATTENTION, decode_only)))
    assert answer(verdict) == ("prefill-decode", ATTENTION, "own")
    assert verdict.edges["score-prefill"].mismatched == 0
    assert verdict.first is not None
    assert verdict.first.phase == "decode"
    assert verdict.first.position == min(WORLD.prompts[s] for s in WORLD.tokens)
    assert verdict.affected.rows == verdict.affected.of > 0


def test_decode_alone_without_reprefill_is_score_decode() -> None:
    verdict = diff_captures(TRAIN, gen(plant(ATTENTION, decode_only), generation(WORLD, [0, 1], reprefill=False)))
    assert answer(verdict) == ("score-decode", ATTENTION, "own")
    assert verdict.edges["prefill-decode"].compared == 0
    assert any(skip.what == "edge prefill-decode" for skip in verdict.coverage.skipped)


def test_prefill_alone_is_score_prefill() -> None:
    verdict = diff_captures(TRAIN, gen(plant(ATTENTION, lambda ctx: ctx.phase is Phase.PREFILL)))
    assert answer(verdict) == ("score-prefill", ATTENTION, "own")


def test_batch_variance_of_the_engine_is_within_b() -> None:
    verdict = diff_captures(TRAIN, gen(plant(QKV, lambda ctx: ctx.phase is Phase.PREFILL and ctx.rows_in_call < 6)))
    assert answer(verdict) == ("within-b", QKV, "own")


def test_batch_variance_of_the_scorer_is_within_a() -> None:
    both = [*scoring(WORLD, size=4), *scoring(WORLD, size=2)]
    train = memory(WORLD, "train", both, Options(tweak=plant(QKV, lambda ctx: ctx.rows_in_call > 20)))
    assert answer(diff_captures(train, gen())) == ("within-a", QKV, "own")


def test_variance_that_cannot_explain_the_other_edge_does_not_hide_it() -> None:
    def always(ctx: Ctx, value: Any) -> Any:
        late = ctx.phase is Phase.PREFILL and ctx.frame > 8
        return plant(QKV, ulps=3 if late else 1)(ctx, value)

    verdict = diff_captures(TRAIN, gen(always))
    assert verdict.edges["within-b"].mismatched > 0
    assert answer(verdict) == ("score-prefill", QKV, "own")


def test_one_chance_duplicate_does_not_make_it_a_fault_of_one_side() -> None:
    """Only the second sample of a scoring batch is wrong; one prefix happens to be in a first and a second place."""

    def second(ctx: Ctx) -> bool:
        return ctx.side == "train" and ctx.sample in (0, 2, 3)

    train = memory(WORLD, "train", scoring(WORLD), Options(tweak=plant(ATTENTION, second)))
    verdict = diff_captures(train, gen())
    assert verdict.edges["within-a"].first is not None
    assert verdict.edges["within-a"].first.site == ATTENTION
    within = verdict.row_table(ATTENTION, "within-a")
    crossing = verdict.row_table(ATTENTION, "score-prefill")
    few = len(np.unique(within["position"][within["mismatch"]])) / crossing["mismatch"].sum()
    assert few < 0.25
    assert answer(verdict) == ("score-prefill", ATTENTION, "own")


def test_two_training_captures_differ_on_score_score() -> None:
    other = memory(WORLD, "train", scoring(WORLD, size=1), Options(tweak=plant(QKV)))
    verdict = diff_captures(TRAIN, other)
    assert answer(verdict) == ("score-score", QKV, "own")
    assert set(verdict.edges) == {*verdict.edges, "score-prefill", "prefill-decode", "score-decode"}


def test_two_engines_where_one_decodes_wrongly() -> None:
    verdict = diff_captures(gen(), gen(plant(ATTENTION, decode_only)))
    assert answer(verdict) == ("prefill-decode", ATTENTION, "own")
    assert verdict.first is not None
    assert verdict.first.rows["left"]["side"] == verdict.first.rows["right"]["side"] == "b"


def test_engine_first_and_trainer_second() -> None:
    verdict = diff_captures(gen(plant(ATTENTION)), TRAIN)
    assert answer(verdict) == ("score-prefill", ATTENTION, "own")


def test_the_earliest_edge_wins() -> None:
    def two(ctx: Ctx, value: Any) -> Any:
        value = plant("decoder.layers.1.mlp.linear_fc1:out", lambda c: c.phase is Phase.PREFILL)(ctx, value)
        return plant(QKV, decode_only)(ctx, value)

    assert answer(diff_captures(TRAIN, gen(two)))[:2] == ("prefill-decode", QKV)


@pytest.mark.parametrize("site", [name for name in TRAIN.sites if "layers.0" not in name])
def test_one_flipped_bit_is_found_at_its_row(site: str) -> None:
    """Only the record changes, in one row: the first site and row must be that one."""
    if site.startswith("inputs/"):
        pytest.skip("refused: see test_diff_refuse")
    label = site in ("logprobs/label:out.0", "logprobs/selected:out.0")
    train = copy.deepcopy(TRAIN)
    target = train.sites[site]
    rows = train.rows[target.rows]
    at = int(np.flatnonzero((rows["sample"] == 2) & (rows["position"] == 3))[0])
    assert target.bits is not None
    target.bits[at, 0] ^= 1
    target.digest[at] = digest_array(target.bits[at : at + 1])[0]
    verdict = diff_captures(train, gen())
    assert verdict.first is not None
    assert (verdict.first.site, verdict.first.sample, verdict.first.position) == (site, 2, 3)
    assert verdict.affected.rows == 1
    port = parse_site(site).is_input and not site.endswith("linear_fc2:in")  # that is what the activation gives
    assert verdict.first.kind is (Kind.PROPAGATED if port else Kind.OWN)
    assert label or verdict.edges["score-prefill"].mismatched >= 1


def _shuffled(calls: list[Call], data: st.DataObject) -> list[Call]:
    """Scoring calls cut anew: samples in another order, in other batches, some twice."""
    parts = [part for call in calls for part in call.parts]
    order = data.draw(st.permutations(parts))
    twice = data.draw(st.lists(st.sampled_from(parts), max_size=2))
    again = [Part(part.sample, part.start, part.stop, again=9 + i) for i, part in enumerate(twice)]
    out, rest = [], [*order, *again]
    while rest:
        n = data.draw(st.integers(1, 3))
        out.append(Call(Phase.SCORE, tuple(rest[:n])))
        rest = rest[n:]
    return out


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_order_batches_and_copies_do_not_matter(data: st.DataObject) -> None:
    train = memory(WORLD, "train", _shuffled(scoring(WORLD), data))
    order = data.draw(st.permutations(list(WORLD.tokens)))
    calls = generation(WORLD, order, chunk=data.draw(st.integers(1, 6)))
    broken = data.draw(st.booleans())
    engine = memory(WORLD, "gen", calls, Options(tweak=plant(ATTENTION, decode_only) if broken else None))
    verdict = diff_captures(train, engine)
    if not broken:
        assert verdict.verdict == "identical"
        return
    expected = diff_captures(TRAIN, gen(plant(ATTENTION, decode_only)))
    assert answer(verdict) == answer(expected) == ("prefill-decode", ATTENTION, "own")
    assert verdict.first is not None
    assert expected.first is not None
    assert (verdict.first.sample, verdict.first.position) == (expected.first.sample, expected.first.position)
    assert (verdict.affected.rows, verdict.affected.of) == (expected.affected.rows, expected.affected.of)


def test_neighbours_and_padding_on_one_side_change_nothing() -> None:
    more = World({**WORLD.tokens, 9: [39, 38, 37, 36]}, {**WORLD.prompts, 9: 2}, WORLD.seed)
    engine = memory(more, "gen", generation(more))
    padded = memory(WORLD, "train", scoring(WORLD), Options(padding=3))
    verdict = diff_captures(padded, engine)
    assert verdict.verdict == "identical"
    reasons = {skip.what.split(" (")[0] for skip in verdict.coverage.skipped}
    assert {"rows of A", "rows of B"} <= reasons
    assert verdict.coverage.prompt.compared is not None
    assert verdict.coverage.prompt.compared < verdict.coverage.prompt.of


def test_training_steps_are_not_mixed() -> None:
    """The same prefix at another step, under other weights, is another row."""
    later = default_world()
    later.weights = {name: value * np.float32(1.5) for name, value in WORLD.weights.items()}
    runs = []
    for side, make in (("train", scoring), ("gen", generation)):
        parts = [
            memory(world, side, [Call(c.phase, c.parts, step, step + offset) for c in make(world)])
            for step, world, offset in ((0, WORLD, 5 if side == "gen" else 0), (1, later, 9 if side == "gen" else 0))
        ]
        runs.append(_joined(parts[0], parts[1]))
    assert diff_captures(runs[0], runs[1]).verdict == "identical"
    runs[1].frames["step"] = np.where(runs[1].frames["step"] == 1, 0, 1)  # weights of the other step
    swapped = diff_captures(runs[0], runs[1])
    assert swapped.verdict == "diverged"


def _joined(one: MemoryCapture, two: MemoryCapture) -> MemoryCapture:
    rows, frames = two.rows.copy(), two.frames.copy()
    rows["frame"] += len(one.frames)
    frames["frame"] += len(one.frames)
    for name, site in one.sites.items():
        other = two.sites[name]
        site.rows = np.concatenate([site.rows, other.rows + len(one.rows)])
        site.digest = np.concatenate([site.digest, other.digest])
        assert site.bits is not None
        assert other.bits is not None
        site.bits = np.concatenate([site.bits, other.bits])
    one.rows, one.frames = np.concatenate([one.rows, rows]), np.concatenate([one.frames, frames])
    one.states = {}
    return one
