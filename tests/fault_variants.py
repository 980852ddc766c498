"""Variants of the catalogue's faults, with other constants and in other places: kinds are found, not cases."""

from __future__ import annotations

import functools
from typing import Any

import torch
from fault_breaks import (
    F16,
    activated,
    bf16_probabilities,
    chunked_log_softmax,
    combine,
    early_rounding,
    eps,
    frequencies,
    gating,
    gen_attention,
    gen_log_softmax_of,
    gen_rope_freqs,
    left_out,
    linear_split,
    log_softmax_of,
    module_output,
    norm_forward,
    norm_partials,
    old_weight,
    one_expert,
    other_base,
    other_kv_heads,
    other_scale,
    rolled_labels,
    rolled_selection,
    rotated_combine,
    rounded,
    scaled_routing,
    sigmoid_weights,
    split_keys,
    tiles,
    top_k_only,
    topk_routing,
    wide_combine,
    window,
    zero_rows,
)

from zkl_debug.beds.faults import Answer, Fault
from zkl_debug.stack import attention
from zkl_debug.stack.combine import ordered_unpermute

BOTH = ("fp32", "bf16")


def variant(
    name: str,
    breaks: Any,
    sites: str,
    names: str,
    *,
    beds: tuple[str, ...] = ("tiny-gpt",),
    dtypes: tuple[str, ...] = BOTH,
    sides: tuple[str, ...] = ("gen",),
    rule: str = "",
    says: str = "",
    edge: str = "",
    **fields: Any,
) -> Fault:
    """A fault with its answer; ``names`` and ``edge`` are alternatives separated by ``|``."""
    answer = Answer(
        (sites,),
        edge,
        "own",
        rule_says=(rule,) if rule else (),
        names=tuple(names.split("|")),
        says=(says,) if says else (),
    )
    return Fault(name, name, "", beds, dtypes, sides, breaks, answer, **fields)


_CORE = "decoder.layers.0.self_attention.core_attention:out"
_NORM0 = "decoder.layers.0.input_layernorm:out"
_SOFT = "logprobs/log_softmax:out*"
_ROPE = "decoder.layers.0.self_attention/rope.[qk]:out*"
_EVERY = "^every row|^no rule: every row alike"

VARIANTS: tuple[Fault, ...] = (
    variant(
        "norm-4-from-90",
        norm_partials(4, 90),
        _NORM0,
        "reduction-order",
        dtypes=("fp32",),
        sides=("gen", "train"),
        options={"micro_batch": 4},
    ),
    variant("norm-16-always", norm_partials(16, 0), _NORM0, "reduction-order", dtypes=("fp32",), rule=_EVERY),
    variant(
        "fc1-4-chunks-layer-2",
        linear_split("decoder.layers.2.mlp.linear_fc1", 4, lambda m: m >= 60),
        "decoder.layers.2.mlp.linear_fc1:out",
        "reduction-order",
        sides=("gen", "train"),
        rule="rows in call",
    ),
    variant(
        "proj-2-chunks-gen",
        linear_split("decoder.layers.1.self_attention.linear_proj", 2, lambda _m: True),
        "decoder.layers.1.self_attention.linear_proj:out",
        "reduction-order",
        rule=_EVERY,
    ),
    variant(
        "output-2-chunks",
        linear_split("output_layer", 2, lambda _m: True),
        "output_layer:out",
        "reduction-order",
        rule=_EVERY,
    ),
    variant(
        "decode-4-splits",
        gen_attention(attention.reference_attention, split_keys(4)),
        _CORE,
        "reduction-order",
        rule="phase decode",
        edge="prefill-decode",
    ),
    variant("all-3-splits", gen_attention(split_keys(3)), _CORE, "reduction-order", edge="score-prefill"),
    variant(
        "attention-probs-bf16",
        gen_attention(bf16_probabilities),
        _CORE,
        "extra-rounding|reduction-order|attention-probabilities",
        dtypes=("fp32",),
    ),
    variant("attention-window-16", gen_attention(window(16)), _CORE, "mask-fit", rule="^position >= 16"),
    variant(
        "attention-scale", gen_attention(other_scale), _CORE, "softmax-scale|attention-scale|mask-fit", says="scale"
    ),
    variant(
        "combine-reversed-layer-2",
        combine(2, functools.partial(ordered_unpermute, reverse=True)),
        "decoder.layers.2.mlp/unpermute:out*",
        "reduction-order",
        beds=("tiny-moe",),
    ),
    variant(
        "combine-rotated",
        combine(1, rotated_combine),
        "decoder.layers.1.mlp/unpermute:out*",
        "reduction-order",
        beds=("tiny-moe",),
    ),
    variant(
        "combine-fp32",
        combine(3, wide_combine),
        "decoder.layers.3.mlp/unpermute:out*",
        "reduction-order|extra-rounding|fewer-roundings",
        beds=("tiny-moe",),
        dtypes=("bf16",),
    ),
    variant(
        "log-softmax-2-from-3",
        chunked_log_softmax(2, 3),
        _SOFT,
        "reduction-order",
        sides=("train",),
        rule="in call of score",
        options={"micro_batch": 3},
    ),
    variant(
        "logits-fp16",
        module_output("output_layer", rounded(F16)),
        "output_layer:out",
        "extra-rounding",
        dtypes=("fp32",),
        says="float16",
    ),
    variant(
        "logits-bf16-train",
        module_output("output_layer", rounded(torch.bfloat16)),
        "output_layer:out",
        "extra-rounding",
        dtypes=("fp32",),
        sides=("train",),
        says="bfloat16",
    ),
    variant(
        "fc1-bf16-layer-3",
        module_output("decoder.layers.3.mlp.linear_fc1", rounded(torch.bfloat16)),
        "decoder.layers.3.mlp.linear_fc1:out",
        "extra-rounding",
        dtypes=("fp32",),
        says="bfloat16",
    ),
    variant(
        "qkv-fp8",
        module_output("decoder.layers.1.self_attention.linear_qkv", rounded(torch.float8_e4m3fn)),
        "decoder.layers.1.self_attention.linear_qkv:out",
        "extra-rounding",
        says="float8_e4m3",
    ),
    variant(
        "router-fp16",
        gating(F16),
        "decoder.layers.1.mlp/router.gating:out*",
        "extra-rounding",
        beds=("tiny-moe",),
        says="float16",
    ),
    variant(
        "router-bf16-train",
        gating(torch.bfloat16),
        "decoder.layers.1.mlp/router.gating:out*",
        "extra-rounding",
        beds=("tiny-moe",),
        sides=("train",),
        says="bfloat16",
    ),
    variant(
        "norm-early-layer-3",
        norm_forward("decoder.layers.3.pre_mlp_layernorm", early_rounding),
        "decoder.layers.3.pre_mlp_layernorm:out",
        "norm-rounding-order",
        dtypes=("bf16",),
    ),
    variant(
        "norm-early-final-train",
        norm_forward("decoder.final_layernorm", early_rounding),
        "decoder.final_layernorm:out",
        "norm-rounding-order",
        dtypes=("bf16",),
        sides=("train",),
    ),
    variant("eps-1e-8", eps(1e-8), _NORM0, "eps"),
    variant(
        "eps-1e-3-layer-2",
        eps(1e-3, "decoder.layers.2.input_layernorm"),
        "decoder.layers.2.input_layernorm:out",
        "eps",
        says="0.001|1e-0?3",
    ),
    variant("eps-5e-6-train", eps(5e-6), _NORM0, "eps", sides=("train",), says="5e-0?6|from"),
    variant("rope-fp16", frequencies(rounded(F16)), _ROPE, "rope-frequency", says="float16", rule="^position >= "),
    variant("rope-base", frequencies(other_base(5e5)), _ROPE, "rope-frequency", rule="^position >= 1"),
    variant(
        "rope-negative",
        gen_rope_freqs(lambda f: -f),
        _ROPE,
        "rope-direction|rope-frequency|rope-pairing",
        rule="^position >= 1",
    ),
    variant("rope-scaled", frequencies(lambda f: f / 4), _ROPE, "rope-frequency|position-shift", rule="^position >= 1"),
    variant("temperature-1.5-gen", gen_log_softmax_of(lambda t: t / 1.5), _SOFT, "temperature", says=r"1\.5"),
    variant(
        "temperature-0.6-train",
        log_softmax_of(lambda original, t: original(t / 0.6)),
        _SOFT,
        "temperature",
        sides=("train",),
        says=r"0\.6",
    ),
    variant("top-k-support", log_softmax_of(top_k_only), _SOFT, "softmax-support", sides=("train",)),
    variant(
        "soft-cap",
        log_softmax_of(lambda original, t: original(30 * torch.tanh(t / 30))),
        _SOFT,
        "softmax-support|log-softmax-formula|logit-soft-cap|not-localised",
        sides=("train",),
    ),
    variant(
        "log-softmax-bf16",
        log_softmax_of(lambda original, t: original(t).bfloat16().float()),
        _SOFT,
        "extra-rounding",
        sides=("train",),
    ),
    variant("selected-shift-2", rolled_selection(2), "logprobs/selected:out*", "row-shift", sides=("train",), says="2"),
    variant("selected-shift-minus-1", rolled_selection(-1), "logprobs/selected:out*", "row-shift", sides=("train",)),
    variant("labels-rolled", rolled_labels(-1), "logprobs/label:out*", "label-fault", sides=("train",)),
    variant("tiles-16-2", tiles(16, 2, 20), _CORE, "reduction-order", rule="^position >= "),
    variant("all-8-splits", gen_attention(split_keys(8)), _CORE, "reduction-order"),
    variant("window-40", gen_attention(window(40)), _CORE, "mask-fit", rule="^position >= 40"),
    variant(
        "sigmoid-routing",
        topk_routing(sigmoid_weights),
        "decoder.layers.1.mlp/router.topk:out.0",
        "routing-weights",
        beds=("tiny-moe",),
        sides=("train",),
    ),
    variant("temperature-2-gen", gen_log_softmax_of(lambda t: t / 2), _SOFT, "temperature", says="2"),
    variant(
        "final-norm-fp16",
        module_output("decoder.final_layernorm", rounded(F16)),
        "decoder.final_layernorm:out",
        "extra-rounding",
        dtypes=("fp32",),
        sides=("train",),
        says="float16",
    ),
    variant(
        "proj-halved-layer-3",
        module_output("decoder.layers.3.self_attention.linear_proj", lambda t: t * 0.5),
        "decoder.layers.3.self_attention.linear_proj:out",
        "constant-ratio",
        says=r"0\.5",
    ),
    variant(
        "fc2-clipped",
        module_output("decoder.layers.0.mlp.linear_fc2", lambda t: t.clamp(-0.5, 0.5)),
        "decoder.layers.0.mlp.linear_fc2:out",
        "clamped",
    ),
    *(
        Fault(
            f"old-{path}",
            "an older weight of one module",
            "",
            ("tiny-gpt",),
            BOTH,
            (side,),
            old_weight(path),
            Answer(verdict="refused", names=("weights-differ",), says=(path,)),
        )
        for path, side in (
            ("decoder.layers.1.mlp.linear_fc2", "gen"),
            ("decoder.layers.2.self_attention.linear_qkv", "train"),
            ("embedding.word_embeddings", "gen"),
            ("decoder.layers.1.input_layernorm", "gen"),
        )
    ),
    variant(
        "routing-scaled",
        scaled_routing(2.5),
        "decoder.layers.1.mlp/router.topk:out.0",
        "routing-weights|constant-ratio",
        beds=("tiny-moe",),
        says=r"2\.5",
    ),
    variant(
        "proj-doubled",
        module_output("decoder.layers.1.self_attention.linear_proj", lambda t: t * 2),
        "decoder.layers.1.self_attention.linear_proj:out",
        "constant-ratio",
        says="2",
    ),
    variant(
        "fc2-offset",
        module_output("decoder.layers.2.mlp.linear_fc2", lambda t: t + 0.5),
        "decoder.layers.2.mlp.linear_fc2:out",
        "constant-offset",
        says=r"0\.5",
    ),
    variant(
        "fc1-reversed-columns",
        module_output("decoder.layers.2.mlp.linear_fc1", lambda t: t.flip(-1)),
        "decoder.layers.2.mlp.linear_fc1:out",
        "column-permutation",
    ),
    variant(
        "proj-zero-rows",
        module_output("decoder.layers.1.self_attention.linear_proj", zero_rows),
        "decoder.layers.1.self_attention.linear_proj:out",
        "uninitialised",
    ),
    variant("kv-heads-swapped", gen_attention(other_kv_heads), _CORE, "head-grouping"),
    variant(
        "norm-left-out",
        left_out("decoder.layers.2.pre_mlp_layernorm"),
        "decoder.layers.2.pre_mlp_layernorm:out",
        "not-applied",
    ),
    variant(
        "logits-clamped", module_output("output_layer", lambda t: t.clamp(-1.5, 1.5)), "output_layer:out", "clamped"
    ),
    variant(
        "fc2-flushed",
        module_output("decoder.layers.1.mlp.linear_fc2", lambda t: torch.where(t.abs() < 2e-3, t * 0, t)),
        "decoder.layers.1.mlp.linear_fc2:out",
        "flushed-to-zero|signed-zero",
        sides=("train",),
    ),
    variant("embedding-scaled", module_output("embedding", lambda t: t * 1.25), "embedding:out", "constant-ratio"),
    variant(
        "first-rows-swapped",
        module_output("decoder.layers.1.self_attention.linear_proj", lambda t: t[[1, 0, *range(2, len(t))]]),
        "decoder.layers.1.self_attention.linear_proj:out",
        "row-permutation|equals-other-sample",
    ),
    *(
        variant(
            f"activation-{name}",
            activated(function),
            "decoder.layers.0.mlp.linear_fc2:in",
            "activation",
            sides=(side,),
            says=name,
        )
        for name, function, side in (
            ("gelu", torch.nn.functional.gelu, "gen"),
            ("gelu-tanh", functools.partial(torch.nn.functional.gelu, approximate="tanh"), "train"),
            ("relu", torch.nn.functional.relu, "gen"),
            ("silu at 1.0", lambda x: x * torch.sigmoid(1.01 * x), "gen"),
        )
    ),
    variant(
        "gate-halves-swapped",
        module_output("decoder.layers.1.mlp.linear_fc1", lambda t: torch.cat(t.chunk(2, -1)[::-1], -1)),
        "decoder.layers.1.mlp.linear_fc1:out",
        "column-permutation",
    ),
    variant(
        "one-expert-fp8",
        one_expert(2, rounded(torch.float8_e4m3fn)),
        "decoder.layers.1.mlp.experts:out",
        "extra-rounding",
        beds=("tiny-moe",),
        rule="expert 2",
        says="float8_e4m3",
    ),
)
