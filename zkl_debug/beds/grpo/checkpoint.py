"""A step on disk: trainer weights, optimizer, random state and step number, as raw bits in one npz file (no pickle).

With these and the options, any step can be run again in a new process and gives the same tokens, log-probs and
weights. What an engine had kept is not in it, on purpose: a replay that is clean where the live run was not says that
the engine's state is to blame.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.beds.grpo.side import values_of
from zkl_debug.errors import CaptureInvalid, Refused

if TYPE_CHECKING:
    import torch

    from zkl_debug.beds.grpo.loop import GrpoLoop

FORMAT = "zkl-grpo-checkpoint"
_META = "__meta__"


def save(loop: GrpoLoop, path: Path) -> Path:
    """Write what the next step of ``loop`` starts from; returns the path."""
    import torch

    tensors: dict[str, torch.Tensor] = {f"weights/{n}": p for n, p in loop.layout.trainer.named_parameters()}
    tensors |= {f"buffers/{n}": b for n, b in loop.layout.trainer.named_buffers()}
    tensors |= {f"optimizer/{n}": t for n, t in loop.optimizer.state().items()}
    tensors["rng"] = torch.get_rng_state()
    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        values = values_of(tensor)
        arrays[f"t{index}"] = values.bits
        facts[name] = {"key": f"t{index}", "dtype": values.dtype, "shape": list(tensor.shape)}
    meta = {
        "format": FORMAT,
        "version": 1,
        "step": loop.step,
        "weight_version": loop.version,
        "options": asdict(loop.options),
        "tensors": facts,
    }
    arrays[_META] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, **arrays)
    return path


def load(loop: GrpoLoop, path: Path) -> None:
    """Bring an open loop to where the checkpoint was written; its next step is the one that followed there.

    The engine gets the weights at the refit of that step.

    Raises:
        CaptureInvalid: not such a file, or damaged.
        Refused: written by a loop with other options.
    """
    import torch

    meta, arrays = _read(path)
    _refuse_other(loop.options, meta["options"])
    tensors = {name: _tensor(arrays[fact["key"]], fact) for name, fact in meta["tensors"].items()}
    with torch.no_grad():
        for name, parameter in loop.layout.trainer.named_parameters():
            parameter.copy_(tensors[f"weights/{name}"])
        for name, buffer in loop.layout.trainer.named_buffers():
            buffer.copy_(tensors[f"buffers/{name}"])
    loop.optimizer.load({n.removeprefix("optimizer/"): t for n, t in tensors.items() if n.startswith("optimizer/")})
    torch.set_rng_state(tensors["rng"])
    loop.step, loop.version = int(meta["step"]), int(meta["weight_version"])


def _read(path: Path) -> tuple[dict[str, Any], Any]:
    try:
        arrays = np.load(path, allow_pickle=False)
        meta = json.loads(bytes(arrays[_META]))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CaptureInvalid(f"{path} cannot be read: {error}", f"a file with format {FORMAT}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or meta.get("version") != 1:
        raise CaptureInvalid(f"{path} has another format", f"{FORMAT}, version 1")
    return meta, arrays


def _refuse_other(options: GrpoOptions, written: dict[str, Any]) -> None:
    mine = json.loads(json.dumps(asdict(options)))
    differ = [k for k in mine if k in written and mine[k] != written[k] and k not in ("steps", "fault", "invalidate")]
    if differ:
        found = ", ".join(f"{k}={written[k]!r}" for k in differ)
        raise Refused(f"the checkpoint was written with {found}", ", ".join(f"{k}={mine[k]!r}" for k in differ))


def _tensor(bits: Any, fact: dict[str, Any]) -> torch.Tensor:
    import torch

    signed = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[bits.dtype.itemsize]
    raw = torch.from_numpy(bits.view(signed).copy())
    return raw.view(getattr(torch, fact["dtype"])).reshape(fact["shape"])
