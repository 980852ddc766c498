"""Types and effective defaults of the recipe keys that rules look at.

The nesting is that of the public NeMo-RL recipes (Apache-2.0); the defaults are those of megatron-core's
``TransformerConfig`` and ``InferenceConfig``, or of NeMo-RL where it reads the key with a default of its own.
A key without ``origin`` has no default: NeMo-RL reads it directly.
"""

from __future__ import annotations

from zkl_debug.stack.recipes.model import GENERATION_ROOT, TRAIN_ROOT, Key

MCORE = "megatron-core"
NEMO = "NeMo-RL"

#: One setting, renamed twice. Oldest first; the last is the name to write today.
TRAINING_FORWARD = (
    "moe_inference_training_forward",
    "moe_match_generation_forward",
    "moe_training_matches_inference",
)
MAX_TOKENS_PER_RANK = "moe_inference_training_max_tokens_per_rank"

#: Keys of ``policy.megatron_cfg``; ``mcore_generation_config`` may override each of them.
TRAIN_KEYS: dict[str, Key] = {
    "enabled": Key("bool", False, NEMO),
    "zero_train_gen_mismatch": Key("bool", False, NEMO),
    "batch_invariant_mode": Key("bool", False, MCORE),
    "batch_invariant_backend": Key("str", "te_native", MCORE),
    "batch_invariant_collective": Key("str", "ordered", MCORE),
    "attention_backend": Key("str", "auto", MCORE),
    "flash_attention_version": Key("int", 2, NEMO),
    "moe_permute_fusion": Key("bool", False, MCORE),
    "transformer_impl": Key("str", "transformer_engine", MCORE),
    "tensor_model_parallel_size": Key("int", 1, MCORE, null_is_default=False),
    "context_parallel_size": Key("int", 1, MCORE, null_is_default=False),
    "expert_model_parallel_size": Key("int", 1, MCORE, null_is_default=False),
    "sequence_parallel": Key("bool", False, MCORE),
    "cp_comm_type": Key("any", "p2p", MCORE),
    "use_fused_linear_logprobs": Key("bool", False, NEMO),
    "moe_token_dispatcher_type": Key("str"),
    "inference_moe_token_dispatcher_type": Key("str", "nvls", MCORE),
    "inference_grouped_gemm_backend": Key("str", "vllm", MCORE),
    "inference_moe_nvfp4_recipe": Key("str", None, MCORE),
    "activation_checkpointing": Key("bool", False, NEMO),
    "recompute_granularity": Key("str", "full", NEMO),
    "recompute_modules": Key("list", ["core_attn"], MCORE),
    "cuda_graph_impl": Key("str", "none", MCORE),
    "te_precision_config_file": Key("str", None, NEMO),
    "fp8_cfg": Key("map"),
    "fp8_cfg.enabled": Key("bool", False, NEMO),
    "fp8_cfg.fp8": Key("str", None, MCORE),
    "fp8_cfg.fp8_recipe": Key("str", "delayed", MCORE),
    "fp8_cfg.fp8_param": Key("bool", False, MCORE),
    "optimizer": Key("map"),
    "optimizer.use_precision_aware_optimizer": Key("bool", False, MCORE),
    "env_vars": Key("map"),
    "model_overrides": Key("map"),
    "multi_latent_attention": Key("bool", False, MCORE),
    "experimental_attention_variant": Key("str", None, MCORE),
    "hybrid_layer_pattern": Key("str", None, MCORE),
    "is_hybrid_model": Key("bool", False, MCORE),
    MAX_TOKENS_PER_RANK: Key("int", None, "derived by NeMo-RL"),
    **{name: Key("bool", False, MCORE) for name in TRAINING_FORWARD},
}

#: Keys that only generation reads; they are still looked up in the merged config.
GENERATION_KEYS: dict[str, Key] = {
    "logprobs_mode": Key("str", "processed_logprobs", NEMO),
    "enable_chunked_prefill": Key("bool", False, MCORE),
    "enable_prefix_caching": Key("bool", False, MCORE),
}

#: Environment variables under ``megatron_cfg.env_vars``.
ENV_KEY = Key("any", None, "unset")

RECIPE_KEYS: dict[str, Key] = {
    "policy": Key("map"),
    "policy.megatron_cfg": Key("map"),
    "policy.generation": Key("map"),
    "policy.generation.mcore_generation_config": Key("map"),
    "policy.generation.colocated": Key("map"),
    "policy.generation.colocated.resources": Key("map"),
    "policy.sequence_packing": Key("map"),
    "policy.dynamic_batching": Key("map"),
    "policy.dtensor_cfg": Key("map"),
    "policy.model_name": Key("str"),
    "policy.precision": Key("str"),
    "policy.max_total_sequence_length": Key("int"),
    "policy.train_micro_batch_size": Key("int"),
    "policy.logprob_batch_size": Key("int"),
    "policy.make_sequence_length_divisible_by": Key("int", None, "", null_is_default=False),
    "policy.dtensor_cfg.enabled": Key("bool", False, NEMO),
    "policy.generation.backend": Key("str"),
    "policy.generation.temperature": Key("number", None, "", null_is_default=False),
    "policy.generation.top_p": Key("number", None, "", null_is_default=False),
    "policy.generation.top_k": Key("int", None, NEMO),
    "policy.generation.colocated.enabled": Key("bool"),
    "policy.generation.colocated.resources.gpus_per_node": Key("int", None, NEMO),
    "policy.generation.colocated.resources.num_nodes": Key("int", None, NEMO),
    "policy.sequence_packing.enabled": Key("bool", False, NEMO),
    "policy.sequence_packing.train_mb_tokens": Key("int"),
    "policy.sequence_packing.logprob_mb_tokens": Key("int"),
    "policy.dynamic_batching.enabled": Key("bool", False, NEMO),
    "policy.dynamic_batching.train_mb_tokens": Key("int"),
    "policy.dynamic_batching.logprob_mb_tokens": Key("int"),
    "policy.dynamic_batching.sequence_length_round": Key("int", None, "", null_is_default=False),
    "grpo": Key("map"),
    "grpo.async_grpo": Key("map"),
    "grpo.async_grpo.enabled": Key("bool", False, NEMO),
    "grpo.async_grpo.max_trajectory_age_steps": Key("int", 1, NEMO),
    "grpo.async_grpo.in_flight_weight_updates": Key("bool", False, NEMO),
    "cluster": Key("map"),
    "cluster.num_nodes": Key("int", 1, NEMO),
}


def train_key(name: str) -> Key:
    """What is known of a key of ``policy.megatron_cfg`` or of the merged generation config."""
    if name.startswith("env_vars."):
        return ENV_KEY
    return TRAIN_KEYS.get(name) or GENERATION_KEYS.get(name) or Key("any")


def recipe_key(path: str) -> Key:
    """What is known of a dotted path from the top of the recipe."""
    for root in (TRAIN_ROOT, GENERATION_ROOT):
        if path.startswith(root + "."):
            return train_key(path[len(root) + 1 :])
    return RECIPE_KEYS.get(path) or Key("any")
