"""A row's result does not depend on the other rows, on their number, on its place, or on the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from zkl_debug.stack import attention, cpu, rowwise


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


ROW_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": rowwise.softmax,
    "log_softmax": rowwise.log_softmax,
    "mean": rowwise.mean_last,
    "exp": lambda x: rowwise.elementwise(torch.exp, x),
    "cos": lambda x: rowwise.elementwise(torch.cos, x),
}


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", ROW_FUNCTIONS)
@pytest.mark.parametrize("width", [1, 16, 100, 128])
def test_rows_are_independent(name: str, width: int) -> None:
    fn = ROW_FUNCTIONS[name]
    x = _random(301, width) * 4
    whole = fn(x)
    for start, stop in ((0, 1), (7, 8), (13, 46), (250, 301)):
        assert torch.equal(fn(x[start:stop].clone()), whole[start:stop])
    assert torch.equal(fn(x.flip(0)).flip(0), whole)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmaxes_agree_with_torch(name: str) -> None:
    x = _random(9, 100) * 5
    expected = getattr(torch, name)(x.double(), -1)
    torch.testing.assert_close(ROW_FUNCTIONS[name](x).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_matmul_rows_are_independent(dtype: torch.dtype, transposed: bool) -> None:
    b = _random(96, 64, dtype=dtype, seed=1).t() if transposed else _random(64, 96, dtype=dtype, seed=1)
    a = _random(133, 64, dtype=dtype)
    multiply = rowwise.TiledMatmul()
    whole = multiply(a, b)
    for start, stop in ((0, 1), (5, 38), (17, 133)):
        assert torch.equal(multiply(a[start:stop], b), whole[start:stop])
    assert torch.equal(multiply(a.flip(0), b).flip(0), whole)
    assert multiply(a[:0], b).shape == (0, 96)
    torch.testing.assert_close(whole, a @ b, rtol=2e-2, atol=2e-2)


def test_matmul_falls_back_to_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise.TiledMatmul, "_place_independent", lambda _self, _b: False)
    multiply = rowwise.TiledMatmul()
    a, b = _random(5, 8), _random(8, 4)
    assert torch.equal(multiply(a, b), torch.cat([row[None] @ b for row in a]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_rows_are_independent(dtype: torch.dtype) -> None:
    q, k, v = (_random(150, heads, 16, dtype=dtype, seed=heads) for heads in (4, 2, 1))
    v = v.repeat_interleave(2, 1)
    whole = attention.reference_attention(q, k, v, 0.25)
    for first, last in ((0, 1), (0, 40), (39, 40), (64, 130), (128, 129), (149, 150)):
        part = attention.reference_attention(q[first:last], k[:last], v[:last], 0.25)
        assert torch.equal(part, whole[first:last]), (first, last)
    keys, values = (t.repeat_interleave(2, 1).transpose(0, 1)[None].float() for t in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None].float(), keys, values, is_causal=True, scale=0.25
    )[0].transpose(0, 1)
    torch.testing.assert_close(whole.float(), expected, rtol=1e-2, atol=1e-2)


def test_halves_of_attention_merge_to_the_whole() -> None:
    q, k, v = (_random(20, 2, 8, seed=s) for s in (1, 2, 3))
    whole = attention.reference_attention(q, k, v, 0.3)
    first, second = (attention.attention_parts(q[19:], k, v, 0.3, part) for part in (slice(0, 9), slice(9, None)))
    top = torch.maximum(first[2], second[2])
    weights = [(part[2] - top).exp() for part in (first, second)]
    merged = sum(p[0] * w[..., None] for p, w in zip((first, second), weights, strict=True))
    total = sum(p[1] * w for p, w in zip((first, second), weights, strict=True))
    torch.testing.assert_close(merged / total[..., None], whole[19:])  # type: ignore[index]


def test_ordered_unpermute_adds_in_expert_order() -> None:
    from zkl_debug.stack.combine import ordered_unpermute

    slots = torch.tensor([0, 2, 0, 1, 2, 1, 2])  # token of each slot, grouped by expert
    rows = _random(7, 5, dtype=torch.bfloat16)
    out = ordered_unpermute(rows, slots, (4, 5))
    assert torch.equal(out[0], rows[0] + rows[2])
    assert torch.equal(out[1], rows[3] + rows[5])
    assert torch.equal(out[2], rows[1] + rows[4] + rows[6])
    assert torch.equal(out[3], torch.zeros(5, dtype=torch.bfloat16))
    backwards = ordered_unpermute(rows, slots, (4, 5), reverse=True)
    assert torch.equal(backwards[2], rows[6] + rows[4] + rows[1])


def test_replaced_kernels_keep_gradients() -> None:
    x = _random(10, 64).requires_grad_()
    w = _random(64, 64, seed=2).requires_grad_()

    def loss() -> Tensor:
        return torch.nn.functional.silu(x @ w).mean(-1).sum() + torch.log_softmax(x @ w, -1)[:, 3].sum()

    plain = torch.autograd.grad(loss(), (x, w))
    with cpu.gemm_row_tiles(), cpu.norm_rows(), cpu.activation_rows(), cpu.log_softmax_rows():
        tiled = torch.autograd.grad(loss(), (x, w))
    for a, b in zip(plain, tiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_replaced_kernels_defer_on_other_axes() -> None:
    x = _random(6, 5, 4)
    with cpu.norm_rows(), cpu.softmax_rows(), cpu.log_softmax_rows():
        torch.testing.assert_close(x.mean(0), x.sum(0) / 6)
        torch.testing.assert_close(x.mean((1, 2)), x.sum((1, 2)) / 20)
        torch.testing.assert_close(x.softmax(1).sum(1), torch.ones(6, 4))
        torch.testing.assert_close(x.log_softmax(0).exp().sum(0), torch.ones(5, 4))
