"""`zkl-debug check` as users run it: text, JSON, exit codes, --fix, --environment."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_check_recipes import BF16, BREAKS, GEN, GONE, TRAIN, Changes, change, sound, write

from zkl_debug.cli.main import main
from zkl_debug.stack.recipes import environment
from zkl_debug.stack.recipes.environment import Environment, judge_environment
from zkl_debug.stack.recipes.loader import load_recipe
from zkl_debug.stack.recipes.presets import PRESETS
from zkl_debug.stack.recipes.view import View

_BROKEN: Changes = {
    **BREAKS["attention-backend"],
    **BREAKS["temperature"],
    **BREAKS["sequence-multiple"],
    **BREAKS["agree-flash-attention-version"],
}


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "100")

    def call(*args: object) -> Ran:
        with pytest.raises(SystemExit) as stop:
            main(["check", *map(str, args)])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Ran(int(stop.value.code or 0), out, err)

    return call


def test_text_report_fits_100_columns_and_names_everything(tmp_path: Path, run: Any) -> None:
    ran = run(
        write(
            tmp_path, change(BF16, {**_BROKEN, f"{TRAIN}.atention_backend": "x" * 150, "grpo.async_grpo.enabled": True})
        )
    )
    assert ran.code == 1
    assert max(len(line) for line in ran.out.splitlines()) <= 100
    assert not any(line.endswith(" ") for line in ran.out.splitlines())
    for text in (
        "preset    bf16, picked: neither FP8 nor FlashInfer experts in the recipe",
        "verified by a run: Qwen3-30B-A3B MoE, GB200",
        "4 violations, 3 of them fixable",
        "policy.megatron_cfg.attention_backend",
        'found     "auto"',
        'required  "flash"',
        "bf16 · NeMo-RL #3208 · attention-backend",
        "leaves it: it changes what is sampled",
        "Not zero by design",
        "did you mean policy.megatron_cfg.attention_backend?",
    ):
        assert text in ran.out, text


def test_markup_and_control_characters_of_a_recipe_are_only_text(tmp_path: Path, run: Any) -> None:
    recipe = change(BF16, {"policy.precision": "[bold]\x1b[31mred", "policy.[link=x]": 1})
    ran = run(write(tmp_path, recipe))
    assert ran.code == 1
    assert "\x1b" not in ran.out
    assert "[bold]" in ran.out


def test_json_is_one_document_of_version_1(tmp_path: Path, run: Any) -> None:
    ran = run(write(tmp_path, change(BF16, _BROKEN)), "--json")
    document = ran.document
    assert ran.code == 1
    assert (document["format"], document["version"]) == ("zkl-check", 1)
    assert document["verdict"] == "violations"
    assert document["counts"] == {"rules": 39, "violations": 4, "fixable": 3}
    assert [v["rule"] for v in document["violations"]] == [
        "attention-backend",
        "temperature",
        "sequence-multiple",
        "agree-flash-attention-version",
    ]
    first = document["violations"][0]
    assert first["key"] == "policy.megatron_cfg.attention_backend"
    assert first["required"] == '"flash"'
    assert first["preset"] == "bf16"
    assert first["file"] == "recipe.yaml"
    assert {p["name"]: p["status"] for p in document["presets"]} == {
        "bf16": "verified by a run",
        "mxfp8": "enforced only",
        "nvfp4-flashinfer": "verified by a run",
        "mxfp8-flashinfer": "enforced only",
    }


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_sound_recipe_exits_0(tmp_path: Path, run: Any, preset: str) -> None:
    path = write(tmp_path, sound(preset))
    ran = run(path)
    assert ran.code == 0
    assert "verdict   sound: all" in ran.out
    document = run(path, "--json").document
    assert document["verdict"] == "sound"
    assert document["zero_expected"] is True
    assert run(path, "--generation-only").code == 0


def test_not_zero_by_design_exits_0_and_expects_no_zero(tmp_path: Path, run: Any) -> None:
    path = write(tmp_path, change(BF16, {"grpo.async_grpo.enabled": True}))
    ran = run(path, "--json")
    assert ran.code == 0
    assert ran.document["zero_expected"] is False
    assert [v["rule"] for v in ran.document["not_zero_by_design"]] == ["async-age"]
    assert "not zero by design" in run(path).out


def test_a_named_preset_is_used(tmp_path: Path, run: Any) -> None:
    path = write(tmp_path, BF16)
    ran = run(path, "--preset", "mxfp8", "--json")
    assert ran.code == 1
    assert [v["rule"] for v in ran.document["violations"]] == ["train-mxfp8-enabled", "train-mxfp8-recipe"]
    assert ran.document["preset"]["picked"] == "named with --preset"
    assert run(path, "--preset", "fp4").code == 2


def test_usage_errors_exit_2(tmp_path: Path, run: Any) -> None:
    assert run().code == 2
    assert run(tmp_path / "nowhere.yaml").code == 2
    assert run(tmp_path).code == 2


def test_list_shows_every_preset_and_rule(run: Any) -> None:
    ran = run("--list")
    assert ran.code == 0
    assert all(name in ran.out for name in PRESETS)
    assert "not supported" in ran.out
    document = run("--list", "--json").document
    assert [p["name"] for p in document["presets"]] == list(PRESETS)
    assert all(rule["why"] and rule["source"] for p in document["presets"] for rule in p["rules"])


def test_fix_writes_an_overlay_and_says_what_it_could_not_fix(tmp_path: Path, run: Any) -> None:
    (tmp_path / "sub").mkdir()
    path = write(tmp_path, change(BF16, _BROKEN))
    before = path.read_bytes()
    ran = run(path, "--fix", tmp_path / "sub/out.yaml", "--json")
    assert ran.code == 1
    assert path.read_bytes() == before
    fix = ran.document["fix"]
    assert [c["key"] for c in fix["changes"]] == [
        f"{TRAIN}.attention_backend",
        "policy.make_sequence_length_divisible_by",
        f"{GEN}.flash_attention_version",
    ]
    assert [v["rule"] for v in fix["remaining"]] == ["temperature"]
    overlay = yaml.safe_load((tmp_path / "sub/out.yaml").read_text())
    assert overlay == {
        "defaults": "../recipe.yaml",
        "policy": {
            "megatron_cfg": {"attention_backend": "flash"},
            "make_sequence_length_divisible_by": 64,
            "generation": {"mcore_generation_config": {"flash_attention_version": 4}},
        },
    }
    assert "could not fix" in run(path, "--fix", tmp_path / "sub/out.yaml").out


@pytest.mark.parametrize("preset", list(PRESETS))
def test_fix_repairs_every_fixable_rule_at_once(tmp_path: Path, run: Any, preset: str) -> None:
    recipe = change(BF16, {f"{TRAIN}.{key}": GONE for key in BF16["policy"]["megatron_cfg"] if key != "enabled"})
    recipe = change(recipe, {GEN: GONE, "policy.sequence_packing": GONE, "policy.generation.backend": "vllm"})
    ran = run(write(tmp_path, recipe), "--preset", preset, "--fix", tmp_path / "out.yaml", "--json")
    assert ran.code == 0, ran.document["fix"]["remaining"]
    assert run(tmp_path / "out.yaml", "--json").document["preset"]["name"] == preset


def test_fix_keeps_what_a_value_already_has(tmp_path: Path, run: Any) -> None:
    changes: Changes = {
        f"{TRAIN}.recompute_modules": ["core_attn"],
        "policy.make_sequence_length_divisible_by": 24,
        f"{TRAIN}.moe_training_matches_inference": GONE,
        f"{TRAIN}.moe_match_generation_forward": False,
    }
    path = write(tmp_path, change(sound("nvfp4-flashinfer"), changes))
    changed = {
        c["key"]: c["value"] for c in run(path, "--fix", tmp_path / "o.yaml", "--json").document["fix"]["changes"]
    }
    assert changed == {
        f"{TRAIN}.recompute_modules": ["core_attn", "moe"],
        "policy.make_sequence_length_divisible_by": 192,
        f"{TRAIN}.moe_match_generation_forward": True,
    }


def test_fix_of_tensor_parallelism_takes_sequence_parallelism_along(tmp_path: Path, run: Any) -> None:
    changes: Changes = {
        f"{TRAIN}.tensor_model_parallel_size": 4,
        f"{TRAIN}.sequence_parallel": True,
        f"{GEN}.tensor_model_parallel_size": 2,
        f"{GEN}.sequence_parallel": True,
    }
    ran = run(write(tmp_path, change(BF16, changes)), "--fix", tmp_path / "out.yaml", "--json")
    assert ran.code == 0
    values = {c["key"].rpartition("policy.")[2]: c["value"] for c in ran.document["fix"]["changes"]}
    assert values == {
        "megatron_cfg.tensor_model_parallel_size": 1,
        "megatron_cfg.sequence_parallel": False,
        "generation.mcore_generation_config.tensor_model_parallel_size": 1,
        "generation.mcore_generation_config.sequence_parallel": False,
    }


def test_fix_of_an_unresolved_value_sets_it(tmp_path: Path, run: Any) -> None:
    path = write(tmp_path, change(BF16, {f"{TRAIN}.attention_backend": "${oc.env:ZKL_TEST_NOT_SET}"}))
    assert run(path, "--fix", tmp_path / "out.yaml").code == 0


def test_fix_never_writes_over_the_recipe_its_chain_or_a_strangers_file(tmp_path: Path, run: Any) -> None:
    base = write(tmp_path, change(BF16, _BROKEN), "base.yaml")
    path = write(tmp_path, {"defaults": "base.yaml"}, "child.yaml")
    stranger = write(tmp_path, {"x": 1}, "stranger.yaml")
    link = tmp_path / "link.yaml"
    link.symlink_to(base)
    hard = tmp_path / "hard.yaml"
    hard.hardlink_to(base)
    kept = {p: p.read_bytes() for p in (base, path, stranger)}
    for target in (base, path, stranger, link, hard, tmp_path, tmp_path / "no/such/folder.yaml"):
        assert run(path, "--fix", target).code == 2, target
    assert {p: p.read_bytes() for p in kept} == kept


def test_fix_of_a_sound_recipe_writes_nothing(tmp_path: Path, run: Any) -> None:
    ran = run(write(tmp_path, BF16), "--fix", tmp_path / "out.yaml")
    assert ran.code == 0
    assert not (tmp_path / "out.yaml").exists()
    assert "no file written" in ran.out


def test_fix_in_generation_only_mode(tmp_path: Path, run: Any) -> None:
    path = write(tmp_path, change(BF16, {f"{GEN}.flash_attention_version": 3}))
    assert run(path, "--generation-only", "--fix", tmp_path / "out.yaml").code == 0


BLACKWELL = Environment(
    packages={
        "transformer_engine": None,
        "transformer_engine_cu13": "2.18.0",
        "flash_attn": "2.8.3",
        "flash-attn-4": "4.0.0b19",
        "nvidia-cutlass-dsl": "4.6.0.dev0",
        "flashinfer-python": "0.7.2.post1",
        "flashinfer-cubin": "0.7.2.post1",
        "flashinfer-jit-cache": "0.7.2.post1",
        "megatron-core": "0.20.0",
        "torch": "2.11.0",
    },
    gpus=(("NVIDIA GB200", "10.0"), ("NVIDIA GB200", "10.0")),
    gpu_source="nvidia-smi",
    fields=frozenset(
        {
            "batch_invariant_mode",
            "batch_invariant_backend",
            "batch_invariant_collective",
            "flash_attention_version",
            "moe_training_matches_inference",
            "inference_moe_nvfp4_recipe",
        }
    ),
    fields_source="test",
    variables={"CUBLASLT_WORKSPACE_SIZE": "0"},
)

_PACKAGES = dict(BLACKWELL.packages)
_MACHINES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpu-sm": ("bf16", {"gpus": (("NVIDIA H200", "9.0"),)}),
    "mcore-fields": ("bf16", {"fields": (BLACKWELL.fields or frozenset()) - {"batch_invariant_collective"}}),
    "transformer-engine": ("bf16", {"packages": {**_PACKAGES, "transformer_engine_cu13": "2.17.1"}}),
    "flash-attn": ("bf16", {"packages": {**_PACKAGES, "flash_attn": "2.8.0"}}),
    "flash-attn-4": ("bf16", {"packages": {**_PACKAGES, "flash-attn-4": "4.0.0b18"}}),
    "cutlass-dsl": ("bf16", {"packages": {**_PACKAGES, "nvidia-cutlass-dsl": None}}),
    "mcore-parity": (
        "mxfp8-flashinfer",
        {"fields": (BLACKWELL.fields or frozenset()) - {"moe_training_matches_inference"}},
    ),
    "flashinfer-python": ("nvfp4-flashinfer", {"packages": {**_PACKAGES, "flashinfer-python": None}}),
    "flashinfer-cubin": ("nvfp4-flashinfer", {"packages": {**_PACKAGES, "flashinfer-cubin": None}}),
    "flashinfer-same": ("nvfp4-flashinfer", {"packages": {**_PACKAGES, "flashinfer-cubin": "0.7.0.post1"}}),
    "mcore-nvfp4-field": (
        "nvfp4-flashinfer",
        {"fields": (BLACKWELL.fields or frozenset()) - {"inference_moe_nvfp4_recipe"}},
    ),
    "flashinfer-jit-cache": ("mxfp8-flashinfer", {"packages": {**_PACKAGES, "flashinfer-jit-cache": None}}),
    "shell-env-cublas-workspace": ("bf16", {"variables": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}}),
}


def judged(tmp_path: Path, preset: str, machine: Environment, changes: Changes | None = None) -> list[str]:
    view = View(load_recipe(write(tmp_path, change(sound(preset), changes or {}))))
    return [v.rule for v in judge_environment(preset, view, machine)]


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_blackwell_node_is_sound_for_every_preset(tmp_path: Path, preset: str) -> None:
    assert judged(tmp_path, preset, BLACKWELL) == []


@pytest.mark.parametrize("rule", list(_MACHINES))
def test_a_machine_that_lacks_one_thing_is_reported_for_it_alone(tmp_path: Path, rule: str) -> None:
    preset, lacking = _MACHINES[rule]
    assert judged(tmp_path, preset, dataclasses.replace(BLACKWELL, **lacking)) == [rule]


def test_every_environment_rule_is_tested() -> None:
    rules = {rule.id for preset in PRESETS.values() for rule in preset.environment}
    assert rules <= set(_MACHINES)


def test_an_older_name_of_the_switch_is_a_violation_where_mcore_does_not_know_it(tmp_path: Path) -> None:
    changes: Changes = {
        f"{TRAIN}.moe_training_matches_inference": GONE,
        f"{TRAIN}.moe_inference_training_forward": True,
    }
    assert judged(tmp_path, "nvfp4-flashinfer", BLACKWELL, changes) == ["installed-name"]


def test_environment_violations_are_part_of_the_report(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Environment({}, (), "nothing", None, "No module named 'megatron'", {})
    monkeypatch.setattr("zkl_debug.cli.check.probe", lambda _preset: bare)
    path = write(tmp_path, BF16)
    ran = run(path, "--environment", "--json")
    assert ran.code == 1
    assert [v["rule"] for v in ran.document["violations"]] == list(_MACHINES)[:6]
    assert ran.document["environment"]["transformer_config_fields"] is None
    assert run(path, "--environment", "--fix", tmp_path / "o.yaml").code == 1
    monkeypatch.setattr("zkl_debug.cli.check.probe", lambda _preset: BLACKWELL)
    assert run(path, "--environment").code == 0


def test_probe_reads_nvidia_smi_and_survives_its_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"nvidia-smi": "NVIDIA GB200, 10.0\nNVIDIA GB200, 10.0\n"}

    def fake(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if command[0] == "nvidia-smi" and "nvidia-smi" not in answers:
            raise FileNotFoundError(command[0])
        text = answers.get(command[0], "")
        return subprocess.CompletedProcess(command, 0 if text else 1, text, "" if text else "ImportError: no torch")

    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    machine = environment.probe("bf16")
    assert machine.gpus == (("NVIDIA GB200", "10.0"),) * 2
    assert machine.fields is None
    assert machine.fields_source == "ImportError: no torch"
    assert machine.variables["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert machine.packages["megatron-core"]
    answers.clear()
    assert environment.probe("bf16").gpus == ()


@pytest.mark.slow
def test_probe_of_this_machine() -> None:
    machine = environment.probe("bf16")
    assert machine.fields is not None
    assert "batch_invariant_mode" in machine.fields
