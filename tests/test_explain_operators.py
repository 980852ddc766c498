"""Explanations of attention, log-softmax, labels, experts and rows that hold other rows; a yes and a no for each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from explain_evidence import Real, both, evidence, names, pair, rng, ulps, values

from zkl_debug.diff.explain import Evidence
from zkl_debug.diff.explain.attention import attention
from zkl_debug.diff.explain.attention_math import attend
from zkl_debug.diff.explain.elementwise import soft_cap
from zkl_debug.diff.explain.logprob import label_fault, log_softmax_formula, softmax_support, temperature
from zkl_debug.diff.explain.model import Keys, Labels, Routing, Source
from zkl_debug.diff.explain.moe import combine_order, routing_flip, routing_weights
from zkl_debug.diff.explain.numeric import rounded
from zkl_debug.diff.explain.rows import equals_other_sample, row_shift, uninitialised
from zkl_debug.diff.model import Bools

CORE = "decoder.layers.0.self_attention.core_attention:out"
SOFTMAX = "logprobs/log_softmax:out.0"
COMBINE = "decoder.layers.1.mlp/unpermute:out.0"
TOPK = "decoder.layers.1.mlp/router.topk:out.0"


# ---- attention --------------------------------------------------------------------------------------------------
def items(before: int = 6) -> list[Keys]:
    """Rows of the second sequence of a pack; ``before`` keys of the first one are candidates too."""
    random = rng(40)
    made = []
    for last in range(4, 12):
        n = before + last + 1
        own = np.arange(n) >= before
        position = np.where(own, np.arange(n) - before, np.arange(n))
        sample = np.where(own, 7, 4)
        k, v = random.normal(size=(n, 2, 16)), random.normal(size=(n, 2, 16))
        made.append(Keys(random.normal(size=(4, 16)), k, v, position, own, sample, own.astype(np.int64), last, 7, 1))
    return made


def attended(right: list[Real], dtype: str = "float32") -> Evidence:
    keys = items()
    left = np.stack([attend(k, k.own, 0.25)[0].ravel() for k in keys])
    e = evidence(left, np.stack([o.ravel() for o in right]), site=CORE, semantic="core_attention", dtype=dtype)
    return replace(e, attention=lambda: [(i, k, k) for i, k in enumerate(keys)])


def under(use: list[Bools], scale: float = 0.25) -> list[Real]:
    return [attend(k, u, scale)[0] for k, u in zip(items(), use, strict=True)]


def test_keys_of_the_sequence_before_entered() -> None:
    found = attention(attended(under([np.ones(len(k.own), np.bool_) for k in items()])))
    assert found is not None
    assert (found.name, found.evidence["mask"], found.evidence["side"]) == (
        "mask-fit",
        "earlier-sequences",
        "B (prefill)",
    )
    assert found.evidence["extra_from_samples"] == [4]


def test_a_sliding_window() -> None:
    found = attention(attended(under([k.own & (k.position > k.row_position - 3) for k in items()])))
    assert found is not None
    assert found.evidence["mask"] == "window-3"


def test_two_sliding_windows() -> None:
    """Neither side reads all keys: each is fitted by itself, and equal windows are no finding."""

    def window(size: int) -> list[Real]:
        return under([k.own & (k.position > k.row_position - size) for k in items()])

    def case(left: int, right: int) -> Evidence:
        one, two = (np.stack([o.ravel() for o in window(size)]) for size in (left, right))
        e = evidence(one, two, site=CORE, semantic="core_attention")
        return replace(e, attention=lambda: [(i, k, k) for i, k in enumerate(items())])

    found = attention(case(4, 3))
    assert found is not None
    assert (found.evidence["left_mask"], found.evidence["right_mask"]) == ("window-4", "window-3")
    assert attention(case(3, 3)) is None


def test_another_scale() -> None:
    found = attention(attended(under([k.own for k in items()], 0.3)))
    assert found is not None
    assert (found.name, found.evidence["scale"]) == ("softmax-scale", pytest.approx(0.3, rel=1e-4))


@pytest.mark.parametrize("factor", [1 + 2**-7, 1 + 2**-6, 1 + 2**-5])
def test_a_scale_that_is_only_just_off_is_no_order(factor: float) -> None:
    """In bf16 such a scale stays within what rounding could do; but rounding has no form that fits as well."""
    found = attention(attended(under([k.own for k in items()], 0.25 * factor), "bfloat16"))
    assert found is not None
    assert found.name in ("softmax-scale", "reduction-order")
    assert factor < 1 + 2**-6 or found.name == "softmax-scale"


def test_rounding_alone_is_an_order() -> None:
    exact = [attend(k, k.own, 0.25)[0] for k in items()]
    found = attention(attended([ulps(o, rng(41).integers(-2, 3, o.shape)) for o in exact]))
    assert found is not None
    assert found.name == "reduction-order"


def test_unrelated_outputs_fit_no_mask() -> None:
    assert attention(attended([rng(i).normal(size=(4, 16)) for i in range(8)])) is None


# ---- log-softmax and labels -------------------------------------------------------------------------------------
def softmax_case(left: Real, right: Real, x: Real) -> Evidence:
    return evidence(left, right, site=SOFTMAX, semantic="log_softmax", inputs={"in.0": both(x)})


def log_softmax(x: Real) -> Real:
    top = x.max(axis=1, keepdims=True)
    return np.asarray(x - top - np.log(np.exp(x - top).sum(axis=1, keepdims=True)))


LOGITS = values(rng(42).normal(size=(30, 50)) * 3).real


def test_temperature_is_fitted() -> None:
    e = softmax_case(log_softmax(LOGITS / 0.7), log_softmax(LOGITS), LOGITS)
    found = temperature(e)
    assert found is not None
    assert (found.evidence["left"], found.evidence["right"]) == (0.7, 1.0)
    assert names(e)[0] == "temperature"


def test_equal_temperatures_and_unscaled_noise_are_none() -> None:
    plain = log_softmax(LOGITS)
    assert temperature(softmax_case(plain, ulps(plain, 1), LOGITS)) is None
    assert temperature(softmax_case(plain, log_softmax(LOGITS**3), LOGITS)) is None


def test_the_formula_of_each_side() -> None:
    x = LOGITS.astype(np.float32)
    top = x.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(x - top).sum(axis=1, keepdims=True))
    one, two = x - (top + log_sum), (x - top) - log_sum
    differs = (one != two).any(axis=1)
    e = softmax_case(one[differs], two[differs], x[differs])
    found = log_softmax_formula(e)
    assert found is not None
    assert (found.evidence["formulas"], found.evidence["benign"]) == (["one-pass", "two-pass"], True)
    other = log_softmax_formula(softmax_case(two, (x - top) - np.nextafter(log_sum, np.float32(9)), x))
    assert other is not None
    assert other.name == "reduction-order"


def test_logits_rounded_before_the_log_softmax() -> None:
    def by_formula(x: Real) -> Real:
        shifted = x - x.max(axis=1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))

    x = LOGITS.astype(np.float32)
    coarse = rounded(LOGITS, "bfloat16").astype(np.float32)
    found = log_softmax_formula(softmax_case(by_formula(x), by_formula(coarse), x))
    assert found is not None
    assert (found.name, found.evidence["dtype"], found.evidence["side"]) == (
        "extra-rounding",
        "bfloat16",
        "B (prefill)",
    )
    noisy = by_formula(x * np.float32(1.001))
    assert log_softmax_formula(softmax_case(by_formula(x), noisy, x)) is None


def test_a_sum_that_leaves_columns_out() -> None:
    short = LOGITS - (LOGITS - log_softmax(LOGITS))[:, :1]
    top = LOGITS.max(axis=1, keepdims=True)
    short = LOGITS - top - np.log(np.exp(LOGITS - top)[:, :40].sum(axis=1, keepdims=True))
    found = softmax_support(softmax_case(log_softmax(LOGITS), short, LOGITS))
    assert found is not None
    assert (found.evidence["form"], found.evidence["used"]) == ("first columns", 40)
    assert softmax_support(softmax_case(log_softmax(LOGITS), log_softmax(LOGITS + 0.1), LOGITS)) is None


def test_which_label_was_used() -> None:
    intended = np.array([5, 6, 7])
    labels = Labels((np.array([9, 9, 9]), intended), intended, following=([{9}] * 3, [set()] * 3))
    e = replace(evidence(LOGITS[:3, :1], LOGITS[3:6, :1], site="logprobs/selected:out.0"), parents=labels)
    found = label_fault(e)
    assert found is not None
    assert "first token of another sequence" in found.text
    assert label_fault(replace(e, parents=Labels((intended, intended), intended))) is None


def test_a_log_prob_read_from_another_column_than_its_label() -> None:
    table = values(log_softmax(LOGITS)[:12]).real
    intended = np.arange(12) + 20
    right = table[np.arange(12), np.minimum(intended, 22)][:, None]
    right_rows = np.flatnonzero(intended > 22)
    left = table[np.arange(12), intended][:, None]
    e = evidence(left[right_rows], right[right_rows], site="logprobs/selected:out.0")
    one = Labels(
        (intended[right_rows], intended[right_rows]), intended[right_rows], table[right_rows], table[right_rows]
    )
    found = label_fault(replace(e, parents=one))
    assert found is not None
    assert (found.name, found.evidence["side"], found.evidence["example"]["used"]) == ("label-fault", "B (prefill)", 22)
    assert "one and the same token" in found.text
    noise = replace(e, out=pair(left[right_rows], left[right_rows] + 1e-3), parents=one)
    assert label_fault(noise) is None


# ---- experts ----------------------------------------------------------------------------------------------------
def combined(parts: Real, order: list[int], dtype: str) -> Real:
    total = parts[:, order[0]]
    for at in order[1:]:
        total = rounded(total + parts[:, at], dtype)
    return total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_order_of_the_combine(dtype: str) -> None:
    parts = values(rng(43).normal(size=(20, 4, 32)), dtype).heads()
    sides = combined(parts, [0, 1, 2, 3], dtype), combined(parts, [3, 2, 1, 0], dtype)
    e = evidence(*sides, site=COMBINE, semantic="unpermute", dtype=dtype, inputs={"in.0": both(parts, dtype)})
    found = combine_order(e)
    assert found is not None
    assert "descending" in str(found.evidence["right"])
    assert names(e) == ["reduction-order"]
    missing = evidence(sides[0], combined(parts, [0, 1, 2], dtype), site=COMBINE, dtype=dtype, inputs=e.inputs)
    assert combine_order(missing) is None


def test_flips_with_margins() -> None:
    logits = np.array([[3.0, 2.0, 1.999, 0.0]])
    chosen = (np.array([[True, True, False, False]]), np.array([[True, False, True, False]]))
    routing = Routing(TOPK, chosen, (logits, logits), np.array([4]), np.array([9]))
    found = routing_flip(replace(evidence(logits, logits, site=TOPK), routing=routing))
    assert found is not None
    assert found.evidence["largest_margin"] == pytest.approx(0.001)
    same = Routing(TOPK, (chosen[0], chosen[0]), None, np.array([4]), np.array([9]))
    assert routing_flip(replace(evidence(logits, logits, site=TOPK), routing=same)) is None


def test_weights_recomputed_over_all_experts() -> None:
    x = values(rng(44).normal(size=(20, 8))).real
    chosen = x >= np.sort(x, axis=1)[:, -4:-3]
    every = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) * chosen
    own = every / every.sum(axis=1, keepdims=True)
    routing = Routing(TOPK, (chosen, chosen), (x, x), np.zeros(20, np.int64), np.arange(20))
    e = evidence(every, own, site=TOPK, semantic="router.topk", inputs={"in.0": both(x)})
    found = routing_weights(replace(e, routing=routing))
    assert found is not None
    assert (found.evidence["left"], found.evidence["right"]) == (
        "a softmax over all experts",
        "a softmax over the chosen experts",
    )


def test_one_rank_of_experts_weighed_otherwise() -> None:
    x = values(rng(45).normal(size=(20, 8))).real
    chosen = x >= np.sort(x, axis=1)[:, -4:-3]
    every = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) * chosen
    own = every / every.sum(axis=1, keepdims=True)
    second = np.argsort(-every, axis=1)[:, 1:2]
    odd, noise = own.copy(), own.copy()
    np.put_along_axis(odd, second, np.take_along_axis(every, second, 1), 1)
    np.put_along_axis(noise, second, 0.123, 1)
    routing = Routing(TOPK, (chosen, chosen), (x, x), np.zeros(20, np.int64), np.arange(20))

    def case(right: Real) -> Evidence:
        e = evidence(own, right, site=TOPK, semantic="router.topk", inputs={"in.0": both(x)})
        return replace(e, routing=routing)

    found = routing_weights(case(odd))
    assert found is not None
    usual = "a softmax over the chosen experts"
    assert (found.evidence["left"], found.evidence["right"]) == (
        usual,
        f"{usual}, those ranked 2 by a softmax over all experts",
    )
    assert routing_weights(case(noise)) is None


def test_a_soft_cap() -> None:
    x = values(rng(46).normal(size=(20, 64)) * 9).real
    found = soft_cap(evidence(x, 30 * np.tanh(x / 30), site="output_layer:out"))
    assert found is not None
    assert (found.evidence["cap"], found.evidence["side"]) == (30.0, "B (prefill)")
    assert soft_cap(evidence(x, x * 0.97, site="output_layer:out")) is None
    assert soft_cap(evidence(x, np.clip(x, -12, 12), site="output_layer:out")) is None


# ---- rows that hold other rows ----------------------------------------------------------------------------------
def source(shift: Real, chain: bool, equal: bool = True) -> Source:
    m = len(shift)
    yes, no = np.ones(m, np.bool_), np.zeros(m, np.bool_)
    own = np.arange(m)
    where = np.zeros(m, np.int64) if chain else np.full(m, 3)
    found = yes if equal else no
    return Source(
        found, where, own + shift, found & chain, no, shift, lambda _k: (yes, found), np.zeros(m, np.int64), own
    )


def test_rows_shifted_or_of_another_sample() -> None:
    x = rng(45).normal(size=(10, 8))
    e, none = evidence(x, x + 1), source(np.zeros(10, np.int64), True, equal=False)
    shifted = row_shift(replace(e, sources=(source(np.ones(10, np.int64), True), none)))
    assert shifted is not None
    assert shifted.evidence["lag_of_left"] == 1
    assert row_shift(replace(e, sources=(source(np.arange(10) % 3 + 1, True), none))) is None
    other = equals_other_sample(replace(e, sources=(source(np.zeros(10, np.int64), False), none)))
    assert other is not None
    assert other.evidence["from"] == {"0": 3}
    assert equals_other_sample(replace(e, sources=(none, none))) is None


@pytest.mark.parametrize(("fill", "form"), [(0.0, "zero"), (np.nan, "nan"), (7.0, "constant")])
def test_rows_never_written(fill: float, form: str) -> None:
    x = rng(46).normal(size=(10, 8))
    found = uninitialised(evidence(x, np.full_like(x, fill)))
    assert found is not None
    assert found.evidence["form"] == form
    assert uninitialised(evidence(x, x + 1)) is None
