"""multilinear-128 of CPU tensors as one int8 matrix product: the same bits, several times the speed of 64-bit sums.

A lane is ``b = u0 + 2**8 u1 + 2**16 u2 + 2**24 s3`` with three unsigned bytes and a signed one, and a weight is
``W = sum_m 2**(8 m) d_m mod 2**64`` with signed digits ``d_m`` in [-128, 127]. So ``sum_i b_i W_i`` is
``sum_s 2**(8 s) c_s mod 2**64`` where ``c_s`` adds the products of byte ``j`` and digit ``s - j`` over all lanes: eight
columns for each of the two streams, 16 in all. Unsigned bytes enter as ``u - 128`` (their top bit flipped), and the
128 is put back as a constant of each column. Products of int8 added up in int32 are exact for rows of up to 65,536
bytes; longer rows are cut. Integer sums are associative: the threads and blocking of the product cannot matter.

The product is ``torch._int_mm``, which uses the processor's int8 dot products where there are any. It is taken only
where it gives the bits of :mod:`zkl_debug.digest` on a probe, and the processor has dot products or it was the faster
one there (:func:`available`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug import digest
from zkl_debug.schema import U64

#: Below this many bytes the plain sums are as fast.
LEAST_BYTES = 1 << 19
_FLIP = 0x00808080  # top bits of the three unsigned bytes of a lane
_COLUMNS = 16
_COL_LANES = 1 << 14  # 65,536 bytes: 128 * 128 * 65,536 / 2 < 2**31 would hold for twice as many
_BLOCK_BYTES = 1 << 22  # every product call lays out the columns anew, and larger ones leave the cache
_PROBE_LEAST, _PROBE_MOST = 4, 24  # rounds
_PROBE_SECONDS = 0.2
_CACHED_LANES = 1 << 17  # 8 MiB of columns
_SHIFTS = (np.uint64(1) << (np.uint64(8) * np.arange(8, dtype=np.uint64))).astype(np.uint64)

_lock = threading.Lock()
_columns: torch.Tensor | None = None
_verdict: bool | None = None
_pid = os.getpid()


def _digits(table: U64) -> NDArray[np.int8]:
    """Signed base-256 digits of weights mod 2**64; shape [2, L] in, [2, 8, L] out."""
    out = np.empty((table.shape[0], 8, table.shape[1]), np.int8)
    rest = table.copy()
    for m in range(8):
        digit = (rest & np.uint64(0xFF)).astype(np.uint8).view(np.int8)
        out[:, m] = digit
        rest -= digit.astype(np.int64).view(np.uint64)
        rest >>= np.uint64(8)
    return out


def _make_columns(start: int, count: int) -> torch.Tensor:
    """Columns of the product for lanes ``start ...``, int8 [16, 4 * count]; row ``8 k + s`` is stream k, shift s."""
    digits = _digits(digest.weights(start, count))
    out = np.zeros((2, 8, count, 4), np.int8)
    for byte in range(4):
        out[:, byte:, :, byte] = digits[:, : 8 - byte]
    return torch.from_numpy(out.reshape(_COLUMNS, 4 * count))


def _columns_of(start: int, count: int) -> torch.Tensor:
    global _columns
    stop = start + count
    if stop > _CACHED_LANES:
        return _make_columns(start, count)
    table = _columns
    if table is None or 4 * stop > table.shape[1]:
        with _lock:
            have = 0 if _columns is None else _columns.shape[1] // 4
            if stop > have:
                _columns = _make_columns(0, min(_CACHED_LANES, max(stop, 2 * have)))
            table = _columns
        assert table is not None
    return table[:, 4 * start : 4 * stop]


def _restored(columns: torch.Tensor) -> U64:
    """What the flipped bits took from the two halves of every digest, [2] uint64 mod 2**64."""
    per_lane = columns.view(_COLUMNS, -1, 4)[:, :, :3]
    return _joined((128 * per_lane.sum((1, 2), dtype=torch.int64)).numpy().reshape(1, 2, 8)).reshape(2)


def _joined(columns: NDArray[Any], out: U64 | None = None) -> U64:
    """Halves of digests from their columns, each at its shift; [n, 2, 8] integers in, [n, 2] uint64 out."""
    return np.asarray(np.einsum("nks,s->nk", columns, _SHIFTS, out=out, dtype=np.uint64, casting="unsafe"))


_restore_cache: dict[tuple[int, int], U64] = {}


def _restored_of(start: int, count: int, columns: torch.Tensor) -> U64:
    key = (start, count)
    found = _restore_cache.get(key)
    if found is None:
        if len(_restore_cache) > 4096:
            _restore_cache.clear()
        found = _restore_cache[key] = _restored(columns)
    return found


_own = threading.local()


def _scratch(rows: int, count: int) -> torch.Tensor:
    """Room for flipped lanes, kept by each thread: fresh memory would cost a page fault for every 4 KiB.

    Made outside inference mode, whatever the program is in: a tensor made inside cannot be written to outside.
    """
    room: torch.Tensor | None = getattr(_own, "room", None)
    if room is None or room.numel() < rows * count:
        with torch.inference_mode(mode=False):
            room = _own.room = torch.empty(max(rows * count, _BLOCK_BYTES // 4), dtype=torch.int32)
    return room[: rows * count].view(rows, count)


def digest_lanes(lanes: torch.Tensor, lane_offset: int = 0) -> U64:
    """Digest of every row of a CPU tensor of lanes.

    Args:
        lanes: int32, shape [n, ...] in any strides; no dimension is 0.
        lane_offset: index of the row's first lane in the whole row, for shards.

    Returns:
        numpy uint64, shape [n, 2].
    """
    rows, count = lanes.shape[0], lanes.shape[1:].numel()
    if count > _COL_LANES:
        flat = lanes.reshape(rows, count)
        parts = range(0, count, _COL_LANES)
        return np.sum([digest_lanes(flat[:, at : at + _COL_LANES], lane_offset + at) for at in parts], axis=0)
    columns = _columns_of(lane_offset, count)
    step = max(1, _BLOCK_BYTES // (4 * count))
    room = _scratch(min(step, rows), count)
    out = np.empty((rows, 2), np.uint64)
    for row in range(0, rows, step):
        block = lanes[row : row + step]
        flipped = room[: block.shape[0]]
        torch.bitwise_xor(block, _FLIP, out=flipped.view(block.shape))  # gathers strided rows as well
        product = torch._int_mm(flipped.view(torch.int8), columns.t())
        _joined(product.numpy().reshape(-1, 2, 8), out[row : row + step])
    out += _restored_of(lane_offset, count, columns)
    return out


def available() -> bool:
    """Whether the product gives the right bits here and is taken for the faster one; probed once a process.

    Not in a forked child: the threads of its parent's products are not there, and a product could wait for them.
    """
    global _verdict
    if _verdict is None:
        _verdict = _probe()
    return _verdict and os.getpid() == _pid


def _probe() -> bool:
    if not hasattr(torch, "_int_mm"):
        return False
    generator = np.random.Generator(np.random.PCG64(0x5A4B4C))
    raw: NDArray[Any] = generator.integers(0, 256, (256, 4096), np.uint8)
    raw[:8] = 0x80
    raw[8:16] = 0xFF
    lanes = torch.from_numpy(raw.view("<i4"))
    try:
        if not np.array_equal(digest_lanes(lanes), digest.digest_rows(raw)):
            return False
    except (RuntimeError, TypeError):
        return False
    return _dot_products() or _faster(lambda: digest_lanes(lanes), lambda: digest.digest_rows(raw))


def _dot_products() -> bool:
    """Whether the processor is known to add up products of int8; asked first, for other programs disturb a clock."""
    known: Callable[[], bool] | None = getattr(torch.cpu, "_is_vnni_supported", None)
    return known is not None and known()


def _faster(first: Callable[[], object], second: Callable[[], object]) -> bool:
    """Whether the first call takes less time than the second, by the best of each.

    Where other programs want the processor a call is interrupted for milliseconds, and more often the more threads it
    has; so a first that looks slower is tried again, in turns with the second, for a while.
    """
    best = [float("inf"), float("inf")]
    end = time.perf_counter() + _PROBE_SECONDS
    for round_ in range(_PROBE_MOST):
        for which, call in enumerate((first, second)):
            begin = time.perf_counter()
            call()
            best[which] = min(best[which], time.perf_counter() - begin)
        if round_ + 1 >= _PROBE_LEAST and best[0] < best[1]:
            return True
        if time.perf_counter() > end:
            break
    return False
