"""Explanations of norms and rotary embeddings, on the formulas themselves: a yes, and near-misses that get a no."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from explain_evidence import Real, both, evidence, names, rng, ulps, values

from zkl_debug.diff.explain import Evidence
from zkl_debug.diff.explain.affine import constant_ratio
from zkl_debug.diff.explain.norm import eps, eps_by_bits, fit_weight, norm_rounding_order
from zkl_debug.diff.explain.numeric import rounded
from zkl_debug.diff.explain.order import reduction_order
from zkl_debug.diff.explain.rope import position_shift, rope_frequency, rope_pairing

NORM = "decoder.layers.0.input_layernorm:out"
ROPE = "decoder.layers.0.self_attention/rope.q:out.0"


# ---- norms ------------------------------------------------------------------------------------------------------
def normed(
    x: Real, weight: Real, value: float, dtype: str = "float32", early: bool = False, centred: bool = False
) -> Real:
    """A norm computed in float32."""
    wide = np.asarray(x, np.float32)
    wide = wide - wide.mean(axis=1, keepdims=True) if centred else wide
    unit = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True, dtype=np.float32) + np.float32(value))
    if early:
        unit = rounded(unit.astype(np.float64), dtype).astype(np.float32)
    return rounded((unit * np.asarray(weight, np.float32)).astype(np.float64), dtype)


def norm_case(
    left: float,
    right: float,
    *,
    dtype: str = "float32",
    scale: float = 0.5,
    early: bool = False,
    centred: bool = False,
    clean: int = 0,
    rows: int = 40,
) -> Evidence:
    """A norm at one eps against another; rows of different size; ``clean`` further rows that are equal."""
    random = rng(20)
    x = values(random.normal(size=(rows + clean, 64)) * random.uniform(0.5, 2, (rows + clean, 1)) * scale, dtype).real
    weight = values(random.uniform(0.5, 1.5, (1, 64)), dtype).real
    one = normed(x, weight, left, dtype, centred=centred)
    two = normed(x, weight, right, dtype, early=early, centred=centred)
    differs = (one != two).any(axis=1)
    if clean:
        equal = ~differs
        extra = {"clean": both(one[equal], dtype), "clean_inputs": {"in": values(x[equal], dtype)}}
    else:
        extra = {}
    at = differs if differs.any() else np.ones(len(x), np.bool_)
    inputs = {"in": both(x[at], dtype)}
    return evidence(one[at], two[at], site=NORM, semantic="norm", dtype=dtype, inputs=inputs, **extra)


@pytest.mark.parametrize(("left", "right"), [(1e-5, 1e-6), (1e-6, 1e-5), (1e-5, 1e-3), (1e-5, 1e-8)])
@pytest.mark.parametrize("centred", [False, True])
def test_eps_of_both_sides_is_fitted(left: float, right: float, centred: bool) -> None:
    e = norm_case(left, right, scale=0.1, centred=centred)
    found = eps(e)
    assert found is not None
    assert (found.evidence["left"], found.evidence["right"]) == (left, right)
    assert names(e)[0] == "eps"
    assert "constant-ratio" not in names(e)


def test_the_configured_eps_settles_what_the_rows_leave_open() -> None:
    e = norm_case(1e-5, 1e-6, scale=3.0)
    found = eps(replace(e, config={"layernorm_epsilon": 1e-5}))
    assert found is not None
    assert (found.evidence["left"], found.evidence["right"]) == (1e-5, 1e-6)


def test_another_factor_a_row_is_no_eps() -> None:
    e = norm_case(1e-5, 1e-5)
    assert e.out is not None
    x = e.out.left.real
    moved = evidence(x, x * rng(21).uniform(0.9, 1.1, (len(x), 1)), site=NORM, semantic="norm", inputs=e.inputs)
    assert eps(moved) is None
    assert constant_ratio(moved) is not None


def test_equal_eps_and_rounding_noise_is_no_eps() -> None:
    e = norm_case(1e-5, 1e-5)
    assert e.out is not None
    noisy = ulps(e.out.left.real, rng(22).integers(-1, 2, e.out.left.bits.shape))
    assert eps(evidence(e.out.left.real, noisy, site=NORM, semantic="norm", inputs=e.inputs)) is None


def test_eps_needs_the_input() -> None:
    e = norm_case(1e-5, 1e-3)
    assert e.out is not None
    without = evidence(e.out.left.real, e.out.right.real, site=NORM, semantic="norm")
    assert "eps" not in names(without)


@pytest.mark.parametrize(("left", "right"), [(1e-5, 1e-6), (1e-6, 1e-5)])
def test_eps_in_bf16_shows_at_ties_only(left: float, right: float) -> None:
    e = norm_case(left, right, dtype="bfloat16", scale=0.5, clean=400)
    assert e.out is not None
    assert 3 <= (e.out.left.bits != e.out.right.bits).sum() < e.out.left.bits.size / 10
    found = eps_by_bits(e)
    assert found is not None
    assert left in found.evidence["left_allowed"]
    assert right in found.evidence["right_allowed"]
    assert names(e)[0] == "eps"


def test_other_flips_in_bf16_are_no_eps() -> None:
    e = norm_case(1e-5, 1e-6, dtype="bfloat16", scale=0.5, clean=400)
    assert e.out is not None
    left = e.out.left.real
    flips = rng(23).random(left.shape) < 0.01
    moved = np.where(flips, left + 2.0 ** (np.floor(np.log2(np.abs(left))) - 7), left)
    other = evidence(
        left,
        moved,
        site=NORM,
        semantic="norm",
        dtype="bfloat16",
        inputs=e.inputs,
        clean=e.clean,
        clean_inputs=e.clean_inputs,
    )
    assert eps_by_bits(other) is None


@pytest.mark.parametrize("right", [True, False])
def test_rounding_before_the_weight(right: bool) -> None:
    e = norm_case(1e-5, 1e-5, dtype="bfloat16", early=True, rows=60)
    assert e.out is not None
    sides = (e.out.left.real, e.out.right.real) if right else (e.out.right.real, e.out.left.real)
    e = evidence(*sides, site=NORM, semantic="norm", dtype="bfloat16", inputs=e.inputs)
    found = norm_rounding_order(e)
    assert found is not None
    assert found.evidence["rounds_before_weight"] == ("B (prefill)" if right else "A (score)")
    assert names(e)[0] == "norm-rounding-order"


def test_other_rounding_noise_is_no_rounding_before_the_weight() -> None:
    e = norm_case(1e-5, 1e-5, dtype="bfloat16", early=True, rows=60)
    assert e.out is not None
    left = e.out.left.real
    noisy = np.where(rng(24).random(left.shape) < 0.3, left * (1 + 2.0**-7), left)
    assert (
        norm_rounding_order(evidence(left, noisy, site=NORM, semantic="norm", dtype="bfloat16", inputs=e.inputs))
        is None
    )


def test_the_weight_is_recovered_from_the_rows() -> None:
    random = rng(25)
    unit, weight = random.normal(size=(80, 32)), values(random.uniform(0.5, 2, (1, 32)), "bfloat16").real[0]
    assert np.array_equal(fit_weight(unit, values(unit * weight, "bfloat16")), weight)


def test_another_sum_of_squares_is_one_factor_a_row() -> None:
    random = rng(26)
    x = random.normal(size=(40, 64)).astype(np.float32)
    weight = random.uniform(0.5, 1.5, 64).astype(np.float32)
    sums = []
    for parts in (8, 2):
        total = np.zeros((40, parts), np.float32)
        for chunk in np.split(x * x, 64 // parts, axis=1):
            total = total + chunk
        mean = total[:, 0]
        for k in range(1, parts):
            mean = mean + total[:, k]
        sums.append((x / np.sqrt(mean[:, None] / np.float32(64) + np.float32(1e-5)) * weight).astype(np.float64))
    differs = (sums[0] != sums[1]).any(axis=1)
    e = evidence(sums[0][differs], sums[1][differs], site=NORM, semantic="norm", inputs={"in": both(x[differs])})
    found = reduction_order(e)
    assert found is not None
    assert "one factor" in found.text
    assert names(e)[0] == "reduction-order"


# ---- rotary embedding -------------------------------------------------------------------------------------------
def rope(x: Real, position: Real, frequency: Real, dtype: str = "float32", neighbours: bool = False) -> Real:
    """[m, heads, d] rotated; halves or neighbouring channels."""
    angle = (np.asarray(position)[:, None] * frequency[None, :]).astype(np.float32).astype(np.float64)[:, None, :]
    one, two = (x[..., 0::2], x[..., 1::2]) if neighbours else np.split(x, 2, axis=-1)
    a, b = one * np.cos(angle) - two * np.sin(angle), two * np.cos(angle) + one * np.sin(angle)
    out = np.stack([a, b], axis=-1).reshape(x.shape) if neighbours else np.concatenate([a, b], axis=-1)
    return rounded(out, dtype)


def frequencies(base: float = 10000.0, pairs: int = 8) -> Real:
    return np.asarray(base ** -(np.arange(pairs) / pairs))


def rope_case(dtype: str, left: Real, right: Real, shift: int = 0, other: bool = False, rows: int = 240) -> Evidence:
    """Rows at positions 1 .. 60, rotated at the frequencies of each side."""
    random = rng(30)
    position = 1 + np.arange(rows) % 60
    x = values(random.normal(size=(rows, 4, 16)), dtype).heads()
    one = rope(x, position, left, dtype)
    two = rope(x, position + shift, right, dtype, neighbours=other)
    return evidence(
        one,
        two,
        site=ROPE,
        semantic="rope",
        dtype=dtype,
        inputs={"in.0": both(x, dtype)},
        position=position,
        sample=np.zeros(rows, np.int64),
        clean=both(x[:4], dtype),
        clean_position=np.zeros(4, np.int64),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frequencies_rounded_to_bf16(dtype: str) -> None:
    plain = frequencies()
    e = rope_case(dtype, plain, rounded(plain, "bfloat16"))
    found = rope_frequency(e)
    assert found is not None
    assert (found.evidence["form"], found.evidence["dtype"]) == ("rounded", "bfloat16")
    assert found.evidence["side"] == "B (prefill)"
    assert found.evidence["zero_at_position_0"] is True
    assert names(e)[0] == "rope-frequency"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_base(dtype: str) -> None:
    found = rope_frequency(rope_case(dtype, frequencies(), frequencies(500000.0)))
    assert found is not None
    assert found.evidence["form"] == "base"
    assert found.evidence["base_right"] == pytest.approx(500000, rel=0.05)


def test_scaled_positions() -> None:
    found = rope_frequency(rope_case("float32", frequencies(), frequencies() / 2))
    assert found is not None
    assert found.evidence["form"] == "scaled"
    assert found.evidence["factor"] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_pairs_of_channels(dtype: str) -> None:
    e = rope_case(dtype, frequencies(), frequencies(), other=True)
    found = rope_pairing(e)
    assert found is not None
    assert (found.evidence["left"], found.evidence["right"]) == ("halves", "neighbours")
    assert found.evidence["equal_at_position_0"] is True
    assert found.evidence["same_angles"] is True
    assert names(e)[0] == "rope-pairing"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shift", [1, -1, 7, 93])
def test_positions_shifted(dtype: str, shift: int) -> None:
    e = rope_case(dtype, frequencies(), frequencies(), shift=shift)
    found = position_shift(e)
    assert found is not None
    assert found.evidence["shift"] == {"0": shift}
    assert names(e)[0] == "position-shift"
    assert rope_frequency(e) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_positions_shifted_where_no_row_is_near_the_start(dtype: str) -> None:
    """Decode rows alone: no line can be fitted from position 0 on, but one side turns by the usual frequencies."""
    e = rope_case(dtype, frequencies(), frequencies(), shift=1)
    assert e.out is not None
    late = np.flatnonzero(e.position > 20)
    far = evidence(
        e.out.left.heads()[late],
        e.out.right.heads()[late],
        site=ROPE,
        semantic="rope",
        dtype=dtype,
        inputs={"in.0": both(e.inputs["in.0"].left.heads()[late], dtype)},
        position=e.position[late],
    )
    found = position_shift(far)
    assert found is not None
    assert (found.evidence["shift"], found.evidence["on_right"]) == ({"0": 1}, True)


def test_rounding_noise_is_no_rope_form() -> None:
    e = rope_case("float32", frequencies(), frequencies())
    assert e.out is not None
    left = e.out.left.heads()
    noisy = ulps(left, rng(31).integers(-1, 2, left.shape))
    e = evidence(left, noisy, site=ROPE, semantic="rope", inputs=e.inputs, position=e.position)
    for test in (rope_pairing, rope_frequency, position_shift):
        assert test(e) is None
    assert names(e) == ["not-localised"]


def test_a_turn_that_is_not_in_proportion_to_the_position_is_no_frequency() -> None:
    e = rope_case("float32", frequencies(), frequencies())
    assert e.out is not None
    left = e.out.left.heads()
    turned = rope(left, np.sqrt(e.position), frequencies())
    e = evidence(left, turned, site=ROPE, semantic="rope", inputs=e.inputs, position=e.position)
    assert rope_frequency(e) is None
    assert position_shift(e) is None


def test_a_scaled_output_is_no_rotation() -> None:
    e = rope_case("float32", frequencies(), frequencies())
    assert e.out is not None
    left = e.out.left.heads()
    e = evidence(left, left * 1.01, site=ROPE, semantic="rope", inputs=e.inputs, position=e.position)
    assert rope_pairing(e) is None
    assert rope_frequency(e) is None
    assert names(e)[0] == "constant-ratio"
