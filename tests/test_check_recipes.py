"""`check`: one recipe per rule that breaks only it, and sound recipes for every preset, written from RECIPES.md."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from zkl_debug.stack.recipes.engine import check
from zkl_debug.stack.recipes.loader import Layer, Recipe, load_recipe
from zkl_debug.stack.recipes.model import Kind, Report, Severity
from zkl_debug.stack.recipes.presets import PRESETS, rules_of

TRAIN = "policy.megatron_cfg"
GEN = "policy.generation.mcore_generation_config"
GONE = object()
Changes = dict[str, Any]

BF16: dict[str, Any] = {
    "grpo": {"async_grpo": {"enabled": False, "max_trajectory_age_steps": 1, "in_flight_weight_updates": False}},
    "policy": {
        "model_name": "Qwen/Qwen3-30B-A3B",
        "precision": "bfloat16",
        "max_total_sequence_length": 1000,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 4,
        "make_sequence_length_divisible_by": 64,
        "sequence_packing": {"enabled": False},
        "dynamic_batching": {"enabled": False, "sequence_length_round": 64},
        "megatron_cfg": {
            "enabled": True,
            "zero_train_gen_mismatch": True,
            "batch_invariant_mode": True,
            "batch_invariant_backend": "te_native",
            "batch_invariant_collective": "ordered",
            "attention_backend": "flash",
            "flash_attention_version": 4,
            "moe_permute_fusion": False,
            "use_fused_linear_logprobs": False,
            "tensor_model_parallel_size": 1,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 4,
            "moe_token_dispatcher_type": "alltoall",
            "fp8_cfg": {"enabled": False},
            "optimizer": {"use_precision_aware_optimizer": False},
            "env_vars": {"CUBLASLT_WORKSPACE_SIZE": "0", "CUBLAS_WORKSPACE_CONFIG": ":0:0"},
        },
        "generation": {
            "backend": "megatron",
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "colocated": {"enabled": False, "resources": {"gpus_per_node": 4, "num_nodes": 1}},
            "mcore_generation_config": {
                "transformer_impl": "inference_optimized",
                "logprobs_mode": "raw_logprobs",
                "enable_chunked_prefill": False,
            },
        },
    },
}

_HYBRID: Changes = {
    "policy.model_name": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    f"{TRAIN}.env_vars.MAMBA_DETERMINISTIC": "1",
    f"{TRAIN}.tensor_model_parallel_size": 2,
    f"{TRAIN}.sequence_parallel": True,
    "policy.sequence_packing.enabled": True,
    f"{GEN}.enable_chunked_prefill": True,
    f"{GEN}.enable_prefix_caching": True,
}
_MXFP8: Changes = {f"{TRAIN}.fp8_cfg": {"enabled": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"}}
_FLASHINFER: Changes = {
    f"{TRAIN}.transformer_impl": "inference_optimized",
    f"{TRAIN}.inference_grouped_gemm_backend": "flashinfer",
    f"{TRAIN}.moe_training_matches_inference": True,
    f"{TRAIN}.activation_checkpointing": True,
    f"{TRAIN}.recompute_granularity": "selective",
    f"{TRAIN}.recompute_modules": ["moe"],
    f"{TRAIN}.cuda_graph_impl": "none",
    f"{GEN}.cuda_graph_impl": "local",
}
SOUND: dict[str, Changes] = {
    "bf16": {},
    "mxfp8": {**_HYBRID, **_MXFP8},
    "nvfp4-flashinfer": {
        **_HYBRID,
        **_FLASHINFER,
        f"{TRAIN}.inference_moe_nvfp4_recipe": "per_token",
        f"{TRAIN}.te_precision_config_file": None,
    },
    "mxfp8-flashinfer": {**_HYBRID, **_MXFP8, **_FLASHINFER},
}

FP8_ON = {"enabled": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"}

#: rule id -> what breaks it and nothing else, in a sound recipe of the preset that has the rule.
BREAKS: dict[str, Changes] = {
    "gate": {f"{TRAIN}.zero_train_gen_mismatch": False},
    "megatron-training": {f"{TRAIN}.enabled": False},
    "batch-invariant-mode": {f"{TRAIN}.batch_invariant_mode": False},
    "batch-invariant-backend": {f"{TRAIN}.batch_invariant_backend": "triton"},
    "batch-invariant-collective": {f"{TRAIN}.batch_invariant_collective": "multimem"},
    "attention-backend": {f"{TRAIN}.attention_backend": "auto"},
    "flash-attention-version": {f"{TRAIN}.flash_attention_version": 3},
    "moe-permute-fusion": {f"{TRAIN}.moe_permute_fusion": True},
    "env-cublaslt-workspace": {f"{TRAIN}.env_vars.CUBLASLT_WORKSPACE_SIZE": GONE},
    "env-cublas-workspace": {f"{TRAIN}.env_vars.CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    "generation-env-cublaslt-workspace": {
        f"{GEN}.env_vars": {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "MAMBA_DETERMINISTIC": "1"}
    },
    "generation-env-cublas-workspace": {
        f"{GEN}.env_vars": {"CUBLASLT_WORKSPACE_SIZE": "0", "MAMBA_DETERMINISTIC": "1"}
    },
    "generation-backend": {"policy.generation.backend": "vllm"},
    "generation-transformer-impl": {f"{GEN}.transformer_impl": "transformer_engine"},
    "raw-logprobs": {f"{GEN}.logprobs_mode": "processed_logprobs"},
    "chunked-prefill": {f"{GEN}.enable_chunked_prefill": True},
    "temperature": {"policy.generation.temperature": 0.7},
    "top-p": {"policy.generation.top_p": 0.95},
    "top-k": {"policy.generation.top_k": 50},
    "dedicated-generation": {"policy.generation.colocated.enabled": True},
    "precision": {"policy.precision": "float32"},
    "train-fp8-off": {f"{TRAIN}.fp8_cfg.enabled": True, f"{GEN}.fp8_cfg": {"enabled": False}},
    "generation-fp8-off": {f"{GEN}.fp8_cfg": {"enabled": True}},
    "tensor-parallel": {f"{TRAIN}.tensor_model_parallel_size": 2},
    "context-parallel": {f"{TRAIN}.context_parallel_size": 2},
    "sequence-packing": {"policy.sequence_packing.enabled": True},
    "fused-linear-logprobs": {f"{TRAIN}.use_fused_linear_logprobs": True},
    "sequence-multiple": {"policy.make_sequence_length_divisible_by": 32},
    "dynamic-batching-multiple": {
        "policy.dynamic_batching.enabled": True,
        "policy.dynamic_batching.sequence_length_round": 48,
    },
    "agree-tensor-model-parallel-size": {f"{GEN}.tensor_model_parallel_size": 4},
    "agree-context-parallel-size": {f"{GEN}.context_parallel_size": 2},
    "agree-batch-invariant-mode": {f"{GEN}.batch_invariant_mode": False},
    "agree-batch-invariant-backend": {f"{GEN}.batch_invariant_backend": "deepgemm"},
    "agree-batch-invariant-collective": {f"{GEN}.batch_invariant_collective": "multimem"},
    "agree-batch-invariant-*": {f"{GEN}.batch_invariant_something_new": 3},
    "agree-attention-backend": {f"{GEN}.attention_backend": "fused"},
    "agree-flash-attention-version": {f"{GEN}.flash_attention_version": 3},
    "model-mla": {"policy.model_name": "deepseek-ai/DeepSeek-V3"},
    "model-experimental-attention": {"policy.model_name": "Qwen/Qwen3-Next-80B-A3B-Instruct"},
    "model-hybrid": {"policy.model_name": "nvidia/NVIDIA-Nemotron-Nano-9B-v2"},
    "tensor-parallel-2": {f"{TRAIN}.tensor_model_parallel_size": 4},
    "context-parallel-a2a": {f"{TRAIN}.context_parallel_size": 2},
    "agree-context-parallel-size-or-a2a": {f"{GEN}.context_parallel_size": 2},
    "env-mamba-deterministic": {f"{TRAIN}.env_vars.MAMBA_DETERMINISTIC": "0"},
    "generation-env-mamba-deterministic": {
        f"{GEN}.env_vars": {"CUBLASLT_WORKSPACE_SIZE": "0", "CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    },
    "qwen3-30b-optimizer": {
        "policy.model_name": "Qwen/Qwen3-30B-A3B-Instruct-2507",
        f"{TRAIN}.optimizer.use_precision_aware_optimizer": True,
    },
    "train-mxfp8-enabled": {f"{TRAIN}.fp8_cfg.enabled": False, f"{GEN}.fp8_cfg": FP8_ON},
    "train-mxfp8-recipe": {f"{TRAIN}.fp8_cfg.fp8_recipe": "blockwise", f"{GEN}.fp8_cfg": FP8_ON},
    "generation-mxfp8-enabled": {f"{GEN}.fp8_cfg": {**FP8_ON, "enabled": False}},
    "generation-mxfp8-recipe": {f"{GEN}.fp8_cfg": {**FP8_ON, "fp8_recipe": "delayed"}},
    "agree-fp8-format": {f"{GEN}.fp8_cfg": {**FP8_ON, "fp8": "hybrid"}},
    "agree-te-precision-config": {f"{GEN}.te_precision_config_file": "layers.yaml"},
    "training-forward-switch": {f"{TRAIN}.moe_training_matches_inference": GONE},
    "train-transformer-impl": {f"{TRAIN}.transformer_impl": "transformer_engine"},
    "train-grouped-gemm": {
        f"{TRAIN}.inference_grouped_gemm_backend": GONE,
        f"{GEN}.inference_grouped_gemm_backend": "flashinfer",
    },
    "generation-grouped-gemm": {f"{GEN}.inference_grouped_gemm_backend": "vllm"},
    "train-alltoall": {f"{TRAIN}.moe_token_dispatcher_type": "flex"},
    "recompute-on": {f"{TRAIN}.activation_checkpointing": False},
    "recompute-selective": {f"{TRAIN}.recompute_granularity": "full"},
    "recompute-moe": {f"{TRAIN}.recompute_modules": ["core_attn"]},
    "train-graphs-not-local": {f"{TRAIN}.cuda_graph_impl": "local"},
    "agree-nvfp4-recipe": {f"{GEN}.inference_moe_nvfp4_recipe": "per_block"},
    "agree-inference-dispatcher": {f"{GEN}.inference_moe_token_dispatcher_type": "nccl"},
    "agree-expert-parallel": {f"{GEN}.expert_model_parallel_size": 8},
    "nvfp4-per-token": {f"{TRAIN}.inference_moe_nvfp4_recipe": "per_block"},
    "nvfp4-train-fp8-off": {f"{TRAIN}.fp8_cfg.enabled": True, f"{GEN}.fp8_cfg": {"enabled": False}},
    "nvfp4-generation-fp8-off": {f"{GEN}.fp8_cfg": {"enabled": True}},
    "nvfp4-train-no-precision-file": {
        f"{TRAIN}.te_precision_config_file": "layers.yaml",
        f"{GEN}.te_precision_config_file": None,
    },
    "nvfp4-generation-no-precision-file": {f"{GEN}.te_precision_config_file": "layers.yaml"},
    "mxfp8-experts": {f"{TRAIN}.inference_moe_nvfp4_recipe": "per_token"},
}


def change(recipe: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """A copy of a recipe with dotted paths set (or removed, for GONE)."""
    recipe = copy.deepcopy(recipe)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node = recipe
        for part in parents:
            node = node.setdefault(part, {})
        if value is GONE:
            node.pop(last, None)
        else:
            node[last] = value
    return recipe


def sound(preset: str) -> dict[str, Any]:
    return change(BF16, SOUND[preset])


def write(folder: Path, recipe: dict[str, Any], name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def in_memory(recipe: dict[str, Any], preset: str) -> Report:
    """The same judgement without a file in between."""
    path = Path("recipe.yaml")
    return check(Recipe(path, (Layer(path, recipe),), OmegaConf.create(recipe)), preset=preset)


def judge(folder: Path, recipe: dict[str, Any], preset: str = "", *, generation_only: bool = False) -> Report:
    return check(load_recipe(write(folder, recipe)), preset=preset, generation_only=generation_only)


def ids(report: Report) -> list[str]:
    return [v.rule for v in report.violations]


def violation_rules(preset: str) -> list[str]:
    return [r.id for r in rules_of(preset) if r.severity is Severity.VIOLATION]


CASES = [(preset, rule) for preset in PRESETS for rule in violation_rules(preset)]


@pytest.mark.parametrize("preset", list(PRESETS))
def test_sound_recipe_passes_and_its_preset_is_picked(tmp_path: Path, preset: str) -> None:
    report = judge(tmp_path, sound(preset))
    assert ids(report) == []
    assert report.sound
    assert report.preset == preset
    assert report.picked.startswith("picked: ")
    assert not report.by_design
    assert not report.advice
    assert not report.unknown_keys
    assert not report.unresolved


def test_every_rule_has_a_breaking_recipe() -> None:
    assert {rule for _, rule in CASES} == set(BREAKS)


@pytest.mark.parametrize(("preset", "rule"), CASES)
def test_a_recipe_that_breaks_one_rule_is_reported_for_it_alone(preset: str, rule: str) -> None:
    report = in_memory(change(sound(preset), BREAKS[rule]), preset)
    assert [r.replace("something-new", "*") for r in ids(report)] == [rule]
    violation = report.violations[0]
    assert violation.key
    assert violation.found
    assert violation.required
    assert violation.why
    assert violation.preset in PRESETS
    assert violation.source.startswith("NeMo-RL #")


def test_fifteen_violations_are_all_in_one_report(tmp_path: Path) -> None:
    broken = [
        "gate",
        "batch-invariant-mode",
        "batch-invariant-backend",
        "batch-invariant-collective",
        "attention-backend",
        "flash-attention-version",
        "moe-permute-fusion",
        "env-cublaslt-workspace",
        "env-cublas-workspace",
        "raw-logprobs",
        "chunked-prefill",
        "temperature",
        "dedicated-generation",
        "sequence-packing",
        "sequence-multiple",
    ]
    changes: Changes = {}
    for rule in broken:
        changes |= BREAKS[rule]
    report = judge(tmp_path, change(BF16, changes), "bf16")
    assert ids(report) == broken
    assert len(set(broken)) == 15


@pytest.mark.parametrize("key", ["batch_invariant_backend", "batch_invariant_collective"])
def test_a_key_that_must_be_written_is_missed_though_its_default_is_right(tmp_path: Path, key: str) -> None:
    report = judge(tmp_path, change(BF16, {f"{TRAIN}.{key}": GONE}))
    (violation,) = report.violations
    assert violation.key == f"{TRAIN}.{key}"
    assert violation.found.startswith("absent, so effectively ")
    assert violation.required.endswith(", written out")


def test_absent_null_and_interpolated_are_told_apart(tmp_path: Path) -> None:
    key = f"{TRAIN}.flash_attention_version"
    found = {}
    for name, value in (("absent", GONE), ("null", None), ("interpolated", "${policy.fa}")):
        report = judge(tmp_path, change(BF16, {key: value, "policy.fa": 3}), "bf16")
        (violation,) = report.violations
        found[name] = (violation.state.value, violation.found)
    assert found["absent"] == ("absent", "absent, so effectively 2 (NeMo-RL)")
    assert found["null"] == ("null", "null, so effectively 2 (NeMo-RL)")
    assert found["interpolated"] == ("interpolated", '3 from "${policy.fa}"')


def test_an_absent_key_whose_default_is_right_passes(tmp_path: Path) -> None:
    gone = dict.fromkeys(
        (f"{TRAIN}.tensor_model_parallel_size", f"{TRAIN}.context_parallel_size", f"{TRAIN}.fp8_cfg", "grpo"), GONE
    )
    assert judge(tmp_path, change(BF16, gone)).sound


def test_generation_values_are_merged_key_by_key_over_training(tmp_path: Path) -> None:
    moved = {f"{GEN}.transformer_impl": GONE, f"{TRAIN}.transformer_impl": "inference_optimized"}
    assert judge(tmp_path, change(BF16, moved)).sound
    null = judge(tmp_path, change(BF16, {**moved, f"{GEN}.transformer_impl": None}))
    assert ids(null) == ["generation-transformer-impl"]


@pytest.mark.parametrize("value", [0, "0"])
def test_environment_values_are_compared_as_text(tmp_path: Path, value: Any) -> None:
    report = judge(tmp_path, change(BF16, {f"{TRAIN}.env_vars.CUBLASLT_WORKSPACE_SIZE": value}))
    assert report.sound
    advice = [v.rule for v in report.advice]
    assert advice == ([] if isinstance(value, str) else ["env-cublaslt-workspace-size-is-text"])


@pytest.mark.parametrize(
    "name", ["moe_inference_training_forward", "moe_match_generation_forward", "moe_training_matches_inference"]
)
def test_the_renamed_training_forward_switch_is_known_under_every_name(tmp_path: Path, name: str) -> None:
    changes: Changes = {f"{TRAIN}.moe_training_matches_inference": GONE, f"{TRAIN}.{name}": True}
    report = judge(tmp_path, change(sound("nvfp4-flashinfer"), changes))
    assert report.sound
    assert not report.unknown_keys
    renamed = [v for v in report.advice if v.rule == "renamed-key"]
    assert len(renamed) == (0 if name == "moe_training_matches_inference" else 1)


def test_contradicting_names_of_the_switch_are_a_violation(tmp_path: Path) -> None:
    report = judge(tmp_path, change(sound("nvfp4-flashinfer"), {f"{TRAIN}.moe_match_generation_forward": False}))
    assert ids(report) == ["training-forward-switch"]
    assert "moe_match_generation_forward: false" in report.violations[0].found


def test_context_parallelism_with_a2a_is_allowed_from_mxfp8_on(tmp_path: Path) -> None:
    cp: Changes = {
        f"{TRAIN}.context_parallel_size": 2,
        f"{TRAIN}.cp_comm_type": "a2a",
        f"{GEN}.context_parallel_size": 1,
    }
    assert judge(tmp_path, change(sound("mxfp8"), cp)).sound
    assert "context-parallel" in ids(judge(tmp_path, change(BF16, cp)))


def test_flashinfer_with_bf16_experts_is_refused_and_named(tmp_path: Path) -> None:
    recipe = change(sound("nvfp4-flashinfer"), {f"{TRAIN}.inference_moe_nvfp4_recipe": GONE})
    report = judge(tmp_path, recipe)
    assert report.preset == "nvfp4-flashinfer"
    assert "BF16 experts" in report.picked
    assert ids(report) == ["nvfp4-per-token"]


def test_what_is_not_zero_by_design_is_said_and_is_no_violation(tmp_path: Path) -> None:
    on: Changes = {"grpo.async_grpo.enabled": True, "grpo.async_grpo.in_flight_weight_updates": True}
    report = judge(tmp_path, change(BF16, on))
    assert report.sound
    assert [v.rule for v in report.by_design] == ["async-age", "in-flight-weight-updates"]
    fresh = judge(
        tmp_path, change(BF16, {"grpo.async_grpo.enabled": True, "grpo.async_grpo.max_trajectory_age_steps": 0})
    )
    assert not fresh.by_design


def test_generation_only_clears_the_training_only_flag(tmp_path: Path) -> None:
    training_only: Changes = {
        f"{TRAIN}.moe_training_matches_inference": False,
        f"{TRAIN}.cuda_graph_impl": "local",
        f"{TRAIN}.activation_checkpointing": False,
        "policy.sequence_packing.enabled": True,
    }
    recipe = change(sound("nvfp4-flashinfer"), training_only)
    assert ids(judge(tmp_path, recipe)) == ["training-forward-switch", "recompute-on", "train-graphs-not-local"]
    assert judge(tmp_path, recipe, generation_only=True).sound


def test_generation_only_judges_the_merged_config(tmp_path: Path) -> None:
    recipe = change(BF16, {f"{GEN}.flash_attention_version": 3, f"{GEN}.batch_invariant_mode": False})
    report = judge(tmp_path, recipe, generation_only=True)
    assert ids(report) == ["batch-invariant-mode", "flash-attention-version"]
    assert all(v.key.startswith(GEN) for v in report.violations)
    assert ids(judge(tmp_path, recipe)) == ["agree-batch-invariant-mode", "agree-flash-attention-version"]


def test_max_tokens_per_rank_is_derived_and_explained(tmp_path: Path) -> None:
    recipe = change(sound("nvfp4-flashinfer"), {"policy.sequence_packing.enabled": False})
    (derived,) = judge(tmp_path, recipe).derived
    assert derived.value == 4 * 1024
    assert "padded to a multiple of 64 = 1024" in derived.text
    packed = change(
        sound("nvfp4-flashinfer"),
        {"policy.sequence_packing.train_mb_tokens": 9000, "policy.sequence_packing.logprob_mb_tokens": 7000},
    )
    assert judge(tmp_path, packed).derived[0].value == 9000
    key = f"{TRAIN}.moe_inference_training_max_tokens_per_rank"
    (small,) = judge(tmp_path, change(packed, {key: 100})).derived
    assert small.value == 100
    assert "less than the 9000" in small.warning


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({f"{TRAIN}.model_overrides": {"multi_latent_attention": True}}, "model-mla"),
        ({f"{TRAIN}.model_overrides": {"experimental_attention_variant": "dsa"}}, "model-experimental-attention"),
        ({f"{TRAIN}.hybrid_layer_pattern": "M*M*"}, "model-hybrid"),
        ({"policy.model_name": "moonshotai/Kimi-K2-Instruct"}, "model-mla"),
    ],
)
def test_the_model_is_told_from_its_keys_and_its_name(tmp_path: Path, changes: Changes, fact: str) -> None:
    assert ids(judge(tmp_path, change(BF16, changes))) == [fact]


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen2.5-1.5B", "meta-llama/Llama-3.2-1B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"],
)
def test_plain_transformers_are_no_violation(tmp_path: Path, name: str) -> None:
    report = judge(tmp_path, change(BF16, {"policy.model_name": name}))
    assert report.sound
    assert "for it the preset is enforced only" in report.status


def test_a_local_checkpoint_tells_its_architecture(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "x", "kv_lora_rank": 512}')
    assert ids(judge(tmp_path, change(BF16, {"policy.model_name": str(model)}))) == ["model-mla"]
    (model / "config.json").write_text("{broken")
    assert judge(tmp_path, change(BF16, {"policy.model_name": str(model)})).model["mla"]["value"] is None


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        (f"{TRAIN}.batch_invarient_mode", f"{TRAIN}.batch_invariant_mode"),
        (f"{TRAIN}.flash_attn_version", f"{TRAIN}.flash_attention_version"),
        (f"{TRAIN}.logprobs_mode", f"{GEN}.logprobs_mode"),
        ("policy.generation.enable_chunked_prefill", f"{GEN}.enable_chunked_prefill"),
        ("policy.zero_train_gen_mismatch", f"{TRAIN}.zero_train_gen_mismatch"),
        (f"{TRAIN}.moe_training_match_inference", f"{TRAIN}.moe_training_matches_inference"),
        ("grpo.async_grpo.inflight_weight_updates", "grpo.async_grpo.in_flight_weight_updates"),
        ("polcy", "policy"),
    ],
)
def test_unknown_keys_get_a_did_you_mean(tmp_path: Path, wrong: str, meant: str) -> None:
    report = judge(tmp_path, change(BF16, {wrong: True}))
    assert [(k.path, k.suggestion) for k in report.unknown_keys] == [(wrong, meant)]


def test_a_misspelt_key_is_named_where_the_right_one_is_missed(tmp_path: Path) -> None:
    changes: Changes = {f"{TRAIN}.attention_backend": GONE, f"{TRAIN}.atention_backend": "flash"}
    (violation,) = judge(tmp_path, change(BF16, changes)).violations
    assert violation.hint == f"did you mean this key with {TRAIN}.atention_backend?"


def test_rules_are_data_with_every_field() -> None:
    for name in PRESETS:
        rules = rules_of(name)
        assert len({rule.id for rule in rules}) == len(rules)
        for rule in rules:
            assert rule.why
            assert rule.source
            assert rule.kind in Kind
            assert rule.fixable or rule.not_fixable
