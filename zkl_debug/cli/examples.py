"""Examples of every command, shown at the end of its help. A test parses each of them."""

from __future__ import annotations

import click

#: Command path -> (command line, what it is for). Commands whose own epilog has examples are not here.
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "demo": (("zkl-debug demo", "the story in one screen, on a CPU"),),
    "doctor": (
        ("zkl-debug doctor", "what this machine can run, and known bad combinations"),
        ("zkl-debug doctor --json", "the same, for a bug report"),
    ),
    "beds": (("zkl-debug beds", "workloads, their switches, and defects that can be put in"),),
    "capture": (
        ("zkl-debug capture --bed tiny-gpt --stack off --level payload --out captures/off", "both sides of a bed"),
        ("zkl-debug capture --bed tiny-moe --fault R1 --out captures/r1", "with a known defect put in"),
        ("zkl-debug capture --side train --out captures/train -- python score.py", "a program, unchanged"),
        ("zkl-debug capture --side gen --requests 8 --out captures/gen -- python generate.py", "its first 8 requests"),
        ("zkl-debug capture --side train --steps 1 --out c -- torchrun --nproc-per-node 2 train.py", "every rank"),
    ),
    "diff": (
        ("zkl-debug diff captures/train captures/gen", "the answer, in one screen"),
        ("zkl-debug diff captures/gen", "one capture: batch variance, prefill against decode"),
        ("zkl-debug diff captures/train captures/gen --html report.html", "the same as one page"),
        ("zkl-debug diff captures/train captures/gen --json", "for scripts"),
        ("zkl-debug diff captures/off/train captures/off/gen --drill", "of a bed: look inside the first site"),
    ),
    "zoom": (
        ("zkl-debug zoom captures/off/train captures/off/gen", "inside the first site that differs"),
        ("zkl-debug zoom captures/off/train captures/off/gen --site decoder.layers.0.mlp:out", "inside this one"),
    ),
    "bundle": (
        (
            "zkl-debug bundle captures/off/train captures/off/gen --out bundle",
            "the first operator, to attach to a bug report",
        ),
    ),
    "names": (
        ("zkl-debug names captures/train captures/gen", "which site of one side is which of the other"),
        ("zkl-debug names captures/train captures/gen --map names.toml", "with names of your own"),
    ),
    "inspect": (
        ("zkl-debug inspect captures/train", "what a folder holds"),
        ("zkl-debug inspect captures/train --sites", "every site"),
    ),
    "repair": (("zkl-debug repair captures/train", "recover a capture whose process was killed"),),
    "check": (
        ("zkl-debug check recipe.yaml --preset bf16", "what a NeMo-RL recipe lacks for zero mismatch"),
        ("zkl-debug check recipe.yaml --preset bf16 --fix overlay.yaml", "and an overlay that corrects it"),
        ("zkl-debug check --list", "the presets and their rules"),
    ),
    "bisect commits": (
        ("zkl-debug bisect commits --good v1.0 --bad HEAD -- python probe.py", "exit 0 is zero, 1 a mismatch"),
    ),
    "bisect operators": (
        ("zkl-debug bisect operators --bed tiny-gpt --stack off", "every operator that diverges by itself"),
        ("zkl-debug bisect operators --bed tiny-gpt --stack off --attribution", "and its share of the log-prob gap"),
    ),
    "bisect steps": (
        ("zkl-debug bisect steps --fault S1 --steps 5", "at which step of a loop it starts, and why"),
        ("zkl-debug bisect steps --model hybrid --layout dedicated --steps 4", "a clean loop of another kind"),
    ),
    "bisect switches": (
        ("zkl-debug bisect switches --bed tiny-gpt", "which switches of the stack are needed"),
        ("zkl-debug bisect switches --bed tiny-gpt --journal ladder.jsonl", "resumable"),
        ("zkl-debug bisect switches --space space.yaml -- python probe.py", "switches and a probe of your own"),
        ("zkl-debug bisect switches --bed tiny-gpt --ray local --jobs 2", "its runs on a Ray cluster"),
    ),
    "watch": (
        ("zkl-debug watch --steps 8", "a loop under a light monitor that stops at the first mismatch"),
        ("zkl-debug watch --fault S1 --steps 5 --out found", "with a known defect; keep what is found"),
    ),
    "certify": (
        ("zkl-debug certify", "the gate over every layout: exit 0 only for zero over all edges"),
        ("zkl-debug certify --layout dedicated --steps 3", "one layout, shorter loops"),
    ),
    "stack": (
        ("zkl-debug stack", "the ladder of switches on this machine"),
        ("zkl-debug stack --target sm100 --preset bf16", "what a recipe asks for, on another machine"),
        ("zkl-debug stack --plan --space space.yaml", "the runs of a search over it"),
    ),
    "bench capture": (("zkl-debug bench capture --rounds 10", "what the probe costs on this machine"),),
    "bench diff": (("zkl-debug bench diff --rows 1e6 --ranks 8", "how long a large diff takes"),),
    "bench faults": (
        ("zkl-debug bench faults --seeds 1 --dtype bf16", "the scoreboard over known defects"),
        ("zkl-debug bench faults --fault K1 --fault P1", "some of them"),
    ),
    "bench gpu": (("zkl-debug bench gpu --size small --part kernel", "on a GPU"),),
    "bench peers": (("zkl-debug bench peers", "beside what other tools cost"),),
    "bench store": (("zkl-debug bench store --size 256MiB", "how fast captures are written"),),
}


def lines_of(path: str) -> list[str]:
    """The example lines of a command, each with its comment."""
    found = EXAMPLES.get(path, ())
    width = max((len(line) for line, _ in found if len(line) <= 60), default=0)
    lines = []
    for line, what in found:
        if len(line) > 60:
            lines += [f"  # {what}", f"  {line}"]
        else:
            lines.append(f"  {line:<{width}}  # {what}")
    return lines


def with_examples(command: click.Command, path: str) -> click.Command:
    """The command, its examples at the end of its help."""
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            with_examples(child, f"{path} {name}")
        return command
    lines = lines_of(path)
    if lines and "Examples:" not in (command.epilog or ""):
        own = [command.epilog] if command.epilog else []
        command.epilog = "\n\n".join([*own, "\n".join(["\b", "Examples:", *lines])])
    return command
