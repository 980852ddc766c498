"""Names of recipe keys, section by section, for did-you-mean.

Gathered from the six public recipes of NeMo-RL (Apache-2.0, NVIDIA, 2026-08) and from the rules; only names, no text.
Sections that are not listed here (``env``, ``data``, ``vllm_kwargs`` ...) are open: any key is fine there.
"""

from __future__ import annotations

from zkl_debug.stack.recipes.keys import GENERATION_KEYS, RECIPE_KEYS, TRAIN_KEYS

_NAMES: dict[str, str] = {
    "": """checkpointing cluster data data_plane defaults env grpo logger loss_fn on_policy_distillation policy
        reward_penalties""",
    "grpo": """adv_estimator advantage_clip_high advantage_clip_low async_grpo batch_multiplier
        dynamic_sampling_max_gen_batches invalid_tool_call_advantage malformed_thinking_advantage max_num_epochs
        max_num_steps max_rollout_turns max_val_samples normalize_rewards num_generations_per_prompt
        num_prompts_per_step overlong_filtering reward_scaling reward_shaping seed seq_logprob_error_threshold
        stop_at_validation_metric stop_at_validation_threshold use_dynamic_sampling use_leave_one_out_baseline
        val_at_end val_at_start val_batch_size val_num_generations_per_prompt val_period val_start_at""",
    "grpo.async_grpo": """enabled in_flight_weight_updates max_generation_failures max_trajectory_age_steps
        recompute_kv_cache_after_weight_updates""",
    "cluster": "gpus_per_node num_nodes master_port_range_low master_port_range_high segment_size",
    "policy": """draft dtensor_cfg dynamic_batching generation generation_batch_size hf_config_overrides
        logprob_batch_size logprob_chunk_size make_sequence_length_divisible_by max_grad_norm
        max_total_sequence_length megatron_cfg model_name offload_optimizer_for_logprob optimizer precision scheduler
        sequence_packing tokenizer train_global_batch_size train_micro_batch_size""",
    "policy.dtensor_cfg": """_v2 activation_checkpointing automodel_kwargs context_parallel_size cpu_offload
        custom_parallel_plan enabled lora_cfg sequence_parallel tensor_parallel_size env_vars""",
    "policy.dynamic_batching": "enabled logprob_mb_tokens sequence_length_round train_mb_tokens",
    "policy.sequence_packing": """algorithm enabled logprob_mb_tokens microbatch_order sequence_length_round
        train_mb_tokens""",
    "policy.generation": """backend colocated max_new_tokens mcore_generation_config port_range_high port_range_low
        real_quant_export_cpu_offload refit_cfg refit_transport stop_strings stop_token_ids temperature top_k top_p
        val_temperature val_top_k val_top_p vllm_cfg vllm_kwargs""",
    "policy.generation.colocated": "enabled resources",
    "policy.generation.colocated.resources": "gpus_per_node num_nodes",
    "policy.generation.mcore_generation_config": """activation_checkpointing block_size_tokens buffer_size_gb
        cuda_graph_impl enable_chunked_prefill enable_prefix_caching expose_http_server inference_cuda_graph_scope
        kv_cache_management_mode logging_step_interval mamba_inference_conv_states_dtype
        mamba_inference_ssm_states_dtype materialize_only_last_token_logits max_model_len max_requests max_tokens
        num_cuda_graphs num_speculative_tokens parsers refit_backend use_cuda_graphs_for_non_decode_steps""",
    "policy.megatron_cfg": """activation_checkpointing apply_rope_fusion bias_activation_fusion checkpoint
        converter_type cuda_graph_modules cuda_graph_warmup_steps defer_fp32_logits distributed_data_parallel_config
        empty_unused_memory_level expert_tensor_parallel_size fine_grained_activation_offloading
        force_reconvert_from_hf freeze_moe_router fused_linear_logprobs_chunk_size gradient_accumulation_fusion
        is_inference_model layernorm_epsilon moe_aux_loss_coeff moe_enable_deepep moe_flex_dispatcher_backend
        moe_grouped_gemm moe_pad_experts_for_cuda_graph_inference moe_per_layer_logging moe_router_bias_update_rate
        moe_router_dtype moe_router_enable_expert_bias moe_router_group_topk moe_router_load_balancing_type
        moe_router_num_groups moe_shared_expert_overlap mtp_detach_heads mtp_loss_scaling_factor mtp_num_layers
        mtp_use_repeated_layer num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage offload_modules
        peft pipeline_dtype pipeline_model_parallel_size scheduler track_moe_metrics
        use_fused_weighted_squared_relu use_gloo_process_groups""",
    "policy.megatron_cfg.fp8_cfg": "enabled force_clear_fp8_caches fp8 fp8_param fp8_recipe",
    "policy.megatron_cfg.optimizer": """adam_beta1 adam_beta2 adam_eps bf16 clip_grad fp16 lr min_lr optimizer
        optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d params_dtype sgd_momentum
        use_distributed_optimizer use_precision_aware_optimizer weight_decay""",
}


def _sections() -> dict[str, frozenset[str]]:
    names = {section: set(text.split()) for section, text in _NAMES.items()}
    train = names["policy.megatron_cfg"]
    train.update(key for key in TRAIN_KEYS if "." not in key)
    generation = names["policy.generation.mcore_generation_config"]
    generation.update(GENERATION_KEYS)
    # The generation config may override any key of megatron_cfg except those about the policy as a whole.
    generation.update(train - {"enabled", "zero_train_gen_mismatch"})
    for path in RECIPE_KEYS:
        section, _, name = path.rpartition(".")
        if section in names:
            names[section].add(name)
    names["policy.generation.mcore_generation_config.fp8_cfg"] = names["policy.megatron_cfg.fp8_cfg"]
    return {section: frozenset(members) for section, members in names.items()}


#: section -> the names it may hold.
SECTIONS: dict[str, frozenset[str]] = _sections()
