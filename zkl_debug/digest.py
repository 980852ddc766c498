"""multilinear-128: the digest of a row of raw bytes, in numpy. Imports no torch (see :mod:`zkl_debug.digest_torch`).

A row is zero-padded to a multiple of four bytes and read as signed little-endian 32-bit lanes ``b_i``, widened to 64
bits. The two halves are ``h_k = sum_i b_i * W_k[i] mod 2**64`` with odd weights ``W_k[i]`` from a splitmix64 stream.
Wrapping integer sums are associative: block size, thread count, device and order of reduction cannot change a bit.
Two rows are comparable only when their byte length, dtype and shape agree; padding does not enter the sum.

Digests of shards add up: ``digest(a + b) == digest(a) + digest(b, lane_offset=len(a) // 4)`` when ``len(a)`` is a
multiple of four.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.schema import U64

#: Seeds of the two weight streams. Part of the format: never change them.
SEEDS = (0x5A4B4C2D44454255, 0x6D756C74696C696E)

LANE_BYTES = 4
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# Weights are kept up to this many lanes (64 MiB for both streams); longer rows make theirs block by block.
_CACHED_LANES = 1 << 22
_COL_BLOCK = 1 << 14  # lanes a block
_ROW_BLOCK_BYTES = 1 << 20  # bytes a block of padded rows
_PARALLEL_BYTES = 1 << 18  # below this one thread is faster


def _mix(state: U64) -> U64:
    """The output function of splitmix64, in place."""
    shifted = np.empty_like(state)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        np.right_shift(state, np.uint64(shift), out=shifted)
        np.bitwise_xor(state, shifted, out=state)
        if factor is not None:
            np.multiply(state, factor, out=state)
    return state


def weights_at(index: NDArray[Any]) -> U64:
    """Weights of any lanes: splitmix64 of each stream's seed, made odd; shape [n] in, [2, n] uint64 out."""
    state = np.empty((2, len(index)), np.uint64)
    np.multiply(index.astype(np.uint64) + np.uint64(1), _GAMMA, out=state[0])
    np.add(state[0], np.uint64(SEEDS[1]), out=state[1])
    np.add(state[0], np.uint64(SEEDS[0]), out=state[0])
    return np.bitwise_or(_mix(state), np.uint64(1), out=state)


def _make_weights(start: int, stop: int) -> U64:
    out = np.empty((2, stop - start), np.uint64)
    for at in range(start, stop, _COL_BLOCK):  # block by block: the working set stays in the cache
        index = np.arange(at, min(stop, at + _COL_BLOCK), dtype=np.uint64)
        out[:, at - start : at - start + len(index)] = weights_at(index)
    return out


_weights: U64 = _make_weights(0, 1 << 12)
_weights_lock = threading.Lock()


def weights(start: int, count: int) -> U64:
    """Weights of lanes ``start`` .. ``start + count - 1``, shape [2, count], uint64, all odd. Do not write to it."""
    global _weights
    stop = start + count
    if stop > _CACHED_LANES:
        return _make_weights(start, stop)
    table = _weights
    if stop > table.shape[1]:
        with _weights_lock:
            have = _weights.shape[1]
            if stop > have:
                size = min(_CACHED_LANES, max(stop, 2 * have))
                grown = np.concatenate([_weights, _make_weights(have, size)], axis=1)
                grown.setflags(write=False)
                _weights = grown
            table = _weights
    return table[:, start:stop]


_pool: ThreadPoolExecutor | None = None
_pool_pid = -1
_pool_lock = threading.Lock()


def _threads() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    return min(2, cores)


def _submit(function: Callable[..., None], *task: Any) -> Future[None]:
    global _pool, _pool_pid
    with _pool_lock:
        if _pool is None or _pool_pid != os.getpid():  # a forked child has the object but not its thread
            _pool = ThreadPoolExecutor(1, thread_name_prefix="zkl-digest")
            _pool_pid = os.getpid()
        try:
            return _pool.submit(function, *task)
        except RuntimeError:  # the interpreter ends: captures are closed then, and no thread works any more
            done: Future[None] = Future()
            function(*task)
            done.set_result(None)
            return done


def _sum_lanes(lanes: NDArray[np.int32], lane_offset: int, out: U64) -> None:
    """Add the digests of ``lanes`` [n, L] to ``out`` [n, 2]."""
    width = lanes.shape[1]
    for start in range(0, width, _COL_BLOCK):
        block = lanes[:, start : start + _COL_BLOCK]
        table = weights(lane_offset + start, block.shape[1])
        out += np.einsum("ij,kj->ik", block, table, dtype=np.uint64, casting="unsafe")


def _sum_padded(rows: NDArray[np.uint8], lane_offset: int, out: U64) -> None:
    """As :func:`_sum_lanes` for rows of bytes that cannot be viewed as lanes: padded copies, block by block."""
    n, nbytes = rows.shape
    width = -(-nbytes // LANE_BYTES) * LANE_BYTES
    step = max(1, _ROW_BLOCK_BYTES // max(width, 1))
    buffer = np.zeros((min(step, n), width), np.uint8)
    for start in range(0, n, step):
        block = rows[start : start + step]
        padded = buffer[: block.shape[0]]
        padded[:, :nbytes] = block
        _sum_lanes(padded.view("<i4"), lane_offset, out[start : start + step])


def _sum_rows(rows: NDArray[np.uint8], lane_offset: int, out: U64) -> None:
    if rows.shape[1] % LANE_BYTES == 0 and rows.strides[1] == 1:
        _sum_lanes(rows.view("<i4"), lane_offset, out)
    else:
        _sum_padded(rows, lane_offset, out)


def digest_rows(rows: NDArray[np.uint8], lane_offset: int = 0) -> U64:
    """Digest of every row of raw bytes.

    Args:
        rows: raw bytes, shape [n, nbytes], uint8.
        lane_offset: index of the row's first 32-bit lane in the whole row, for shards.

    Returns:
        Digests, shape [n, 2], uint64.
    """
    if rows.ndim != 2 or rows.dtype != np.uint8:
        raise TypeError(f"digest_rows wants uint8 bytes of shape [n, nbytes], not {rows.dtype} {rows.shape}")
    n, nbytes = rows.shape
    out = np.zeros((n, 2), np.uint64)
    if n == 0 or nbytes == 0:
        return out
    if rows.size < _PARALLEL_BYTES or _threads() < 2:
        _sum_rows(rows, lane_offset, out)
    elif n >= 2:
        half = n // 2
        other = _submit(_sum_rows, rows[:half], lane_offset, out[:half])
        try:
            _sum_rows(rows[half:], lane_offset, out[half:])
        finally:
            other.result()
    else:
        half = nbytes // 2 // LANE_BYTES * LANE_BYTES
        left = np.zeros((1, 2), np.uint64)
        other = _submit(_sum_rows, rows[:, :half], lane_offset, left)
        try:
            _sum_rows(rows[:, half:], lane_offset + half // LANE_BYTES, out)
        finally:
            other.result()
        out += left
    return out


def digest_bytes(data: bytes | bytearray | memoryview, lane_offset: int = 0) -> tuple[int, int]:
    """Digest of one run of bytes, as two Python integers below 2**64."""
    flat = np.frombuffer(data, np.uint8)
    low, high = digest_rows(flat[None, :], lane_offset)[0]
    return int(low), int(high)


def digest_array(array: NDArray[Any], lane_offset: int = 0) -> U64:
    """Digest of every row of an array of any dtype; shape [n, ...] in, [n, 2] uint64 out."""
    n = array.shape[0]
    flat = np.ascontiguousarray(array).reshape(n, -1) if array.size else np.zeros((n, 0), np.uint8)
    return digest_rows(flat.view(np.uint8).reshape(n, -1) if flat.size else flat, lane_offset)


def digest_pieces(rows: NDArray[Any], pieces: Sequence[tuple[int, int]]) -> U64:
    """Digest of rows of which each rank has pieces: those of the ranks add up to that of the whole row.

    Args:
        rows: [n, ...] of any dtype, the pieces one behind the other.
        pieces: (first lane in the whole row, bytes) of each; none for a row that is whole.

    Returns:
        Digests, shape [n, 2], uint64.
    """
    if not pieces:
        return digest_array(rows)
    n = rows.shape[0]
    flat = np.ascontiguousarray(rows).reshape(n, -1).view(np.uint8) if rows.size else np.zeros((n, 0), np.uint8)
    if flat.shape[1] != sum(count for _, count in pieces) and n:
        raise ValueError(f"pieces of {sum(count for _, count in pieces)} bytes for rows of {flat.shape[1]}")
    out, at = np.zeros((n, 2), np.uint64), 0
    for lane, count in pieces:
        out += digest_rows(flat[:, at : at + count], lane)
        at += count
    return out


def wrong_rows(bits: NDArray[Any], digest: U64, pieces: Sequence[tuple[int, int]] = ()) -> NDArray[np.bool_]:
    """Which rows of raw bits [n, W] do not agree with their digests [n, 2]; bool [n].

    ``pieces`` are those of :func:`digest_pieces`, for rows of which a rank has a part.
    """
    if pieces and bits.itemsize * int(np.prod(bits.shape[1:], dtype=np.int64)) != sum(count for _, count in pieces):
        return np.ones(bits.shape[0], np.bool_)
    return np.asarray((digest_pieces(bits, pieces) != digest).any(axis=1), np.bool_)


def prefix_digests(tokens: NDArray[Any]) -> U64:
    """Digest of ``tokens[0..p]`` (as int32 bytes) for every p; shape [n] in, [n, 2] uint64 out."""
    lanes = np.asarray(tokens, dtype="<i4").astype(np.int64).view(np.uint64)
    table = weights(0, lanes.shape[0])
    return np.ascontiguousarray(np.cumsum(lanes * table, axis=1, dtype=np.uint64).T)


def prefix_digests_of(sequences: Sequence[NDArray[Any]]) -> list[U64]:
    """:func:`prefix_digests` of many sequences at the price of a few; shapes [n_i] in, [n_i, 2] uint64 out."""
    ends = np.cumsum([len(tokens) for tokens in sequences])
    if not len(ends) or not ends[-1]:
        return [np.zeros((0, 2), np.uint64) for _ in sequences]
    starts = ends - [len(tokens) for tokens in sequences]
    every = np.concatenate(sequences)
    position = np.arange(len(every)) - np.repeat(starts, ends - starts)
    terms = _token_terms(every, position)
    summed = np.zeros((len(every) + 1, 2), np.uint64)
    np.cumsum(terms, axis=0, out=summed[1:])
    # What lies before a sequence is taken off again: the sums wrap, so nothing is lost.
    return [summed[a + 1 : b + 1] - summed[a] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def parent_prefix(prefix: U64, token: NDArray[Any], position: NDArray[Any]) -> U64:
    """Prefix digests one token shorter: the digest of tokens[0..p-1] from that of tokens[0..p].

    Args:
        prefix: shape [n, 2], uint64.
        token: the token at ``position``, shape [n], any integer dtype that fits int32.
        position: shape [n], not negative.

    Returns:
        Shape [n, 2], uint64; all zero where ``position`` is 0.
    """
    return np.asarray(prefix, np.uint64) - _token_terms(token, position)


def extend_prefix(prefix: U64, token: NDArray[Any], position: NDArray[Any]) -> U64:
    """Prefix digests one token longer: the digest of tokens[0..p] from that of tokens[0..p-1]; shapes as above."""
    return np.asarray(prefix, np.uint64) + _token_terms(token, position)


def _token_terms(token: NDArray[Any], position: NDArray[Any]) -> U64:
    """What each token adds to its prefix digest, shape [n, 2]."""
    lanes = np.asarray(token, dtype="<i4").astype(np.int64).view(np.uint64)
    where = np.asarray(position, dtype=np.int64)
    if where.size == 0:
        return np.zeros((0, 2), np.uint64)
    if int(where.min()) < 0:
        raise ValueError("a row's position cannot be negative")
    last = int(where.max())
    table = weights(0, last + 1)[:, where] if last < _CACHED_LANES else weights_at(where)
    return np.asarray((lanes * table).T, np.uint64)
