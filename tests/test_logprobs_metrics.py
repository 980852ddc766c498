"""NeMo-RL's metrics: by hand, and to the last bit against the same formulas in torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zkl_debug.logprobs.metrics import Metrics, compute_arrays, torch_sum
from zkl_debug.logprobs.table import F32

MEANS = (
    "token_mult_prob_error",
    "gen_kl_error",
    "gen_kl_k1",
    "gen_kl_k2",
    "policy_kl_error",
    "js_divergence_error",
    "sampling_importance_ratio",
)


def f32(*values: float) -> F32:
    return np.asarray(values, np.float32)


def metrics(gen: F32, train: F32, mask: F32 | None = None, curr: F32 | None = None) -> Metrics:
    mask = np.ones_like(gen) if mask is None else mask
    return compute_arrays(gen, train, mask, np.zeros(gen.shape[0], np.int64), curr)


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def test_equal_sides_are_exactly_zero_and_one() -> None:
    x = -np.random.default_rng(0).exponential(2, 1000).astype(np.float32)
    m = metrics(x, x.copy(), curr=x.copy())
    assert (m.token_mult_prob_error, m.gen_kl_error, m.policy_kl_error) == (1, 0, 0)
    assert abs(m.js_divergence_error) < 1e-9  # log(exp(x)) rounds, in NeMo-RL too
    assert (m.gen_kl_k1, m.gen_kl_k2, m.sampling_importance_ratio, m.max_abs) == (0, 0, 1, 0)
    assert (m.probs_ratio_min, m.probs_ratio_max) == (1, 1)
    assert (m.max_seq_mult_prob_error, m.mean_seq_mult_prob_error, m.min_seq_mult_prob_error) == (1, 1, 1)
    assert (m.exact, m.tokens, m.sequences) == (1000, 1000, 1)


def test_by_hand() -> None:
    """Two valid tokens, differences 0 and ln 2; the third token is masked."""
    ln2 = float(np.float32(math.log(2)))
    m = metrics(f32(-1.0, -1.0, -9.0), f32(-1.0, -1.0 - ln2, -1.0), f32(1, 1, 0))
    d = float(np.float32(-1.0) - np.float32(-1.0 - ln2))  # as float32 subtraction leaves it
    r = np.float32(-d)
    up, down = np.float32(math.exp(d)), np.float32(math.exp(-d))
    two, one = np.float32(2) + np.float32(1e-8), np.float32(1)
    assert bits(m.token_mult_prob_error) == bits(float((one + up) / two))
    assert bits(m.gen_kl_error) == bits(float((down - one - r) / two))
    assert bits(m.policy_kl_error) == bits(float((up - one + r) / two))
    assert bits(m.gen_kl_k1) == bits(float(-r / two))
    assert bits(m.gen_kl_k2) == bits(float(r * r / np.float32(2) / two))
    assert bits(m.sampling_importance_ratio) == bits(float((one + down) / two))
    assert bits(m.max_seq_mult_prob_error) == bits(float((one + up) / np.float32(2)))
    assert m.max_abs == d
    assert (m.tokens, m.exact) == (2, 1)
    assert m.probs_ratio_min is None


def test_denominator_has_epsilon_only_for_token_means() -> None:
    m = metrics(f32(-1.0), f32(-2.0))
    assert bits(m.token_mult_prob_error) == bits(float(np.float32(math.e) / (np.float32(1) + np.float32(1e-8))))
    assert bits(m.max_seq_mult_prob_error) == bits(math.e)


def test_empty_mask_gives_zero_not_nan() -> None:
    m = metrics(f32(-1, -2), f32(-3, -4), f32(0, 0), curr=f32(-1, -1))
    assert all(getattr(m, name) == 0 for name in MEANS)
    assert (m.max_seq_mult_prob_error, m.mean_seq_mult_prob_error, m.min_seq_mult_prob_error) == (0, 0, 0)
    assert (m.probs_ratio_min, m.probs_ratio_max) == (math.inf, -math.inf)
    assert (m.tokens, m.sequences, m.max_abs) == (0, 0, 0)


def test_no_rows() -> None:
    assert metrics(f32(), f32()).token_mult_prob_error == 0


def test_a_masked_infinity_makes_the_mean_nan_as_in_nemo_rl_and_says_so() -> None:
    m = metrics(f32(-1, 0), f32(-1, -np.inf), f32(1, 0))
    assert math.isnan(m.gen_kl_error)
    assert m.sampling_importance_ratio == 1  # nan_to_num comes first there
    assert m.max_abs == 0
    assert "0 valid and 1 masked" in m.notes[0]
    assert "valid rows are not to blame" in m.notes[0]


def test_infinity_on_a_valid_row() -> None:
    m = metrics(f32(-1, -2), f32(-1, -np.inf))
    assert m.token_mult_prob_error == math.inf
    assert m.max_abs == math.inf
    assert m.exact == 1
    both = metrics(f32(-np.inf), f32(-np.inf))
    assert both.exact == 1
    assert both.max_abs == 0
    assert math.isnan(both.gen_kl_error)


def test_nan_is_never_equal_to_a_number() -> None:
    m = metrics(f32(np.nan, -1), f32(-1, -1))
    assert m.exact == 1
    assert math.isnan(m.max_abs)
    assert m.to_json()["max_abs"] == "nan"


def test_signed_zero_counts_as_different_bits() -> None:
    m = metrics(f32(-0.0, -1), f32(0.0, -1))
    assert (m.exact, m.max_abs, m.token_mult_prob_error) == (1, 0, 1)


def test_a_huge_difference_overflows_as_float32_does() -> None:
    m = metrics(f32(-1), f32(-101))
    assert m.token_mult_prob_error == math.inf
    assert "too large" in m.notes[0]


def test_masked_sequences_do_not_enter_the_sequence_metrics() -> None:
    m = compute_arrays(f32(-1, -1, -1), f32(-2, -1, -9), f32(1, 1, 0), np.arange(3, dtype=np.int64))
    assert m.sequences == 2
    assert bits(m.max_seq_mult_prob_error) == bits(math.e)
    assert m.min_seq_mult_prob_error == 1


def test_probs_ratio_takes_extremes_over_valid_tokens() -> None:
    m = metrics(f32(-1, -1, -1), f32(-1, -2, -3), f32(1, 1, 0), curr=f32(-1, -1, 9))
    assert m.probs_ratio_min == 1
    assert bits(m.probs_ratio_max or 0) == bits(math.e)


def test_sum_of_few_values_by_hand() -> None:
    """Below 8 values torch adds value 4 to accumulator 0 first: (a + e) + b + c + d."""
    a, b, c, d, e = f32(1e8, 3, -1e8, 7, 5)
    assert torch_sum(f32(a, b, c, d, e)) == np.float32(np.float32(np.float32(a + e) + b) + c) + d


@given(st.lists(st.integers(-1000, 1000), max_size=600))
def test_sum_of_whole_numbers_is_exact(values: list[int]) -> None:
    assert float(torch_sum(np.asarray(values, np.float32))) == sum(values)


def _torch_is_avx2() -> bool:
    torch = pytest.importorskip("torch")
    return bool(torch.backends.cpu.get_cpu_capability() == "AVX2")


def test_torchs_bits_also_on_a_cpu_with_wider_vectors() -> None:
    """Where torch would use wider vectors it is asked for AVX2, in a process of its own: no test is lost."""
    torch = pytest.importorskip("torch")
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("the two tests below run here as they are, or this CPU has no AVX2")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "has_torchs or formulas_in",
    ]
    done = subprocess.run(words, env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def test_sum_has_torchs_bits() -> None:
    if not _torch_is_avx2():
        pytest.skip("torch sums in another order on this CPU")
    import torch

    rng = np.random.default_rng(1)
    for n in [*range(70), 127, 128, 129, 511, 513, 2048, 4097, 20000, 32000]:
        x = rng.standard_normal(n).astype(np.float32)
        assert bits(float(torch_sum(x))) == bits(float(torch.sum(torch.from_numpy(x)))), n


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 60), st.sampled_from([0.0, 1e-6, 0.1, 5.0]))
def test_metrics_have_the_bits_of_the_formulas_in_torch(seed: int, batch: int, length: int, noise: float) -> None:
    """The reference is NeMo-RL's algebra on [B, S] tensors, with exp and log rounded from float64."""
    if not _torch_is_avx2():
        pytest.skip("torch sums in another order on this CPU")
    import torch

    rng = np.random.default_rng(seed)
    gen = -rng.exponential(2, (batch, length)).astype(np.float32)
    train = (gen + noise * rng.standard_normal(gen.shape)).astype(np.float32)
    mask = (rng.random(gen.shape) < 0.7).astype(np.float32)
    g, p, m = (torch.from_numpy(x) for x in (gen, train, mask))

    def exp(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x.double()).float()

    def mean(x: torch.Tensor) -> float:
        return float(torch.sum(x * m) / (torch.sum(m) + 1e-8))

    def k3(r: torch.Tensor) -> torch.Tensor:
        return exp(r) - 1 - r

    mix = torch.log((0.5 * exp(p) + 0.5 * exp(g)).double()).float()
    js = 0.5 * (exp(p - mix) - (p - mix) - 1) + 0.5 * (exp(g - mix) - (g - mix) - 1)
    mult = exp(torch.abs(g - p) * m)
    expected = (mean(mult), mean(k3(p - g)), mean(-(p - g)), mean(torch.square(p - g) / 2), mean(k3(g - p)), mean(js))
    got = compute_arrays(gen.ravel(), train.ravel(), mask.ravel(), np.repeat(np.arange(batch), length))
    assert [bits(getattr(got, name)) for name in MEANS[:6]] == [bits(value) for value in expected]
    per = ((mult * m).sum(dim=-1) / m.sum(dim=-1).clamp(min=1))[m.sum(dim=-1) > 0]
    assert bits(got.max_seq_mult_prob_error) == bits(float(per.max()) if per.numel() else 0.0)
