"""What the FlashInfer presets (NeMo-RL #4791, open) add, as data. Upstream checks part of it; here all is checked."""

from __future__ import annotations

from functools import partial

from zkl_debug.stack.recipes.keys import TRAINING_FORWARD
from zkl_debug.stack.recipes.model import EnvRule, Kind, Need, Rule, Side, When
from zkl_debug.stack.recipes.rules_bf16 import GEN_SETS_FP8

NVFP4 = "nvfp4-flashinfer"
MXFP8 = "mxfp8-flashinfer"

GEN_SETS_BACKEND = When(Side.GENERATION, "inference_grouped_gemm_backend", Kind.OVERRIDDEN)
GEN_SETS_PRECISION_FILE = When(Side.GENERATION, "te_precision_config_file", Kind.OVERRIDDEN)
_STRAIGHT_THROUGH = (
    "FlashInfer keeps no activations: the backward comes from the recompute (a straight-through estimator)"
)
_NO_FP8 = "NVFP4 is set by inference_moe_nvfp4_recipe alone; FP8 on either side would quantise besides it"


def _shared(preset: str) -> tuple[Rule, ...]:
    """The rules both FlashInfer presets have, owned by ``preset``."""
    rule = partial(Rule, preset=preset, source="NeMo-RL #4791")
    train = partial(rule, side=Side.TRAIN)
    return (
        train(
            id="training-forward-switch",
            key=TRAINING_FORWARD[-1],
            kind=Kind.FAMILY,
            required=True,
            names=TRAINING_FORWARD,
            training_only=True,
            why="Training must run the expert kernel of generation; otherwise TE experts meet FlashInfer ones",
        ),
        train(
            id="train-transformer-impl",
            key="transformer_impl",
            kind=Kind.EQUALS,
            required="inference_optimized",
            why="Only the inference_optimized layers hold the expert module that FlashInfer runs in",
        ),
        train(
            id="train-grouped-gemm",
            key="inference_grouped_gemm_backend",
            kind=Kind.EQUALS,
            required="flashinfer",
            why="Training must name the same expert backend as generation",
        ),
        rule(
            id="generation-grouped-gemm",
            side=Side.GENERATION,
            key="inference_grouped_gemm_backend",
            kind=Kind.EQUALS,
            required="flashinfer",
            when=(GEN_SETS_BACKEND,),
            why="Generation must run the FlashInfer experts of this preset",
        ),
        train(
            id="train-alltoall",
            key="moe_token_dispatcher_type",
            kind=Kind.EQUALS,
            required="alltoall",
            training_only=True,
            why="The training-forward switch is written for the all-to-all dispatcher",
        ),
        train(
            id="recompute-on",
            key="activation_checkpointing",
            kind=Kind.EQUALS,
            required=True,
            training_only=True,
            why=_STRAIGHT_THROUGH,
        ),
        train(
            id="recompute-selective",
            key="recompute_granularity",
            kind=Kind.EQUALS,
            required="selective",
            training_only=True,
            why=_STRAIGHT_THROUGH,
        ),
        train(
            id="recompute-moe",
            key="recompute_modules",
            kind=Kind.CONTAINS,
            required="moe",
            training_only=True,
            why=_STRAIGHT_THROUGH,
        ),
        train(
            id="train-graphs-not-local",
            key="cuda_graph_impl",
            kind=Kind.NOT_EQUALS,
            required="local",
            fix="none",
            training_only=True,
            why="Local CUDA graphs capture the MoE layer whole and switch off the recompute that the backward needs",
        ),
        train(
            id="agree-nvfp4-recipe",
            key="inference_moe_nvfp4_recipe",
            kind=Kind.AGREE,
            required=None,
            why="Both sides must quantise the experts by the same recipe",
        ),
        train(
            id="agree-inference-dispatcher",
            key="inference_moe_token_dispatcher_type",
            kind=Kind.AGREE,
            required=None,
            why="Both sides must exchange and combine expert tokens the same way",
        ),
        train(
            id="agree-expert-parallel",
            key="expert_model_parallel_size",
            kind=Kind.AGREE,
            required=None,
            why="Another expert split means other expert batches and another combine",
        ),
    )


_nvfp4 = partial(Rule, preset=NVFP4, source="NeMo-RL #4791", upstream="no")

NVFP4_RULES: tuple[Rule, ...] = (
    *_shared(NVFP4),
    Rule(
        preset=NVFP4,
        source="NeMo-RL #4791",
        id="nvfp4-per-token",
        side=Side.TRAIN,
        key="inference_moe_nvfp4_recipe",
        kind=Kind.EQUALS,
        required="per_token",
        why="Per-token scales do not depend on the batch; FlashInfer's BF16 experts are not batch invariant at all",
    ),
    _nvfp4(
        id="nvfp4-train-fp8-off", side=Side.TRAIN, key="fp8_cfg.enabled", kind=Kind.OFF, required=False, why=_NO_FP8
    ),
    _nvfp4(
        id="nvfp4-generation-fp8-off",
        side=Side.GENERATION,
        key="fp8_cfg.enabled",
        kind=Kind.OFF,
        required=False,
        when=(GEN_SETS_FP8,),
        why=_NO_FP8,
    ),
    _nvfp4(
        id="nvfp4-train-no-precision-file",
        side=Side.TRAIN,
        key="te_precision_config_file",
        kind=Kind.NULL,
        required=None,
        why=_NO_FP8,
    ),
    _nvfp4(
        id="nvfp4-generation-no-precision-file",
        side=Side.GENERATION,
        key="te_precision_config_file",
        kind=Kind.NULL,
        required=None,
        when=(GEN_SETS_PRECISION_FILE,),
        why=_NO_FP8,
    ),
)

MXFP8_FLASHINFER_RULES: tuple[Rule, ...] = (
    *_shared(MXFP8),
    Rule(
        preset=MXFP8,
        source="NeMo-RL #4791",
        id="mxfp8-experts",
        side=Side.TRAIN,
        key="inference_moe_nvfp4_recipe",
        kind=Kind.NULL,
        required=None,
        why="This preset runs MXFP8 experts; an NVFP4 recipe would quantise them to four bits",
        upstream="no",
    ),
)


def _environment(preset: str) -> tuple[EnvRule, ...]:
    rule = partial(EnvRule, preset=preset, source="NeMo-RL #4791")
    return (
        rule(
            id="mcore-parity",
            need=Need.ANY_FIELD,
            names=TRAINING_FORWARD,
            why="megatron-core needs the FlashInfer train/generation parity work (Megatron-LM #7798)",
            upstream="no",
        ),
        rule(
            id="flashinfer-python",
            need=Need.VERSION,
            names=("flashinfer-python",),
            minimum="0.7.0.post1",
            why="The expert kernels; later work pins 0.7.2.post1",
            upstream="no",
        ),
        rule(
            id="flashinfer-cubin",
            need=Need.VERSION,
            names=("flashinfer-cubin",),
            minimum="0.7.0.post1",
            why="The compiled expert kernels; later work pins 0.7.2.post1",
            upstream="no",
        ),
        rule(
            id="flashinfer-same",
            need=Need.SAME_VERSION,
            names=("flashinfer-python", "flashinfer-cubin"),
            why="Python and cubin packages of different versions run kernels the Python side does not describe",
            upstream="no",
        ),
    )


NVFP4_ENVIRONMENT = (
    *_environment(NVFP4),
    EnvRule(
        id="mcore-nvfp4-field",
        need=Need.FIELDS,
        names=("inference_moe_nvfp4_recipe",),
        why="Without the field the experts stay BF16, whose FlashInfer kernel is not batch invariant",
        source="NeMo-RL #4791",
        preset=NVFP4,
        upstream="no",
    ),
)
MXFP8_FLASHINFER_ENVIRONMENT = (
    *_environment(MXFP8),
    EnvRule(
        id="flashinfer-jit-cache",
        need=Need.PRESENT,
        names=("flashinfer-jit-cache",),
        why="megatron-core asks for it when it builds MXFP8 experts",
        source="NeMo-RL #4791",
        preset=MXFP8,
        upstream="by megatron-core at build",
    ),
)
