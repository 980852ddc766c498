"""Single elements left alone, cut off or flushed, and heads that read other heads: a yes and a no for each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from explain_evidence import Real, both, evidence, names, rng, values
from test_explain_operators import attended, items

from zkl_debug.diff.explain import Strength
from zkl_debug.diff.explain.attention import attention
from zkl_debug.diff.explain.attention_math import attend
from zkl_debug.diff.explain.elementwise import clamped, flushed_to_zero, not_applied, signed_zero

X = values(rng(60).normal(size=(24, 64))).real
NORM = "decoder.layers.2.pre_mlp_layernorm:out"


@pytest.mark.parametrize("right", [True, False])
def test_an_operator_left_out_returns_its_input(right: bool) -> None:
    normed = X / np.sqrt((X**2).mean(axis=1, keepdims=True))
    sides = (normed, X) if right else (X, normed)
    e = evidence(*sides, site=NORM, inputs={"in": both(X)})
    found = not_applied(e)
    assert found is not None
    assert found.evidence["side"] == ("B (prefill)" if right else "A (score)")
    assert names(e)[0] == "not-applied"
    one_row = sides[0].copy(), sides[1].copy()
    one_row[int(right)][3, 5] += 1.0
    assert not_applied(evidence(*one_row, site=NORM, inputs={"in": both(X)})) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_limits_of_a_clamp_are_found(dtype: str) -> None:
    plain = values(X, dtype).real
    found = clamped(evidence(plain, np.clip(plain, -1.5, 1.0), dtype=dtype))
    assert found is not None
    assert (found.evidence["low"], found.evidence["high"], found.strength) == (-1.5, 1.0, Strength.EXACT)
    above = clamped(evidence(np.minimum(plain, 0.5), plain, dtype=dtype))
    assert above is not None
    assert (above.evidence["low"], above.evidence["high"]) == (None, 0.5)
    assert above.evidence["side"] == "A (score)"


def test_a_clamp_that_spares_one_element_is_none() -> None:
    cut = np.clip(X, -1.5, 1.0)
    at = np.unravel_index(int(X.argmax()), X.shape)
    cut[at] = X[at]
    assert clamped(evidence(X, cut)) is None
    assert clamped(evidence(X, np.where(X > 1.0, 0.0, X))) is None  # zeroed, not cut off


def test_small_values_made_zero() -> None:
    found = flushed_to_zero(evidence(X, np.where(np.abs(X) < 0.2, 0.0, X)))
    assert found is not None
    assert found.evidence["side"] == "B (prefill)"
    assert found.evidence["largest_flushed"] < 0.2 <= found.evidence["smallest_kept"]
    # Zeros anywhere else are a mask, not a threshold.
    assert flushed_to_zero(evidence(X, np.where(rng(61).random(X.shape) < 0.2, 0.0, X))) is None
    assert flushed_to_zero(evidence(X, np.where(np.abs(X) > 1.0, 0.0, X))) is None


def test_zeros_of_another_sign() -> None:
    zeros = np.where(np.abs(X) < 0.2, 0.0, X)
    e = evidence(zeros, np.where(zeros == 0, -0.0, zeros))
    found = signed_zero(e)
    assert found is not None
    assert (found.evidence["minus_left"], found.evidence["minus_right"]) == (0, found.evidence["elements"])
    assert names(e)[0] == "signed-zero"
    assert signed_zero(evidence(zeros, np.where(zeros == 0, 1e-30, zeros))) is None


def heads_read(order: list[int]) -> list[Real]:
    """Query head h reads KV head ``order[h]``."""
    made = []
    for keys in items():
        each = [
            attend(replace(keys, key=keys.key[:, g : g + 1], value=keys.value[:, g : g + 1]), keys.own, 0.25)[0][h]
            for h, g in enumerate(order)
        ]
        made.append(np.stack(each))
    return made


@pytest.mark.parametrize(("order", "words"), [([0, 1, 0, 1], "h mod 2"), ([1, 1, 0, 0], "0 reads 1")])
def test_query_heads_that_read_other_heads(order: list[int], words: str) -> None:
    found = attention(attended(heads_read(order)))
    assert found is not None
    assert (found.name, found.evidence["kv_head"]) == ("head-grouping", order)
    assert words in found.text


def test_a_head_that_fits_no_kv_head_is_no_grouping() -> None:
    heads = heads_read([1, 1, 0, 0])
    found = attention(attended([np.concatenate([o[:3], o[3:] * 1.5]) for o in heads]))
    assert found is None or found.name != "head-grouping"
