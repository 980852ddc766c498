"""Mamba in the loop: one recurrence on every path, mcore's own decode cache, and the weight update that it outlives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from zkl_debug.beds.grpo.loop import open_loop, surroundings
from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.engines import mamba_reference as reference
from zkl_debug.engines import mamba_scan
from zkl_debug.engines.cpu import cpu_backend, quiet
from zkl_debug.stack.mamba import one_scan

HYBRID = GrpoOptions(
    layout="colocated-inference-model", hybrid=True, dtype="fp32", prefix_caching=False, groups=3, returns_at=0
)


def test_training_and_decode_are_one_recurrence_to_the_last_bit() -> None:
    """A sequence at once, against token by token through the decode kernels."""
    gen = torch.Generator().manual_seed(0)
    heads, headdim, groups, n, length = 4, 8, 2, 6, 11
    inner, conv = heads * headdim, heads * headdim + 2 * groups * n
    x = torch.randn(1, length, inner + conv + heads, generator=gen)
    weight, bias = torch.randn(conv, 4, generator=gen), torch.randn(conv, generator=gen)
    dt_bias, decay = torch.randn(heads, generator=gen), -torch.rand(heads, generator=gen) - 0.5
    skip = torch.randn(heads, generator=gen)
    with one_scan():
        whole = reference.mamba_split_conv1d_scan_combined(
            x, weight, bias, dt_bias, decay, skip, headdim=headdim, ngroups=groups
        )
    conv_state, state = torch.zeros(1, conv, 4), torch.zeros(1, heads, headdim, n)
    for t in range(length):
        z, xbc, dt = torch.split(x[:, t : t + 1], [inner, conv, heads], -1)
        mixed = reference.causal_conv1d_update(xbc, conv_state, weight, bias)
        part, b, c = torch.split(mixed, [inner, groups * n, groups * n], -1)
        y = reference.selective_state_update(
            state,
            part.view(1, 1, heads, headdim),
            dt[..., None].expand(1, 1, heads, headdim),
            decay[:, None, None].expand(heads, headdim, n),
            b.view(1, 1, groups, n),
            c.view(1, 1, groups, n),
            skip[:, None].expand(heads, headdim),
            z.view(1, 1, heads, headdim),
            dt_bias=dt_bias[:, None].expand(heads, headdim),
        )
        assert torch.equal(y.flatten(-2)[0, 0], whole[0, t])


def test_the_recurrence_is_the_textbook_one() -> None:
    """Against the closed sum over the past in float64: y_t = sum_s C_t B_s dt_s x_s exp(sum dt A) + D x_t."""
    gen = torch.Generator().manual_seed(1)
    x, dt, b, c = (torch.randn(7, *s, generator=gen) for s in ((2, 3), (2,), (1, 4), (1, 4)))
    a, d, bias = -torch.rand(2, generator=gen), torch.randn(2, generator=gen), torch.randn(2, generator=gen)
    step = torch.nn.functional.softplus((dt + bias).double())
    recurrent, _ = mamba_scan.recurrent(x, dt, a, b, c, d, bias, None)
    blocks, _ = mamba_scan.chunked(x, dt, a, b, c, d, bias, None, 4)
    assert not torch.equal(recurrent, blocks)
    for t in range(7):
        want = d.double()[:, None] * x[t].double()
        for s in range(t + 1):
            kept = torch.exp((step[s + 1 : t + 1] * a.double()).sum(0))
            dot = (c[t, 0].double() * b[s, 0].double()).sum()
            want = want + (kept * step[s])[:, None] * dot * x[s].double()
        for got in (recurrent, blocks):
            torch.testing.assert_close(got[t].double(), want, rtol=1e-5, atol=1e-5)


def test_mcores_decode_cache_outlives_a_weight_swap_in_eval_and_train_drops_it() -> None:
    from zkl_debug.beds.grpo.layouts import bed_model
    from zkl_debug.engines.megatron.refit import swap_weights

    with surroundings(HYBRID), torch.no_grad():
        trainer: Any = bed_model(HYBRID)
        engine: Any = bed_model(HYBRID).eval()
        mixer = engine.decoder.layers[0].mixer
        assert type(mixer).__module__ == "megatron.core.ssm.mamba_mixer"
        before = mixer._get_decode_A_neg_exp()[:, 0, 0].clone()
        trainer.decoder.layers[0].mixer.A_log.add_(0.5)
        swap_weights(trainer, engine)
        engine.eval()
        now = -torch.exp(mixer.A_log.float())
        assert not torch.equal(before, now)
        assert torch.equal(mixer._get_decode_A_neg_exp()[:, 0, 0], before)
        engine.train()
        engine.eval()
        assert torch.equal(mixer._get_decode_A_neg_exp()[:, 0, 0], now)


def test_hybrid_loop_is_zero_when_the_cache_is_refreshed_and_only_decode_is_wrong_when_not() -> None:
    with open_loop(HYBRID) as loop:
        assert not any(r.diverged for r in loop.run(2))
    with open_loop(replace(HYBRID, refresh=False)) as loop:
        first, second = loop.run(2)
    assert not first.diverged
    assert len(second.diverged) == len(second.sequences)
    # The first generated token comes from prefill, which computes the decay anew.
    assert all(s.gen[0] == s.train[0] for s in second.sequences)


def test_reference_kernels_are_taken_out_again() -> None:
    with cpu_backend(), quiet():
        import megatron.core.ssm.mamba_mixer as mixer

        from zkl_debug.engines.megatron.hybrid import mamba_backend

        before = dict(vars(mixer))
        with mamba_backend():
            assert mixer.selective_state_update is reference.selective_state_update
            assert mixer.HAVE_MAMBA_SSM
        assert dict(vars(mixer)) == before
