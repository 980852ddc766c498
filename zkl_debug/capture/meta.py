"""What a capture says of the program it observed: versions, environment, threads, device, resolved configuration."""

from __future__ import annotations

import dataclasses
import enum
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from zkl_debug import __version__
from zkl_debug.schema import Json

PACKAGES = (
    "torch",
    "megatron-core",
    "transformer_engine",
    "flash_attn",
    "flash-attn-4",
    "flashinfer-python",
    "triton",
    "mamba_ssm",
    "causal_conv1d",
    "deep_gemm",
    "numpy",
    "h5py",
)

#: variables that can change numerics; values of anything else are never written
ENVIRONMENT_PREFIXES = (
    "ATEN_",
    "CUBLAS",
    "CUDA_DEVICE",
    "CUDA_LAUNCH",
    "CUDNN",
    "KMP_",
    "MAMBA_",
    "MCORE_",
    "MKL_",
    "NCCL_",
    "NRL_",
    "NVIDIA_TF32",
    "NVTE_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTORCH_",
    "TORCH_",
    "TRITON_",
    "ZKL_",
)


def versions() -> dict[str, str]:
    """Versions of what is installed among :data:`PACKAGES`, plus python and zkl-debug."""
    found = {"python": platform.python_version(), "zkl-debug": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, str]:
    """Environment variables that can change numerics. Paths in their values are reduced to the last component."""
    return {
        key: Path(value).name if value.startswith(("/", "~")) else value
        for key, value in sorted(os.environ.items())
        if key.startswith(ENVIRONMENT_PREFIXES)
    }


def process() -> dict[str, Json]:
    """Threads, device and the global switches of torch that change arithmetic."""
    info: dict[str, Json] = {
        "platform": platform.machine(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "argv0": Path(sys.argv[0]).name if sys.argv else "",
    }
    if torch.cuda.is_available() and torch.version.cuda:
        properties = torch.cuda.get_device_properties(0)
        info["device"] = {"name": properties.name, "sm": f"{properties.major}{properties.minor}"}
    return info


def to_json(value: Any, depth: int = 0) -> Json:
    """A JSON form of a configuration object; what has none becomes its short text.

    Memory addresses are left out, so two runs of the same program give the same text.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    if depth > 4:
        return type(value).__name__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name, None), depth + 1) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_json(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [to_json(v, depth + 1) for v in value]
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return type(value).__name__
