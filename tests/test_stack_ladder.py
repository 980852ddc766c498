"""The full ladder as data: complete against RECIPES.md and the recipe rules; availability is a function of facts."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from zkl_debug.bisect.load import load_space, parse_space
from zkl_debug.cli.stack import command
from zkl_debug.errors import UsageError
from zkl_debug.stack.expected import expected_runs, first_steps
from zkl_debug.stack.full import full_ladder, of_preset
from zkl_debug.stack.needs import FA4, TARGETS, TE, TE_218, Facts, Need, availability, gpu, model_field, summary
from zkl_debug.stack.overrides import from_environment, recipe_overrides, states, variables
from zkl_debug.stack.plan import make_plan
from zkl_debug.stack.recipes.model import Kind, Side
from zkl_debug.stack.recipes.presets import PRESETS, rules_of
from zkl_debug.stack.space import command_space, to_yaml
from zkl_debug.stack.switches import Switch, ladder, resolve, switch

LADDER = full_ladder()
BY_NAME = {s.name: s for s in LADDER}
MECHANISMS = {
    *("reduction order", "shape class", "lifecycle", "label", "precision", "routing", "sampling", "nothing"),
}
#: Rules about a recipe that are no switches: what the model is, how resources are laid out, how values are spelled.
NOT_SWITCHES = {
    *("enabled", "policy.dtensor_cfg.enabled", "sequence_parallel", "fp8_cfg.fp8_param", "fp8_cfg.fp8"),
    *("policy.generation.colocated.resources.gpus_per_node", "policy.generation.colocated.resources.num_nodes"),
    "batch_invariant_*",
}


def test_every_patch_of_the_first_implementation_is_there_once() -> None:
    numbers = Counter(s.patch for s in LADDER if s.patch not in ("", "+"))
    assert numbers == Counter(str(n) for n in range(1, 15))
    in_order = [s.patch for s in LADDER if s.patch not in ("", "+")]
    assert in_order == [str(n) for n in range(1, 15)]
    extras = {s.target for s in LADDER if s.patch == "+"}
    assert {t.split(".")[0].split(" ")[0] for t in extras} == {"RouterReplay", "metadata", "cuda_graph_attr_cache"}


def test_every_switch_is_documented() -> None:
    for s in LADDER:
        assert len(s.fixes) > 10, s.name
        assert s.fixes[0].islower() or s.fixes[:2].isupper() or s.fixes[0].isupper(), s.name
        assert s.owner in {"TE", "mcore", "NeMo-RL", "environment"}, s.name
        assert s.mechanism in MECHANISMS, s.name
        assert s.group, s.name
        assert s.target, s.name
        assert {*s.requires, *s.conflicts, *s.alternatives} <= set(BY_NAME), s.name
        assert s.name not in {*s.requires, *s.conflicts, *s.alternatives}
        assert set(s.presets) <= set(PRESETS)
        assert all(x.where in ("env", "recipe") for x in s.settings)
        if s.kind in ("environment", "model key", "engine key", "recipe key"):
            assert s.settings or s.name == "mamba-exact-path", s.name


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_key_a_preset_asks_for_is_a_switch(preset: str) -> None:
    keys = {x.key.lstrip("~") for s in of_preset(preset) for x in s.settings}
    for rule in rules_of(preset):
        if rule.side is Side.MODEL or rule.key in NOT_SWITCHES or rule.kind is Kind.IS_TEXT:
            continue
        names = rule.names or (rule.key,)
        covered = any(key == name or key.endswith("." + name) for key in keys for name in names)
        assert covered, f"{rule.id}: no switch sets {rule.key}"


def test_the_variables_of_the_recipes_and_the_engine_keys_are_switches() -> None:
    keys = {x.key.rpartition(".")[2] for s in LADDER for x in s.settings}
    for name in (
        *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "MAMBA_DETERMINISTIC", "NRL_REFIT_PARAM_SYNC"),
        *("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
        *("num_cuda_graphs", "enable_chunked_prefill", "enable_prefix_caching", "kv_cache_management_mode"),
        *("max_requests", "sampling_backend", "logprobs_mode", "materialize_only_last_token_logits"),
        *("moe_training_matches_inference", "moe_inference_training_max_tokens_per_rank", "zero_train_gen_mismatch"),
    ):
        assert name in keys, name
    overrides = {s.name for s in LADDER if s.kind == "kernel"}
    assert overrides >= {"bi-mm", "bi-addmm", "bi-log-softmax", "bi-mean", "bi-te-gemm", "bi-te-rmsnorm"}
    assert set(BY_NAME["bi-kernels"].conflicts) == overrides - {"bi-kernels"}


# --- availability -----------------------------------------------------------------------------------------------------

_MCORE = {"TransformerConfig": frozenset({"flash_attention_version", "batch_invariant_mode", "attention_backend"})}


def _stub(name: str, *needs: Need, requires: tuple[str, ...] = ()) -> Switch:
    return dataclasses.replace(BY_NAME["log-softmax"], name=name, needs=needs, requires=requires)


def test_availability_says_what_is_missing() -> None:
    facts = Facts("a node", sm=90, packages={"transformer_engine": "2.9", "flash-attn-4": "4.0.0b28"}, fields=_MCORE)
    stubs = [
        _stub("old", TE_218),
        _stub("sm", gpu("100")),
        _stub("field", model_field("batch_invariant_backend")),
        _stub("renamed", model_field("new_name", "batch_invariant_mode")),
        _stub("ready", gpu("90"), FA4, TE),
        _stub("above", requires=("middle",)),
        _stub("middle", requires=("sm",)),
    ]
    found = availability(stubs, facts)
    assert {name: a.reason for name, a in found.items()} == {
        "old": "needs transformer_engine >= 2.18, found 2.9",
        "sm": "needs SM100; a node has SM90",
        "field": "the installed megatron-core has no TransformerConfig.batch_invariant_backend",
        "renamed": "",
        "ready": "",
        "above": "requires middle, which is untestable",
        "middle": "requires sm, which is untestable",
    }
    assert found["old"].text == "untestable: needs transformer_engine >= 2.18, found 2.9"
    assert found["ready"].text == "available"


def test_what_nobody_looked_at_is_assumed_and_said() -> None:
    found = availability(LADDER, TARGETS["sm100"])
    assert found["batch-invariant-backend"].available
    assert "transformer_engine >= 2.18" in found["batch-invariant-backend"].assumes
    assert found["gemm-row-tiles"].reason == "stands in for a kernel on a machine without a GPU"
    low = availability(LADDER, TARGETS["sm90"])
    assert low["batch-invariant-backend"].reason == "needs SM100; sm90 (H100, H200) has SM90"
    assert low["flash-attention-4"].available
    cpu = availability(LADDER, TARGETS["cpu"])
    assert all(cpu[s.name].available for s in ladder())
    assert cpu["bi-mm"].reason == "needs a GPU; there is none"
    assert not cpu["batch-invariant-collective"].available


def test_a_megatron_core_that_cannot_be_asked_is_a_reason() -> None:
    facts = Facts("a node", sm=100, packages={}, problem="ImportError: no module named megatron")
    found = availability([_stub("x", model_field("flash_attention_version"))], facts)
    assert found["x"].reason == "megatron-core does not answer: ImportError: no module named megatron"


def test_needs_are_summed_up() -> None:
    assert summary([gpu(), gpu("90"), TE, TE_218, FA4, gpu("100")]) == {
        "gpu": ["a GPU of SM100 or newer"],
        "packages": ["transformer_engine >= 2.18", "flash-attn-4 >= 4.0.0b19"],
    }
    assert summary([gpu()]) == {"gpu": ["a GPU"]}
    assert summary([]) == {}


# --- asking for switches ----------------------------------------------------------------------------------------------


def test_switches_outside_the_stack_are_turned_on_by_name() -> None:
    assert [s.name for s in resolve(False, {"no-chunked-prefill": True})] == ["no-chunked-prefill"]
    on = [s.name for s in resolve(True, {"no-chunked-prefill": True, "chunk-edge-labels": False})]
    assert on == [s.name for s in ladder() if s.name != "chunk-edge-labels"] + ["no-chunked-prefill"]
    assert resolve(True, {"no-chunked-prefill": False}) == ladder()
    with pytest.raises(UsageError, match=r"one-ssm-scan .* carries no code for it"):
        resolve(True, {"one-ssm-scan": True})
    assert switch("bi-mm").kind == "kernel"


# --- from outside -----------------------------------------------------------------------------------------------------


def test_a_configuration_becomes_recipe_overrides_and_variables() -> None:
    on = {"flash-attention-4": True, "batch-invariant-mode": False, "cublas-workspace": True, "bi-mm": True}
    assert recipe_overrides(on) == (
        "++policy.megatron_cfg.batch_invariant_mode=false",
        "++policy.megatron_cfg.env_vars.CUBLAS_WORKSPACE_CONFIG=':0:0'",
        "++policy.megatron_cfg.flash_attention_version=4",
    )
    assert variables(on) == {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    assert recipe_overrides({"expert-tokens-derived": True}) == (
        "~policy.megatron_cfg.moe_inference_training_max_tokens_per_rank",
    )
    environ = {"ZKL_SWITCHES": json.dumps({**on, "yours": True, "one-ssm-scan": True})}
    assert [s.name for s in from_environment(environ)] == ["cublas-workspace", "flash-attention-4", "bi-mm"]


@pytest.mark.parametrize("text", [None, "{", "[]", '{"a": 1}'])
def test_a_broken_configuration_is_refused(text: str | None) -> None:
    with pytest.raises(UsageError, match="ZKL_SWITCHES"):
        states({} if text is None else {"ZKL_SWITCHES": text})


def test_overrides_are_printed_for_a_shell() -> None:
    env = {**os.environ, "ZKL_SWITCHES": json.dumps({"cublas-workspace": True})}
    done = subprocess.run(
        [sys.executable, "-m", "zkl_debug.stack.overrides"], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "'++policy.megatron_cfg.env_vars.CUBLAS_WORKSPACE_CONFIG='\"'\"':0:0'\"'\"''"


# --- plans ------------------------------------------------------------------------------------------------------------


def test_the_space_file_says_the_same_as_the_space() -> None:
    space = command_space(LADDER, availability(LADDER, TARGETS["sm100"]))
    assert parse_space(yaml.safe_load(to_yaml(space))).digest() == space.digest()
    assert "bi-kernels" in space.swappable
    assert "the gate on" in next(s.untestable for s in space.switches if s.name == "zero-mismatch-gate")


def test_a_plan_counts_runs_with_the_search_itself() -> None:
    switches = of_preset("bf16")
    plan = make_plan("sm100", "bf16", switches, availability(switches, TARGETS["sm100"]))
    assert len(plan.searched) == len(switches) - 1  # all but the gate
    by_causes = {e.causes: e for e in plan.expected}
    assert list(by_causes) == [1, 2, 3, 5]
    means = [e.mean for e in plan.expected]
    assert means == sorted(means)
    assert by_causes[1].worst <= 20
    assert by_causes[1].phases["endpoints"] == 2
    first, second, third = plan.steps[:3]
    assert (first.number, first.on) == (1, ())
    assert (second.number, second.on) == (2, plan.searched)
    assert 0 < len(third.on) < len(plan.searched)
    assert {step.after for step in plan.steps if step.number == 4} == {"run 3 zero", "run 3 mismatch"}


def test_small_spaces_have_plans_too() -> None:
    space = command_space([_stub("only")], availability([_stub("only")], TARGETS["cpu"]))
    assert expected_runs(space, 2) is None
    one = expected_runs(space, 1)
    assert one is not None
    assert one.worst <= 5
    assert [step.number for step in first_steps(space)][:2] == [1, 2]


def test_command_plans_the_whole_ladder_for_blackwell() -> None:
    done = CliRunner().invoke(command, ["--target", "sm100", "--plan", "--json"], standalone_mode=False)
    assert done.exception is None
    body = json.loads(done.stdout)
    assert body["machine"]["sm"] == 100
    assert len(body["switches"]) == len(LADDER)
    plan = body["plan"]
    patches = {s["name"] for s in body["switches"] if s["patch"] not in (None, "+")}
    assert len(patches) == 14
    assert patches <= set(plan["switches"]["searched"])
    assert plan["requirements"]["gpu"] == ["a GPU of SM100 or newer"]
    assert any(e["causes"] == 3 and e["mean"] > 10 and e["seconds"] for e in plan["runs"])
    assert plan["order"][1]["env"]["CUBLASLT_WORKSPACE_SIZE"] == "0"
    assert "++policy.megatron_cfg.flash_attention_version=2" in plan["order"][0]["overrides"]
    assert any("bisect switches --space" in line for line in plan["commands"])


def test_command_prints_ladder_and_plan(tmp_path: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(command, ["--target", "sm90"], env={"COLUMNS": "200"}, standalone_mode=False)
    assert "untestable: needs SM100; sm90 (H100, H200) has SM90" in listed.output
    assert "get_cublas_workspace_size_bytes" in listed.output
    space = tmp_path / "ladder.yaml"
    arguments = ["--target", "sm100", "--preset", "mxfp8", "--plan", "--space", str(space)]
    planned = runner.invoke(command, arguments, env={"COLUMNS": "200"}, standalone_mode=False)
    assert planned.exception is None
    assert "Expected number of runs" in planned.output
    assert "CUBLAS_WORKSPACE_CONFIG=:0:0" in planned.output
    assert {"one-ssm-scan", "mxfp8-both-sides"} <= {s.name for s in load_space(space).switches}
    again = runner.invoke(command, arguments, standalone_mode=False)
    assert isinstance(again.exception, UsageError)
    unknown = runner.invoke(command, ["--preset", "fp7", "--target", "cpu"], standalone_mode=False)
    assert isinstance(unknown.exception, UsageError)


def test_command_plans_a_bed_on_a_cpu() -> None:
    done = CliRunner().invoke(command, ["--target", "cpu", "--plan", "--json"], standalone_mode=False)
    plan = json.loads(done.stdout)["plan"]
    assert plan["commands"] == ["zkl-debug bisect switches --bed tiny-gpt --dtype bf16 --journal ladder.jsonl"]
    assert {"gemm-row-tiles", "no-chunked-prefill"} <= set(plan["switches"]["searched"])
