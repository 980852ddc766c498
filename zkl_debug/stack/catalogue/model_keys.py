"""Keys of ``TransformerConfig`` and of the training side of a recipe (RECIPES.md, presets bf16 to mxfp8-flashinfer)."""

from __future__ import annotations

from functools import partial

from zkl_debug.stack.applying import by_config, elsewhere
from zkl_debug.stack.catalogue.cpu import EVERY_PRESET
from zkl_debug.stack.catalogue.variables import MXFP8_AND_LATER
from zkl_debug.stack.needs import FA4, FLASHINFER, MAMBA, TE, TE_218, gpu, model_field
from zkl_debug.stack.switches import Setting, Switch

_T = "policy.megatron_cfg."
_G = "policy.generation.mcore_generation_config."
_FLASHINFER_PRESETS = ("nvfp4-flashinfer", "mxfp8-flashinfer")
_MXFP8_PRESETS = ("mxfp8", "mxfp8-flashinfer")
_TRAINING_FORWARD = ("moe_training_matches_inference", "moe_match_generation_forward", "moe_inference_training_forward")


def _both(key: str, on: str) -> tuple[Setting, ...]:
    return Setting("recipe", _T + key, on), Setting("recipe", _G + key, on)


_key = partial(by_config, config_class="TransformerConfig", kind="model key", stacked=False)
_elsewhere = partial(elsewhere, kind="model key")

MODEL_KEYS: tuple[Switch, ...] = (
    _key(
        "attention-flash",
        values={"attention_backend": "flash"},
        fixes="both sides may take FlashAttention only, not whatever a backend search finds",
        owner="mcore",
        group="batch invariance",
        settings=(Setting("recipe", _T + "attention_backend", "flash", "auto"),),
        presets=EVERY_PRESET,
        needs=(gpu(),),
    ),
    _key(
        "flash-attention-4",
        values={"flash_attention_version": 4},
        fixes="training and generation run one FlashAttention kernel, with a fixed split over keys",
        owner="mcore",
        group="batch invariance",
        settings=(Setting("recipe", _T + "flash_attention_version", "4", "2"),),
        presets=EVERY_PRESET,
        needs=(gpu("90"), FA4),
    ),
    _key(
        "batch-invariant-mode",
        values={"batch_invariant_mode": True},
        fixes="one split of the keys in attention, and the batch-invariant kernels of megatron-core",
        owner="mcore",
        group="batch invariance",
        settings=(Setting("recipe", _T + "batch_invariant_mode", "true", "false"),),
        presets=EVERY_PRESET,
        requires=("attention-flash", "flash-attention-4"),
        needs=(gpu(), TE),
    ),
    _key(
        "batch-invariant-backend",
        values={"batch_invariant_backend": "te_native"},
        fixes="TE's own batch-invariant GEMM, norm and attention instead of Triton's; a fixed top-k add tree",
        owner="TE",
        group="batch invariance",
        settings=(Setting("recipe", _T + "batch_invariant_backend", "te_native", "triton"),),
        presets=EVERY_PRESET,
        requires=("batch-invariant-mode",),
        needs=(gpu("100"), TE_218),
    ),
    _key(
        "batch-invariant-collective",
        values={"batch_invariant_collective": "ordered"},
        fixes="all-reduce adds the ranks in one order, whatever the message size",
        owner="mcore",
        group="batch invariance",
        settings=(Setting("recipe", _T + "batch_invariant_collective", "ordered", "null"),),
        presets=EVERY_PRESET,
        requires=("batch-invariant-mode",),
        needs=(gpu(),),
    ),
    _key(
        "no-permute-fusion",
        values={"moe_permute_fusion": False},
        fixes="tokens are permuted by the kernel that generation uses",
        owner="mcore",
        group="batch invariance",
        settings=(Setting("recipe", _T + "moe_permute_fusion", "false", "true"),),
        presets=EVERY_PRESET,
    ),
    _key(
        "training-matches-inference",
        values={"|".join(_TRAINING_FORWARD): True},
        fixes="the experts of the training forward run through the kernels of generation",
        owner="mcore",
        group="batch invariance",
        settings=(Setting("recipe", _T + _TRAINING_FORWARD[0], "true", "false"),),
        presets=_FLASHINFER_PRESETS,
        needs=(gpu("100"), FLASHINFER),
    ),
    _key(
        "train-alltoall",
        values={"moe_token_dispatcher_type": "alltoall"},
        fixes="the dispatcher whose combine has the order of generation's",
        owner="mcore",
        group="batch invariance",
        mechanism="routing",
        settings=(Setting("recipe", _T + "moe_token_dispatcher_type", "alltoall"),),
        presets=_FLASHINFER_PRESETS,
    ),
    _key(
        "mamba-exact-path",
        values={"use_mamba_mem_eff_path": False},
        fixes="the mixer scans, then norms, as prefill does, instead of gating inside the scan",
        owner="mcore",
        group="mamba",
        needs=(MAMBA,),
    ),
    _elsewhere(
        "inference-optimized",
        fixes="both sides build the layers that generation runs fastest, with one set of kernels",
        owner="mcore",
        group="batch invariance",
        target="TransformerConfig.transformer_impl",
        settings=(Setting("recipe", _G + "transformer_impl", "inference_optimized", "transformer_engine"),),
        presets=EVERY_PRESET,
        needs=(gpu("90"), TE, model_field("transformer_impl")),
    ),
    _elsewhere(
        "train-inference-optimized",
        fixes="training builds generation's layers too",
        owner="mcore",
        group="batch invariance",
        target="TransformerConfig.transformer_impl",
        settings=(Setting("recipe", _T + "transformer_impl", "inference_optimized", "transformer_engine"),),
        presets=_FLASHINFER_PRESETS,
        requires=("inference-optimized",),
        needs=(gpu("90"), TE, model_field("transformer_impl")),
    ),
    _elsewhere(
        "grouped-gemm-flashinfer",
        fixes="experts run FlashInfer's grouped GEMM on both sides",
        owner="mcore",
        group="batch invariance",
        target="TransformerConfig.inference_grouped_gemm_backend",
        settings=_both("inference_grouped_gemm_backend", "flashinfer"),
        presets=_FLASHINFER_PRESETS,
        requires=("train-inference-optimized", "training-matches-inference"),
        needs=(gpu("100"), FLASHINFER, model_field("inference_grouped_gemm_backend")),
    ),
    _elsewhere(
        "nvfp4-per-token",
        fixes="NVFP4 scales belong to one token, so a row's values do not depend on its neighbours",
        owner="mcore",
        group="precision",
        mechanism="precision",
        target="TransformerConfig.inference_moe_nvfp4_recipe",
        settings=_both("inference_moe_nvfp4_recipe", "per_token"),
        presets=("nvfp4-flashinfer",),
        requires=("grouped-gemm-flashinfer",),
        conflicts=("mxfp8-both-sides",),
        needs=(gpu("100"), FLASHINFER, model_field("inference_moe_nvfp4_recipe")),
    ),
    _elsewhere(
        "moe-recompute",
        fixes="the backward of experts that ran inference kernels comes from a recompute (straight-through)",
        owner="mcore",
        group="lifecycle",
        mechanism="lifecycle",
        target="activation_checkpointing, recompute_granularity, recompute_modules",
        settings=(
            Setting("recipe", _T + "activation_checkpointing", "true", "false"),
            Setting("recipe", _T + "recompute_granularity", "selective", "null"),
            Setting("recipe", _T + "recompute_modules", "[moe]", "null"),
        ),
        presets=_FLASHINFER_PRESETS,
        needs=(gpu(),),
    ),
    _elsewhere(
        "train-graphs-not-local",
        fixes="training captures no local graph, which the recompute could not leave",
        owner="mcore",
        group="graph shapes",
        mechanism="lifecycle",
        target="TransformerConfig.cuda_graph_impl",
        settings=(Setting("recipe", _T + "cuda_graph_impl", "none", "local"),),
        presets=_FLASHINFER_PRESETS,
        needs=(gpu(), model_field("cuda_graph_impl")),
    ),
    _elsewhere(
        "expert-tokens-derived",
        fixes="the buffer of the inference experts holds the largest train or log-prob micro-batch",
        owner="NeMo-RL",
        group="batch invariance",
        mechanism="shape class",
        target="moe_inference_training_max_tokens_per_rank",
        settings=(Setting("recipe", "~" + _T + "moe_inference_training_max_tokens_per_rank", ""),),
        presets=_FLASHINFER_PRESETS,
        needs=(gpu("100"),),
    ),
    _elsewhere(
        "mxfp8-both-sides",
        fixes="both sides quantise to MXFP8 along the same scaling path",
        owner="TE",
        group="precision",
        mechanism="precision",
        target="fp8_cfg.enabled, fp8_cfg.fp8_recipe",
        settings=(*_both("fp8_cfg.enabled", "true"), *_both("fp8_cfg.fp8_recipe", "mxfp8")),
        presets=_MXFP8_PRESETS,
        needs=(gpu("100"), TE_218),
    ),
    _elsewhere(
        "fp8-off-both-sides",
        fixes="neither side quantises to FP8",
        owner="TE",
        group="precision",
        mechanism="precision",
        target="fp8_cfg.enabled",
        settings=_both("fp8_cfg.enabled", "false"),
        presets=("bf16", "nvfp4-flashinfer"),
        conflicts=("mxfp8-both-sides",),
        needs=(gpu(),),
    ),
    _elsewhere(
        "no-precision-file",
        fixes="no per-layer precision file turns FP8 on behind the switch",
        owner="TE",
        group="precision",
        mechanism="precision",
        target="te_precision_config_file",
        settings=_both("te_precision_config_file", "null"),
        presets=("nvfp4-flashinfer",),
        needs=(gpu(),),
    ),
    _elsewhere(
        "plain-optimizer",
        fixes="Qwen3-30B: master weights stay in the optimizer's own precision, so a refit sends what was trained",
        owner="mcore",
        group="precision",
        mechanism="precision",
        target="optimizer.use_precision_aware_optimizer",
        settings=(Setting("recipe", _T + "optimizer.use_precision_aware_optimizer", "false", "true"),),
        presets=MXFP8_AND_LATER,
        needs=(gpu(),),
    ),
)
