"""Tensors of other tools' files as raw bits: nothing is converted, rounded or interpreted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bits import DTYPES, to_float64
from zkl_debug.digest import digest_bytes
from zkl_debug.errors import Refused
from zkl_debug.schema import StateRecord

I64 = NDArray[np.int64]
_NUMPY = {f"{kind}{8 * size}" for kind in ("float", "int", "uint") for size in (1, 2, 4, 8)} | {"bool"}


@dataclass(frozen=True)
class RawTensor:
    """A tensor by its bits.

    Attributes:
        dtype: torch's name of the dtype, a key of :data:`~zkl_debug.bits.DTYPES`.
        shape: its shape, in elements.
        bits: raw bits in the unsigned dtype of the same width, [elements] in row-major order; None where only the
            shape was read.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: NDArray[Any] | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes, whether read or not."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def rows(self) -> NDArray[Any]:
        """The bits with the tensor's shape; shares memory."""
        assert self.bits is not None
        return self.bits.reshape(self.shape)

    def integers(self) -> I64:
        """The values of an integer tensor, its own shape.

        Raises:
            ValueError: when it does not hold integers, or some do not fit int64.
        """
        info = DTYPES[self.dtype]
        if info.is_float or self.bits is None:
            raise ValueError(f"{self.dtype} is no integer dtype")
        signed = info.storage.str.replace("u", "i") if info.is_signed else info.storage.str
        values = self.rows().view(signed)
        if values.dtype == np.uint64 and values.size and int(values.max()) > 2**63 - 1:
            raise ValueError("a value of 2**63 or more")
        return values.astype(np.int64)

    def floats(self) -> NDArray[np.float64]:
        """The values as float64, which holds each of them exactly, its own shape.

        Raises:
            ValueError: when it does not hold floating point numbers.
        """
        if not DTYPES[self.dtype].is_float or self.bits is None:
            raise ValueError(f"{self.dtype} is no floating point dtype")
        return to_float64(self.rows(), self.dtype)


def from_numpy(array: NDArray[Any], dtype: str = "") -> RawTensor:
    """Bits of a numpy array.

    Args:
        array: any numeric array, in any byte order.
        dtype: torch's name where numpy has none (bfloat16 and fp8 kept as unsigned integers); default numpy's own.

    Raises:
        ValueError: when numpy's dtype is not one of torch's, or is not as wide as ``dtype``.
    """
    name = dtype or array.dtype.name
    if array.dtype.kind not in "iufb" or (not dtype and name not in _NUMPY):
        raise ValueError(f"dtype {array.dtype}")
    info = DTYPES.get(name)
    if info is None or info.itemsize != array.dtype.itemsize:
        raise ValueError(f"dtype {array.dtype} kept as {name}")
    native = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return RawTensor(name, tuple(array.shape), native.reshape(-1).view(info.storage))


def state_of(name: str, tensor: RawTensor) -> StateRecord:
    """The record of a parameter: the digest of its bytes, as a capture of the model itself makes it."""
    assert tensor.bits is not None
    digest = digest_bytes(tensor.bits.tobytes()) if tensor.bits.size else (0, 0)
    return StateRecord(name, "parameter", tensor.dtype, tensor.shape, digest)


def files_under(folder: Path, endings: Sequence[str]) -> tuple[list[Path], int]:
    """Regular files of a folder by ending, in name order, and how many links were left out.

    Links are not followed, whether to files or to folders: what is ingested lies in the folder itself.

    Raises:
        Refused: when the folder cannot be listed.
    """
    found: list[Path] = []
    links = 0

    def failed(error: OSError) -> None:
        raise Refused(f"{folder} cannot be listed: {error.strerror or error}", "a readable folder")

    for root, folders, names in os.walk(folder, followlinks=False, onerror=failed):
        here = Path(root)
        links += sum((here / name).is_symlink() for name in folders)
        for name in names:
            path = here / name
            if path.suffix not in endings:
                continue
            if path.is_symlink():
                links += 1
            elif path.is_file():
                found.append(path)
    return sorted(found), links
