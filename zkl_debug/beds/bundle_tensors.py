"""Tensors of a bundle: raw bits in a safetensors file, and large weights cut down to the outputs that differ."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.model import Ints
from zkl_debug.errors import UsageError
from zkl_debug.schema import Json

_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "U8",  # two values a byte: the bytes are what can be read everywhere
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class Stored:
    """A tensor as it goes into the file: raw bits with their torch dtype and shape."""

    bits: NDArray[Any]
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.bits.nbytes)


def cut_linear(tensors: Mapping[str, Stored], most: int) -> tuple[dict[str, Stored], Ints | None]:
    """A linear layer's tensors with only some of its outputs, where the weight is larger than ``most`` bytes.

    Args:
        tensors: with ``out/a``, ``out/b`` and ``weight/weight`` [n, k] (or one for each side); ``weight/bias`` [n] may
            be there.
        most: bytes that the weights may have.

    Returns:
        The tensors, and the outputs that were kept, most often differing ones first among those that fit, in
        ascending order; None when nothing was cut.
    """
    named = [name for name in tensors if name.startswith(("weight/weight", "weight/bias"))]
    weights = [tensors[name] for name in named if name.startswith("weight/weight")]
    a, b = (tensors.get(name) for name in ("out/a", "out/b"))
    weight = max(weights, key=lambda w: w.nbytes, default=None)
    if weight is None or a is None or b is None or sum(w.nbytes for w in weights) <= most:
        return dict(tensors), None
    if any(tensors[name].shape[:1] != weight.shape[:1] for name in named):
        return dict(tensors), None
    outputs = weight.shape[0]
    differ = (_matrix(a) != _matrix(b)).sum(axis=0)
    room = max(1, most // (sum(w.nbytes for w in weights) // outputs))
    kept = np.sort(np.argsort(-differ, kind="stable")[:room])
    cut = dict(tensors)
    for name in ("out/a", "out/b"):
        cut[name] = Stored(_matrix(tensors[name])[:, kept], tensors[name].dtype, (len(_matrix(a)), len(kept)))
    for name in named:
        if cut[name].shape:
            rows = cut[name].bits.reshape(outputs, -1)[kept]
            cut[name] = Stored(rows, cut[name].dtype, (len(kept), *cut[name].shape[1:]))
    return cut, kept


def _matrix(tensor: Stored) -> NDArray[Any]:
    return tensor.bits.reshape(tensor.shape[0], -1)


def safetensors(tensors: Mapping[str, Stored]) -> bytes:
    """A safetensors file of some tensors.

    Raises:
        UsageError: a dtype that the format has no name for.
    """
    header: dict[str, Json] = {}
    parts: list[bytes] = []
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _SAFETENSORS:
            raise UsageError(f"{name} has dtype {tensor.dtype}", f"one of {', '.join(_SAFETENSORS)}")
        data = np.ascontiguousarray(tensor.bits).tobytes()
        header[name] = {
            "dtype": _SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(data)],
        }
        parts.append(data)
        at += len(data)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + b"".join(parts)
