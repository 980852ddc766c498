"""Explanations of values alone: rounding, dtype, shape, constants, columns, weights, order; a yes and a no for each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from explain_evidence import Real, both, evidence, names, pair, rng, says, ulps, values
from hypothesis import given, settings
from hypothesis import strategies as st

from zkl_debug.diff.explain import Strength, explain_evidence
from zkl_debug.diff.explain.affine import column_permutation, constant_offset, constant_ratio, fit_ratio
from zkl_debug.diff.explain.model import Port
from zkl_debug.diff.explain.numeric import narrower, rounded, spacing
from zkl_debug.diff.explain.order import reduction_order
from zkl_debug.diff.explain.rounding import dtype_change, extra_rounding, shape_change
from zkl_debug.diff.explain.weights import other_weights

X = rng(1).normal(size=(24, 64))


# ---- one more rounding ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["tf32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("right", [True, False])
def test_one_more_rounding_names_format_and_side(name: str, right: bool) -> None:
    plain = values(X).real
    sides = (plain, rounded(plain, name)) if right else (rounded(plain, name), plain)
    e = evidence(*sides, site="output_layer:out")
    found = extra_rounding(e)
    assert found is not None
    assert found.strength is Strength.EXACT
    assert name in (found.evidence["dtype"], *found.evidence["or"])
    assert found.evidence["side"] == ("B (prefill)" if right else "A (score)")
    assert names(e)[0] == "extra-rounding"
    assert "reduction-order" not in names(e)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_of_a_narrow_site_to_a_narrower_format(dtype: str) -> None:
    plain = values(X, dtype).real
    found = extra_rounding(evidence(plain, rounded(plain, "float8_e4m3fn"), dtype=dtype))
    assert found is not None
    assert found.evidence["dtype"] == "float8_e4m3fn"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_of_every_row_rounded(dtype: str) -> None:
    plain = values(X, dtype).real
    part = plain.copy()
    part[:, 16:32] = rounded(plain[:, 16:32], "float8_e4m3fn")
    found = extra_rounding(evidence(plain, part, dtype=dtype))
    assert found is not None
    assert (found.evidence["dtype"], found.evidence["side"]) == ("float8_e4m3fn", "B (prefill)")
    assert found.evidence["left_alone"] > 0
    part[3, 20] *= 1.125
    other = extra_rounding(evidence(plain, part, dtype=dtype))
    assert other is None or not other.evidence["exact"]


def test_one_element_off_is_not_an_exact_rounding() -> None:
    plain = values(X).real
    near = rounded(plain, "bfloat16")
    near[3, 5] += 4 * spacing(near[3:4, 5:6], "bfloat16")[0, 0]
    assert extra_rounding(evidence(plain, near)) is None


def test_computed_in_bf16_is_told_as_close_not_exact() -> None:
    plain = values(X).real
    near = rounded(plain, "bfloat16")
    step = spacing(near, "bfloat16")
    near = np.where(rng(2).random(near.shape) < 0.1, near + step * (near != 0), near)
    found = extra_rounding(evidence(plain, near))
    assert found is not None
    assert (found.strength, found.evidence["exact"]) == (Strength.FITTED, False)


def test_two_roundings_to_the_same_format_are_no_rounding_of_each_other() -> None:
    one, two = rounded(X, "bfloat16"), rounded(X * (1 + 2**-8), "bfloat16")
    assert extra_rounding(evidence(one, two)) is None


def test_clean_rows_that_would_have_changed_are_mentioned() -> None:
    plain = values(X).real
    e = evidence(plain, rounded(plain, "bfloat16"), clean=both(X[:4]))
    found = extra_rounding(e)
    assert found is not None
    assert found.evidence["clean_rows_unchanged_by_it"] == "0 of 4"


def test_formats_come_widest_first() -> None:
    assert narrower("float32")[:3] == ("float16", "tf32", "bfloat16")
    assert narrower("bfloat16") == ("float8_e4m3fn", "float8_e5m2")


# ---- dtype and shape --------------------------------------------------------------------------------------------
def test_dtype_change_with_equal_values() -> None:
    out = Port(values(X), values(X, "bfloat16"))
    e = evidence(X, X, differ="dtype", metas=(("float32", (64,)), ("bfloat16", (64,))))
    e = replace(e, out=out)
    found = dtype_change(e)
    assert found is not None
    assert (found.name, found.strength, found.evidence["equal_after_rounding"]) == ("dtype-change", Strength.EXACT, 1.0)
    other = replace(e, out=Port(values(X), values(X + 0.1, "bfloat16")))
    again = dtype_change(other)
    assert again is not None
    assert again.strength is Strength.CLASS
    assert names(e)[0] == "dtype-change"


def test_same_dtype_is_no_dtype_change() -> None:
    assert dtype_change(evidence(X, X)) is None
    assert shape_change(evidence(X, X)) is None


def test_shape_change_tells_an_equal_head() -> None:
    e = evidence(X, X, differ="shape", metas=(("float32", (64,)), ("float32", (60,))))
    e = replace(e, out=Port(values(X), values(X[:, :60])))
    found = shape_change(e)
    assert found is not None
    assert (found.strength, found.evidence["equal_head"]) == (Strength.EXACT, 60)
    assert names(e) == ["shape-change"]


# ---- constants --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [2.0, 0.125, -1.0, 1.05, 1 / np.sqrt(16)])
def test_one_factor_for_all(dtype: str, factor: float) -> None:
    x = values(X, dtype).real
    e = evidence(x, x * factor, site="decoder.layers.0.mlp/scale:out", dtype=dtype)
    found = constant_ratio(e)
    assert found is not None
    assert found.evidence["by"] == "all"
    assert found.evidence["value"] == pytest.approx(factor, rel=1e-2 if dtype == "bfloat16" else 1e-6)
    assert "constant-ratio" in names(e)


def test_one_factor_a_row_and_one_a_column() -> None:
    rows = constant_ratio(evidence(X, X * rng(3).uniform(0.5, 2, (24, 1))))
    columns = constant_ratio(evidence(X, X * rng(3).uniform(0.5, 2, (1, 64))))
    assert rows is not None
    assert columns is not None
    assert (rows.evidence["by"], columns.evidence["by"]) == ("row", "column")


def test_one_element_off_is_no_constant_factor() -> None:
    y = X * 2
    y[7, 7] *= 1 + 1e-4
    assert constant_ratio(evidence(X, y)) is None


def test_rounding_noise_is_no_factor() -> None:
    assert constant_ratio(evidence(X, ulps(X, rng(4).integers(-2, 3, X.shape)))) is None
    assert constant_ratio(evidence(X, X * (1 + 2.0**-22))) is None
    assert constant_offset(evidence(X, ulps(X, rng(4).integers(-2, 3, X.shape)))) is None


@pytest.mark.parametrize("by", ["all", "row", "column"])
def test_offsets(by: str) -> None:
    size = {"all": (1, 1), "row": (24, 1), "column": (1, 64)}[by]
    found = constant_offset(evidence(X, X + rng(5).normal(size=size)))
    assert found is not None
    assert found.evidence["by"] == by
    if by == "column":
        assert "bias" in found.text


def test_one_element_apart_is_no_constant() -> None:
    x = rounded(rng(11).uniform(1.0, 1.9, (1, 32)), "bfloat16")
    y = x.copy()
    y[0, 5] -= 3 * 2.0**-7  # within rounding, 0.994 fits all 32; but it would have changed most of them
    assert constant_ratio(evidence(x, y, dtype="bfloat16")) is None
    assert constant_offset(evidence(x, y, dtype="bfloat16")) is None
    assert constant_ratio(evidence(x, rounded(0.97 * x, "bfloat16"), dtype="bfloat16")) is not None


def test_an_affine_map_is_neither_ratio_nor_offset() -> None:
    y = X * 1.5 + 0.25
    assert constant_ratio(evidence(X, y)) is None
    assert constant_offset(evidence(X, y)) is None


def test_a_factor_by_position() -> None:
    position = np.arange(24) % 12
    y = X * (1 + 0.1 * np.log1p(position))[:, None]
    found = constant_ratio(evidence(X, y, position=position))
    assert found is not None
    assert found.name == "scale-by-position"
    mixed = constant_ratio(evidence(X, X * rng(6).uniform(1, 2, (24, 1)), position=position))
    assert mixed is not None
    assert mixed.name == "constant-ratio"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_a_fitted_factor_really_fits(seed: int, dtype: str) -> None:
    """Whatever is claimed: the claimed factor gives every element within the rounding of both sides."""
    random = rng(seed)
    x = values(random.normal(size=(6, 16)), dtype)
    y = values(x.real * random.uniform(-3, 3), dtype)
    fit = fit_ratio(Port(x, y))
    if fit is None:
        return
    error = np.abs(y.real - x.real * (fit.value[0] if fit.by == "all" else fit.value[:, None]))
    if fit.by != "column":
        assert (error <= 2.5 * spacing(y.real, dtype) + 2.5 * np.abs(fit.value.max()) * spacing(x.real, dtype)).all()


# ---- columns ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("order", "pattern"),
    [
        (np.arange(64)[::-1], "reversed"),
        (np.roll(np.arange(64), -3), "rotated by 3"),
        (np.arange(64).reshape(2, 32).T.ravel(), "[2, 32] read as [32, 2]"),
        (np.arange(64).reshape(4, 16)[[2, 0, 3, 1]].ravel(), "blocks of 16 in the order [2, 0, 3, 1]"),
    ],
)
def test_columns_in_another_order(order: Real, pattern: str) -> None:
    e = evidence(X, X[:, order])
    found = column_permutation(e)
    assert found is not None
    assert (found.strength, found.evidence["from"]) == (Strength.EXACT, order.tolist())
    assert pattern in str(found.evidence["pattern"])
    assert names(e)[0] == "column-permutation"


def test_repeated_heads_are_columns_used_twice() -> None:
    heads = X.reshape(24, 4, 16)
    found = column_permutation(evidence(X, heads[:, [0, 1, 0, 1]].reshape(24, 64)))
    assert found is not None
    assert found.evidence["each_once"] is False


def test_one_row_permuted_otherwise_is_no_permutation() -> None:
    y = X[:, ::-1].copy()
    y[5] = X[5, np.roll(np.arange(64), 1)]
    assert column_permutation(evidence(X, y)) is None
    assert column_permutation(evidence(X, X)) is None


# ---- another weight ---------------------------------------------------------------------------------------------
def linear_case(
    dtype: str = "float32", change: float = 1e-2, rows: int = 96
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = rng(7)
    x = values(random.normal(size=(rows, 32)), dtype).real
    w = random.normal(size=(32, 48))
    return x, x @ w, x @ (w + change * random.normal(size=w.shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_weights(dtype: str) -> None:
    x, left, right = linear_case(dtype, 0.05)
    e = evidence(left, right, dtype=dtype, semantic="linear", inputs={"in": both(x, dtype)})
    found = other_weights(e)
    assert found is not None
    assert found.evidence["columns_changed"] == 48
    assert names(e)[0] == "other-weights"
    assert "stale" in found.text


def test_one_changed_column_is_counted() -> None:
    x, left, _ = linear_case()
    right = left.copy()
    right[:, 4] += x @ rng(8).normal(size=32)
    found = other_weights(evidence(left, right, semantic="linear", inputs={"in": both(x)}))
    assert found is not None
    assert (found.evidence["columns_changed"], found.evidence["rank_of_change"]) == (1, 1)


def test_rounding_noise_is_no_other_weight() -> None:
    x, left, _ = linear_case()
    noisy = ulps(left, rng(9).integers(-3, 4, left.shape))
    assert other_weights(evidence(left, noisy, semantic="linear", inputs={"in": both(x)})) is None


def test_other_weights_needs_more_rows_than_unknowns_and_the_input() -> None:
    x, left, right = linear_case(rows=30)
    assert other_weights(evidence(left, right, semantic="linear", inputs={"in": both(x)})) is None
    x, left, right = linear_case()
    assert other_weights(evidence(left, right, semantic="linear")) is None


def test_a_nonlinear_change_is_no_other_weight() -> None:
    x, left, _ = linear_case()
    assert other_weights(evidence(left, left + 0.05 * np.tanh(left), semantic="linear", inputs={"in": both(x)})) is None


def test_an_embedding_with_another_table() -> None:
    table, token = rng(10).normal(size=(12, 16)), rng(10).integers(0, 12, 60)
    site = "embedding.word_embeddings:out"
    e = evidence(table[token], (table + 0.01)[token], site=site, semantic="embedding", token=token)
    assert says("other-weights", e)
    noisy = evidence(table[token], ulps(table[token], rng(11).integers(0, 3, (60, 16))), site=site, token=token)
    assert not says("other-weights", noisy)


# ---- order of addition ------------------------------------------------------------------------------------------
def summed(dtype: str = "float32", terms: int = 64) -> tuple[Real, Real, Real]:
    """A linear in float32 with its terms added forwards and backwards."""
    random = rng(12)
    x, w = random.normal(size=(20, terms)).astype(np.float32), random.normal(size=(terms, 40)).astype(np.float32)
    parts = x[:, :, None] * w[None]
    forwards, backwards = parts[:, 0], parts[:, -1]
    for i in range(1, terms):
        forwards, backwards = forwards + parts[:, i], backwards + parts[:, terms - 1 - i]
    return x.astype(np.float64), values(forwards, dtype).real, values(backwards, dtype).real


def test_another_order_of_addition() -> None:
    x, left, right = summed()
    e = evidence(left, right, semantic="linear", inputs={"in": both(x)})
    found = reduction_order(e)
    assert found is not None
    assert found.strength is Strength.CLASS
    assert names(e) == ["reduction-order"]


def test_too_large_is_no_order() -> None:
    x, left, right = summed()
    e = evidence(left, left + 100 * (right - left), semantic="linear", inputs={"in": both(x)})
    assert reduction_order(e) is None
    assert names(e)[0] == "not-localised"


def test_a_truncation_leans_to_one_side() -> None:
    x, left, _ = summed()
    e = evidence(left, ulps(left, -rng(13).integers(0, 2, left.shape)), semantic="linear", inputs={"in": both(x)})
    assert reduction_order(e) is None


def test_operators_that_add_nothing_have_no_order() -> None:
    noisy = ulps(X, rng(14).integers(-1, 2, X.shape))
    for site in ("decoder.layers.0/mlp_bda:out.0", "decoder.layers.0.self_attention/rope.q:out.0"):
        e = evidence(X, noisy, site=site, semantic="residual" if "bda" in site else "rope")
        assert "reduction-order" not in names(e)
        assert names(e)[0] == "not-localised"


def test_inputs_that_differ_forbid_blaming_the_order() -> None:
    x, left, right = summed()
    e = evidence(left, right, semantic="linear", inputs={"in": pair(x, ulps(x, 1))}, inputs_equal=False)
    assert reduction_order(e) is None


def test_without_raw_bits_the_answer_is_what_to_capture() -> None:
    e = evidence(X, X, site="decoder.layers.2.mlp.linear_fc1:out")
    e = replace(e, out=None)
    (found,) = explain_evidence(e)
    assert found.name == "not-localised"
    assert "--level payload --sites 'decoder.layers.2.mlp.linear_fc1:*'" in found.text


def test_not_localised_lists_what_was_ruled_out() -> None:
    e = evidence(X, X + rng(15).normal(size=X.shape), semantic="linear", inputs={"in": both(X + 3)})
    (found,) = explain_evidence(e)
    assert found.name == "not-localised"
    assert {"extra-rounding", "reduction-order", "constant-ratio", "column-permutation"} <= set(
        found.evidence["ruled_out"]
    )
    assert "eps" not in found.evidence["ruled_out"], "not a norm: nothing was ruled out"


def test_a_test_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from zkl_debug.diff.explain import run

    def broken(_e: object) -> None:
        raise ZeroDivisionError("by hand")

    tests = (*run.TESTS, run.Test("broken", broken, lambda _e: ""))
    monkeypatch.setattr(run, "TESTS", tests)
    found = explain_evidence(evidence(X, rounded(values(X).real, "bfloat16")))
    assert found[0].name == "extra-rounding"
    assert found[-1].name == "explanation-failed"
    assert "ZeroDivisionError: by hand" in str(found[-1].evidence["broken"])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 100_000), st.sampled_from(["float32", "bfloat16", "float16"]), st.sampled_from([4, 16, 64]))
def test_unrelated_rows_have_no_closed_form(seed: int, dtype: str, width: int) -> None:
    """Random against random: nothing may claim to explain it."""
    random = rng(seed)
    e = evidence(
        random.normal(size=(12, width)),
        random.normal(size=(12, width)),
        dtype=dtype,
        semantic="linear",
        inputs={"in": both(random.normal(size=(12, 8)), dtype)},
    )
    assert names(e) == ["not-localised"]
