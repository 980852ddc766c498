"""State that was right once: caches derived from a parameter, KV blocks, and blocks that were freed too early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from zkl_debug.diff.state_model import (
    GEN,
    REFIT,
    TRAIN,
    Bits,
    EventRef,
    MomentLike,
    StateFinding,
    ValueSource,
    bits_of,
    is_read,
    ref_of,
    versions,
)
from zkl_debug.diff.state_values import Match, Source, explain_values
from zkl_debug.schema import Json, StateRecord


def find_caches(
    history: Sequence[MomentLike], values: ValueSource | None, after: MomentLike | None = None
) -> list[StateFinding]:
    """Caches that are a function of a parameter under an old version, or older than every parameter beside them.

    One that is another ``after`` the state was used had been marked for renewal: it was old, but nothing read it so.
    """
    now = history[-1]
    known = versions(history)
    found = []
    for name, record in now.state.items():
        is_derived = record.kind == "cache" or (record.kind == "buffer" and not record.detail.get("persistent"))
        if not name.startswith(GEN) or not is_derived or not is_read(record):
            continue
        if record.detail.get("shares_storage_with") or _same_everywhere(now, name, record):
            continue
        renewed = after.state.get(name) if after is not None else None
        if renewed is not None and is_read(renewed) and bits_of(renewed) != bits_of(record):
            continue
        path = name.removeprefix(GEN)
        match, strength = _derived(path, record, now, known, values)
        if match is None:
            match = _by_age(history, name, record)
            strength = "age"
        if match is None or (match.source is not None and match.source.version == now.version):
            continue
        changed = _last_change(history, name)
        event = _outdated(history, changed, match.source, known) or _next_refit(history, changed)
        detail: dict[str, Json] = {
            "last_changed": ref_of(history[changed]).to_json(),
            "owner": record.detail.get("owner"),
        }
        found.append(StateFinding(path, "cache", match, now.version, "kept", event, strength, detail))
    return found


def _same_everywhere(now: MomentLike, name: str, record: StateRecord) -> bool:
    """The trainer holds the same bits under the same path: a constant, or not derived from weights that changed."""
    other = now.state.get(TRAIN + name.removeprefix(GEN))
    return other is not None and bits_of(other) == bits_of(record) and other.data_ptr != record.data_ptr


def _derived(
    path: str,
    record: StateRecord,
    now: MomentLike,
    known: Mapping[str, Mapping[int, Bits]],
    values: ValueSource | None,
) -> tuple[Match | None, str]:
    size = _count(record)
    owner = str(record.detail.get("owner") or "")
    sources = [
        p
        for p, seen in known.items()
        if now.state.get(TRAIN + p) is not None
        and now.state[TRAIN + p].kind == "parameter"
        and any(_size(bits[1]) == size for bits in seen.values())
    ]
    sources.sort(key=lambda p: p.rpartition(".")[0] != owner)  # parameters of the same module first
    for p in sources:
        for version, bits in sorted(known[p].items(), reverse=True):
            if bits == bits_of(record):
                return Match("equal", Source(p, version)), "digest"
    got = values.engine(path) if values is not None else None
    if got is None or values is None:
        return None, "digest"
    beside = [p for p in sources if p.rpartition(".")[0] == owner] or sources
    candidates = [
        (Source(p, v), w)
        for p in beside
        for v in sorted(known[p], reverse=True)
        if (w := values.trainer(p, v)) is not None
    ]
    match = explain_values(got, candidates)
    return (match if match.source is not None else None), "bytes"


def _by_age(history: Sequence[MomentLike], name: str, record: StateRecord) -> Match | None:
    """Made while the loop ran (so not a constant of the model), and not touched since the weights beside it changed."""
    owner = str(record.detail.get("owner") or "")
    beside = [n for n in history[-1].state if n.startswith(GEN) and _is_parameter_of(history[-1].state[n], n, owner)]
    if not beside or name in history[0].state:
        return None
    changed = _last_change(history, name)
    newer = max((_last_change(history, n) for n in beside), default=-1)
    if changed >= newer:
        return None
    return Match("older than its parameter", None, {"parameters": [n.removeprefix(GEN) for n in beside]})


def _is_parameter_of(record: StateRecord, name: str, owner: str) -> bool:
    return record.kind == "parameter" and name.removeprefix(GEN).rpartition(".")[0] == owner


def _last_change(history: Sequence[MomentLike], name: str) -> int:
    """Index of the last moment at which the tensor appeared or changed."""
    last, previous = 0, None
    for index, moment in enumerate(history):
        record = moment.state.get(name)
        if record is not None and (previous is None or bits_of(record) != bits_of(previous)):
            last = index
        previous = record
    return last


def _next_refit(history: Sequence[MomentLike], after: int) -> EventRef | None:
    """The first refit behind a moment that brought other weights: it should have changed what depends on them."""
    for moment in history[after + 1 :]:
        if moment.name == REFIT and moment.phase == "end" and moment.version > history[after].version:
            return ref_of(moment)
    return None


def _outdated(
    history: Sequence[MomentLike], after: int, source: Source | None, known: Mapping[str, Mapping[int, Bits]]
) -> EventRef | None:
    """The first refit behind a moment that brought other bits of the very parameter a cache was made from."""
    seen = known.get(source.name, {}) if source else {}
    for moment in history[after + 1 :]:
        if moment.name != REFIT or moment.phase != "end" or moment.version not in seen:
            continue
        if source is not None and seen[moment.version] != seen.get(source.version):
            return ref_of(moment)
    return None


def _count(record: StateRecord) -> int:
    return _size(tuple(record.shape))


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


# ---- KV blocks -----------------------------------------------------------------------------------------------------


def find_blocks(history: Sequence[MomentLike]) -> list[StateFinding]:
    """KV blocks that the engine can still find by hash and that were written under older weights."""
    now = history[-1]
    found = []
    for name, record in now.state.items():
        if not name.startswith(GEN) or record.kind not in ("kv", "ssm") or not record.detail.get("found_by_hash"):
            continue
        written = _last_change(history, name)
        if history[written].version >= now.version:
            continue
        event = _next_refit(history, written)
        match = Match("equal", Source(name.removeprefix(GEN), history[written].version))
        detail: dict[str, Json] = {
            "block": record.detail.get("block"),
            "hash": record.detail.get("hash"),
            "written": ref_of(history[written]).to_json(),
            "users_then": history[written].state[name].detail.get("users"),
        }
        path = name.removeprefix(GEN)
        found.append(StateFinding(path, record.kind, match, now.version, "kept", event, "digest", detail))
    return found


def freed_blocks(moments: Sequence[MomentLike], step: int) -> list[StateFinding]:
    """KV blocks that were given back to the pool while a request in flight still pointed to them, within a step."""
    found: dict[str, StateFinding] = {}
    history = [m for m in moments if m.state and m.step == step]
    for earlier, moment in pairwise(history):
        for name, record in moment.state.items():
            if record.kind != "kv" or not record.detail.get("free") or not record.detail.get("owners"):
                continue
            before = earlier.state.get(name)
            if name in found or (before is not None and before.detail.get("free")):
                continue
            path = name.removeprefix(GEN)
            detail: dict[str, Json] = {"block": record.detail.get("block"), "owners": record.detail.get("owners")}
            match = Match("freed while in use")
            found[name] = StateFinding(path, "kv", match, moment.version, "changed", ref_of(moment), "digest", detail)
    return list(found.values())
