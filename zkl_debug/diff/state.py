"""Which state of the engine is not what the trainer's weights ask for, and which event is to answer for it.

Pure functions over the moments of an event log (:mod:`zkl_debug.capture.events` makes them, a capture keeps them):
digests decide, and values, where the caller still has them, explain. Three kinds of state:

- parameters and persistent buffers, compared with the trainer's by name, now and under every version that was seen;
- caches derived from a parameter, compared with functions of it under every version;
- KV blocks that can still be found: old when nothing was written into them since before the last weight update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from zkl_debug.diff.state_values import Match, Source, Values, explain_values
from zkl_debug.schema import EventRecord, Json, StateRecord

TRAIN, GEN = "train:", "gen:"
#: Names of the events during which weights are brought to the engine.
REFIT = "refit"
BUILD = "build"

_Bits = tuple[str, tuple[int, ...], tuple[int, int]]


class MomentLike(Protocol):
    """State at one side of an event; see :class:`zkl_debug.capture.events.Moment`."""

    @property
    def seq(self) -> int:
        """Sequence number."""

    @property
    def name(self) -> str:
        """Name of the event."""

    @property
    def phase(self) -> str:
        """``begin``, ``end`` or ``mark``."""

    @property
    def step(self) -> int:
        """Step of the loop."""

    @property
    def version(self) -> int:
        """Weight version of the trainer."""

    @property
    def site(self) -> str:
        """Where it was called."""

    @property
    def state(self) -> Mapping[str, StateRecord]:
        """Records by ``part:path``; empty where none was taken."""


class ValueSource(Protocol):
    """Values the caller still has."""

    def engine(self, path: str) -> Values | None:
        """The engine's tensor of that path at the moment in question."""

    def trainer(self, path: str, version: int) -> Values | None:
        """The trainer's parameter of that path under a version."""


@dataclass(frozen=True)
class EventRef:
    """An event, as a finding names it."""

    name: str
    step: int
    seq: int
    site: str

    def to_json(self) -> Json:
        """All fields."""
        return {"name": self.name, "step": self.step, "seq": self.seq, "site": self.site}


@dataclass(frozen=True)
class StateFinding:
    """One tensor whose contents are not what they should be.

    Attributes:
        path: path within the engine, without the part's name.
        kind: ``parameter``, ``buffer``, ``cache`` or ``kv``.
        match: what it is.
        current: the weight version it should belong to.
        role: what ``event`` did: ``changed`` it, ``wrote`` a wrong value, ``left`` it as it was, ``kept`` it though the
            weights had changed, or ``unknown``.
        event: that event.
        strength: ``digest``, ``bytes``, or ``age`` where only the order of changes speaks.
        detail: more facts.
    """

    path: str
    kind: str
    match: Match
    current: int
    role: str
    event: EventRef | None
    strength: str = "digest"
    detail: Mapping[str, Json] = field(default_factory=dict)

    @property
    def lag(self) -> int | None:
        """Versions behind, or None when it matches none."""
        return None if self.match.source is None else self.current - self.match.source.version

    def text(self) -> str:
        """One line."""
        doing = {
            "changed": "changed by",
            "wrote": "written by",
            "left": "left as it was by",
            "kept": "kept over",
            "unknown": "seen at",
        }[self.role]
        event = f"{doing} {self.event.name} of step {self.event.step}" if self.event else "no event explains it"
        return f"{self.path}: {self.match.text(self.current, self.path)}; {event}"

    def to_json(self) -> Json:
        """All fields."""
        return {
            "path": self.path,
            "kind": self.kind,
            "match": self.match.to_json(self.current),
            "text": self.text(),
            "role": self.role,
            "event": self.event.to_json() if self.event else None,
            "strength": self.strength,
            "detail": dict(self.detail),
        }


@dataclass(frozen=True)
class StoredMoment:
    """A moment read back from a capture."""

    seq: int
    name: str
    phase: str
    step: int
    version: int
    site: str
    state: Mapping[str, StateRecord]


def stored_moments(events: Sequence[EventRecord], states: Mapping[int, Sequence[StateRecord]]) -> list[StoredMoment]:
    """The event log of a capture folder (``capture.events`` and ``capture.states``), with the state of each moment."""
    return [
        StoredMoment(
            index,
            event.name,
            str(event.detail.get("phase", "mark")),
            event.step,
            event.weight_version,
            str(event.detail.get("site", "")),
            {record.name: record for record in states.get(event.event_seq, ())},
        )
        for index, event in enumerate(events)
    ]


def state_findings(moments: Sequence[MomentLike], at: int, values: ValueSource | None = None) -> list[StateFinding]:
    """Everything in the engine that is not as the trainer's weights ask for at moment ``at``.

    Args:
        moments: the log, in order; those without state are passed over.
        at: index of the moment in question (the beginning of the generation that diverged).
        values: tensors the caller still has, to explain what digests cannot.
    """
    history = [m for m in moments[: at + 1] if m.state]
    if not history or history[-1] is not moments[at]:
        return []
    return [
        *_parameters(history, values),
        *_caches(history, values),
        *_blocks(history),
    ]


# ---- parameters ----------------------------------------------------------------------------------------------------


def versions(history: Sequence[MomentLike]) -> dict[str, dict[int, _Bits]]:
    """Digest of every tensor of the trainer under every version that was seen, by path and version."""
    found: dict[str, dict[int, _Bits]] = {}
    for moment in history:
        if moment.name == "optimizer_step" and moment.phase == "begin":
            continue
        for name, record in moment.state.items():
            if name.startswith(TRAIN) and record.kind != "kv":
                found.setdefault(name[len(TRAIN) :], {})[moment.version] = _bits(record)
    return found


def _bits(record: StateRecord) -> _Bits:
    return record.torch_dtype, tuple(record.shape), (int(record.digest[0]), int(record.digest[1]))


def _parameters(history: Sequence[MomentLike], values: ValueSource | None) -> list[StateFinding]:
    now = history[-1]
    known = versions(history)
    by_bits = {
        bits: Source(path, version)
        for path, seen in known.items()
        for version, bits in sorted(seen.items())
        if now.state.get(TRAIN + path) is not None and now.state[TRAIN + path].kind != "cache"
    }
    found = []
    for name, record in now.state.items():
        path = name.removeprefix(GEN)
        if not name.startswith(GEN) or record.kind not in ("parameter", "buffer") or not _is_read(record):
            continue
        wanted = known.get(path, {}).get(now.version)
        if wanted is None or wanted == _bits(record):
            continue
        source = _version_of(record, known.get(path, {}), path) or by_bits.get(_bits(record))
        match, strength = Match("equal", source) if source else Match("none"), "digest"
        if source is None and values is not None:
            match, strength = _explain(path, now.version, known, values), "bytes"
        role, event = _blame(history, name, path, known)
        found.append(StateFinding(path, record.kind, match, now.version, role, event, strength))
    return found


def _is_read(record: StateRecord) -> bool:
    return "no_digest" not in record.detail


def _version_of(record: StateRecord, seen: Mapping[int, _Bits], path: str) -> Source | None:
    equal = [version for version, bits in seen.items() if bits == _bits(record)]
    return Source(path, max(equal)) if equal else None


def _explain(path: str, current: int, known: Mapping[str, Mapping[int, _Bits]], values: ValueSource) -> Match:
    found = values.engine(path)
    if found is None:
        return Match("none")
    order = sorted(known.get(path, {}), key=lambda version: abs(current - version))
    candidates = [(Source(path, v), values.trainer(path, v)) for v in order]
    return explain_values(found, [(source, got) for source, got in candidates if got is not None])


def _blame(
    history: Sequence[MomentLike], name: str, path: str, known: Mapping[str, Mapping[int, _Bits]]
) -> tuple[str, EventRef | None]:
    """The event that made a tensor of the engine wrong, or should have made it right and did not."""
    ends = [
        i for i, m in enumerate(history) if m.name == REFIT and m.phase == "end" and m.version == history[-1].version
    ]
    if not ends:
        last = [m for m in history if m.name in (REFIT, BUILD)]
        return "unknown", _ref(last[-1]) if last else None
    refit = ends[-1]
    after, wanted = history[refit].state.get(name), known.get(path, {}).get(history[-1].version)
    if after is not None and _bits(after) == wanted:
        changed = _first_change(history, name, refit)
        return ("changed", _ref(changed)) if changed else ("unknown", None)
    before = next((history[i].state.get(name) for i in range(refit - 1, -1, -1) if history[i].state.get(name)), None)
    same = before is not None and after is not None and _bits(before) == _bits(after)
    return ("left" if same else "wrote"), _ref(history[refit])


def _first_change(history: Sequence[MomentLike], name: str, start: int) -> MomentLike | None:
    """The first moment after ``start`` at which the tensor is another than just before."""
    previous = history[start].state.get(name)
    for moment in history[start + 1 :]:
        record = moment.state.get(name)
        if record is not None and previous is not None and _bits(record) != _bits(previous):
            return moment
        previous = record or previous
    return None


def _ref(moment: MomentLike) -> EventRef:
    return EventRef(moment.name, moment.step, moment.seq, moment.site)


# ---- derived caches ------------------------------------------------------------------------------------------------


def _caches(history: Sequence[MomentLike], values: ValueSource | None) -> list[StateFinding]:
    """Caches that are a function of a parameter under an old version, or older than every parameter beside them."""
    now = history[-1]
    known = versions(history)
    found = []
    for name, record in now.state.items():
        is_derived = record.kind == "cache" or (record.kind == "buffer" and not record.detail.get("persistent"))
        if not name.startswith(GEN) or not is_derived or not _is_read(record):
            continue
        if record.detail.get("shares_storage_with") or _same_everywhere(now, name, record):
            continue
        path = name.removeprefix(GEN)
        match, strength = _derived(path, record, now, known, values)
        if match is None:
            match = _by_age(history, name, record)
            strength = "age"
        if match is None or (match.source is not None and match.source.version == now.version):
            continue
        changed = _last_change(history, name)
        event = _next_refit(history, changed)
        detail: dict[str, Json] = {
            "last_changed": _ref(history[changed]).to_json(),
            "owner": record.detail.get("owner"),
        }
        found.append(StateFinding(path, "cache", match, now.version, "kept", event, strength, detail))
    return found


def _same_everywhere(now: MomentLike, name: str, record: StateRecord) -> bool:
    """The trainer holds the same bits under the same path: a constant, or not derived from weights that changed."""
    other = now.state.get(TRAIN + name.removeprefix(GEN))
    return other is not None and _bits(other) == _bits(record) and other.data_ptr != record.data_ptr


def _derived(
    path: str,
    record: StateRecord,
    now: MomentLike,
    known: Mapping[str, Mapping[int, _Bits]],
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
            if bits == _bits(record):
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
        if record is not None and (previous is None or _bits(record) != _bits(previous)):
            last = index
        previous = record
    return last


def _next_refit(history: Sequence[MomentLike], after: int) -> EventRef | None:
    """The first refit behind a moment that brought other weights: it should have changed what depends on them."""
    for moment in history[after + 1 :]:
        if moment.name == REFIT and moment.phase == "end" and moment.version > history[after].version:
            return _ref(moment)
    return None


def _count(record: StateRecord) -> int:
    return _size(tuple(record.shape))


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


# ---- KV blocks -----------------------------------------------------------------------------------------------------


def _blocks(history: Sequence[MomentLike]) -> list[StateFinding]:
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
            "written": _ref(history[written]).to_json(),
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
            found[name] = StateFinding(path, "kv", match, moment.version, "changed", _ref(moment), "digest", detail)
    return list(found.values())


def confirmed(finding: StateFinding, **facts: Json) -> StateFinding:
    """The same finding, proved by bytes."""
    return replace(finding, strength="bytes", detail={**finding.detail, **facts})
