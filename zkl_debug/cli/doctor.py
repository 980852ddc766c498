"""``zkl-debug doctor``: what this machine can run, and what is known to go wrong here."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from zkl_debug.cli.common import emit_json, stdout
from zkl_debug.errors import ExitCode

REQUIRED = {"torch": "torch", "megatron-core": "megatron.core", "h5py": "h5py", "numpy": "numpy", "click": "click"}
OPTIONAL = {
    "transformer_engine": "transformer_engine",
    "flash_attn": "flash_attn",
    "flash-attn-3": "flash_attn_3",
    "flash-attn-4": "flash_attn.cute",
    "nvidia-cutlass-dsl": "cutlass",
    "flashinfer-python": "flashinfer",
    "triton": "triton",
    "mamba_ssm": "mamba_ssm",
    "causal_conv1d": "causal_conv1d",
    "deep_gemm": "deep_gemm",
}
#: (package, version prefix, package, version prefix, what goes wrong, evidence)
BAD_PAIRS = (
    (
        "transformer_engine",
        "2.20.2",
        "flash-attn-4",
        "4.0.0b36",
        "causal attention of the training side is wrong: window (-1, 0) is read as a real window",
        "seen on an H200: layer-0 core attention differs on every row, an fp64 replay sides with generation",
    ),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``level`` is ``ok``, ``note``, ``warn`` or ``fail``."""

    level: str
    subject: str
    text: str
    next_step: str = ""


def examine() -> list[Finding]:
    """Look at the interpreter, packages, device and environment; runs no model."""
    return [*_python(), *_packages(), *_bad_pairs(), *_device(), *_attention(), *_environment(), *_disk()]


def _python() -> list[Finding]:
    version = sys.version_info[:2]
    if version in ((3, 12), (3, 13)):
        return [Finding("ok", "python", platform.python_version())]
    text = f"{platform.python_version()}; megatron-core 0.19 has wheels for 3.12 and 3.13 only"
    return [Finding("fail", "python", text, "make PYTHON=python3.12 setup")]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> list[Finding]:
    found = []
    for name in REQUIRED:
        version = _version(name)
        if version is None:
            found.append(Finding("fail", name, "not installed", "make setup"))
        else:
            found.append(Finding("ok", name, version))
    missing = []
    for name, module in OPTIONAL.items():
        version = _version(name)
        if version is None and not _importable(module):
            missing.append(name)
        else:
            found.append(Finding("ok", name, version or "present, version unknown"))
    if missing:
        found.append(Finding("note", "not installed", ", ".join(missing) + " (kernels of these cannot be run here)"))
    return found


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _bad_pairs() -> list[Finding]:
    found = []
    for first, first_version, second, second_version, wrong, evidence in BAD_PAIRS:
        a, b = _version(first), _version(second)
        if a and b and a.startswith(first_version) and b.startswith(second_version):
            text = f"{first} {a} with {second} {b}: {wrong} ({evidence})"
            found.append(Finding("warn", "known bad pair", text, f"pip install another version of {second}"))
    return found


def _device() -> list[Finding]:
    if _version("torch") is None:
        return []
    import torch

    threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    found = [Finding("ok", "cpu", f"{platform.machine()}, {threads}")]
    if not torch.cuda.is_available():
        if driver_version():
            found.append(Finding("warn", "driver", f"{driver_version()}, yet torch sees no GPU"))
        found.append(Finding("note", "gpu", "none: megatron-core runs through the CPU backend (reference attention)"))
        return found
    found.append(Finding("ok", "driver", f"{driver_version() or 'unknown'}, CUDA {torch.version.cuda}"))
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        found.append(Finding("ok", f"gpu {index}", f"{p.name}, SM {p.major}{p.minor}, {p.total_memory >> 30} GiB"))
        if p.major < 10:
            text = f"SM {p.major}{p.minor}: the zero-mismatch presets ask for SM 100; what needs it is untestable here"
            found.append(Finding("note", f"gpu {index}", text))
    return found


def driver_version() -> str | None:
    """Version of the NVIDIA kernel driver, or None."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module\S*\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    return found.group(1) if found else None


def _attention() -> list[Finding]:
    """Which FlashAttention each side can call, as megatron-core and Transformer Engine say where there is a GPU."""
    if _version("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available() or _version("megatron-core") is None:
        return []
    answer, problem = _ask_attention()
    if answer is None:
        return [Finding("note", "attention", f"megatron-core could not be asked: {problem}")]
    gen = [name for name, there in answer["gen"].items() if there]
    train = [f"{name} {version}" for name, version in answer["train"].items() if version]
    found = [Finding("ok", "attention, generation", f"can call {', '.join(gen) or 'none'}")]
    found.append(Finding("ok", "attention, training", f"Transformer Engine finds {', '.join(train) or 'none'}"))
    return found


_ATTENTION = """
import json
import megatron.core.transformer.attention as a
gen = {f"FA{n}": bool(getattr(a, f"HAVE_FA{n}", False)) for n in (2, 3, 4)}
train = {}
try:
    from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils as u
    for n, prefix in ((2, ""), (3, "v3_"), (4, "v4_")):
        there = getattr(u, prefix + "is_installed", False)
        train[f"FA{n}"] = str(getattr(u, {2: "version", 3: "fa3_version", 4: "fa4_version"}[n], "")) if there else ""
except ImportError:
    pass
print("zkl-attention:" + json.dumps({"gen": gen, "train": train}))
"""


def _ask_attention() -> tuple[dict[str, Any] | None, str]:
    """In a process of its own: importing megatron-core takes seconds and may fail."""
    command = [sys.executable, "-c", _ATTENTION]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return None, "no answer within 120 s"
    for line in done.stdout.splitlines():
        if line.startswith("zkl-attention:"):
            answer: dict[str, Any] = json.loads(line.removeprefix("zkl-attention:"))
            return answer, ""
    return None, (done.stderr.strip().splitlines() or ["no answer"])[-1][:200]


def _environment() -> list[Finding]:
    found = []
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "MAMBA_DETERMINISTIC", "NVTE_FLASH_ATTN"):
        value = os.environ.get(name)
        if value is not None:
            found.append(Finding("note", name, f"is set to {value!r}"))
    return found


def _disk() -> list[Finding]:
    stat = os.statvfs(Path.cwd())
    free = stat.f_bavail * stat.f_frsize
    level = "ok" if free > 2 << 30 else "warn"
    return [Finding(level, "disk", f"{free / (1 << 30):.1f} GiB free in the current folder")]


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool) -> int:
    """Check python, packages, device and environment. Exit 0 when the project can run here, 1 when not."""
    findings = examine()
    bad = any(f.level == "fail" for f in findings)
    if as_json:
        document: dict[str, Any] = {"format": "zkl-doctor", "version": 1, "ok": not bad}
        document["findings"] = [asdict(f) for f in findings]
        emit_json(document)
        return int(ExitCode.DIVERGED if bad else ExitCode.OK)
    console = stdout()
    colour = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red"}
    for f in findings:
        console.print(f"[{colour[f.level]}]{f.level:>4}[/] {f.subject}: {f.text}")
        if f.next_step:
            console.print(f"      next: {f.next_step}")
    return int(ExitCode.DIVERGED if bad else ExitCode.OK)
