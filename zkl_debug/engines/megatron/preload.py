"""Imports everything a bed needs, and runs nothing: what a fork server does once for all its runs."""

from __future__ import annotations

import importlib

#: Modules that a run imports late, by name, ours and megatron-core's.
MODULES = (
    "megatron.core.inference.contexts.dynamic_context",
    "megatron.core.inference.engines.dynamic_engine",
    "megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper",
    "megatron.core.inference.sampling_params",
    "megatron.core.inference.text_generation_controllers.text_generation_controller",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.packed_seq_params",
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.moe.router",
    "megatron.core.transformer.moe.token_dispatcher",
    "zkl_debug.beds.faults",
    "zkl_debug.beds.observe",
    "zkl_debug.capture.api",
    "zkl_debug.diff",
    "zkl_debug.engines.cpu",
    "zkl_debug.engines.megatron.adapter",
    "zkl_debug.engines.megatron.config_fields",
    "zkl_debug.engines.megatron.generation",
    "zkl_debug.engines.megatron.model",
    "zkl_debug.engines.megatron.scoring",
    "zkl_debug.engines.megatron.seams",
    "zkl_debug.engines.megatron.world",
    "zkl_debug.stack.cpu",
    "zkl_debug.stack.full",
)


def preload() -> None:
    """Import all of :data:`MODULES`; no model, no process group, no thread pool is made."""
    from zkl_debug.engines.cpu import quiet

    with quiet():
        for name in MODULES:
            importlib.import_module(name)
