"""What a state diff speaks of: moments of an event log, findings, and the small questions asked of records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from zkl_debug.diff.state_values import Match, Values
from zkl_debug.schema import EventRecord, Json, StateRecord

TRAIN, GEN = "train:", "gen:"
#: Names of the events during which weights are brought to the engine.
REFIT = "refit"
BUILD = "build"

Bits = tuple[str, tuple[int, ...], tuple[int, int]]


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
            weights had changed, ``reused`` it without a reset, or ``unknown``.
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
            "reused": "given out again in",
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


def versions(history: Sequence[MomentLike]) -> dict[str, dict[int, Bits]]:
    """Digest of every tensor of the trainer under every version that was seen, by path and version."""
    found: dict[str, dict[int, Bits]] = {}
    for moment in history:
        if moment.name == "optimizer_step" and moment.phase == "begin":
            continue
        for name, record in moment.state.items():
            if name.startswith(TRAIN) and record.kind != "kv":
                found.setdefault(name[len(TRAIN) :], {})[moment.version] = bits_of(record)
    return found


def bits_of(record: StateRecord) -> Bits:
    return record.torch_dtype, tuple(record.shape), (int(record.digest[0]), int(record.digest[1]))


def is_read(record: StateRecord) -> bool:
    return "no_digest" not in record.detail


def ref_of(moment: MomentLike) -> EventRef:
    return EventRef(moment.name, moment.step, moment.seq, moment.site)


def confirmed(finding: StateFinding, **facts: Json) -> StateFinding:
    """The same finding, proved by bytes."""
    return replace(finding, strength="bytes", detail={**finding.detail, **facts})
