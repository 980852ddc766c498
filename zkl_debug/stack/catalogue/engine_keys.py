"""Keys of ``InferenceConfig``: what the generation engine is built with."""

from __future__ import annotations

from functools import partial

from zkl_debug.stack.applying import by_config
from zkl_debug.stack.catalogue.cpu import BED_ENGINE_KEYS, EVERY_PRESET
from zkl_debug.stack.needs import gpu
from zkl_debug.stack.switches import Setting, Switch

_G = "policy.generation.mcore_generation_config."
_key = partial(by_config, config_class="InferenceConfig", kind="engine key", owner="mcore", stacked=False)

ENGINE_KEYS: tuple[Switch, ...] = (
    *BED_ENGINE_KEYS,
    _key(
        "no-cuda-graphs",
        values={"num_cuda_graphs": None},
        fixes="no step is padded to a captured bucket, no replay reads a buffer that moved",
        group="graph shapes",
        mechanism="shape class",
        settings=(Setting("recipe", _G + "num_cuda_graphs", "null", "16"),),
        alternatives=("graph-buckets-64", "decode-padding-64", "graph-capture-window", "no-match-without-graphs"),
        needs=(gpu(),),
    ),
    _key(
        "kv-recompute",
        values={"kv_cache_management_mode": "recompute"},
        fixes="suspend drops the KV cache: nothing computed with older weights survives a refit",
        group="lifecycle",
        mechanism="lifecycle",
        settings=(Setting("recipe", _G + "kv_cache_management_mode", "recompute", "persist"),),
        alternatives=("prefix-cache-reset",),
    ),
    _key(
        "max-requests-64",
        values={"max_requests": 64},
        fixes="decode steps can reach the multiple of 64 they are padded to, instead of being cut at max_requests",
        group="graph shapes",
        mechanism="shape class",
        settings=(Setting("recipe", _G + "max_requests", "64"),),
        alternatives=("decode-padding-64",),
    ),
    _key(
        "torch-sampling",
        values={"sampling_backend": "torch"},
        fixes="sampling does not go through FlashInfer's kernels",
        group="sampling",
        mechanism="sampling",
        settings=(Setting("recipe", _G + "sampling_backend", "torch", "flashinfer"),),
    ),
    _key(
        "raw-logprobs",
        values={"logprobs_mode": "raw_logprobs"},
        fixes="returned log-probs are those of the raw logits, before temperature, top-p and top-k",
        group="log-probs",
        mechanism="label",
        settings=(Setting("recipe", _G + "logprobs_mode", "raw_logprobs", "processed_logprobs"),),
        presets=EVERY_PRESET,
    ),
    _key(
        "full-logits",
        values={"materialize_only_last_token_logits": False},
        fixes="the output layer sees every row of a step, as it does in scoring, not the last rows alone",
        group="log-probs",
        mechanism="shape class",
        settings=(Setting("recipe", _G + "materialize_only_last_token_logits", "false", "true"),),
    ),
)
