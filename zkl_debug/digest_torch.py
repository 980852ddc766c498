"""multilinear-128 of torch tensors; the same bits as :mod:`zkl_debug.digest`.

CPU tensors are read in place: small ones through numpy, large ones through :mod:`zkl_debug.digest_int8`. Nothing here
is visible to a dispatch or function mode that is active in the program under observation, and no autograd graph is
made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from zkl_debug import digest, digest_int8
from zkl_debug.schema import U64

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BLOCK_LANES = 1 << 22  # lanes a block on an accelerator
_WHOLE_BYTES = 1 << 16  # bytes of each tensor that are digested together


class _Unobserved:
    """Every large digest passes through it, so it costs next to nothing where the program has no mode."""

    __slots__ = ("_function", "_grad", "_modes")

    def __enter__(self) -> None:
        self._modes: Any = None
        if _len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():  # type: ignore[no-untyped-call]
            self._modes = _disable_current_modes()
            self._modes.__enter__()
        self._function = torch._C.DisableTorchFunction()
        self._function.__enter__()
        self._grad = torch.is_grad_enabled()
        if self._grad:
            torch._C._set_grad_enabled(False)

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        if self._grad:
            torch._C._set_grad_enabled(True)
        self._function.__exit__(kind, error, tb)
        if self._modes is not None:
            self._modes.__exit__(None, None, None)


def unobserved() -> AbstractContextManager[None]:
    """Run torch calls that no active mode sees: dispatch modes off, function modes off, autograd off."""
    return _Unobserved()


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
    if _plain_size(t) >= digest_int8.LEAST_BYTES:
        found = _product_digest(t, rows, lane_offset)
        if found is not None:
            return found
    plain = _plain_bytes(t, rows)
    if plain is not None:
        return digest.digest_rows(plain, lane_offset)
    with unobserved():
        raw = _row_bytes(t, rows)
        if raw.device.type != "cpu":
            return _device_digest(raw, lane_offset)
        found = _product_digest(raw, rows, lane_offset) if raw.numel() >= digest_int8.LEAST_BYTES else None
        return digest.digest_rows(raw.numpy(), lane_offset) if found is None else found


def _product_digest(t: torch.Tensor, rows: int, lane_offset: int) -> U64 | None:
    """The digest by :mod:`zkl_debug.digest_int8`; None where it is not to be had, or rows are not whole lanes."""
    with unobserved():
        _check_rows(t.numel(), rows)
        if not digest_int8.available():
            return None
        t = t.detach()
        if t.is_contiguous() or t.dim() < 2 or t.shape[0] != rows or t.stride(-1) != 1:
            t = t.contiguous().view(rows, -1)
        try:
            lanes = t.view(torch.int32)  # rows with gaps are read as they lie
        except RuntimeError:  # elements smaller than a lane, and no whole number of lanes without a gap
            return None
        return digest_int8.digest_lanes(lanes, lane_offset)


def digest_wholes(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Digest of each tensor read as one row, like ``digest_tensor(t, 1)`` of it.

    The weights of a lane cost more than the lane itself. Here they are worked out once for all tensors of a CPU, so
    that a model costs about as much as its largest tensor does alone.
    """
    found: list[tuple[int, int]] = [(0, 0)] * len(tensors)
    rows: dict[int, NDArray[np.uint8]] = {}
    kept = []  # what the rows are views of
    for place, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        flat = tensor.detach().contiguous().reshape(1, -1)
        raw = _plain_bytes(flat, 1) if _plain_size(flat) >= _WHOLE_BYTES else None
        if raw is None:
            digest_ = digest_tensor(flat, 1)[0]
            found[place] = int(digest_[0]), int(digest_[1])
        else:
            rows[place] = raw[0]
            kept.append(flat)
    total = {place: np.zeros(2, np.uint64) for place in rows}
    for start in range(0, max((len(row) for row in rows.values()), default=0), _WHOLE_BYTES):
        live = [place for place, row in rows.items() if len(row) > start]
        block = np.zeros((len(live), min(_WHOLE_BYTES, max(len(rows[p]) for p in live) - start)), np.uint8)
        for line, place in zip(block, live, strict=True):
            part = rows[place][start : start + _WHOLE_BYTES]
            line[: len(part)] = part  # the lanes behind are zero, and add nothing
        for place, digest_ in zip(
            live, digest_tensor(torch.from_numpy(block), len(live), start // digest.LANE_BYTES), strict=True
        ):
            total[place] += digest_
    for place, digest_ in total.items():
        found[place] = int(digest_[0]), int(digest_[1])
    return found


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


def _plain_size(t: torch.Tensor) -> int:
    """Bytes of an ordinary tensor in the memory of a CPU, whose strides say where its elements are; -1 of any other."""
    if type(t) not in _PLAIN:
        return -1
    with torch._C.DisableTorchFunction():
        if (
            t.device.type != "cpu"
            or t.layout != torch.strided
            or t.dtype.is_complex
            or t.is_neg()
            or is_functorch_wrapped_tensor(t)
        ):
            return -1
        return t.numel() * t.element_size()


def _plain_bytes(t: torch.Tensor, rows: int) -> NDArray[np.uint8] | None:
    """Bytes of an ordinary contiguous CPU tensor, without one torch operation; None for any other tensor.

    The array does not keep the tensor alive: it is for use while the caller holds ``t``.
    """
    nbytes = _plain_size(t)
    if nbytes < 0:
        return None
    with torch._C.DisableTorchFunction():
        if not t.is_contiguous():
            return None
        _check_rows(t.numel(), rows)
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
        table = _device_weights(lane_offset + start, min(cols, width - start), raw.device)
        for row in range(0, rows, step):
            block = lanes[row : row + step, start : start + cols].to(torch.int64)
            for k in (0, 1):
                total[row : row + step, k] += (block * table[k]).sum(1)
    return np.asarray(total.cpu().numpy()).view(np.uint64)


def _device_weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    """:func:`zkl_debug.digest.weights` made on a device, int64 [2, count]: sending them would take longer."""
    factors = tuple(int(f.astype(np.int64)) for f in (digest._GAMMA, digest._MIX_1, digest._MIX_2))
    state = torch.arange(start + 1, start + count + 1, device=device) * factors[0]
    seeds = np.array(digest.SEEDS, np.uint64).view(np.int64).tolist()
    table = torch.stack([state + seed for seed in seeds])
    for shift, factor in ((30, factors[1]), (27, factors[2]), (31, 1)):
        table ^= (table >> shift) & ((1 << (64 - shift)) - 1)  # a shift of signed numbers keeps the sign
        if factor != 1:
            table *= factor
    return table | 1
