"""An open frame: what was recorded of it so far, on the host and still on the device; and how it is filed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.device import DeviceFrame, Pending, payload_bits
from zkl_debug.capture.layout import RowView
from zkl_debug.capture.rows import FrameRows, Geometry, Sketch
from zkl_debug.capture.twins import AUDITS, END, Key, Pair, Reading, Twins, memory_key
from zkl_debug.schema import U64, SiteBlock, SiteMeta

if TYPE_CHECKING:
    from zkl_debug.capture.graph_plans import Plan
    from zkl_debug.capture.postponed import Errand, Waiting

_TWIN_KEEP = 24  # tensors kept alive for the next hooks of the same frame


@dataclass(frozen=True)
class Block:
    """One site of a frame: its digests (and payload) on the host, or where they are on the device."""

    meta: SiteMeta
    row: NDArray[np.uint32]
    digest: U64 | None = None
    payload: NDArray[Any] | None = None
    pending: Pending | None = None


class Deferred(Protocol):
    """Sites that are made only when the frame is filed, such as those of a replayed graph."""

    def blocks(self, frame: OpenFrame, parts: list[U64]) -> list[SiteBlock]:
        """The sites, from the digests of each chunk; may add label rows to the frame."""

    def judge(self, parts: list[U64]) -> None:  # noqa: ARG002
        """Look at the digests of each chunk when they are there, before :meth:`blocks` is asked for."""
        return


@dataclass(slots=True)
class OpenFrame:
    """The frame that is being recorded.

    Attributes:
        index: its number in the capture.
        given: what its token slots are, or what is known of them until :attr:`rows` is asked for.
        blocks: sites so far.
        labels: label rows, in order, behind ``rows``.
        seen: occurrences of each site name.
        alias: on a CPU, digests of the last tensors.
        scratch: what an adapter keeps for the length of the frame.
        device: what is on the device, if anything is.
        plans, replayed: graphs that were replayed in it and not yet read out, in order and as a set.
        replayed_names: names of the sites of graphs that were read out.
        deferred: sites made when the frame is filed.
        event_seq: number of the last event before its end.
        ended: the model has issued all it will.
        failed: it raised an exception.
        followed: it was put aside, and the next forward has been issued.
        may_wait: whether sites may be read later: see :mod:`zkl_debug.capture.postponed`.
        parts: they wait for the end of a part of the model, not of all of it.
        stream: the stream that was current when it began; only what is issued there may wait.
        fresh: none does, for frames of its shape are new.
        trusted: those that are known to be the same then.
        waiting, errands: what waits.
        names: sites that wait or did.
        early: what waited in the running part of the model was read before its end, for it held too much memory.
        passed, passed_bytes: sites that were passed since waiting ones were last read, and what they hold.
        geometry: where its rows lie, once that was asked for.
        kind: class of the frame for :class:`Twins`: its phase, and whether it replays a graph.
        shape: its bucket, or -1, and its number of rows, as they were told first.
        places: what tells where they lie, as it was told first: see :class:`Sketch`.
    """

    index: int
    given: FrameRows | Sketch
    event_seq: int = 0
    blocks: list[Block] = field(default_factory=list)
    labels: list[NDArray[np.void]] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    alias: OrderedDict[tuple[Any, ...], tuple[torch.Tensor, U64]] = field(default_factory=OrderedDict)
    scratch: dict[str, Any] = field(default_factory=dict)
    device: DeviceFrame | None = None
    plans: list[Plan] = field(default_factory=list)
    replayed: set[Plan] = field(default_factory=set)
    replayed_names: list[frozenset[str]] = field(default_factory=list)
    deferred: list[Deferred] = field(default_factory=list)
    twins: OrderedDict[Key, Reading] = field(default_factory=OrderedDict)
    pairs: list[Pair] = field(default_factory=list)
    ended: bool = False
    failed: bool = False
    followed: bool = False
    may_wait: bool = False
    parts: bool = False
    stream: tuple[int, int] = (0, 0)
    fresh: bool = False
    trusted: Container[str] = ()
    waiting: list[Waiting] = field(default_factory=list)
    errands: list[Errand] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    early: bool = False
    passed: int = 0
    passed_bytes: int = 0
    geometry: Geometry | None = None
    kind: int = field(init=False)
    shape: tuple[int, int] = field(init=False)
    places: Hashable = field(init=False)

    def __post_init__(self) -> None:
        given = self.given
        self.kind = int(given.phase) + (16 if given.graph >= 0 else 0)
        self.shape = given.graph, given.n_rows
        self.places = given.places if isinstance(given, Sketch) else None

    @property
    def rows(self) -> FrameRows:
        """What its token slots are; worked out when it is asked for first: see :attr:`Sketch.make`."""
        given = self.given
        if isinstance(given, Sketch):
            given = self.given = given.rows()
        return given

    @property
    def n_rows(self) -> int:
        """Rows so far, label rows included."""
        return self.rows.n_rows + sum(len(part) for part in self.labels)

    def passed_already(self, name: str) -> bool:
        """Whether a site was passed, and recorded or told to wait."""
        return name in self.seen or name in self.names

    def table(self) -> NDArray[np.void]:
        """All rows, label rows last."""
        rows = self.rows.rows
        table: NDArray[np.void] = np.concatenate([rows, *self.labels]) if self.labels else rows
        table["frame"] = self.index
        return table

    def launch(
        self, name: str, view: RowView, source: torch.Tensor | None, payload: bool, twins: Twins
    ) -> Pending | None:
        """Digests of a view on its device; those of the tensor's last site where the two are known to be one."""
        assert self.device is not None
        key = memory_key(source, view.take, int(view.tensor.shape[0])) if source is not None else None
        if key is None or source is None:
            return self.device.launch(view, payload)
        made = None if payload else self.known(key, source, name, twins)
        made = made or self.device.launch(view, payload)
        if made is None:
            return None
        earlier = self._earlier(key, source)
        again = earlier is not None and made is not earlier.pending
        if earlier is not None and not twins.refuses(self.kind, earlier.site, name):
            if again:
                self.pairs.append(Pair(earlier.site, name, earlier.pending, made))
            self.remember(key, Reading(source, source._version, name, earlier.pending, again))
        else:
            self.remember(key, Reading(source, source._version, name, made))
        return made

    def known(self, key: Key, tensor: torch.Tensor, name: str, twins: Twins) -> Pending | None:
        """The digests of the last site that saw this memory, where the two are known to be one."""
        earlier = self._earlier(key, tensor)
        if earlier is not None and not earlier.doubted and twins.trusted(self.kind, self.index, earlier.site, name):
            return earlier.pending
        return None

    def remember(self, key: Key, reading: Reading) -> None:
        """Some memory was read; keeps its tensor alive for a while."""
        known = self.twins.get(key)
        if known is not None and known.pending is reading.pending:
            # Of the site it was read for.
            doubted = known.doubted or reading.doubted
            reading = replace(known, tensor=reading.tensor, version=reading.version, doubted=doubted)
        self.twins[key] = reading
        self.twins.move_to_end(key)
        self.forget(_TWIN_KEEP)

    def forget(self, keep: int = 0) -> None:
        """Let go of the tensors that were read, but for the last so many."""
        while len(self.twins) > keep:
            self.twins.popitem(last=False)

    def _earlier(self, key: Key, tensor: torch.Tensor) -> Reading | None:
        known = self.twins.get(key)
        return None if known is None or known.written_since(tensor) else known

    def sites(self, parts: list[U64]) -> list[SiteBlock]:
        """The sites of the frame, from the digests of each chunk; label rows that were put off are made now."""
        eager = [_finished(block, parts) for block in self.blocks]
        return [*eager, *(block for later in self.deferred for block in later.blocks(self, parts))]

    def judge(self, twins: Twins, parts: list[U64]) -> None:
        """Tell which pairs of sites, and which readings of one, were equal."""
        for pair in self.pairs:
            audits = AUDITS if pair.second == END and not self.parts else 1
            digests = _digests(parts, pair.a), _digests(parts, pair.b)
            twins.judge(self.kind, pair, *digests, fresh=self.fresh, audits=audits)
        if self.fresh and not self.failed and (self.parts or all(pair.proof for pair in self.pairs)):
            twins.judged(self.kind, self.shape)
        for later in self.deferred:
            later.judge(parts)

    @property
    def payload_bytes(self) -> int:
        """Bytes of clones that wait on a device."""
        kept = [block.pending.payload for block in self.blocks if block.pending is not None]
        return sum(payload.numel() * payload.element_size() for payload in kept if payload is not None)


def _digests(parts: list[U64], pending: Pending) -> U64:
    found = parts[pending.part][pending.start : pending.start + pending.rows]
    return found if pending.take is None else found[pending.take]


def _finished(block: Block, parts: list[U64]) -> SiteBlock:
    pending = block.pending
    if pending is None:
        assert block.digest is not None
        return SiteBlock(block.meta, block.row, block.digest, block.payload)
    payload = payload_bits(pending)
    if payload is not None and pending.take is not None:
        payload = payload[pending.take]
    return SiteBlock(block.meta, block.row, _digests(parts, pending), payload)
