"""The referee: float64 says who is wrong, and lets rounding be rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from zkl_debug.bits import F64
from zkl_debug.diff import formulas
from zkl_debug.diff.explain.model import Evidence, Keys, Port, Values
from zkl_debug.diff.referee import limit_of, referee, ruled
from zkl_debug.schema import parse_site

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


def values(tensor: torch.Tensor) -> Values:
    flat = tensor.detach().contiguous().reshape(len(tensor), -1)
    raw = flat.view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()
    bits = raw.view(np.uint16 if tensor.element_size() == 2 else np.uint32)
    return Values(bits, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))


def case(site: str, x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **more: Any) -> Evidence:
    port = Port(values(x), values(x))
    return Evidence(parse_site(site), out=Port(values(left), values(right)), inputs={"in": port}, **more)


def double(**tensors: torch.Tensor | float) -> dict[str, F64]:
    return {name: np.asarray(torch.as_tensor(value).double().numpy()) for name, value in tensors.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_in_another_order_is_rounding_and_with_other_weights_is_wrong(dtype: str) -> None:
    x, w = torch.randn(40, 96).to(DTYPES[dtype]), torch.randn(32, 96).to(DTYPES[dtype])
    whole = (x.float() @ w.float().t()).to(x.dtype)
    halves = (x[:, :48].float() @ w[:, :48].float().t()).to(x.dtype) + (x[:, 48:] @ w[:, 48:].t())
    site = "decoder.layers.0.self_attention.linear_qkv:out"
    ruling = referee(case(site, x, whole, halves), double(weight=w))
    assert ruling.verdict == "rounding", ruling.text
    stale = (x.float() @ (w.float() + 0.1).t()).to(x.dtype)
    ruling = referee(case(site, x, whole, stale), double(weight=w))
    assert ruling.verdict == "right-wrong", ruling.text
    assert referee(case(site, x, stale, whole), double(weight=w)).verdict == "left-wrong"
    assert referee(case(site, x, stale, stale * 2), double(weight=w)).verdict == "both-wrong"


def test_slightly_older_weights_are_wrong_in_bfloat16_though_each_element_could_be_rounding() -> None:
    x, w = torch.randn(200, 64).bfloat16(), torch.randn(128, 64).bfloat16()
    old = (w.float() - torch.randn(128, 64) * 1e-2).bfloat16()
    sound, stale = ((x.float() @ weight.float().t()).bfloat16() for weight in (w, old))
    ruling = referee(case("output_layer:out", x, sound, stale), double(weight=w))
    assert ruling.verdict == "right-wrong", ruling.text
    parts = [a @ b.t() for a, b in zip(x.chunk(8, 1), w.chunk(8, 1), strict=True)]
    split = parts[0]
    for part in parts[1:]:
        split = split + part
    ruling = referee(case("output_layer:out", x, sound, split), double(weight=w))
    assert ruling.verdict == "rounding", ruling.text


def test_norm_with_another_eps_is_wrong_and_rounding_before_gamma_is_not() -> None:
    x, w = torch.randn(64, 64) * 0.5, torch.rand(64) + 0.5

    def norm(x: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    site = "decoder.layers.0.input_layernorm:out"
    ruling = referee(case(site, x, norm(x, 1e-5) * w, norm(x, 1e-6) * w), double(weight=w, eps=1e-5))
    assert ruling.verdict == "right-wrong", ruling.text
    low, gamma = x.bfloat16(), w.bfloat16()
    late = (norm(low.float(), 1e-5) * gamma.float()).bfloat16()
    early = norm(low.float(), 1e-5).bfloat16() * gamma
    assert not torch.equal(late, early)
    ruling = referee(case(site, low, late, early), double(weight=gamma, eps=1e-5))
    assert ruling.verdict == "rounding", ruling.text


def test_layernorm_has_a_mean_and_a_bias() -> None:
    x, w, b = torch.randn(30, 48), torch.rand(48), torch.randn(48)
    exact, size = formulas.layernorm(x.double().numpy(), w.double().numpy(), b.double().numpy(), 1e-5)
    torch_one = torch.nn.functional.layer_norm(x.double(), (48,), w.double(), b.double(), 1e-5).numpy()
    assert np.allclose(exact, torch_one, rtol=1e-12, atol=1e-12)
    assert (size >= np.abs(exact) * 0.99).all()


def test_combine_in_another_order_is_rounding_and_a_lost_expert_is_wrong() -> None:
    parts = torch.randn(50, 4, 64).bfloat16()
    up = parts[:, 0] + parts[:, 1] + parts[:, 2] + parts[:, 3]
    down = parts[:, 3] + parts[:, 2] + parts[:, 1] + parts[:, 0]
    site = "decoder.layers.1.mlp/unpermute:out.0"
    assert referee(case(site, parts, up, down), {}).verdict == "rounding"
    assert referee(case(site, parts, up, parts[:, :3].sum(1)), {}).verdict == "right-wrong"


def test_log_softmax_formulas_round_and_a_temperature_is_wrong() -> None:
    x = torch.randn(20, 128) * 4
    two_pass = torch.log_softmax(x, -1)
    one_pass = x - torch.logsumexp(x, -1, keepdim=True)
    site = "logprobs/log_softmax:out.0"
    assert referee(case(site, x, two_pass, one_pass), {}).verdict == "rounding"
    assert referee(case(site, x, two_pass, torch.log_softmax(x / 0.7, -1)), {}).verdict == "right-wrong"


def test_swiglu_and_rope_are_what_torch_computes() -> None:
    x = torch.randn(12, 32)
    exact, _ = formulas.swiglu(x.double().numpy())
    assert np.allclose(exact, (torch.nn.functional.silu(x[:, :16].double()) * x[:, 16:].double()).numpy())
    heads, position = torch.randn(12, 3, 16), np.arange(12) * 5
    frequencies = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    for interleaved in (False, True):
        exact, _ = formulas.rope(heads.double().numpy(), position, frequencies, interleaved)
        pairs = exact.reshape(12, 3, 8, 2) if interleaved else exact.reshape(12, 3, 2, 8).swapaxes(2, 3)
        before = heads.double().reshape(12, 3, 8, 2) if interleaved else heads.double().reshape(12, 3, 2, 8).mT
        turned = torch.view_as_complex(before.contiguous()) * torch.polar(
            torch.ones(1).double(), torch.from_numpy(position[:, None, None] * frequencies)
        )
        assert np.allclose(torch.view_as_real(turned).numpy(), pairs)


def test_rope_with_rounded_frequencies_is_wrong() -> None:
    x, position = torch.randn(30, 2, 16), np.arange(30)
    exact = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    coarse = torch.from_numpy(exact).bfloat16().double().numpy()
    outs = [torch.from_numpy(formulas.rope(x.double().numpy(), position, f)[0]).float() for f in (exact, coarse)]
    found = case("decoder.layers.0.self_attention/rope.q:out.0", x, outs[0], outs[1], position=position)
    ruling = referee(found, {"frequencies": exact})
    assert ruling.verdict == "right-wrong", ruling.text


def keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Keys:
    n = len(k)
    numbers = np.arange(n)
    own = np.ones(n, np.bool_)
    zeros = np.zeros(n, np.int64)
    query, key, value = (t.double().numpy() for t in (q, k, v))
    return Keys(query, key, value, numbers, own, zeros, zeros, n - 1, 0, 0)


def test_attention_that_reads_one_key_less_is_wrong() -> None:
    rows, outs = [], ([], [], [])  # type: ignore[var-annotated]
    for i in range(4):
        q, k, v = torch.randn(4, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
        rows.append((i, keys(q, k, v), keys(q, k, v)))
        for out, use in zip(outs, (torch.arange(20), torch.arange(19, -1, -1), torch.arange(19)), strict=True):
            kk, vv = (t[use].repeat_interleave(2, 1) for t in (k, v))
            weight = torch.softmax(torch.einsum("hd,nhd->hn", q, kk) / 4.0, -1)
            out.append(torch.einsum("hn,nhd->hd", weight, vv))
    whole, other_order, less = (torch.stack(out) for out in outs)
    site = "decoder.layers.0.self_attention.core_attention:out"
    for right, verdict in ((other_order, "rounding"), (less, "right-wrong")):
        ruling = referee(case(site, whole, whole, right, attention=lambda: rows), {})
        assert ruling.verdict == verdict, ruling.text
        assert ruling.rows == 4


def test_no_ruling_says_what_is_missing() -> None:
    x = torch.randn(4, 8)
    assert "weight" in referee(case("decoder.layers.0.mlp.linear_fc1:out", x, x, x), {}).reason
    assert "no formula" in referee(case("decoder.layers.0/mlp_bda:out.0", x, x, x), {}).reason
    assert "raw bits" in referee(Evidence(parse_site("output_layer:out")), {}).reason
    assert referee(case("output_layer:in", x, x, x), {}).verdict == "no-ruling"


def test_limits_grow_with_the_number_of_addends() -> None:
    assert limit_of("linear", 4, "float32") == 4.0
    assert limit_of("linear", 400, "float32") == 20.0
    assert limit_of("linear", 400, "bfloat16") == 2.0
    assert limit_of("combine", 8, "bfloat16") == 5.0
    assert limit_of("norm", 4096, "float32") == 4.0
    assert [ruled(1, 1, 2), ruled(3, 1, 2), ruled(1, 3, 2), ruled(3, 3, 2)] == [
        "rounding",
        "left-wrong",
        "right-wrong",
        "both-wrong",
    ]
