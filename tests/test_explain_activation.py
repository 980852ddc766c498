"""Which activation each side applied, from equal values before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from explain_evidence import Real, both, evidence, names, rng, says, values

from zkl_debug.diff.explain.activation import FUNCTIONS, activation
from zkl_debug.diff.explain.model import Evidence
from zkl_debug.diff.explain.numeric import rounded

SITE = "decoder.layers.1.mlp.linear_fc2:in"
HALVES = rng(70).normal(size=(32, 48)) * 2


def case(left: Real, right: Real, dtype: str = "float32", **inputs: Real) -> Evidence:
    given: dict[str, Any] = {
        name.replace("_out", ":out").replace("_in", ":in.1"): both(x, dtype) for name, x in inputs.items()
    }
    return evidence(left, right, site=SITE, dtype=dtype, inputs=given)


def gated(x: Real, name: str, dtype: str, swap: bool = False, beta: float = 1.0) -> Real:
    x = values(x, dtype).real
    g, u = x[:, :24], x[:, 24:]
    if swap:
        g, u = u, g
    return rounded(rounded(FUNCTIONS[name](beta * g) / beta, dtype) * u, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "other"), [("silu", "gelu"), ("gelu", "gelu-tanh"), ("silu", "quick-gelu"), ("relu", "silu")]
)
def test_two_functions_are_told_apart(name: str, other: str, dtype: str) -> None:
    e = case(gated(HALVES, name, dtype), gated(HALVES, other, dtype), dtype, linear_fc1_out=HALVES)
    found = activation(e)
    assert found is not None
    assert (found.name, found.evidence["left"], found.evidence["right"]) == ("activation", name, other)
    assert names(e)[0] == "activation"


def test_the_other_half_and_a_scaled_argument() -> None:
    right = gated(HALVES, "silu", "float32", swap=True)
    found = activation(case(gated(HALVES, "silu", "float32"), right, linear_fc1_out=HALVES))
    assert found is not None
    assert (found.evidence["left_gate"], found.evidence["right_gate"]) == ("first", "second")
    scaled = gated(HALVES, "silu", "float32", beta=1.5)
    found = activation(case(gated(HALVES, "silu", "float32"), scaled, linear_fc1_out=HALVES))
    assert found is not None
    assert found.evidence["right_beta"] == pytest.approx(1.5, rel=1e-4)


def test_two_layers_before_it_and_an_expert_probability() -> None:
    gate, up, share = HALVES[:, :24], HALVES[:, 24:], np.abs(HALVES[:, :1])
    silu, gelu = (rounded(FUNCTIONS[name](values(gate).real) * values(up).real, "float32") for name in ("silu", "gelu"))
    found = activation(case(silu, gelu, gate_proj_out=gate, up_proj_out=up))
    assert found is not None
    assert (found.evidence["left"], found.evidence["right"]) == ("silu", "gelu")
    one, two = (rounded(each * values(share).real, "float32") for each in (silu, gelu))
    found = activation(case(one, two, linear_fc1_out=HALVES, experts_in=share))
    assert found is not None
    assert (found.evidence["left"], found.evidence["right"]) == ("silu", "gelu")


def test_the_same_function_rounded_elsewhere() -> None:
    x = values(HALVES, "bfloat16").real
    once = rounded(FUNCTIONS["silu"](x[:, :24]) * x[:, 24:], "bfloat16")
    found = activation(case(gated(HALVES, "silu", "bfloat16"), once, "bfloat16", linear_fc1_out=HALVES))
    assert found is not None
    assert found.name == "activation-rounding"


def test_unrelated_values_and_values_that_differ_before_it_are_none() -> None:
    noise = rng(71).normal(size=(32, 24))
    assert activation(case(noise, noise * 2 + 1, linear_fc1_out=HALVES)) is None
    e = case(gated(HALVES, "silu", "float32"), gated(HALVES, "gelu", "float32"))
    assert not says("activation", e)
    one = gated(HALVES, "silu", "float32")
    off = one.copy()
    off[3, 5] += 0.5
    found = activation(case(one, off, linear_fc1_out=HALVES))
    assert found is None or found.evidence["right"] is None
