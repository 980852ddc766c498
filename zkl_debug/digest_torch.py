"""multilinear-128 of torch tensors; the same bits as :mod:`zkl_debug.digest`.

CPU tensors are read in place: small ones through numpy, large ones through :mod:`zkl_debug.digest_int8`. Nothing here
is visible to a dispatch or function mode that is active in the program under observation, and no autograd graph is
made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _disable_current_modes

from zkl_debug import digest, digest_int8
from zkl_debug.schema import U64

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BLOCK_LANES = 1 << 22  # lanes a block on an accelerator


@contextmanager
def unobserved() -> Iterator[None]:
    """Run torch calls that no active mode sees: dispatch modes off, function modes off, autograd off."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def digest_tensor(t: torch.Tensor, rows: int, lane_offset: int = 0) -> U64:
    """Digest of every row of a tensor read as [rows, nbytes].

    Args:
        t: any dtype, device and strides; its elements in row-major order are cut into ``rows`` equal rows.
        rows: number of rows; must divide the number of elements.
        lane_offset: index of the row's first 32-bit lane in the whole row, for shards.

    Returns:
        numpy uint64, shape [rows, 2].

    Raises:
        ValueError: when the elements do not divide into ``rows`` rows.
    """
    plain = _plain_bytes(t, rows)
    if plain is not None:
        return _host_digest(plain, lane_offset)
    with unobserved():
        raw = _row_bytes(t, rows)
        if raw.device.type == "cpu":
            return _host_digest(raw.numpy(), lane_offset)
        return _device_digest(raw, lane_offset)


def _host_digest(raw: NDArray[np.uint8], lane_offset: int) -> U64:
    if raw.size < digest_int8.LEAST_BYTES or raw.shape[1] % digest.LANE_BYTES:
        return digest.digest_rows(raw, lane_offset)
    with unobserved():
        if not digest_int8.available():
            return digest.digest_rows(raw, lane_offset)
        return digest_int8.digest_lanes(torch.from_numpy(raw.view("<i4")), lane_offset)


def row_bytes(t: torch.Tensor, rows: int) -> NDArray[np.uint8]:
    """Raw bytes of a tensor as numpy uint8 [rows, nbytes].

    Of a contiguous CPU tensor this is a view that does not keep the tensor alive: copy it to keep it.

    Raises:
        ValueError: when the elements do not divide into ``rows`` rows.
    """
    plain = _plain_bytes(t, rows)
    if plain is not None:
        return plain
    with unobserved():
        return np.asarray(_row_bytes(t, rows).cpu().numpy())


def _check_rows(count: int, rows: int) -> None:
    if rows < 0 or (rows == 0 and count) or (rows > 0 and count % rows):
        raise ValueError(f"{count} elements do not make {rows} equal rows")


def _plain_bytes(t: torch.Tensor, rows: int) -> NDArray[np.uint8] | None:
    """Bytes of an ordinary contiguous CPU tensor, without one torch operation; None for any other tensor.

    The array does not keep the tensor alive: it is for use while the caller holds ``t``.
    """
    if type(t) not in _PLAIN:
        return None
    with torch._C.DisableTorchFunction():
        if (
            t.device.type != "cpu"
            or t.layout != torch.strided
            or not t.is_contiguous()
            or t.dtype.is_complex
            or t.is_neg()
            or is_functorch_wrapped_tensor(t)
        ):
            return None
        count = t.numel()
        _check_rows(count, rows)
        nbytes = count * t.element_size()
        if nbytes == 0:
            return np.zeros((rows, 0), np.uint8)
        memory = (ctypes.c_uint8 * nbytes).from_address(t.data_ptr())
    return np.frombuffer(memory, np.uint8).reshape(rows, -1)


def _row_bytes(t: torch.Tensor, rows: int) -> torch.Tensor:
    t = t.detach()
    count = t.numel()
    _check_rows(count, rows)
    if t.is_conj() or t.is_neg():
        t = t.resolve_conj().resolve_neg()
    if not t.is_contiguous():
        t = t.contiguous()
    if count == 0:
        return torch.empty((rows, 0), dtype=torch.uint8, device=t.device)
    return t.reshape(-1).view(torch.uint8).reshape(rows, -1)


def _device_digest(raw: torch.Tensor, lane_offset: int) -> U64:
    """The sum with plain integer operations of the device: exact, though far from its bandwidth."""
    rows, nbytes = raw.shape
    out = np.zeros((rows, 2), np.uint64)
    if rows == 0 or nbytes == 0:
        return out
    odd = nbytes % digest.LANE_BYTES
    if odd:
        raw = torch.nn.functional.pad(raw, (0, digest.LANE_BYTES - odd))
    lanes = raw.view(torch.int32)
    width = lanes.shape[1]
    total = torch.zeros((rows, 2), dtype=torch.int64, device=raw.device)
    cols = min(width, _BLOCK_LANES)
    step = max(1, _BLOCK_LANES // cols)
    for start in range(0, width, cols):
        table = torch.from_numpy(digest.weights(lane_offset + start, min(cols, width - start)).view(np.int64).copy())
        table = table.to(raw.device)
        for row in range(0, rows, step):
            block = lanes[row : row + step, start : start + cols].to(torch.int64)
            for k in (0, 1):
                total[row : row + step, k] += (block * table[k]).sum(1)
    return np.asarray(total.cpu().numpy()).view(np.uint64)
