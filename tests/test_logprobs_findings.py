"""Every finding has a case where it holds and cases where it must say no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from zkl_debug.bits import round_to, to_float64
from zkl_debug.logprobs import noise, placement, shapes
from zkl_debug.logprobs.finding import Finding
from zkl_debug.logprobs.report import Report, analyse
from zkl_debug.logprobs.table import F32, LogprobTable, make_table
from zkl_debug.logprobs.view import View, view_of

Edit = Callable[[NDArray[np.float32]], None]
Columns = dict[str, Any]
PROMPT = 40


def grid(sequences: int = 8, length: int = 100, seed: int = 0) -> F32:
    """Log-probs of [sequences, length] tokens; column p is position p + 1."""
    return -np.random.default_rng(seed).exponential(2.0, (sequences, length)).astype(np.float32)


def table(gen: F32, train: F32, *, tokens: NDArray[np.int64] | None = None, prompt: int = PROMPT) -> LogprobTable:
    """A table whose rows all count and whose first ``prompt`` rows are prompt."""
    n, length = gen.shape
    return make_table(
        sample=np.repeat(np.arange(n), length),
        position=np.tile(np.arange(1, length + 1), n),
        token=None if tokens is None else tokens.ravel(),
        gen=gen.ravel(),
        train=train.ravel(),
        generated=np.tile(np.arange(length) >= prompt, n),
    )


def edited(edit: Edit, **kwargs: int) -> View:
    """The view of equal sides after ``edit`` changed gen in place."""
    train = grid(**kwargs)
    gen = train.copy()
    edit(gen)
    return view_of(table(gen, train))


def names(report: Report) -> list[str]:
    return [finding.name for finding in report.findings]


def report_of(gen: F32, train: F32) -> Report:
    return analyse(table(gen, train))


def need(finding: Finding | None) -> Finding:
    assert finding is not None
    return finding


# shift -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [1, -1, 3, -8])
def test_shift_is_found_with_its_sign(lag: int) -> None:
    train = grid()
    gen = np.roll(train, -lag, axis=1)  # gen[p] = train[p + lag]
    found = need(shapes.shift(view_of(table(gen, train))))
    assert found.evidence["lag"] == lag
    assert found.evidence["formula"] == f"gen[p] == train[p{lag:+d}]"
    assert names(report_of(gen, train))[0] == "shift"


def test_shift_under_kernel_noise() -> None:
    train = grid()
    jitter = 0.01 * np.random.default_rng(5).standard_normal(train.shape)
    gen = (np.roll(train, -1, axis=1) + jitter).astype(np.float32)
    found = need(shapes.shift(view_of(table(gen, train))))
    assert found.evidence["lag"] == 1
    assert found.evidence["bitwise"] < 0.05


def test_shift_says_no_to_noise_and_to_single_rows() -> None:
    train = grid()
    gen = (train + 0.1 * np.random.default_rng(3).standard_normal(train.shape)).astype(np.float32)
    assert shapes.shift(view_of(table(gen, train))) is None

    def one_row(gen: F32) -> None:
        gen[2, 10] = gen[2, 11]

    assert shapes.shift(edited(one_row)) is None


# offset, ratio, constant, rounding ---------------------------------------------------------------------------------


def test_constant_offset_and_ratio() -> None:
    train = grid()
    found = need(shapes.offset(view_of(table(train - np.float32(0.75), train))))
    assert found.evidence["offset"] == pytest.approx(-0.75, abs=1e-6)
    scaled = (train * np.float32(1 / np.log(2))).astype(np.float32)
    found = need(shapes.ratio(view_of(table(scaled, train))))
    assert found.evidence["ratio"] == pytest.approx(1 / np.log(2), rel=1e-6)
    assert found.evidence["meaning"] == ["log2 instead of ln"]


def test_offset_and_ratio_say_no() -> None:
    train = grid()
    almost = train - np.float32(0.75)
    almost[0, 0] += np.float32(1e-3)
    assert shapes.offset(view_of(table(almost, train))) is None
    scaled = train * np.float32(0.5)
    assert shapes.offset(view_of(table(scaled, train))) is None
    scaled[0, 0] *= np.float32(1.01)
    assert shapes.ratio(view_of(table(scaled, train))) is None
    few = train.copy()
    few[0, :2] -= np.float32(1)  # two rows are no proof
    assert shapes.offset(view_of(table(few, train))) is None


@pytest.mark.parametrize("temperature", [0.7, 0.95, 1.2])
def test_a_temperature_is_seen_as_one_and_said_to_need_logits(temperature: float) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((8, 100, 50)) * 2
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    token = (chances.cumsum(-1) > rng.random((8, 100, 1))).argmax(-1)

    def score(t: float) -> F32:
        z = logits / t
        picked = np.take_along_axis(z, token[..., None], -1)[..., 0]
        return np.asarray(picked - np.log(np.exp(z).sum(-1)), np.float32)

    report = report_of(score(1.0), score(temperature))
    assert names(report) == ["temperature-like"]
    assert report.findings[0].evidence["sharper"] == ("train" if temperature < 1 else "gen")
    assert any("temperature" in limit for limit in report.limits)


def test_constant_value_names_the_side() -> None:
    def hole(gen: F32) -> None:
        gen[1:4, 10:20] = 0.0

    found = need(shapes.constant(edited(hole)))
    assert found.evidence["side"] == "gen"

    def two_values(gen: F32) -> None:
        gen[1:4, 10:20] = 0.0
        gen[1, 10] = -1.0

    assert shapes.constant(edited(two_values)) is None


def test_extra_rounding_to_bf16() -> None:
    train = grid()
    rounded = to_float64(round_to(train.astype(np.float64), "bfloat16"), "bfloat16").astype(np.float32)
    found = need(shapes.extra_rounding(view_of(table(rounded, train))))
    assert (found.evidence["side"], found.evidence["dtype"]) == ("gen", "bfloat16")
    found = need(shapes.extra_rounding(view_of(table(train, rounded))))
    assert found.evidence["side"] == "train"
    rounded[3, 3] = np.nextafter(rounded[3, 3], np.float32(0))
    assert shapes.extra_rounding(view_of(table(rounded, train))) is None


# copies -----------------------------------------------------------------------------------------------------------


def test_rows_of_another_sample_are_named() -> None:
    """Prompt log-probs of the cached part were never written: the buffer still holds another request's (S13)."""

    def stale(gen: F32) -> None:
        gen[5, :16] = gen[2, :16]

    train = grid()
    gen = train.copy()
    stale(gen)
    report = report_of(gen, train)
    found = report.findings[0]
    assert found.name == "another-samples-rows"
    assert found.evidence["side"] == "gen"
    assert found.evidence["sources"] == [{"step": 0, "sample": 5, "equals_step": 0, "equals_sample": 2}]
    rule = report.affected.rule
    assert rule is not None
    assert rule.is_exact
    assert "position < 17" in rule.text
    assert "sample 5" in rule.text


def test_rows_of_an_earlier_step() -> None:
    steps = [grid(seed=1), grid(seed=2)]
    gen = [x.copy() for x in steps]
    gen[1][3] = steps[0][3]
    parts = [table(g, t) for g, t in zip(gen, steps, strict=True)]
    joined = make_table(
        step=np.repeat([1, 2], len(parts[0])),
        sample=np.concatenate([p.sample for p in parts]),
        position=np.concatenate([p.position for p in parts]),
        gen=np.concatenate([p.gen for p in parts]),
        train=np.concatenate([g.ravel() for g in steps]),
    )
    report = analyse(joined)
    assert report.onset is not None
    assert (report.onset.step, report.onset.last_clean) == (2, 1)
    assert names(report) == ["rows-of-another-step"]


def test_copies_say_no() -> None:
    def one_of_ten(gen: F32) -> None:
        gen[5, :10] -= np.float32(0.5)
        gen[5, 0] = gen[2, 0]

    assert shapes.copied(edited(one_of_ten)) is None

    def wrong_place(gen: F32) -> None:
        gen[5, :10] = gen[2, 10:20]

    assert shapes.copied(edited(wrong_place)) is None

    def only_zeros(gen: F32) -> None:
        gen[5, :10] = 0

    assert shapes.copied(edited(only_zeros)) is None


def test_equal_values_of_equal_prefixes_are_no_copies() -> None:
    tokens = np.random.default_rng(0).integers(0, 99, (4, 30))
    tokens[1, :20] = tokens[0, :20]
    train = grid(4, 30)
    train[1, :20] = train[0, :20]
    gen = train.copy()
    train = train.copy()
    train[1, :20] -= np.float32(0.25)  # train is wrong on sample 1; gen rightly equals sample 0
    keys: Columns = {
        "sample": np.repeat(np.arange(4), 30),
        "position": np.tile(np.arange(30), 4),
        "token": tokens.ravel(),
    }
    view = view_of(make_table(**keys, gen=gen.ravel(), train=train.ravel()))
    assert shapes.copied(view) is None
    found = need(
        noise.self_finding(noise.self_check(make_table(**keys, gen=gen.ravel(), train=train.ravel())), view.sides)
    )
    assert found.evidence["differing"] == {"gen": 0, "train": 20}
    assert "train gives different" in found.text


# label faults -----------------------------------------------------------------------------------------------------


def chunk_edges(gen: F32, *, chunk: int, noisy: bool, seed: int = 0) -> F32:
    """Gen with the label fault at prompt positions chunk, 2 chunk ...; column p - 1 is position p."""
    rng = np.random.default_rng(seed)
    out = gen + (0.01 * rng.standard_normal(gen.shape) if noisy else 0)
    out = out.astype(np.float32)
    for position in range(chunk, PROMPT, chunk):
        out[:, position - 1] = rng.uniform(-1.0, -0.5, gen.shape[0])
    return out


@pytest.mark.parametrize("noisy", [False, True])
def test_label_fault_at_chunk_edges(noisy: bool) -> None:
    train = grid()
    train[:, [15, 31]] = np.random.default_rng(9).uniform(-14, -9, (8, 2)).astype(np.float32)
    report = report_of(chunk_edges(train, chunk=16, noisy=noisy), train)
    found = report.findings[0]
    assert found.name == "label-fault"
    assert found.evidence["place"] == "chunk-edge"
    assert (found.evidence["chunk"], found.evidence["positions"], found.evidence["logits_rows"]) == (
        16,
        [16, 32],
        [15, 31],
    )
    assert found.evidence["suspect"] == "gen"
    assert ("numerics-throughout" in names(report)) is noisy


def test_a_row_off_the_grid_or_a_missing_edge_is_no_chunk_edge() -> None:
    def off_grid(gen: F32) -> None:
        gen[:, 15] -= np.float32(3)
        gen[:, 21] -= np.float32(3)  # positions 16 and 22: common divisor 2, most edges missing

    view = edited(off_grid)
    assert placement.label_fault(view) is None
    assert need(placement.isolated(view)).name == "isolated-rows"

    def first_edge_only(gen: F32) -> None:
        gen[:, 15] = -8.0
        gen[:, 31] = -9.0  # position 32 is unlikely on both sides, and equal: a missed edge

    train = grid()
    first_edge_only(train)
    gen = train.copy()
    gen[:, 15] = -0.5
    found = need(placement.label_fault(view_of(table(gen, train))))
    assert found.evidence["place"] == "single-prompt-rows"  # a label, but the chunk size is not claimed


def test_an_edge_where_the_sampled_token_is_the_prompts_token_may_agree() -> None:
    train = grid()
    train[:, 15] = -8.0
    train[:, 31] = -0.2
    gen = train.copy()
    gen[:, 15] = -0.5
    train[3, 31] = gen[3, 31] = -0.1
    gen[0, 31], train[0, 31] = -0.3, -7.0
    found = need(placement.label_fault(view_of(table(gen, train))))
    assert found.evidence["chunk"] == 16
    assert found.evidence["edges_hit"] == 9


def test_chunks_of_varying_size_are_a_label_fault_without_a_chunk() -> None:
    train = grid()
    gen = train.copy()
    for row, position in enumerate((5, 9, 14, 22, 31, 33)):
        train[row, position - 1], gen[row, position - 1] = -9 - row, -0.6
    found = need(placement.label_fault(view_of(table(gen, train))))
    assert found.evidence["place"] == "single-prompt-rows"
    assert found.evidence["suspect"] == "gen"
    gen[0, 4], train[0, 4] = -11.0, -0.4  # the other way round: nothing speaks for a label any more
    assert placement.label_fault(view_of(table(gen, train))) is None


def test_an_edge_that_another_sequence_does_not_show_is_none() -> None:
    train = grid()
    train[:, 15] = -9.0
    gen = train.copy()
    gen[2, 15] = -0.5
    assert placement.label_fault(view_of(table(gen, train))) is None


def test_one_edge_at_an_odd_place_needs_the_engine_steps() -> None:
    def odd(gen: F32) -> None:
        gen[0, 36] = 0.9 * gen[0, 36] - 9

    train = grid(1, 60)
    gen = train.copy()
    odd(gen)
    one = table(gen, train)
    assert placement.label_fault(view_of(one)) is None
    columns: Columns = {n: getattr(one, n) for n in ("sample", "position", "gen", "train", "generated")}
    meta = {"a": {"engine_steps": {"0": 30}}, "b": {"engine_steps": {"0": 31}}}
    seen = need(placement.label_fault(view_of(make_table(**columns, sides=("A", "B"), meta=meta))))
    assert (seen.evidence["positions"], seen.evidence["suspect"]) == ([37], "B")


def test_two_likely_values_cannot_be_two_tokens() -> None:
    """exp(a) + exp(b) > 1: no distribution gives both, so it is not a wrong label."""
    train = grid()
    train[:, 15] = np.log(0.7)
    gen = train.copy()
    gen[:, 15] = np.log(0.5)
    assert placement.label_fault(view_of(table(gen, train))) is None


def test_state_that_is_carried_on_is_no_label_fault() -> None:
    def state(gen: F32) -> None:
        gen[2, 15:] -= np.float32(1.5) + np.random.default_rng(0).random(85).astype(np.float32)

    view = edited(state)
    assert placement.label_fault(view) is None
    assert placement.isolated(view) is None
    found = need(placement.carried_forward(view))
    assert found.evidence["from_first_valid_token"] is False
    assert "position 16" in found.text


def test_generated_rows_are_no_prefill_edge() -> None:
    def late(gen: F32) -> None:
        gen[:, 63] = -0.01 - np.random.default_rng(0).random(8).astype(np.float32)

    train = grid()
    train[:, 63] = -9
    gen = train.copy()
    late(gen)
    assert placement.label_fault(view_of(table(gen, train))) is None


def test_labels_rolled_over_the_pack() -> None:
    def roll(gen: F32) -> None:
        gen[:, -1] = -12 - np.random.default_rng(0).random(8).astype(np.float32)

    train = grid()
    gen = train.copy()
    roll(gen)
    report = report_of(gen, train)
    assert names(report) == ["label-fault"]
    assert report.findings[0].evidence["place"] == "sequence-end"
    assert report.affected.rule is not None
    assert report.affected.rule.text == "last position of each sequence"
    gen[3, -1] = train[3, -1]  # one sequence clean: not "each"
    assert placement.label_fault(view_of(table(gen, train))) is None


# classes ----------------------------------------------------------------------------------------------------------


def test_a_few_ulp_are_benign_and_one_more_row_is_not() -> None:
    train = grid()
    wobble = np.random.default_rng(0).integers(-2, 3, train.shape) * np.spacing(np.float32(16))
    gen = (train + wobble).astype(np.float32)
    report = report_of(gen, train)
    assert names(report) == ["fp32-rounding"]
    assert report.findings[0].is_benign
    assert report.verdict == "diverged"
    gen[0, 0] += np.float32(1e-3)
    assert "fp32-rounding" not in names(report_of(gen, train))


def test_numerics_throughout_is_two_sided_and_small() -> None:
    train = grid() - np.float32(0.2)
    rng = np.random.default_rng(0)
    gen = (train + 0.02 * rng.standard_normal(train.shape)).astype(np.float32)
    assert names(report_of(gen, train)) == ["numerics-throughout"]
    biased = (train + 0.02 * np.abs(rng.standard_normal(train.shape))).astype(np.float32)
    assert names(report_of(biased, train)) == ["all-rows-differ"]
    unrelated = grid(seed=77)
    assert names(report_of(unrelated, train)) == ["all-rows-differ"]


def test_numerics_on_some_rows() -> None:
    train = grid() - np.float32(0.2)
    rng = np.random.default_rng(0)
    rows = rng.random(train.shape) < 0.3
    gen = np.where(rows, train + 0.02 * rng.standard_normal(train.shape), train).astype(np.float32)
    assert names(report_of(gen, train)) == ["numerics-scattered"]
    gen = np.where(rows, train + 0.02 * np.abs(rng.standard_normal(train.shape)), train).astype(np.float32)
    report = report_of(gen, train)
    assert names(report) == []
    assert "not localised at the log-prob level" in report.limits[-1]


def test_values_that_are_no_log_probs() -> None:
    train = grid()
    gen = train.copy()
    gen[0, 0], gen[1, 1], train[2, 2] = np.nan, 0.5, -np.inf
    report = report_of(gen, train)
    assert {"not-a-number", "above-zero", "minus-infinity"} <= set(names(report))
    assert report.affected.rows == 3
    clean = grid()
    clean[0, 0] = np.nan
    same = report_of(clean, clean.copy())
    assert same.verdict == "refused"  # the bits are equal, but nothing of it is a log-prob: no gate may pass on it
    assert names(same) == ["not-a-number"]


def test_sides_that_agree_with_themselves() -> None:
    tokens = np.random.default_rng(0).integers(0, 99, (4, 30))
    tokens[1:, :20] = tokens[0, :20]
    values = grid(4, 30)
    values[1:, :20] = values[0, :20]
    keys: Columns = {
        "sample": np.repeat(np.arange(4), 30),
        "position": np.tile(np.arange(30), 4),
        "token": tokens.ravel(),
    }
    check = noise.self_check(make_table(**keys, gen=values.ravel(), train=values.ravel()))
    assert check.groups == 20
    assert noise.self_finding(check, ("gen", "train")) is None
