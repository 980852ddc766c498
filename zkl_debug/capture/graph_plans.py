"""What recorded graphs write at each replay, and how it is read out and made into sites."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.device import Pending, to_device
from zkl_debug.capture.frame import Deferred, OpenFrame
from zkl_debug.capture.layout import raw_bits
from zkl_debug.schema import U64, SiteBlock, SiteMeta

if TYPE_CHECKING:
    from zkl_debug.capture.late import LateReadings, Light

#: A copy of what is read out, and a row of it.
Place = tuple[int, int]


@dataclass(frozen=True)
class GraphSite:
    """A site of a graph: where its digests are, rows ``start`` .. ``start + rows`` of ``arena``, and its payload."""

    name: str
    meta: SiteMeta
    arena: torch.Tensor
    start: int
    rows: int
    payload: torch.Tensor | None


@dataclass(eq=False)
class Plan:
    """What a graph writes at each replay. Kept alive by the graph itself, for it writes as long as it is replayed.

    Attributes:
        owner: the watch that recorded it.
        sites: in execution order.
        slots: token slots of the call the graph was recorded for.
        moment: how far the recording was behind the last digest.
        fresh: by memory, the sites read since anything but digests was recorded: what they read is as it was.
        late: second readings, None where there are none.
        light: what is launched in its place between rechecks, once that is known to do.
    """

    owner: object
    sites: list[GraphSite] = field(default_factory=list)
    slots: int = 0
    moment: tuple[int, ...] | None = None
    fresh: dict[object, GraphSite] = field(default_factory=dict)
    late: LateReadings | None = None
    light: Light | None = None


@dataclass(frozen=True)
class Copied:
    """Digests of graphs that are copied at once.

    Attributes:
        memory: where graphs write them, int64 [n, 2].
        index: rows of it, int64 [m] on its device; None for all.
    """

    memory: torch.Tensor
    index: torch.Tensor | None


@dataclass(frozen=True)
class Reading:
    """How the sites of graphs replayed together are read out.

    Attributes:
        sites: in execution order.
        copies: what is copied at once.
        places: of each site, the index of its copy and its offset within.
        names: names of the sites.
        rows: numbers of rows that occur.
        payload: whether any site has one.
        doubles: readings that were made twice: whose, the row of the first, and where the two are, as in ``places``.
    """

    sites: tuple[GraphSite, ...]
    copies: tuple[Copied, ...]
    places: tuple[Place, ...]
    names: frozenset[str]
    rows: set[int]
    payload: bool
    doubles: tuple[tuple[LateReadings, int, Place, Place], ...]
    plans: tuple[Plan, ...]  # alive as long as their ids are keys

    @classmethod
    def of(cls, plans: list[Plan]) -> Reading:
        """The reading of graphs in the order of their replay."""
        sites = tuple(site for plan in plans for site in plan.sites)
        wanted: dict[int, tuple[torch.Tensor, dict[int, int]]] = {}  # by memory: rows of each reading by its first
        for plan in plans:
            for site in plan.sites:
                of = wanted.setdefault(id(site.arena), (site.arena, {}))[1]
                of[site.start] = site.rows
                if plan.late is not None and site.start in plan.late.rows:
                    of[plan.late.rows[site.start]] = site.rows
        copies, at = [], {}
        for number, (memory, of) in enumerate(wanted.values()):
            starts = sorted(of)
            offsets = np.cumsum([0, *(of[start] for start in starts)])
            at.update({(id(memory), start): (number, int(off)) for start, off in zip(starts, offsets, strict=False)})
            if starts[-1] + of[starts[-1]] - starts[0] == offsets[-1]:
                copies.append(Copied(memory[starts[0] : starts[0] + int(offsets[-1])], None))
            else:
                rows = np.concatenate([np.arange(start, start + of[start]) for start in starts])
                copies.append(Copied(memory, to_device(rows, memory.device)))
        places = tuple(at[id(site.arena), site.start] for site in sites)
        doubles = []
        for plan in plans:
            late = plan.late
            for start, memory in {s.start: s.arena for s in plan.sites}.items():
                if late is not None and start in late.rows:
                    doubles.append((late, start, at[id(memory), start], at[id(memory), late.rows[start]]))
        names = frozenset(site.name for site in sites)
        payload = any(site.payload is not None for site in sites)
        row_counts = {s.rows for s in sites}
        return cls(sites, tuple(copies), places, names, row_counts, payload, tuple(doubles), tuple(plans))


@dataclass(frozen=True)
class Replay(Deferred):
    """One replay's sites, made into blocks when the frame is filed; padding rows are dropped then."""

    reading: Reading
    fetched: list[Pending]
    slot: NDArray[np.int64]
    n_slots: int
    metas: list[SiteMeta] | None
    payloads: list[torch.Tensor | None]

    def blocks(self, frame: OpenFrame, parts: list[U64]) -> list[SiteBlock]:  # noqa: ARG002
        """The sites, from the digests of each chunk."""
        count = len(self.slot)
        rows = np.arange(count, dtype=np.uint32)
        pick = slice(0, count) if np.array_equal(self.slot, rows) else self.slot
        found = []
        for i, (site, place) in enumerate(zip(self.reading.sites, self.reading.places, strict=True)):
            if site.rows != self.n_slots:
                continue
            digest = self._part(parts, place)[pick]
            payload = self.payloads[i] if self.payloads else None
            bits = None if payload is None else raw_bits(payload)[pick]
            found.append(SiteBlock(self.metas[i] if self.metas else site.meta, rows, digest, bits))
        return found

    def judge(self, parts: list[U64]) -> None:
        """Compare the readings that were made twice."""
        doubles = self.reading.doubles
        if not doubles or self.reading.rows != {self.n_slots}:
            return
        for late, start, first, second in doubles:
            late.compare(start, *(self._part(parts, place)[self.slot] for place in (first, second)))
        for late in {id(late): late for late, *_ in doubles}.values():
            late.count(len(self.slot))

    def _part(self, parts: list[U64], place: Place) -> U64:
        """Digests of all token slots of a reading."""
        fetched = self.fetched[place[0]]
        start = fetched.start + place[1]
        return parts[fetched.part][start : start + self.n_slots]
