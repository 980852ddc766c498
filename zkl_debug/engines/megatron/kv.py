"""What a dynamic inference context keeps between calls: KV blocks and recurrent slots with owner and digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zkl_debug.capture.layout import dtype_name
from zkl_debug.digest_torch import digest_tensor
from zkl_debug.engines.megatron.rollout import BlockUse, block_table
from zkl_debug.schema import Json, StateRecord


def kv_source(context: Any, uses: Callable[[], Iterable[BlockUse]]) -> Callable[[], list[StateRecord]]:
    """A state source over ``context``; ``uses`` tells which requests were given which blocks in the last generation."""
    return lambda: [*kv_records(context, uses()), *slot_records(context)]


def kv_records(context: Any, uses: Iterable[BlockUse] = ()) -> list[StateRecord]:
    """One record per KV block that is in use or can be found by its hash.

    The digest is over K and V of all layers of the block. ``detail``: ``hash`` (-1: none), ``refs``, ``free``
    (in the pool of free blocks), ``owners`` (requests in flight), ``users`` (requests of the last generation that were
    given it).
    Nothing is returned while the cache is not allocated.
    """
    allocator = context.kv_block_allocator
    buffer = getattr(context, "memory_buffer", None)
    if buffer is None or not isinstance(getattr(context, "request_to_kv_block_ids", None), torch.Tensor):
        return []
    owners: dict[int, list[int]] = {}
    for request, blocks in block_table(context).items():
        for block in blocks:
            owners.setdefault(block, []).append(request)
    hashes, refs = _tables(allocator)
    listed = sorted({*owners, *(b for b, h in hashes.items() if h != -1), *(b for b, r in refs.items() if r > 0)})
    if not listed:
        return []
    allocated = buffer.untyped_storage().nbytes() >= buffer.numel() * buffer.element_size()
    free = set(allocator.block_bag[: int(allocator.total_avail)].tolist())
    users: dict[int, list[int]] = {}
    for use in uses:
        for block in use.blocks:
            users.setdefault(block, []).append(use.request)
    found = set(allocator.kv_hash_to_block_id.values()) if hashes else set()
    axis = 2 if buffer.dim() == 6 else 1  # [k/v, layer, block, ...], or [layer, block, ...] for MLA latents
    shape = tuple(size for i, size in enumerate(buffer.shape) if i != axis)
    digests = _digests(buffer, axis, listed) if allocated else None
    records = []
    for row, block in enumerate(listed):
        detail: dict[str, Json] = {
            "block": block,
            "hash": hashes.get(block, -1),
            "found_by_hash": block in found,
            "refs": refs.get(block, 0),
            "free": block in free,
            "owners": owners.get(block, []),
            "users": sorted(set(users.get(block, []))),
        }
        if digests is None:
            detail["no_digest"] = "its storage is not allocated"
        else:
            detail["nbytes"] = buffer.numel() * buffer.element_size() // allocator.total_count
        digest = (int(digests[row, 0]), int(digests[row, 1])) if digests is not None else (0, 0)
        records.append(StateRecord(f"kv/block.{block:06d}", "kv", dtype_name(buffer), shape, digest, 0, detail))
    return records


def slot_records(context: Any) -> list[StateRecord]:
    """Two records per recurrent slot: the scan's states and the convolution's, of all layers.

    ``detail``: ``slot``, and ``owner``, the request in flight that has it (-1: nobody). Nothing is returned for a model
    without recurrent layers, or while the slots are not allocated.
    """
    if not getattr(context, "is_hybrid_model", False):
        return []
    count = int(context.total_request_count)
    given = context.mamba_metadata.request_to_mamba_state_idx[:count].tolist() if count else []
    owner = dict(zip(given, context.request_ids[:count].tolist() if count else [], strict=True))
    records = []
    for name in ("ssm", "conv"):
        buffer = getattr(context, f"mamba_{name}_states", None)
        if buffer is None or buffer.untyped_storage().nbytes() < buffer.numel() * buffer.element_size():
            continue
        slots = list(range(buffer.shape[1]))
        digests = _digests(buffer, 1, slots)
        shape = (buffer.shape[0], *buffer.shape[2:])
        nbytes = buffer.numel() * buffer.element_size() // len(slots)
        for slot, digest in zip(slots, digests, strict=True):
            detail: dict[str, Json] = {"slot": slot, "owner": int(owner.get(slot, -1)), "nbytes": nbytes}
            bits = (int(digest[0]), int(digest[1]))
            records.append(StateRecord(f"{name}/slot.{slot:04d}", "ssm", dtype_name(buffer), shape, bits, 0, detail))
    return records


def _tables(allocator: Any) -> tuple[dict[int, int], dict[int, int]]:
    """Hash and reference count by block; empty without prefix caching."""
    if not allocator.enable_prefix_caching:
        return {}, {}
    hashes = {b: int(h) for b, h in enumerate(allocator.block_hashes.tolist()) if h != -1}
    refs = {b: int(r) for b, r in enumerate(allocator.block_ref_counts.tolist()) if r > 0}
    return hashes, refs


def _digests(buffer: torch.Tensor, axis: int, blocks: list[int]) -> Any:
    """uint64 [n, 2]: one digest for each of the given blocks, which lie along ``axis``."""
    rows = buffer.index_select(axis, torch.tensor(blocks)).movedim(axis, 0).contiguous()
    return digest_tensor(rows, len(blocks))
