"""Fewer kernels in a recorded graph: digests of a block of the model in one launch, once that is seen to be the same.

A launch for every hook is what is right without knowing the program: whatever the next kernel writes over has been
read. In a decode step those launches cost more than all they read. So each tensor is read a second time while a graph
is recorded, together with others, where the block it belongs to ends; the probe holds it until then, so that its memory
is given to no other. Whether nothing wrote into it in between is not assumed, but measured: the first replays on real
rows carry both readings, and they are compared bit by bit. Then a second executable graph is made of what was recorded,
without the first readings of the tensors that were the same both times, and launched in place of the graph; in every
frame whose number is a multiple of :data:`~zkl_debug.capture.twins.RECHECK` the graph itself is replayed and its two
readings are compared again. The graph of the program is neither recorded again nor changed.

What is read where a graph ends, such as the output of a layer, is read a third time by the first launch of the graph
that is recorded next. Where that was the same too, the launch at the end is left out with the others. Then the next
graph has to be replayed next, which is looked at in every frame; and as what runs between two graphs may be another
thing in each step, only programs are served so of which it is known that nothing does.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zkl_debug.schema import U64

if TYPE_CHECKING:
    from zkl_debug.capture.graph_edit import Executable
    from zkl_debug.capture.graph_plans import GraphSite, Plan
    from zkl_debug.capture.kernels import Kernels

#: A tensor, how many rows of it are read, to which row of the memory of digests, and where it was when it was passed.
Held = tuple[torch.Tensor, int, int, int]

#: Replays, and rows of them, whose two readings are compared.
AUDITS, AUDITED_ROWS = 4, 64
#: Tensors of one launch at most.
_MOST = 32
_TEMPLATE, _GENERATORS = "_zkl_template", "_zkl_generators"
#: Behind these something is known to write in place: the rotary embedding of the dynamic engine's queries.
_WRITTEN_BEHIND = ("/rope.q:in.0",)
_PART_OF_BLOCK = re.compile(r"(?:.*\.)?\d+\.[^.\d][^.]*")


def ends_part(path: str) -> bool:
    """Whether a module is a part of a numbered block, such as the attention or the MLP of a layer."""
    return _PART_OF_BLOCK.fullmatch(path) is not None


def written_behind(site: str) -> bool:
    """Whether what waits should be read at once behind this site, for the sake of fewer launches alone."""
    return site.endswith(_WRITTEN_BEHIND)


class Arena:
    """Memory that graphs write digests to, handed out from both ends.

    Attributes:
        memory: int64 [n, 2].
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._used, self._top = 0, len(memory)

    @property
    def room(self) -> int:
        """Rows that are left."""
        return self._top - self._used

    def take(self, rows: int) -> int | None:
        """Set rows aside; the first of them, or None when there is no room."""
        if self.room < rows:
            return None
        start, self._used = self._used, self._used + rows
        return start

    def take_late(self, rows: int) -> int | None:
        """:meth:`take` from the other end: what most replays write lies together, and is one copy."""
        if self.room < rows:
            return None
        self._top -= rows
        return self._top


@dataclass
class LateReadings:
    """The second readings of one graph.

    Attributes:
        arena: memory that all readings are written to, int64 [n, 2].
        take: sets so many rows of it aside and gives the first; None when there is no room.
        rows: by the row of a first reading, that of the second.
        nodes: by the row of a first reading, the node of its launch; 0 when it is not known.
        written: rows of first readings whose second one was unequal.
        audited, audited_rows: replays that were compared, and rows.
        trusted: rows of first readings that are left out between rechecks.
        tried: whether :meth:`settled` was.
        last: node of the launch at the end of the graph; 0 when there is none, or it is not known.
        last_rows: rows of the readings it makes.
        taker: readings of the graph that makes them once more.
        handed: by such a row, that of the reading there.
        apart: of these, those that were unequal.
        relied: of the rows handed on, those by which sites are read: the launch at the end is left out.
    """

    arena: torch.Tensor
    take: Callable[[int], int | None]
    rows: dict[int, int] = field(default_factory=dict)
    nodes: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    audited: int = 0
    audited_rows: int = 0
    trusted: frozenset[int] = frozenset()
    tried: bool = False
    last: int = 0
    last_rows: frozenset[int] = frozenset()
    taker: LateReadings | None = None
    handed: dict[int, int] = field(default_factory=dict)
    apart: set[int] = field(default_factory=set)
    relied: frozenset[int] = frozenset()
    _waiting: dict[object, Held] = field(default_factory=dict)
    _adopted: tuple[LateReadings, dict[object, Held]] | None = None
    _unplaced: list[int] = field(default_factory=list)

    @property
    def due(self) -> bool:
        """Whether enough was compared, and nothing made of it yet."""
        return not self.tried and self.audited >= AUDITS and self.audited_rows >= AUDITED_ROWS

    # ---- while the graph is being recorded ------------------------------------------------------------------------
    def read(self, start: int) -> None:
        """The first reading of a tensor, to row ``start``, was asked for."""
        self._unplaced.append(start)

    def wait(self, memory: object, tensor: torch.Tensor, rows: int, start: int) -> None:
        """Have a tensor, whose first reading goes to row ``start``, read again at the next :meth:`flush`."""
        known = self._waiting.get(memory)
        if known is None:
            at = self.take(rows)
            if at is None:
                return
            known = self._waiting[memory] = (tensor, rows, at, tensor.data_ptr())
        self.rows[start] = known[2]

    def issued(self, launches: int, moment: tuple[int, ...] | None) -> None:
        """First readings were recorded, in so many launches, of which the last is the node ``moment``."""
        node = moment[0] if launches == 1 and moment is not None and len(moment) == 1 else 0
        for start in self._unplaced:
            self.nodes[start] = node
        self._unplaced.clear()

    def full(self) -> bool:
        """Whether no more fit into a launch."""
        return len(self._waiting) >= _MOST

    def flush(self, kernels: Kernels) -> int:
        """Record the second readings that wait; the number of launches."""
        if self._waiting:
            self._take_over()
        waiting, self._waiting = self._waiting, {}
        # One that gave up its memory is not read: its row stays without a digest, so that the first reading is kept.
        there = [(t, rows, start) for t, rows, start, address in waiting.values() if t.data_ptr() == address]
        jobs = [kernels.job(t, rows, self.arena, start, None, clear=False) for t, rows, start in there]
        return kernels.issue(jobs) if jobs else 0

    def end(self, kernels: Kernels) -> dict[object, Held]:
        """The recording ends: :meth:`flush`, and what was read by that, for the next graph to read once more."""
        self._adopted = None  # what the last launch reads may be left to the graph behind it
        waiting = self._waiting
        launches = self.flush(kernels)
        node = kernels.moment() if launches == 1 else None
        if node is None or len(node) != 1:
            return {}
        self.last, self.last_rows = node[0], frozenset(at for _, _, at, _ in waiting.values())
        return waiting

    def adopt(self, giver: LateReadings, waiting: dict[object, Held]) -> None:
        """Have tensors that the graph before read at its end read once more by the first launch of this one."""
        self._adopted = giver, waiting

    def _take_over(self) -> None:
        adopted, self._adopted = self._adopted, None
        if adopted is None:
            return
        giver, held = adopted
        if len(self._waiting.keys() | held.keys()) > _MOST:
            return
        for memory, (tensor, rows, at, address) in held.items():
            if memory not in self._waiting:
                own = self.take(rows)
                if own is None:
                    return
                self._waiting[memory] = (tensor, rows, own, address)
            giver.handed[at] = self._waiting[memory][2]
        giver.taker = self

    def again(self, start: int) -> tuple[tuple[torch.Tensor, int], ...]:
        """Memory and row of the further readings of a tensor, whose first goes to row ``start``: of this graph, and of
        the next one where that makes one."""
        if start not in self.rows:
            return ()
        second = self.arena, self.rows[start]
        if self.taker is None or second[1] not in self.handed:
            return (second,)
        return second, (self.taker.arena, self.handed[second[1]])

    # ---- afterwards -----------------------------------------------------------------------------------------------
    def compare(self, start: int, first: U64, second: U64) -> None:
        """Judge the two readings of a tensor in one replay, uint64 [n, 2] each, rows without meaning left out."""
        if not np.array_equal(first, second):
            self.written.add(start)

    def compare_handed(self, at: int, second: U64, third: U64) -> None:
        """:meth:`compare` for the reading of the next graph."""
        if not np.array_equal(second, third):
            self.apart.add(at)

    def count(self, rows: int) -> None:
        """A replay of so many rows was compared."""
        self.audited += 1
        self.audited_rows += rows

    def superfluous(self) -> list[int]:
        """Nodes none of whose tensors was written to before its second reading."""
        kept = {self.nodes.get(start, 0) for start in self.written}
        kept |= {node for start, node in self.nodes.items() if start not in self.rows} | {0}
        gone = [node for node in dict.fromkeys(self.nodes.values()) if node not in kept]
        left = self._left(set(gone))
        spared = self.taker is not None and self.last and left and left <= self.handed.keys() - self.apart
        return [*gone, self.last] if spared else gone

    def _left(self, gone: set[int]) -> set[int]:
        """Rows of the launch at the end that stand for first readings, once these nodes are gone."""
        late = {self.rows[start] for start, node in self.nodes.items() if node in gone and start in self.rows}
        return late & self.last_rows

    @property
    def betrayed(self) -> bool:
        """Whether a later replay had unequal readings of a tensor that is read once between rechecks."""
        return not (self.trusted.isdisjoint(self.written) and self.relied.isdisjoint(self.apart))

    def unequal(self, site: GraphSite) -> bool:
        """Whether readings of a site were."""
        return site.start in self.written or self.rows.get(site.start) in self.apart

    def forsake(self) -> None:
        """The next graph was not replayed next, before anything rested on that."""
        if not self.relied:
            self.taker = None

    def settled(self, plan: Plan, gone: set[int]) -> Plan:
        """What the graph of a plan writes once these nodes are gone."""
        self.trusted = frozenset(start for start, node in self.nodes.items() if node in gone)
        self.relied = frozenset(self._left(gone)) if self.last in gone else frozenset()
        sites = [self._placed(site) if site.start in self.trusted else site for site in plan.sites]
        return type(plan)(plan.owner, sites, plan.slots, base=plan, needs=self.taker if self.relied else None)

    def _placed(self, site: GraphSite) -> GraphSite:
        at = self.rows[site.start]
        if self.taker is not None and at in self.relied:
            return replace(site, arena=self.taker.arena, start=self.handed[at])
        return replace(site, start=at)


@dataclass(frozen=True)
class Light:
    """A graph without the first readings that second ones stand for.

    Attributes:
        executable: it.
        plan: what it writes.
        late: the readings it rests on.
    """

    executable: Executable
    plan: Plan
    late: LateReadings

    @property
    def usable(self) -> bool:
        """Whether it may be launched now in place of the graph it was made of."""
        return not self.late.betrayed and self.executable.ready


def generators(graph: Any) -> list[Any]:
    """Random generators that a graph was told of."""
    found: list[Any] = getattr(graph, _GENERATORS, [])
    return found


class Templates:
    """Graphs that keep what they were made of, so that others can be made of it, and are used as any other."""

    def made(self, original: Any) -> Any:
        """For the constructor of the graph class."""

        def init(graph: Any, keep_graph: bool = False) -> None:
            original(graph, keep_graph=True)
            setattr(graph, _TEMPLATE, keep_graph)

        return init

    def registered(self, original: Any) -> Any:
        """For the method by which a program tells which random generators a graph draws from."""

        @functools.wraps(original)
        def register(graph: Any, state: Any) -> Any:
            setattr(graph, _GENERATORS, [*generators(graph), state])
            return original(graph, state)

        return register

    def ended(self, graph: Any) -> None:
        """The recording has ended: make the graph executable, unless the program wants to do that itself."""
        if getattr(graph, _TEMPLATE, None) is False:
            graph.instantiate()

    def has(self, graph: Any) -> bool:
        """Whether the template of a graph is kept for the probe alone; one that the program asked for is left alone."""
        return getattr(graph, _TEMPLATE, None) is False
