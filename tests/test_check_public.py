"""`check` on the public NeMo-RL recipes (Apache-2.0): what each lacks for bf16, and that ``--fix`` completes it.

The whole recipes are read from ``../shared/data`` where that is present; an excerpt is part of this repository.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_check_recipes import ids, write

from zkl_debug.errors import UsageError
from zkl_debug.stack.recipes.engine import check
from zkl_debug.stack.recipes.fixer import Fix, fix
from zkl_debug.stack.recipes.loader import load_recipe

CONFIGS = Path(__file__).resolve().parents[2] / "shared/data/nemo_rl_recipes/examples/configs"
EXCERPT = Path(__file__).resolve().parent / "data/nemo_rl_excerpt"
LLAMA = "recipes/llm/grpo-llama3.2-1b-instruct-1n8g-megatron_generation.yaml"
LLAMA_DEDICATED = "recipes/llm/grpo-llama3.2-1b-instruct-2n8g-megatron_generation-noncolocated.yaml"
NANO = "recipes/llm/grpo-nanov3-30BA3B-2n8g-megatron_generation.yaml"
NANO_ASYNC = "recipes/llm/grpo-nanov3-30BA3B-2n8g-megatron_generation-async-gym.yaml"

_GATE = ["gate"]
_KERNELS = [
    "batch-invariant-mode",
    "batch-invariant-backend",
    "batch-invariant-collective",
    "attention-backend",
    "flash-attention-version",
    "moe-permute-fusion",
    "env-cublaslt-workspace",
    "env-cublas-workspace",
]
_LOGPROBS = ["raw-logprobs", "chunked-prefill"]
_IMPL = ["generation-transformer-impl"]
_SHAPES = ["sequence-packing", "sequence-multiple"]

#: recipe -> exactly what it lacks for bf16, in the order of the report.
LACKS: dict[str, list[str]] = {
    "grpo_math_1B.yaml": [
        *_GATE,
        "megatron-training",
        *_KERNELS,
        "generation-backend",
        *_IMPL,
        *_LOGPROBS,
        "dedicated-generation",
        *_SHAPES,
    ],
    "grpo_math_1B_megatron.yaml": [
        *_GATE,
        *_KERNELS,
        "generation-backend",
        *_IMPL,
        *_LOGPROBS,
        "dedicated-generation",
        *_SHAPES,
    ],
    LLAMA: [*_GATE, *_KERNELS, *_IMPL, *_LOGPROBS, "dedicated-generation", *_SHAPES],
    LLAMA_DEDICATED: [*_GATE, *_KERNELS, *_IMPL, *_LOGPROBS, *_SHAPES],
    NANO: [*_GATE, *_KERNELS, *_LOGPROBS, "tensor-parallel", "sequence-multiple", "model-hybrid"],
}

#: Stands in for examples/nemo_gym/grpo_nanov3.yaml, which the sixth recipe builds on and the shared data lacks:
#: the shape of a Nano v3 recipe, written for this test.
NANO_PARENT = {
    "policy": {
        "precision": "bfloat16",
        "max_total_sequence_length": 4096,
        "train_micro_batch_size": 1,
        "logprob_batch_size": 1,
        "make_sequence_length_divisible_by": (
            "${mul:${mul:${policy.megatron_cfg.tensor_model_parallel_size}, "
            "${policy.megatron_cfg.context_parallel_size}}, 2}"
        ),
        "sequence_packing": {"enabled": True, "train_mb_tokens": "${mul:${policy.max_total_sequence_length}, 1}"},
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": 2,
            "context_parallel_size": 4,
            "sequence_parallel": True,
            "moe_permute_fusion": True,
            "moe_token_dispatcher_type": "alltoall",
        },
        "generation": {
            "backend": "vllm",
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "mcore_generation_config": {
                "transformer_impl": "inference_optimized",
                "enable_chunked_prefill": True,
                "tensor_model_parallel_size": 2,
                "context_parallel_size": 1,
                "sequence_parallel": True,
            },
        },
    }
}
NANO_ASYNC_LACKS = [
    *_GATE,
    *_KERNELS,
    *_LOGPROBS,
    "tensor-parallel",
    "context-parallel",
    *_SHAPES,
    "agree-context-parallel-size",
    "model-hybrid",
]

shared = pytest.mark.skipif(not CONFIGS.is_dir(), reason="the public recipes are not beside this repository")


def run_fix(path: Path, out: Path, preset: str = "") -> Fix:
    recipe = load_recipe(path)
    return fix(recipe, check(recipe, preset=preset), out)


@shared
@pytest.mark.parametrize("name", list(LACKS))
def test_a_public_recipe_lacks_exactly_this_for_bf16(name: str) -> None:
    report = check(load_recipe(CONFIGS / name))
    assert report.preset == "bf16"
    assert ids(report) == LACKS[name]
    assert not report.unknown_keys
    assert not report.unresolved
    assert not report.by_design


@shared
@pytest.mark.parametrize("name", [name for name in LACKS if name != NANO])
def test_a_public_recipe_completed_by_fix_passes(tmp_path: Path, name: str) -> None:
    before = (CONFIGS / name).read_bytes()
    fixed = run_fix(CONFIGS / name, tmp_path / "fixed.yaml")
    assert fixed.after.sound, fixed.remaining
    assert (CONFIGS / name).read_bytes() == before
    again = check(load_recipe(tmp_path / "fixed.yaml"))
    assert again.sound
    assert again.preset == "bf16"


@shared
def test_a_hybrid_cannot_be_fixed_for_bf16_and_can_for_the_presets_that_allow_it(tmp_path: Path) -> None:
    fixed = run_fix(CONFIGS / NANO, tmp_path / "bf16.yaml")
    assert [v.rule for v in fixed.remaining] == ["model-hybrid"]
    assert "--preset mxfp8" in fixed.remaining[0].not_fixable
    for preset in ("mxfp8", "nvfp4-flashinfer", "mxfp8-flashinfer"):
        fixed = run_fix(CONFIGS / NANO, tmp_path / f"{preset}.yaml", preset)
        assert fixed.after.sound, fixed.remaining
        assert check(load_recipe(tmp_path / f"{preset}.yaml")).preset == preset


@shared
def test_the_recipe_whose_parent_is_not_there_says_so() -> None:
    with pytest.raises(UsageError, match=r"grpo_nanov3\.yaml, which does not exist"):
        load_recipe(CONFIGS / NANO_ASYNC)
    report = check(load_recipe(CONFIGS / NANO_ASYNC, partial=True))
    assert not report.sound
    assert [v.rule for v in report.by_design] == ["async-age", "in-flight-weight-updates"]


@shared
def test_the_sixth_recipe_over_a_parent_written_here(tmp_path: Path) -> None:
    folder = tmp_path / "examples/configs/recipes/llm"
    folder.mkdir(parents=True)
    path = folder / Path(NANO_ASYNC).name
    path.write_bytes((CONFIGS / NANO_ASYNC).read_bytes())
    (tmp_path / "examples/nemo_gym").mkdir()
    write(tmp_path / "examples/nemo_gym", NANO_PARENT, "grpo_nanov3.yaml")
    report = check(load_recipe(path))
    assert ids(report) == NANO_ASYNC_LACKS
    assert [v.rule for v in report.by_design] == ["async-age", "in-flight-weight-updates"]
    found = {v.rule: v.found for v in report.violations}
    assert found["sequence-multiple"].startswith('8 from "${mul:')
    fixed = run_fix(path, tmp_path / "fixed.yaml", "mxfp8")
    assert fixed.after.sound, fixed.remaining
    assert len(fixed.after.by_design) == 2


@pytest.mark.parametrize("name", [LLAMA, NANO, "grpo_math_1B.yaml"])
def test_the_excerpt_in_this_repository_lacks_the_same(tmp_path: Path, name: str) -> None:
    report = check(load_recipe(EXCERPT / name))
    assert ids(report) == LACKS[name]
    assert not report.unknown_keys
    fixed = run_fix(EXCERPT / name, tmp_path / "fixed.yaml", "mxfp8" if name == NANO else "bf16")
    assert fixed.after.sound, fixed.remaining


@pytest.mark.parametrize("file", sorted(EXCERPT.rglob("*.yaml")), ids=lambda p: p.name)
def test_the_excerpt_names_source_and_licence(file: Path) -> None:
    head = "".join(file.read_text(encoding="utf-8").splitlines()[:2])
    assert "https://github.com/NVIDIA-NeMo/RL" in head
    assert "Apache License 2.0" in head
