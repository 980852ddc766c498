"""The presets, what each rests on, and how one is picked from a recipe."""

from __future__ import annotations

from zkl_debug.stack.recipes.model import EnvRule, Kind, Pick, Preset, Rule, Side, Status, When
from zkl_debug.stack.recipes.rules_bf16 import BF16_ENVIRONMENT, BF16_RULES
from zkl_debug.stack.recipes.rules_common import ADVICE_ONLY_FOR, COMMON_RULES
from zkl_debug.stack.recipes.rules_flashinfer import (
    MXFP8_FLASHINFER_ENVIRONMENT,
    MXFP8_FLASHINFER_RULES,
    NVFP4_ENVIRONMENT,
    NVFP4_RULES,
)
from zkl_debug.stack.recipes.rules_mxfp8 import FP8_RULES, MXFP8_ENVIRONMENT, MXFP8_REPLACES, MXFP8_RULES

_LOG_SOFTMAX = (
    "At TP 1 scoring must use the fused log_softmax of generation, not the distributed max/exp/sum/log "
    "decomposition: NeMo-RL's code decides that, no key does."
)
_RESOLVED_MODEL = "The architecture is final only once the model is resolved: a checkpoint may say more than its name."
_WORKER = "A dedicated generation worker validates its merged config: check that with --generation-only."

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="bf16",
            title="BF16 on both sides, dedicated generation",
            source="NeMo-RL #3208 (merged)",
            status=Status.VERIFIED,
            evidence=(
                "Qwen3-30B-A3B MoE, GB200, training TP1/PP1/CP1 EP4 ETP1 + one dedicated generation node, "
                "CUDA graphs on, 5 GRPO steps exact"
            ),
            verified_model=r"qwen3-30b-a3b",
            rules=BF16_RULES,
            environment=BF16_ENVIRONMENT,
            beyond=(_LOG_SOFTMAX, _RESOLVED_MODEL),
        ),
        Preset(
            name="mxfp8",
            title="MXFP8 on both sides; Mamba hybrids, TP 2, CP with a2a, packing",
            source="NeMo-RL #4683 (merged)",
            status=Status.ENFORCED,
            evidence="the rules are merged and enforced; no run is on record here",
            rules=MXFP8_RULES,
            environment=MXFP8_ENVIRONMENT,
            base="bf16",
            replaces=MXFP8_REPLACES,
            beyond=(_LOG_SOFTMAX, _RESOLVED_MODEL),
        ),
        Preset(
            name="nvfp4-flashinfer",
            title="NVFP4 experts on FlashInfer, per-token scales",
            source="NeMo-RL #4791 (open)",
            status=Status.VERIFIED,
            evidence=(
                "Nemotron Nano v3 per-token NVFP4, GB200, 2 nodes x 4, 5 steps: gen_kl_error 0, "
                "token_mult_prob_error 1, probs_ratio_min = max = 1"
            ),
            verified_model=r"nemotron-3-nano|nano-?v3",
            rules=NVFP4_RULES,
            environment=NVFP4_ENVIRONMENT,
            base="mxfp8",
            replaces=tuple(rule.id for rule in FP8_RULES),
            beyond=(_LOG_SOFTMAX, _RESOLVED_MODEL, _WORKER),
        ),
        Preset(
            name="mxfp8-flashinfer",
            title="MXFP8 experts on FlashInfer",
            source="NeMo-RL #4791 (open)",
            status=Status.ENFORCED,
            evidence="the rules are in the open pull request; no run is on record here",
            rules=MXFP8_FLASHINFER_RULES,
            environment=MXFP8_FLASHINFER_ENVIRONMENT,
            base="mxfp8",
            beyond=(_LOG_SOFTMAX, _RESOLVED_MODEL, _WORKER),
        ),
    )
}

#: What people ask for and no preset covers.
UNSUPPORTED: dict[str, str] = {
    "bf16 experts on FlashInfer": "the FlashInfer BF16 kernel is not batch invariant",
    "colocated generation": "bit-exact for the first steps only (#3743, workstream 1, cause unknown)",
    "Hopper (SM90)": "the matched kernels are for SM100 and newer",
    "MLA, experimental attention": "their attention kernels are not covered",
}

_FLASHINFER = When(Side.GENERATION, "inference_grouped_gemm_backend", Kind.EQUALS, "flashinfer")
_TRAIN_FLASHINFER = When(Side.TRAIN, "inference_grouped_gemm_backend", Kind.EQUALS, "flashinfer")
_NVFP4 = When(Side.GENERATION, "inference_moe_nvfp4_recipe", Kind.NOT_NULL)
_TRAIN_NVFP4 = When(Side.TRAIN, "inference_moe_nvfp4_recipe", Kind.NOT_NULL)
_FP8 = When(Side.GENERATION, "fp8_cfg.enabled", Kind.EQUALS, True)
_TRAIN_FP8 = When(Side.TRAIN, "fp8_cfg.enabled", Kind.EQUALS, True)
_BARE_FLASHINFER = (
    "FlashInfer experts without MXFP8 or NVFP4 are BF16 experts, which no preset supports: "
    "checked against the verified FlashInfer preset"
)

PICKS: tuple[Pick, ...] = (
    Pick("nvfp4-flashinfer", (_NVFP4,), "the generation side sets inference_moe_nvfp4_recipe"),
    Pick("nvfp4-flashinfer", (_TRAIN_NVFP4,), "the training side sets inference_moe_nvfp4_recipe"),
    Pick("mxfp8-flashinfer", (_FLASHINFER, _FP8), "FlashInfer experts and FP8 in generation"),
    Pick("mxfp8-flashinfer", (_FLASHINFER, _TRAIN_FP8), "FlashInfer experts and FP8 in training"),
    Pick("mxfp8-flashinfer", (_TRAIN_FLASHINFER, _TRAIN_FP8), "FlashInfer experts and FP8 in training"),
    Pick("nvfp4-flashinfer", (_FLASHINFER,), _BARE_FLASHINFER),
    Pick("nvfp4-flashinfer", (_TRAIN_FLASHINFER,), _BARE_FLASHINFER),
    Pick("mxfp8", (_TRAIN_FP8,), "FP8 in training"),
    Pick("mxfp8", (_FP8,), "FP8 in generation"),
    Pick("bf16", (), "neither FP8 nor FlashInfer experts in the recipe"),
)


def chain(name: str) -> tuple[Preset, ...]:
    """The preset and those it builds on, the base first."""
    preset = PRESETS[name]
    return (*chain(preset.base), preset) if preset.base else (preset,)


def rules_of(name: str) -> tuple[Rule, ...]:
    """All rules in force for a preset, in the order of the report: base presets first, the common ones last."""
    rules: dict[str, Rule] = {}
    for preset in chain(name):
        for gone in preset.replaces:
            rules.pop(gone, None)
        rules.update({rule.id: rule for rule in preset.rules})
    common = [rule for rule in COMMON_RULES if ADVICE_ONLY_FOR.get(rule.id, name) == name]
    return (*rules.values(), *common)


def environment_of(name: str) -> tuple[EnvRule, ...]:
    """All requirements on the machine for a preset, base presets first."""
    return tuple(rule for preset in chain(name) for rule in preset.environment)
