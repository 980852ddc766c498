"""The engines themselves: static generation, what the dynamic engine goes through, and guards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zkl_debug.beds import BedOptions, open_bed, workload
from zkl_debug.engines.megatron import model, scoring, seams
from zkl_debug.engines.megatron.generation import Request
from zkl_debug.engines.megatron.static import StaticGenerator


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_static_engine_is_zero_under_the_stack(dtype: str) -> None:
    with open_bed(BedOptions(bed="tiny-moe", dtype=dtype, reprefill=False)) as context:
        requests = workload.requests(context.options, context.spec.vocab)[:3]
        requests.append(Request(50, requests[0].prompt[::-1], 9))
        static = StaticGenerator(context.model).generate(requests)
        assert not seams.inference_mode_active()
        scored = context.run_train({r.sample: r.tokens for r in static}).log_probs
        dynamic = {r.sample: r.tokens for r in context.run_gen().results}
    assert all(np.array_equal(scored[r.sample], r.log_probs) for r in static)
    assert all(r.tokens == dynamic[r.sample] for r in static if r.sample in dynamic)
    assert all(len(r.tokens) == len(q.prompt) + q.n_generate for r, q in zip(static, requests, strict=True))


def test_the_dynamic_engine_takes_every_kind_of_step() -> None:
    steps = []
    with open_bed(BedOptions(dtype="fp32")) as context:
        engine, ctx = context.generator.engine, context.generator.context
        original = context.generator.controller._dynamic_step_forward_logits

        def record(ids: torch.Tensor, positions: torch.Tensor) -> None:
            steps.append(
                (ctx.num_prefill_requests, ctx.num_decode_requests, ctx.chunked_prefill_request_id >= 0, ids.shape[1])
            )
            original(ids, positions)

        context.generator.controller._dynamic_step_forward_logits = record
        context.run_gen()
        assert not engine.has_unfinished_requests()
    assert any(p and d for p, d, _, _ in steps), "mixed steps"
    assert any(d and not p for p, d, _, _ in steps), "decode-only steps"
    assert any(chunked for _, _, chunked, _ in steps), "a prompt over several chunks"
    assert len({d for _, d, _, _ in steps}) > 3, "a batch that changes while decoding"
    assert not {slots for *_, slots in steps} & {1, 33}


def test_scoring_refuses_inference_mode() -> None:
    from megatron.core.inference.utils import InferenceMode

    with open_bed(BedOptions(dtype="fp32")) as context, InferenceMode.active():
        batch = scoring.padded_batch(0, [(0, [1, 2, 3])])
        with pytest.raises(RuntimeError, match="InferenceMode is on"):
            scoring.score_microbatch(context.model, batch)


def test_functions_are_looked_up_in_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name in ("forward_logits", "log_softmax", "select_logprobs"):
        original = getattr(scoring, name)

        def tap(*args: object, _original: object = original, _name: str = name) -> object:
            seen.append(_name)
            return _original(*args)  # type: ignore[operator]

        monkeypatch.setattr(scoring, name, tap)
    with open_bed(BedOptions(dtype="fp32")) as context:
        (scored,) = scoring.score_microbatch(context.model, scoring.padded_batch(0, [(0, [1, 2, 3])]))
    assert seen == ["forward_logits", "log_softmax", "select_logprobs"]
    assert scored.dtype == np.float32
    assert scored.shape == (2,)


def test_micro_batches() -> None:
    left = scoring.padded_batch(4, [(7, [1, 2, 3]), (8, [4])], multiple=4, left=True)
    assert left.tokens.tolist() == [[0, 1, 2, 3], [0, 0, 0, 4]]
    assert left.position_ids.tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]
    assert left.offsets == (1, 3)
    mask = left.attention_mask()
    assert mask is not None
    assert mask[0, 0, 3].tolist() == [True, False, False, False]
    packed = scoring.packed_batch(5, [(7, [1, 2, 3]), (8, [4, 5])], multiple=4)
    assert packed.tokens.tolist() == [[1, 2, 3, 0, 4, 5, 0, 0]]
    assert packed.cu_seqlens == (0, 3, 5)
    assert packed.cu_seqlens_padded == (0, 4, 8)
    assert packed.locate(1) == (0, 4)
    assert packed.attention_mask() is None
    assert scoring.packed_batch(5, [(7, [1, 2])]).cu_seqlens_padded is None


def test_weights_depend_on_the_seed_only() -> None:
    def digest(seed: int) -> bytes:
        with open_bed(BedOptions(seed=seed, dtype="fp32")) as context:
            return b"".join(p.detach().numpy().tobytes() for p in context.model.parameters())

    torch.manual_seed(1)
    first = digest(3)
    torch.manual_seed(2)
    assert digest(3) == first
    assert digest(4) != first


def test_model_sizes() -> None:
    spec = model.ModelSpec(experts=8, topk=4, dense_layers=1)
    assert spec.layers == 4
    with open_bed(BedOptions(bed="tiny-moe", dtype="bf16")) as context:
        names = dict(context.model.named_parameters())
        assert names["decoder.layers.0.mlp.linear_fc1.weight"].dtype == torch.bfloat16
        assert names["decoder.layers.1.mlp.experts.local_experts.7.linear_fc2.weight"].shape == (64, 64)
        gammas = names["decoder.final_layernorm.weight"].float()
        assert gammas.min() >= 0.5
        assert gammas.std() > 0.1
