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
#: A row of memory, of which the identity is told.
Row = tuple[int, int]
#: A reading that was made twice: whose, a row of the first, and where the two are.
Double = tuple["LateReadings", int, Place, Place]


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
        base: of the plan of such a light one, the plan of the graph itself.
        needs: of the same, readings of the graph that must be replayed next, for it reads what this one leaves unread.
    """

    owner: object
    sites: list[GraphSite] = field(default_factory=list)
    slots: int = 0
    moment: tuple[int, ...] | None = None
    fresh: dict[object, GraphSite] = field(default_factory=dict)
    late: LateReadings | None = None
    light: Light | None = None
    base: Plan | None = None
    needs: LateReadings | None = None

    @property
    def recorded(self) -> LateReadings | None:
        """The second readings of the graph, or of the one that a light one was made of."""
        return self.late if self.base is None else self.base.late


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
        doubles: readings that were made twice.
        handed: second readings that the graph replayed next made once more.
        astray: what a graph left to the next one was left to another than that.
    """

    sites: tuple[GraphSite, ...]
    copies: tuple[Copied, ...]
    places: tuple[Place, ...]
    names: frozenset[str]
    rows: set[int]
    payload: bool
    doubles: tuple[Double, ...]
    handed: tuple[Double, ...]
    astray: bool
    plans: tuple[Plan, ...]  # alive as long as their ids are keys

    @classmethod
    def of(cls, plans: list[Plan]) -> Reading:
        """The reading of graphs in the order of their replay."""
        behind = [*(plan.recorded for plan in plans[1:]), None]
        for plan, late in zip(plans, behind, strict=True):
            if plan.late is not None and plan.late.taker is not late:
                plan.late.forsake()
        sites = tuple(site for plan in plans for site in plan.sites)
        copies, at = _copies(plans)
        doubles: list[Double] = []
        handed: list[Double] = []
        for plan in plans:
            for start, memory in {site.start: site.arena for site in plan.sites}.items():
                again = () if plan.late is None else plan.late.again(start)
                if plan.late is None or not again:
                    continue
                first, second, *third = (at[id(of), row] for of, row in ((memory, start), *again))
                doubles.append((plan.late, start, first, second))
                handed += ((plan.late, again[0][1], second, place) for place in third)
        return cls(
            sites,
            copies,
            tuple(at[id(site.arena), site.start] for site in sites),
            frozenset(site.name for site in sites),
            {site.rows for site in sites},
            any(site.payload is not None for site in sites),
            tuple(doubles),
            tuple(handed),
            any(plan.needs is not None and plan.needs is not late for plan, late in zip(plans, behind, strict=True)),
            tuple(plans),
        )


def _copies(plans: list[Plan]) -> tuple[tuple[Copied, ...], dict[Row, Place]]:
    """What is copied to read the sites of graphs, and where each reading is then."""
    wanted: dict[int, tuple[torch.Tensor, dict[int, int]]] = {}  # by memory: rows of each reading by its first
    for plan in plans:
        for site in plan.sites:
            again = () if plan.late is None else plan.late.again(site.start)
            for memory, row in ((site.arena, site.start), *again):
                wanted.setdefault(id(memory), (memory, {}))[1][row] = site.rows
    copies, at = [], {}
    for number, (memory, of) in enumerate(wanted.values()):
        starts = sorted(of)
        first, end, total = starts[0], starts[-1] + of[starts[-1]], sum(of.values())
        if end - first <= 2 * total:
            copies.append(Copied(memory[first:end], None))
            at.update({(id(memory), start): (number, start - first) for start in starts})
        else:
            rows = np.concatenate([np.arange(start, start + of[start]) for start in starts])
            copies.append(Copied(memory, to_device(rows, memory.device)))
            offsets = np.cumsum([0, *(of[start] for start in starts)])
            at.update({(id(memory), start): (number, int(off)) for start, off in zip(starts, offsets, strict=False)})
    return tuple(copies), at


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
        for late, at, second, third in self.reading.handed:
            late.compare_handed(at, *(self._part(parts, place)[self.slot] for place in (second, third)))
        for late in {id(late): late for late, *_ in doubles}.values():
            late.count(len(self.slot))

    def _part(self, parts: list[U64], place: Place) -> U64:
        """Digests of all token slots of a reading."""
        fetched = self.fetched[place[0]]
        start = fetched.start + place[1]
        return parts[fetched.part][start : start + self.n_slots]
