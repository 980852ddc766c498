"""The plan of a bisection on a machine that need not be this one: what to run, in which order, and what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zkl_debug.bisect.space import Space
from zkl_debug.stack.expected import Expected, Step, expected_runs, first_steps
from zkl_debug.stack.needs import Availability, summary
from zkl_debug.stack.overrides import recipe_overrides, variables
from zkl_debug.stack.space import command_space
from zkl_debug.stack.switches import Switch

_CAUSES = (1, 2, 3, 5)


@dataclass(frozen=True)
class Place:
    """What one run takes, roughly.

    Attributes:
        machine: nodes and GPUs.
        seconds: one run, or None where nobody measured.
        memory: in words.
        basis: where the numbers come from.
    """

    machine: str
    seconds: float | None
    memory: str
    basis: str


_QWEN = Place(
    "2 nodes of 4 GB200: training EP4 on one, generation on the other",
    480.0,
    "weights 57 GiB a copy in BF16; with gradients and Adam about 510 GiB over the 4 training GPUs",
    "Qwen3-30B-A3B as in NeMo-RL #3208; about 8 minutes a run is #3743's gen_kl_harness; memory is parameters x bytes",
)
_NANO = Place(
    "2 nodes of 4 GB200",
    480.0,
    "weights about 60 GiB a copy in BF16, a quarter of it for NVFP4 experts",
    "Nemotron Nano v3 as in NeMo-RL #4791; the time is that of #3743's harness, not measured for this model",
)
_PLACES = {"nvfp4-flashinfer": _NANO, "mxfp8-flashinfer": _NANO}
_SM90 = Place(
    "1 node of H100 or H200",
    None,
    "as the model needs",
    "no preset is verified on SM90; the batch-invariant kernels with FlashAttention 4 gave 0 of 384 tokens on an H200",
)
_CPU = Place("this kind of machine, one core", 5.0, "1 GiB", "bed tiny-gpt, measured on a two-core CPU machine")


@dataclass(frozen=True)
class Plan:
    """A plan; see :meth:`to_json`."""

    target: str
    preset: str
    space: Space
    switches: tuple[Switch, ...]
    available: dict[str, Availability]
    place: Place
    expected: tuple[Expected, ...]
    steps: tuple[Step, ...]
    commands: tuple[str, ...]

    @property
    def searched(self) -> tuple[str, ...]:
        """Names of the switches that are varied."""
        return self.space.sort(self.space.top - self.space.bottom)

    @property
    def requirements(self) -> dict[str, list[str]]:
        """What the machine must have for everything that is varied, by kind."""
        by_name = {s.name: s for s in self.switches}
        return summary(need for name in self.searched for need in by_name[name].needs)

    def to_json(self) -> dict[str, Any]:
        """The document ``zkl-debug stack --plan --json`` prints under ``plan``."""
        seconds = self.place.seconds
        return {
            "target": self.target,
            "preset": self.preset or None,
            "requirements": self.requirements,
            "switches": {
                "searched": list(self.searched),
                "alternatives": list(self.space.swappable),
                "untestable": {s.name: s.untestable for s in self.space.switches if s.untestable},
            },
            "runs": [
                {**asdict(e), "seconds": round(e.mean * seconds) if seconds is not None else None}
                for e in self.expected
            ],
            "one_run": asdict(self.place),
            "order": [self._step(step) for step in self.steps],
            "commands": list(self.commands),
        }

    def _step(self, step: Step) -> dict[str, Any]:
        on = {s.name: s.name in step.on for s in self.switches}
        return {
            **asdict(step),
            "on": list(step.on),
            "env": variables(on, self.switches),
            "overrides": list(recipe_overrides(on, self.switches)),
        }


def make_plan(
    target: str, preset: str, switches: Sequence[Switch], available: dict[str, Availability], bed: bool = False
) -> Plan:
    """The plan for a ladder on a machine.

    Args:
        target: ``sm100``, ``sm90`` or ``cpu``.
        preset: the preset the ladder is cut to, or empty.
        switches: the ladder.
        available: availability of its switches there.
        bed: the runs are those of a bed of this project, not of the user's program.
    """
    chosen = tuple(switches)
    space = command_space(chosen, available)
    expected = tuple(e for n in _CAUSES if (e := expected_runs(space, n)) is not None)
    place = _CPU if bed else _SM90 if target == "sm90" else _PLACES.get(preset, _QWEN)
    commands = _bed_commands() if bed else _commands(target, preset)
    return Plan(target, preset, space, chosen, available, place, expected, first_steps(space), commands)


def _bed_commands() -> tuple[str, ...]:
    return ("zkl-debug bisect switches --bed tiny-gpt --dtype bf16 --journal ladder.jsonl",)


def _commands(target: str, preset: str) -> tuple[str, ...]:
    chosen = f" --preset {preset}" if preset else ""
    check = f"zkl-debug check RECIPE.yaml{chosen} --environment"
    return (
        f"{check}   # on the node: what is missing there",
        f"zkl-debug stack --target {target}{chosen} --space ladder.yaml   # anywhere: the space file of this plan",
        "zkl-debug bisect switches --space ladder.yaml --journal ladder.jsonl --timeout 3600 "
        "--criterion 'gen_kl_error == 0' -- bash run_one.sh",
        "# run_one.sh: uv run examples/run_grpo.py --config RECIPE.yaml "
        "++policy.megatron_cfg.zero_train_gen_mismatch=false $(python -m zkl_debug.stack.overrides); "
        'then write {"gen_kl_error": ..., "token_mult_prob_error": ...} to $ZKL_VERDICT_FILE. Patches that only '
        "your code carries: ZKL_SWITCH_<NAME> is 1 or 0",
    )
