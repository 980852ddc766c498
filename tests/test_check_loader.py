"""`check`: defaults chains, interpolations, wrong types, bad files. A recipe never causes a traceback."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from test_check_recipes import BF16, GONE, TRAIN, change, ids, judge, write

from zkl_debug.cli.main import main
from zkl_debug.errors import UsageError
from zkl_debug.stack.recipes.engine import check
from zkl_debug.stack.recipes.loader import load_recipe
from zkl_debug.stack.recipes.model import Side, State
from zkl_debug.stack.recipes.view import View

ROOT = Path(__file__).resolve().parents[1]


def files(folder: Path, **contents: str) -> Path:
    """Write ``name.yaml`` for each argument and return the path of ``a.yaml``."""
    for name, text in contents.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / "a.yaml"


def test_defaults_chain_is_deep_merged_and_the_child_wins(tmp_path: Path) -> None:
    path = files(
        tmp_path,
        a="defaults: b.yaml\nx: {one: a}\n",
        b="defaults: [c.yaml, d.yaml]\nx: {two: b}\n",
        c="x: {one: c, two: c, three: c, four: c}\nlist: [1, 2]\n",
        d="x: {three: d}\nlist: [3]\n",
    )
    recipe = load_recipe(path)
    assert OmegaConf.to_container(recipe.config) == {
        "x": {"one": "a", "two": "b", "three": "d", "four": "c"},
        "list": [3],
    }
    assert [layer.path.name for layer in recipe.layers] == ["c.yaml", "d.yaml", "b.yaml", "a.yaml"]
    assert recipe.origin(("x", "three")) == "d.yaml"


def test_defaults_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "recipes" / "llm").mkdir(parents=True)
    (tmp_path / "base.yaml").write_text("x: 1\n")
    (tmp_path / "recipes" / "mid.yaml").write_text("defaults: ../base.yaml\ny: 2\n")
    path = tmp_path / "recipes" / "llm" / "a.yaml"
    path.write_text("defaults: ../mid.yaml\nz: 3\n")
    assert OmegaConf.to_container(load_recipe(path).config) == {"x": 1, "y": 2, "z": 3}


def test_one_base_named_twice_is_no_cycle(tmp_path: Path) -> None:
    path = files(tmp_path, a="defaults: [b.yaml, c.yaml]\n", b="defaults: d.yaml\n", c="defaults: d.yaml\n", d="x: 1\n")
    assert load_recipe(path).config.x == 1


def test_override_mark_replaces_a_section(tmp_path: Path) -> None:
    path = files(tmp_path, a="defaults: b.yaml\nx: {_override_: true, one: a}\n", b="x: {one: b, two: b}\n")
    assert OmegaConf.to_container(load_recipe(path).config) == {"x": {"one": "a"}}


BAD: dict[str, tuple[dict[str, str], str]] = {
    "unclosed": ({"a": "x: [1, 2\n"}, "not valid YAML: line 2"),
    "tab": ({"a": "x:\n\ty: 1\n"}, "not valid YAML: line 2"),
    "duplicate key": ({"a": "x: 1\nx: 2\n"}, "not valid YAML"),
    "two documents": ({"a": "x: 1\n---\ny: 2\n"}, "not valid YAML"),
    "python object": ({"a": "x: !!python/object/apply:os.system [echo]\n"}, "not valid YAML"),
    "list at the top": ({"a": "- x\n"}, "holds a list"),
    "text at the top": ({"a": "hello\n"}, "holds a single value"),
    "empty": ({"a": ""}, "holds nothing"),
    "only a comment": ({"a": "# nothing\n"}, "holds nothing"),
    "itself": ({"a": "defaults: a.yaml\nx: 1\n"}, "form a cycle: a.yaml -> a.yaml"),
    "cycle": (
        {"a": "defaults: b.yaml\n", "b": "defaults: c.yaml\n", "c": "defaults: a.yaml\n"},
        "form a cycle: a.yaml -> b.yaml -> c.yaml -> a.yaml",
    ),
    "missing base": ({"a": "defaults: nowhere.yaml\n"}, "nowhere.yaml, which does not exist"),
    "base is a folder": ({"a": "defaults: .\n"}, "which is a folder"),
    "defaults of a wrong type": ({"a": "defaults: {x: 1}\n"}, "`defaults` holds"),
    "defaults is null": ({"a": "defaults:\nx: 1\n"}, "`defaults` holds"),
    "number in defaults": ({"a": "defaults: [3]\n"}, "`defaults` holds 3"),
    "unresolvable defaults": ({"a": "defaults: ${oc.env:ZKL_NOT_SET}/b.yaml\n"}, "`defaults` cannot be resolved"),
    "broken interpolation": ({"a": "x: ${policy\n"}, "not valid YAML"),
    "alias to itself": ({"a": "x: &x [*x]\n"}, "alias refers to itself"),
    "alias bomb": (
        {
            "a": "a: &a [1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{n}: &{n} [" + ",".join([f"*{p}"] * 9) + "]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True)
            )
        },
        "aliases expand to more than",
    ),
    "deep nesting": ({"a": "x: " + "[" * 20000 + "]" * 20000 + "\n"}, "nest"),
    "policy is a number": ({"a": "policy: 3\n"}, "policy (a.yaml): 3 is a int, not a mapping"),
    "wrong types": (
        {"a": "policy: {precision: 16, megatron_cfg: {context_parallel_size: two, moe_permute_fusion: 'no'}}\n"},
        "3 value(s) of the wrong type",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_recipes_end_in_a_clear_error_and_exit_code_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents, message = BAD[case]
    path = files(tmp_path, **contents)
    with pytest.raises(SystemExit) as stop:
        main(["check", str(path)])
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


def test_not_text_and_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"x: \xff\xfe\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_recipe(tmp_path / "a.yaml")
    with pytest.raises(UsageError, match="does not exist"):
        load_recipe(tmp_path / "b.yaml")


def test_all_wrong_types_are_in_one_error(tmp_path: Path) -> None:
    wrong = {
        f"{TRAIN}.batch_invariant_mode": "true",
        f"{TRAIN}.tensor_model_parallel_size": "1",
        f"{TRAIN}.recompute_modules": "moe",
        f"{TRAIN}.env_vars": ["A=1"],
        "policy.generation.temperature": "hot",
        "policy.generation.mcore_generation_config.enable_chunked_prefill": 0,
    }
    with pytest.raises(UsageError) as error:
        judge(tmp_path, change(BF16, wrong))
    for key in wrong:
        assert key in str(error.value)


def find(tmp_path: Path, recipe: dict[str, Any], key: str) -> Any:
    return View(load_recipe(write(tmp_path, recipe))).find(Side.RECIPE, key)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${mul:${policy.train_micro_batch_size}, 32}", 64),
        ("${div:128, ${policy.train_micro_batch_size}}", 64.0),
        ("${max:64, ${policy.train_micro_batch_size}}", 64),
        ("${add:62, 2}", 64),
        ("${mul:${mul:${policy.train_micro_batch_size}, 16}, 2}", 64),
        ("${oc.decode:${oc.env:ZKL_TEST_MULTIPLE}}", 64),
        ("${oc.decode:${oc.env:ZKL_TEST_UNSET,64}}", 64),
        ("${.max_total_sequence_length}", 1000),
    ],
)
def test_interpolations_of_nemo_rl_resolve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, value: float
) -> None:
    monkeypatch.setenv("ZKL_TEST_MULTIPLE", "64")
    key = "policy.make_sequence_length_divisible_by"
    found = find(tmp_path, change(BF16, {key: text}), key)
    assert (found.state, found.effective, found.raw) == (State.INTERPOLATED, value, text)
    assert judge(tmp_path, change(BF16, {key: text})).sound == (value % 64 == 0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("${oc.env:ZKL_TEST_NOT_SET}", "ZKL_TEST_NOT_SET"),
        ("${policy.no_such_key}", "no_such_key"),
        ("${sub:1,2}", "sub"),
        ("${env:HOME}", "env"),
        ("${mul:a,9999999999}", "not a number"),
        ("${div:1,0}", "division by zero"),
        ("${policy.make_sequence_length_divisible_by}", ""),
        ("${mul:1}", ""),
    ],
)
def test_what_does_not_resolve_is_reported_not_raised(tmp_path: Path, text: str, reason: str) -> None:
    key = "policy.make_sequence_length_divisible_by"
    report = judge(tmp_path, change(BF16, {key: text}))
    (violation,) = report.violations
    assert (violation.rule, violation.state) == ("sequence-multiple", State.UNRESOLVED)
    assert text in violation.found
    assert reason in violation.found
    assert [u.path for u in report.unresolved] == [key]


def test_an_unresolved_key_no_rule_needs_is_reported_but_no_violation(tmp_path: Path) -> None:
    report = judge(tmp_path, change(BF16, {"logger.wandb.key": "${oc.env:ZKL_TEST_NOT_SET}", "env.list": ["${nope}"]}))
    assert report.sound
    assert {u.path for u in report.unresolved} == {"logger.wandb.key", "env.list.0"}


def test_an_unresolved_condition_cannot_be_judged(tmp_path: Path) -> None:
    report = judge(tmp_path, change(BF16, {"policy.dynamic_batching.enabled": "${oc.env:ZKL_TEST_NOT_SET}"}))
    assert ids(report) == ["dynamic-batching-multiple"]
    assert "to tell whether" in report.violations[0].required
    assert not report.violations[0].fixable


def test_sections_may_be_interpolated_or_missing(tmp_path: Path) -> None:
    env = dict(BF16["policy"]["megatron_cfg"]["env_vars"])
    assert judge(tmp_path, change(BF16, {"shared": env, f"{TRAIN}.env_vars": "${shared}"})).sound
    mandatory = judge(tmp_path, change(BF16, {"policy.precision": "???"}))
    assert ids(mandatory) == ["precision"]
    assert mandatory.violations[0].state is State.MISSING
    whole = judge(tmp_path, change(BF16, {"policy.generation": GONE}))
    assert {"generation-backend", "raw-logprobs", "temperature", "dedicated-generation"} <= set(ids(whole))


def test_partial_counts_missing_files_as_empty_and_is_never_sound(tmp_path: Path) -> None:
    path = write(tmp_path, {"defaults": "gone.yaml", **BF16})
    with pytest.raises(UsageError, match="--partial"):
        load_recipe(path)
    report = check(load_recipe(path, partial=True))
    assert not report.violations
    assert not report.sound
    assert "gone.yaml" in report.missing_files[0]


def test_a_check_of_the_recipe_alone_imports_neither_torch_nor_megatron(tmp_path: Path) -> None:
    path = write(tmp_path, BF16)
    program = (
        "import sys\nfrom zkl_debug.cli.main import main\n"
        f"try:\n    main(['check', {str(path)!r}, '--json'])\nexcept SystemExit as stop:\n"
        "    bad = [m for m in ('torch', 'megatron', 'h5py') if m in sys.modules]\n"
        "    sys.exit(f'imported {bad}' if bad else stop.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 200), st.floats(allow_nan=False), st.text("ab${}:.,?!\n ", max_size=8)
)
_paths = st.sampled_from(
    [
        *(f"policy.{name}" for name in BF16["policy"]),
        *(f"{TRAIN}.{name}" for name in BF16["policy"]["megatron_cfg"]),
        "policy.generation.mcore_generation_config",
        "policy.generation.colocated",
        "defaults",
        "grpo",
        "a.b",
    ]
)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text("ab_*", max_size=3), inner)),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(_paths, _values, max_size=3))
def test_no_recipe_raises_anything_but_an_explained_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe = dict(BF16)
    for path, value in changes.items():
        parents = [recipe]
        try:
            recipe = change(recipe, {path: value})
        except (TypeError, AttributeError):
            recipe = parents[0]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    with contextlib.suppress(UsageError):
        check(load_recipe(tmp_path / "recipe.yaml"))
