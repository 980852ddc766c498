"""State snapshots of all ranks as one of the whole model: digests of a tensor's parts added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zkl_debug.diff.model import Skip
from zkl_debug.schema import StateRecord

_WORD = 1 << 64


def join_states(
    states: Mapping[int, Mapping[int, Sequence[StateRecord]]],
) -> tuple[dict[int, list[StateRecord]], list[Skip], list[tuple[str, int, int]]]:
    """Snapshots over all ranks, by event.

    Args:
        states: of each rank, by event sequence number.

    Returns:
        The joined snapshots; tensors that could not be joined; and (name, rank, other rank) of whole tensors that two
        ranks do not have alike.
    """
    joined: dict[int, list[StateRecord]] = {}
    skips: dict[str, Skip] = {}
    unlike: dict[str, tuple[str, int, int]] = {}
    for seq in sorted({seq for own in states.values() for seq in own}):
        found: dict[str, list[tuple[int, StateRecord]]] = {}
        for rank, own in states.items():
            for record in own.get(seq, ()):
                found.setdefault(record.name, []).append((rank, record))
        joined[seq] = []
        for name, records in found.items():
            one, why = _join(records)
            if one is not None:
                joined[seq].append(one)
            if why:
                skips[name] = Skip(f"state {name}", why)
            other = next((r for r in records[1:] if r[1].kind == "parameter" and not _alike(records[0][1], r[1])), None)
            if other is not None:
                unlike[name] = (name, records[0][0], other[0])
    return joined, list(skips.values()), list(unlike.values())


def _alike(a: StateRecord, b: StateRecord) -> bool:
    """Whether two ranks' records of one tensor can both be right: shards differ, whole tensors do not."""
    if a.detail.get("shard") or b.detail.get("shard"):
        return a.detail.get("shard") is not None and b.detail.get("shard") is not None
    return (a.torch_dtype, a.shape, a.digest) == (b.torch_dtype, b.shape, b.digest)


def _join(records: list[tuple[int, StateRecord]]) -> tuple[StateRecord | None, str]:
    """One record of several ranks', or why there is none."""
    first = records[0][1]
    shard = first.detail.get("shard")
    if not shard:
        return first, ""
    parts: dict[int, StateRecord] = {}
    for _, record in records:
        own = record.detail.get("shard")
        if not own or own["count"] != shard["count"] or own["shape"] != shard["shape"]:
            return None, "ranks have parts of different tensors under this name"
        if not own.get("adds"):
            return None, "its parts do not begin at whole 32-bit lanes: digests of ranks cannot be added"
        parts.setdefault(int(own["index"]), record)
    missing = sorted(set(range(int(shard["count"]))) - set(parts))
    if missing:
        return None, f"part {missing[0]} of {shard['count']} was not captured"
    low = sum(int(record.digest[0]) for record in parts.values()) % _WORD
    high = sum(int(record.digest[1]) for record in parts.values()) % _WORD
    return replace(first, shape=tuple(int(n) for n in shard["shape"]), digest=(low, high), detail={}), ""
