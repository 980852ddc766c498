"""Keys of a recipe outside the model: how it trains, samples, batches and lays out its ranks."""

from __future__ import annotations

from functools import partial

from zkl_debug.stack.applying import elsewhere
from zkl_debug.stack.catalogue.cpu import EVERY_PRESET
from zkl_debug.stack.catalogue.variables import MXFP8_AND_LATER
from zkl_debug.stack.needs import NEMO_RL, gpu
from zkl_debug.stack.switches import Setting, Switch

_T = "policy.megatron_cfg."
_G = "policy.generation.mcore_generation_config."
_FLASHINFER_PRESETS = ("nvfp4-flashinfer", "mxfp8-flashinfer")
_key = partial(elsewhere, kind="recipe key", owner="NeMo-RL", needs=(gpu(), NEMO_RL))


def _one(key: str, on: str) -> tuple[Setting, ...]:
    """One key; with the switch off it stays as the recipe has it, for these keys decide what the workload is."""
    return (Setting("recipe", key, on),)


RECIPE_KEYS: tuple[Switch, ...] = (
    _key(
        "zero-mismatch-gate",
        fixes="NeMo-RL checks the recipe and sets what the preset needs",
        group="gate",
        mechanism="nothing",
        target="zero_train_gen_mismatch",
        settings=_one(_T + "zero_train_gen_mismatch", "true"),
        not_searched="with the gate on NeMo-RL refuses every configuration but the whole one: leave it off in a search",
        presets=EVERY_PRESET,
    ),
    _key(
        "dedicated-generation",
        fixes="generation has its own node: no reshard in place, no shared buffers to go stale",
        group="lifecycle",
        mechanism="lifecycle",
        target="policy.generation.colocated.enabled",
        settings=_one("policy.generation.colocated.enabled", "false"),
        presets=EVERY_PRESET,
    ),
    _key(
        "megatron-generation",
        fixes="generation runs megatron-core's kernels, not another engine's",
        group="engine",
        target="policy.generation.backend",
        settings=_one("policy.generation.backend", "megatron"),
        presets=EVERY_PRESET,
    ),
    _key(
        "precision-bf16",
        fixes="weights and activations have one dtype on both sides",
        group="precision",
        mechanism="precision",
        target="policy.precision",
        settings=_one("policy.precision", "bfloat16"),
        presets=EVERY_PRESET,
    ),
    _key(
        "plain-sampling",
        fixes="temperature 1, no top-p, no top-k: the distribution that is sampled is the one that is scored",
        group="sampling",
        mechanism="sampling",
        target="policy.generation.temperature, top_p, top_k",
        settings=(
            Setting("recipe", "policy.generation.temperature", "1.0"),
            Setting("recipe", "policy.generation.top_p", "1.0"),
            Setting("recipe", "policy.generation.top_k", "null"),
        ),
        presets=EVERY_PRESET,
    ),
    _key(
        "tensor-parallel-1",
        fixes="no linear is split over ranks: no partial sums to add",
        group="parallelism",
        target="tensor_model_parallel_size",
        settings=(
            Setting("recipe", _T + "tensor_model_parallel_size", "1"),
            Setting("recipe", _G + "tensor_model_parallel_size", "1"),
        ),
        presets=("bf16",),
        alternatives=("batch-invariant-collective",),
    ),
    _key(
        "context-parallel-1",
        fixes="no sequence is split over ranks: attention merges no partial results",
        group="parallelism",
        target="context_parallel_size",
        settings=(
            Setting("recipe", _T + "context_parallel_size", "1"),
            Setting("recipe", _G + "context_parallel_size", "1"),
        ),
        presets=("bf16",),
        alternatives=("context-parallel-a2a",),
    ),
    _key(
        "context-parallel-a2a",
        fixes="with CP > 1 every rank sees all keys of its heads, as generation does",
        group="parallelism",
        target="cp_comm_type",
        settings=_one(_T + "cp_comm_type", "a2a"),
        presets=MXFP8_AND_LATER,
    ),
    _key(
        "same-tensor-parallel",
        fixes="generation splits its linears over as many ranks as training does",
        group="parallelism",
        target="tensor_model_parallel_size",
        settings=_one(_G + "tensor_model_parallel_size", "'${policy.megatron_cfg.tensor_model_parallel_size}'"),
        presets=MXFP8_AND_LATER,
        requires=("batch-invariant-collective",),
    ),
    _key(
        "same-context-parallel",
        fixes="generation splits sequences over as many ranks as training does",
        group="parallelism",
        target="context_parallel_size",
        settings=_one(_G + "context_parallel_size", "'${policy.megatron_cfg.context_parallel_size}'"),
        presets=MXFP8_AND_LATER,
        alternatives=("context-parallel-a2a",),
    ),
    _key(
        "same-expert-parallel",
        fixes="the order in which experts are combined depends on the number of expert ranks: one on both sides",
        group="parallelism",
        target="expert_model_parallel_size",
        settings=_one(_G + "expert_model_parallel_size", "'${policy.megatron_cfg.expert_model_parallel_size}'"),
        presets=_FLASHINFER_PRESETS,
    ),
    _key(
        "same-inference-dispatcher",
        fixes="both sides dispatch tokens to experts the same way",
        group="parallelism",
        mechanism="routing",
        target="inference_moe_token_dispatcher_type",
        settings=_one(
            _G + "inference_moe_token_dispatcher_type",
            "'${policy.megatron_cfg.inference_moe_token_dispatcher_type}'",
        ),
        presets=_FLASHINFER_PRESETS,
    ),
    _key(
        "no-packing",
        fixes="one sequence a row: what shares a forward does not depend on lengths",
        group="batching",
        mechanism="shape class",
        target="policy.sequence_packing.enabled",
        settings=_one("policy.sequence_packing.enabled", "false"),
        presets=("bf16",),
    ),
    _key(
        "no-fused-linear-logprobs",
        fixes="scoring forms the logits that generation's log-softmax reads",
        group="log-probs",
        target="use_fused_linear_logprobs",
        settings=_one(_T + "use_fused_linear_logprobs", "false"),
        presets=EVERY_PRESET,
    ),
    _key(
        "token-multiple-64",
        fixes="scoring sees numbers of tokens of the same class as generation, multiples of 64",
        group="batching",
        mechanism="shape class",
        target="make_sequence_length_divisible_by, dynamic_batching.sequence_length_round",
        settings=(
            Setting("recipe", "policy.make_sequence_length_divisible_by", "64"),
            Setting("recipe", "policy.dynamic_batching.sequence_length_round", "64"),
        ),
        presets=EVERY_PRESET,
    ),
    _key(
        "no-trajectory-age",
        fixes="no token was generated with older weights than it is scored with",
        group="lifecycle",
        mechanism="lifecycle",
        target="grpo.async_grpo.max_trajectory_age_steps",
        settings=_one("grpo.async_grpo.max_trajectory_age_steps", "0"),
        presets=EVERY_PRESET,
    ),
    _key(
        "no-in-flight-updates",
        fixes="no sequence is generated with two weight versions",
        group="lifecycle",
        mechanism="lifecycle",
        target="grpo.async_grpo.in_flight_weight_updates",
        settings=_one("grpo.async_grpo.in_flight_weight_updates", "false"),
        presets=EVERY_PRESET,
    ),
)
