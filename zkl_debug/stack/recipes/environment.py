"""What this machine has: packages, GPUs, environment variables, megatron-core's config fields. Used only on request.

torch and megatron-core are imported in a process of their own, so that a check never pays for them or dies with them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.version import InvalidVersion, Version

from zkl_debug.schema import Json
from zkl_debug.stack.recipes.loader import first_line
from zkl_debug.stack.recipes.model import EnvRule, Kind, Need, Severity, Side, State, Violation
from zkl_debug.stack.recipes.predicates import condition, env_text, show
from zkl_debug.stack.recipes.presets import environment_of, rules_of
from zkl_debug.stack.recipes.view import View

_TIMEOUT_SECONDS = 120
_FIELDS_PROGRAM = """
import dataclasses, json
from megatron.core.transformer.transformer_config import TransformerConfig
print("zkl:" + json.dumps([f.name for f in dataclasses.fields(TransformerConfig)]))
"""
_GPU_PROGRAM = """
import json, torch
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
print("zkl:" + json.dumps([[torch.cuda.get_device_name(i), "%d.%d" % torch.cuda.get_device_capability(i)]
                          for i in range(n)]))
"""


@dataclass(frozen=True)
class Environment:
    """A snapshot of the machine.

    Args:
        packages: distribution name -> version, or None where it is not installed.
        gpus: name and compute capability (``"10.0"``) of every GPU.
        gpu_source: what was asked, or why nothing answered.
        fields: names of the fields of ``TransformerConfig``; None where megatron-core is not importable.
        fields_source: where they come from, or why there are none.
        variables: environment variables of this process that a rule is about.
    """

    packages: Mapping[str, str | None]
    gpus: tuple[tuple[str, str], ...]
    gpu_source: str
    fields: frozenset[str] | None
    fields_source: str
    variables: Mapping[str, str]


def probe(preset: str) -> Environment:
    """Look at the machine for what the rules of a preset need."""
    rules = environment_of(preset)
    packages = {name for rule in rules if rule.need in _PACKAGE_NEEDS for name in rule.names}
    gpus, gpu_source = _gpus()
    fields, fields_source = _fields()
    variables = {name: os.environ[name] for name in _variables(preset) if name in os.environ}
    return Environment(
        {name: _version(name) for name in sorted({*packages, "megatron-core", "torch"})},
        gpus,
        gpu_source,
        fields,
        fields_source,
        variables,
    )


_PACKAGE_NEEDS = (Need.VERSION, Need.PRESENT, Need.SAME_VERSION)


def _variables(preset: str) -> dict[str, str]:
    """Environment variables the preset sets, with the value it wants."""
    rules = [rule for rule in rules_of(preset) if rule.kind is Kind.TEXT]
    return {rule.key.removeprefix("env_vars."): rule.required for rule in rules}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError):
        return None


def _gpus() -> tuple[tuple[tuple[str, str], ...], str]:
    command = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        done = None
    if done is not None and done.returncode == 0:
        rows = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
        return tuple((name.strip(), capability.strip()) for name, _, capability in rows), "nvidia-smi"
    answer, problem = _ask(_GPU_PROGRAM)
    if answer is None:
        return (), f"no nvidia-smi, and torch does not tell: {problem}"
    return tuple((str(name), str(capability)) for name, capability in answer), "torch"


def _fields() -> tuple[frozenset[str] | None, str]:
    answer, problem = _ask(_FIELDS_PROGRAM)
    if answer is None:
        return None, problem
    return frozenset(str(name) for name in answer), "dataclasses.fields(TransformerConfig)"


def _ask(program: str) -> tuple[Json, str]:
    """Run a small program with this Python and read its one JSON line."""
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_TIMEOUT_SECONDS} s"
    except OSError as error:
        return None, first_line(error)
    for line in done.stdout.splitlines():
        if line.startswith("zkl:"):
            return json.loads(line[4:]), ""
    errors = done.stderr.strip().splitlines()
    return None, first_line(errors[-1] if errors else f"exit code {done.returncode}")


def judge_environment(preset: str, view: View, machine: Environment) -> tuple[Violation, ...]:
    """Every requirement of the preset that this machine does not meet."""
    found = [_judge(rule, machine) for rule in environment_of(preset)]
    renamed = _judge_switch_name(preset, view, machine)
    return (*(v for v in found if v), *renamed, *_judge_variables(preset, view, machine))


def _judge(rule: EnvRule, machine: Environment) -> Violation | None:
    if rule.need is Need.SM:
        return _judge_sm(rule, machine)
    if rule.need in (Need.FIELDS, Need.ANY_FIELD):
        return _judge_fields(rule, machine)
    installed = {name: machine.packages.get(name) for name in rule.names}
    versions = [version for version in installed.values() if version]
    text = "; ".join(f"{name} {version}" for name, version in installed.items() if version)
    text = text or f"{' / '.join(rule.names[:1])} is not installed"
    if rule.need is Need.SAME_VERSION:
        missing = [name for name, version in installed.items() if not version]
        if not missing and len(set(versions)) == 1:
            return None
        return None if missing else _violation(rule, " and ".join(rule.names), text, "the same version of both")
    key = f"package {rule.names[0]}"
    if rule.need is Need.PRESENT:
        return None if versions else _violation(rule, key, text, "installed, any version")
    if versions and _at_least(versions[0], rule.minimum):
        return None
    return _violation(rule, key, text, f">= {rule.minimum}")


def _at_least(version: str, minimum: str) -> bool:
    try:
        return Version(version) >= Version(minimum)
    except InvalidVersion:
        return False


def _judge_sm(rule: EnvRule, machine: Environment) -> Violation | None:
    low = [f"{name} (SM{_sm(capability)})" for name, capability in machine.gpus if _sm(capability) < int(rule.minimum)]
    if machine.gpus and not low:
        return None
    found = ", ".join(sorted(set(low))) if low else f"no GPU visible here ({machine.gpu_source})"
    return _violation(rule, "GPU", found, f"SM{rule.minimum} or newer")


def _sm(capability: str) -> int:
    major, _, minor = capability.partition(".")
    return int(major) * 10 + int(minor or 0) if major.isdigit() and (minor or "0").isdigit() else 0


def _judge_fields(rule: EnvRule, machine: Environment) -> Violation | None:
    key = "megatron-core TransformerConfig"
    version = machine.packages.get("megatron-core")
    if machine.fields is None:
        found = f"megatron-core {version or 'is not installed'}, not importable: {machine.fields_source}"
        return _violation(rule, key, found, "fields " + ", ".join(rule.names))
    absent = [name for name in rule.names if name not in machine.fields]
    if not absent or (rule.need is Need.ANY_FIELD and len(absent) < len(rule.names)):
        return None
    word = "fields " if rule.need is Need.FIELDS else "one of the fields "
    return _violation(rule, key, f"megatron-core {version} lacks {', '.join(absent)}", word + ", ".join(rule.names))


def _judge_switch_name(preset: str, view: View, machine: Environment) -> tuple[Violation, ...]:
    """The recipe must write a renamed setting under the name the installed megatron-core knows."""
    violations = []
    for rule in rules_of(preset):
        if rule.kind is not Kind.FAMILY or machine.fields is None or view.generation_only:
            continue
        known = [name for name in rule.names if name in machine.fields]
        for name in rule.names:
            written = view.find(rule.side, name)
            if known and name not in known and written.state is not State.ABSENT:
                violations.append(
                    Violation(
                        rule="installed-name",
                        severity=Severity.VIOLATION,
                        key=written.path,
                        found="a name the installed megatron-core does not know",
                        required=" or ".join(known),
                        why="The setting was renamed; under the other name it never reaches the model",
                        preset=rule.preset,
                        source=rule.source,
                        upstream="no",
                        side=Side.ENVIRONMENT,
                        fixable=False,
                        not_fixable="rename the key by hand",
                    )
                )
    return tuple(violations)


def _judge_variables(preset: str, view: View, machine: Environment) -> tuple[Violation, ...]:
    """Variables of this shell that contradict the recipe (workers started from here may inherit them)."""
    violations = []
    for rule in rules_of(preset):
        if rule.kind is not Kind.TEXT or rule.side is not Side.TRAIN:
            continue
        in_force = all(condition(when, view) is True for when in rule.when)
        name = rule.key.removeprefix("env_vars.")
        here = machine.variables.get(name)
        if here is None or here == rule.required or not in_force:
            continue
        in_recipe = env_text(view.find(Side.TRAIN, rule.key).effective)
        violations.append(
            Violation(
                rule="shell-" + rule.id,
                severity=Severity.VIOLATION,
                key=f"environment variable {name}",
                found=f"{show(here)} in this shell, {show(in_recipe) if in_recipe else 'unset'} in the recipe",
                required=f"{show(rule.required)}, or unset in the shell",
                why=rule.why,
                preset=rule.preset,
                source=rule.source,
                upstream="no",
                side=Side.ENVIRONMENT,
                fixable=False,
                not_fixable=f"unset {name}",
            )
        )
    return tuple(violations)


def _violation(rule: EnvRule, key: str, found: str, required: str) -> Violation:
    return Violation(
        rule=rule.id,
        severity=Severity.VIOLATION,
        key=key,
        found=found,
        required=required,
        why=rule.why,
        preset=rule.preset,
        source=rule.source,
        upstream=rule.upstream,
        side=Side.ENVIRONMENT,
        fixable=False,
        not_fixable="it is about the machine, not the recipe",
    )


def as_json(machine: Environment) -> dict[str, Json]:
    """The snapshot as part of the report."""
    return {
        "packages": dict(machine.packages),
        "gpus": [{"name": name, "compute_capability": capability} for name, capability in machine.gpus],
        "gpu_source": machine.gpu_source,
        "transformer_config_fields": None if machine.fields is None else len(machine.fields),
        "fields_source": machine.fields_source,
        "variables": dict(machine.variables),
    }
