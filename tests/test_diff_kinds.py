"""Own, propagated, masked; producers that were not captured; containers; label rows; replay; statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_diff_edges import ATTENTION, TRAIN, WORLD, answer, gen
from test_diff_world import Ctx, MemoryCapture, Options, Tweak, bits, memory, plant, scoring

from zkl_debug.diff import Verdict, diff_captures
from zkl_debug.errors import UsageError
from zkl_debug.schema import Phase

CORE = "decoder.layers.*.self_attention.core_attention:*"


def train(**options: Any) -> MemoryCapture:
    return memory(WORLD, "train", scoring(WORLD), Options(**options))


def kind_of(verdict: Verdict, site: str, edge: str | None = None, **row: int) -> set[str]:
    table = verdict.row_table(site, edge)
    for column, value in row.items():
        table = table[table[column] == value]
    return {str(kind) for kind in table["kind"]}


def test_the_linear_proj_trap() -> None:
    """Without a tap round attention the projection's input is the first difference: it is not to blame."""
    verdict = diff_captures(TRAIN, gen(plant(ATTENTION), drop=(CORE,)))
    first = verdict.first
    assert first is not None
    assert (first.site, first.kind.label) == ("decoder.layers.0.self_attention.linear_proj:in", "propagated")
    assert first.last_equal == "decoder.layers.0.self_attention/rope.k:out.0"
    assert f"{ATTENTION} (A only)" in first.between
    assert "no operator is blamed" in first.text
    assert ATTENTION in first.text
    table = verdict.site_table
    assert not table["own"].any()
    assert verdict.claim.scope == "captured-sites"
    assert any(skip.what == f"site {ATTENTION}" and "A only" in skip.reason for skip in verdict.coverage.skipped)


def test_the_trap_without_the_input_port_either() -> None:
    drop = (CORE, "*linear_proj:in")
    verdict = diff_captures(train(drop=("*linear_proj:in",)), gen(plant(ATTENTION), drop=drop))
    first = verdict.first
    assert first is not None
    assert (first.site, first.kind.label) == ("decoder.layers.0.self_attention.linear_proj:out", "propagated")
    assert first.inputs == "not captured"
    assert "no operator is blamed" in first.text


def test_attention_missing_on_one_phase_only() -> None:
    """The tap is there for prefill and not for decode: the site matches, its decode rows do not exist."""
    engine = gen(plant(ATTENTION, lambda ctx: ctx.phase is Phase.DECODE))
    for name in [name for name in engine.sites if ".core_attention:" in name]:
        site = engine.sites[name]
        keep = (engine.rows["flags"][site.rows] & 3) != Phase.DECODE
        assert site.bits is not None
        site.rows, site.digest, site.bits = site.rows[keep], site.digest[keep], site.bits[keep]
    verdict = diff_captures(TRAIN, engine)
    first = verdict.first
    assert first is not None
    assert (first.site, first.kind.label) == ("decoder.layers.0.self_attention.linear_proj:in", "propagated")
    assert f"{ATTENTION} (not for this row)" in first.between


def test_inputs_not_captured_but_everything_before_is_equal() -> None:
    drop = ("*linear_fc1:in",)
    site = "decoder.layers.1.mlp.linear_fc1:out"
    verdict = diff_captures(train(drop=drop), gen(plant(site), drop=drop))
    assert answer(verdict) == ("score-prefill", site, "own")
    assert verdict.first is not None
    assert verdict.first.inputs == "not captured"
    assert "everything before it is equal" in verdict.first.text
    later = kind_of(verdict, "decoder.layers.1.mlp.linear_fc2:out")
    assert "propagated" in later
    assert "own" not in later


@pytest.mark.parametrize("layer", [0, 1])
def test_modules_round_a_fault_are_propagated(layer: int) -> None:
    site = f"decoder.layers.{layer}.mlp.linear_fc1:out"
    verdict = diff_captures(TRAIN, gen(plant(site)))
    for module in (f"decoder.layers.{layer}.mlp:out", f"decoder.layers.{layer}:out"):
        kinds = kind_of(verdict, module)
        assert "propagated" in kinds
        assert "own" not in kinds


def test_a_module_is_own_when_nothing_inside_it_was_captured() -> None:
    drop = ("decoder.layers.1.*.*", "decoder.layers.1/*", "decoder.layers.1.*:*")
    verdict = diff_captures(train(drop=drop), gen(plant("decoder.layers.1.mlp.linear_fc1:out"), drop=drop))
    assert answer(verdict) == ("score-prefill", "decoder.layers.1:out", "own")


@pytest.mark.parametrize("coarse", [False, True])
def test_history_is_an_input_of_attention(coarse: bool) -> None:
    """Layer 0 is wrong at position 2 only. Later rows have equal inputs in layer 1, except for K and V of row 2."""

    def at_two(ctx: Ctx) -> bool:
        return ctx.position == 2 and ctx.phase is not Phase.SCORE

    site = "decoder.layers.0.mlp.linear_fc2:out"
    drop = ("*self_attention*", "*mlp*", "*norm*") if coarse else ()
    verdict = diff_captures(train(drop=drop), gen(plant(site, at_two, ulps=1 << 18), drop=drop))
    first = "decoder.layers.0:out" if coarse else site
    assert answer(verdict) == ("score-prefill", first, "own")
    assert kind_of(verdict, "decoder.layers.1:in", "score-prefill", position=4) == {"equal"}
    attention = "decoder.layers.1:out" if coarse else "decoder.layers.1.self_attention.core_attention:out"
    assert kind_of(verdict, attention, "score-prefill", position=4) == {"propagated"}
    assert kind_of(verdict, attention, "score-prefill", position=1) == {"equal"}


def test_masked() -> None:
    """A coarse rounding after the fault hides it: the difference is reported, and the rows after it are equal."""
    fc1 = "decoder.layers.0.mlp.linear_fc1:out"

    def coarse(fault: Tweak | None) -> Tweak:
        def tweak(ctx: Ctx, value: NDArray[Any]) -> NDArray[Any]:
            value = fault(ctx, value) if fault is not None else value
            return np.round(value, 1) + np.float32(0) if ctx.site == fc1 else value

        return tweak

    norm = "decoder.layers.0.pre_mlp_layernorm:out"
    train_side = train(tweak=coarse(None))
    verdict = diff_captures(train_side, gen(coarse(plant(norm))))
    assert answer(verdict) == ("score-prefill", norm, "own")
    assert kind_of(verdict, fc1, "score-prefill") == {"masked"}
    assert kind_of(verdict, "output_layer:out") == {"equal"}
    row = verdict.site_table
    row = row[(row["site"] == fc1) & (row["edge"] == "score-prefill")][0]
    assert row["masked"] == row["compared"] > 0
    assert row["mismatched"] == 0


def test_label_fault_is_not_numerics() -> None:
    site = "logprobs/label:out.0"

    def at_four(ctx: Ctx) -> bool:
        return ctx.position == 4 and ctx.phase is Phase.PREFILL

    verdict = diff_captures(TRAIN, gen(plant(site, at_four)))
    assert answer(verdict) == ("score-prefill", site, "own")
    assert verdict.first is not None
    assert verdict.first.position == 4
    assert kind_of(verdict, "logprobs/selected:out.0", "score-prefill", position=4) == {"propagated"}
    assert kind_of(verdict, "logprobs/log_softmax:out.0") == {"equal"}


def test_selected_inherits_from_the_row_before_it() -> None:
    verdict = diff_captures(TRAIN, gen(plant("logprobs/log_softmax:out.0", lambda ctx: ctx.phase is not Phase.SCORE)))
    assert answer(verdict)[1] == "logprobs/log_softmax:out.0"
    assert kind_of(verdict, "logprobs/selected:out.0", "score-prefill") <= {"propagated", "equal", "masked"}


class _Oracle:
    """Answers a replay: fc1 agrees (hidden state), fc2 does not (a second fault)."""

    def replay(self, site: str, left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int8]:  # noqa: ARG002
        answers = {"decoder.layers.0.mlp.linear_fc1:out": 1, "decoder.layers.0.mlp.linear_fc2:out": 0}
        return np.full(len(left), answers.get(site, -1), np.int8)


def test_replay_settles_kinds() -> None:
    fc1, fc2 = "decoder.layers.0.mlp.linear_fc1:out", "decoder.layers.0.mlp.linear_fc2:out"
    engine = gen(plant(fc1, ulps=1 << 16))
    assert answer(diff_captures(TRAIN, engine)) == ("score-prefill", fc1, "own")
    verdict = diff_captures(TRAIN, engine, oracle=_Oracle())
    assert answer(verdict) == ("score-prefill", fc1, "uncaptured-state")
    assert "own" in kind_of(verdict, fc2)
    assert kind_of(verdict, "decoder.layers.1.mlp.linear_fc1:out") <= {"propagated", "equal", "masked"}


@pytest.mark.parametrize(
    ("change", "ulp", "absolute"),
    [
        (lambda v: -v, 0, 0.0),  # -0 against +0
        (lambda v: np.where(np.arange(len(v)) == 5, np.float32(np.nan), v), None, 0.0),
    ],
)
def test_zero_signs_and_nans_count(change: Any, ulp: int | None, absolute: float) -> None:
    site = "decoder.final_layernorm:out"

    def zero(ctx: Ctx, value: NDArray[Any]) -> NDArray[Any]:
        value = np.zeros_like(value) if ctx.site == site else value
        return change(value).astype(np.float32) if ctx.site == site and ctx.side == "gen" else value

    verdict = diff_captures(train(record=zero), gen(record=zero))
    assert verdict.first is not None
    assert verdict.first.site == site
    stats = verdict.first.stats
    assert (stats.max_ulp, stats.max_abs) == (ulp, absolute)
    assert stats.mismatched_elements == (8 if ulp == 0 else 1)
    assert stats.first_element == (0 if ulp == 0 else 5)


def test_statistics_are_of_mismatching_rows_and_null_without_payload() -> None:
    engine = gen(plant("output_layer:out", lambda ctx: ctx.position == 3, ulps=7))
    verdict = diff_captures(TRAIN, engine)
    table = verdict.site_table
    row = table[(table["site"] == "output_layer:out") & (table["edge"] == "score-prefill")][0]
    assert (row["max_ulp"], row["mismatched_elements"]) == (7, row["stat_rows"])
    assert row["elements"] == row["stat_rows"] * 40
    rows = verdict.row_table("output_layer:out", "score-prefill")
    assert set(rows["ulp"][rows["mismatch"]]) == {7}
    assert set(rows["position"][rows["mismatch"]]) == {3}
    bare = diff_captures(train(payload=False), engine)
    assert answer(bare) == answer(verdict)
    first = bare.to_json()["first"]
    assert [first[k] for k in ("max_ulp", "max_abs", "mismatched_elements", "elements")] == [None] * 4
    assert any("--level payload" in command for command in bare.next)
    with pytest.raises(UsageError):
        verdict.row_table("no.such:site")


def test_another_dtype_is_a_difference_of_every_row() -> None:
    engine = gen()
    site = engine.sites["output_layer:out"]
    assert site.bits is not None
    half = bits(site.bits.view(np.float32).astype(np.float16))
    engine.sites["output_layer:out"] = type(site)(
        type(site.meta)(**{**site.meta.__dict__, "torch_dtype": "float16"}), site.rows, site.digest, half
    )
    verdict = diff_captures(TRAIN, engine, verify_bytes=True)
    first = verdict.first
    assert first is not None
    assert (first.site, first.kind.label) == ("output_layer:out", "own")
    assert first.differ == "dtype float32 on A, float16 on B"
    assert verdict.affected.rows == verdict.affected.of
    assert verdict.edges["within-b"].mismatched == 0


def test_names_of_one_side_can_be_mapped() -> None:
    engine = gen()
    engine.sites = {name.replace("output_layer", "lm_head"): site for name, site in engine.sites.items()}
    assert diff_captures(TRAIN, engine).coverage.matched == len(TRAIN.sites) - 2
    table = {f"lm_head:{port}": f"output_layer:{port}" for port in ("in", "out")}
    assert diff_captures(TRAIN, engine, aliases=table).coverage.matched == len(TRAIN.sites)


def test_a_site_first_seen_in_a_later_frame_keeps_its_place() -> None:
    """As an expert that got no token in the first frame: its order number is behind everything else."""
    site = "decoder.layers.0.mlp.linear_fc1:out"
    sides = [train(), gen(plant(site))]
    for capture in sides:
        named = [name for name in capture.sites if name.startswith("decoder.layers.0.mlp")]
        inside = [name for name in named if not name.endswith(".mlp:out")]
        assert len(inside) == 5
        for old in (capture.sites[name] for name in inside):
            old.meta = type(old.meta)(**{**old.meta.__dict__, "order": old.meta.order + 1000})
    verdict = diff_captures(sides[0], sides[1])
    assert answer(verdict) == ("score-prefill", site, "own")
    assert kind_of(verdict, "decoder.layers.0.mlp:out") == {"propagated", "equal"}  # a ReLU hides some rows
