"""Capture inside CUDA graphs: digests are written by kernels recorded into the graph, and read out after each replay.

Hooks and taps run once, while a graph is being recorded. What they issue becomes part of the graph: for every site the
digest kernel (and, at payload level, a copy) that writes to memory of its own. No two sites share memory, so nothing
that is read out after a replay can be the leftover of another site. Which graph belongs to what is learned from
``torch.cuda.CUDAGraph`` itself: the probe sees a recording begin and end, and every replay.

A graph that was recorded before the probe was attached has no such kernels. It is neither changed nor recorded again:
its replays are counted, and its sites are listed as out of reach.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.device import DeviceFrame, Kernels, Pending
from zkl_debug.capture.frame import Block, OpenFrame
from zkl_debug.capture.layout import RowView, resolve
from zkl_debug.capture.rows import FrameRows, warmup_rows
from zkl_debug.schema import Json, SiteMeta

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession
    from zkl_debug.capture.taps import TapSet

_ATTRIBUTE = "_zkl_plan"
_ARENA_ROWS = 1 << 18  # 4 MiB of digests
_ARENA_SPARE = 1 << 15


@dataclass(frozen=True)
class GraphSite:
    """A site of a graph: where its digests are, rows ``start`` .. ``start + rows`` of ``arena``, and its payload."""

    name: str
    meta: SiteMeta
    arena: torch.Tensor
    start: int
    rows: int
    payload: torch.Tensor | None


@dataclass
class Plan:
    """What a graph writes at each replay. Kept alive by the graph itself, for it writes as long as it is replayed.

    Attributes:
        owner: the watch that recorded it.
        sites: in execution order.
        slots: token slots of the call the graph was recorded for.
    """

    owner: object
    sites: list[GraphSite] = field(default_factory=list)
    slots: int = 0


class GraphWatch:
    """Watches recordings and replays for one session.

    Args:
        session: where sites go.
        kernels: the device.
        graph_class: ``torch.cuda.CUDAGraph``, or a stand-in with the same three methods.
    """

    def __init__(self, session: CaptureSession, kernels: Kernels, graph_class: Any = None) -> None:
        self.session = session
        self.kernels = kernels
        self.graph_class = graph_class if graph_class is not None else torch.cuda.CUDAGraph
        self.opener: Callable[[], None] | None = None
        self.recording: Plan | None = None
        self.recorded = self.replays = 0
        self.unreached_replays = self.unkeyed_replays = 0
        self.unreached: dict[str, str] = {}
        self.sizes: set[int] = set()
        self._arena: torch.Tensor | None = None
        self._used = 0

    # ---- patches --------------------------------------------------------------------------------------------------
    def install(self, taps: TapSet) -> None:
        """Watch every graph of the process until the taps are removed."""
        taps.wrap(self.graph_class, "capture_begin", self._begin)
        taps.wrap(self.graph_class, "capture_end", self._end)
        taps.wrap(self.graph_class, "replay", self._replay)

    def _begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            session = self.session
            if session.enabled:
                with session.guarded("graph:begin"):
                    if not session.in_forward:
                        session.end_frame()  # nothing of an earlier frame may be read out into the recording
                    self._prepare()
                    self.recording = Plan(self)
            return original(graph, *args, **kwargs)

        return capture_begin

    def _end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            plan, self.recording = self.recording, None
            result = original(graph, *args, **kwargs)
            if plan is not None:
                # Even when the probe has failed since: what was recorded writes at every replay.
                setattr(graph, _ATTRIBUTE, plan)
                self.recorded += 1
                self.sizes.add(plan.slots)
            return result

        return capture_end

    def _replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            if self.session.enabled:
                with self.session.guarded("graph:replay"):
                    self._replaying(getattr(graph, _ATTRIBUTE, None))
            return original(graph, *args, **kwargs)

        return replay

    def _prepare(self) -> None:
        """Memory for the digests of the coming graph, outside the graph's own pool."""
        if self._arena is not None and len(self._arena) - self._used >= _ARENA_SPARE:
            return
        with torch.inference_mode(mode=False):
            self._arena = self.kernels.slots(_ARENA_ROWS)
        self._used = 0

    # ---- while a graph is being recorded --------------------------------------------------------------------------
    @property
    def active(self) -> bool:
        """Whether what is issued now becomes part of a graph."""
        return self.recording is not None and self.kernels.capturing()

    def resolve(self, frame: FrameRows, tensor: torch.Tensor, layout: str) -> RowView | None:
        """All token slots of a tensor, padding included: which of them are rows is known at each replay only."""
        return resolve(tensor, warmup_rows(frame.grid), layout)

    def record(self, name: str, meta: SiteMeta, view: RowView, payload: bool) -> None:
        """Record the digest kernel of a site into the graph."""
        plan = self.recording
        assert plan is not None
        rows = len(view.row)
        if self._arena is None or len(self._arena) - self._used < rows:
            self.unreach(name, "no memory was left for its digests; recorded graphs are larger than expected")
            return
        start = self._used
        tensor = view.tensor.detach()
        if view.take is not None:
            self.unreach(name, "its rows are not in the order of the token slots")
            return
        if not self.kernels.ready(tensor, rows):
            self.unreach(
                name, "its kernel was not loaded before the recording: run the model once under the probe first"
            )
            return
        if not self.kernels.digest(tensor, rows, self._arena[start : start + rows], None, clear=True):
            self.unreach(name, "the kernel cannot read it without a copy (row bytes not a multiple of 4)")
            return
        self._used += rows
        kept = self.kernels.keep(tensor) if payload else None
        plan.sites.append(GraphSite(name, meta, self._arena, start, rows, kept))
        plan.slots = max(plan.slots, rows)

    def unreach(self, name: str, reason: str) -> None:
        """A site that cannot be recorded inside a graph."""
        self.unreached.setdefault(name, reason)

    # ---- at replay ------------------------------------------------------------------------------------------------
    def _replaying(self, plan: Plan | None) -> None:
        session = self.session
        if session.frame is None and self.opener is not None:
            self.opener()
        frame = session.frame
        if frame is not None and frame.rows.warmup:
            return
        self.replays += 1
        if plan is None or plan.owner is not self:
            self.unreached_replays += 1
            return
        if frame is None:
            self.unkeyed_replays += 1
            return
        if any(plan is earlier for earlier in frame.plans):
            self.collect(frame)  # the replay that comes overwrites what the one before it wrote
        frame.plans.append(plan)

    def collect(self, frame: OpenFrame) -> None:
        """Issue the read-out of the graphs replayed in a frame, and add their sites to it."""
        plans, frame.plans = frame.plans, []
        if not plans:
            return
        device = self.session.device_frame(frame)
        sites = [site for plan in plans for site in plan.sites]
        fetched = _fetch(device, sites)
        for site, pending in zip(sites, fetched, strict=True):
            if site.rows != frame.rows.n_slots:
                self.unreach(site.name, f"recorded for {site.rows} token slots, replayed with {frame.rows.n_slots}")
                continue
            self._add(frame, site, pending)

    def _add(self, frame: OpenFrame, site: GraphSite, pending: Pending) -> None:
        slot = frame.rows.slot
        rows: NDArray[np.uint32] = frame.scratch.setdefault("graph_rows", np.arange(len(slot), dtype=np.uint32))
        payload = None if site.payload is None else site.payload.clone()
        whole = frame.scratch.setdefault("graph_whole", bool(np.array_equal(slot, np.arange(len(slot)))))
        if whole:
            n = len(slot)
            found = replace(pending, rows=n, payload=None if payload is None else payload[:n])
        else:
            found = replace(pending, take=slot, payload=payload)
        name = self.session.occurrence(frame, site.name)
        meta = site.meta if name == site.name else self.session.meta_like(name, site.meta)
        frame.blocks.append(Block(meta, rows, pending=found))

    # ---- report ---------------------------------------------------------------------------------------------------
    def summary(self, eager: set[str], graphed: set[str]) -> dict[str, Json]:
        """What was recorded into graphs and what could not be; sites of eager frames that graph frames lack."""
        lacking = sorted(eager - graphed) if graphed else []
        reasons = {n: self.unreached.get(n, "not seen in any frame that replayed a graph") for n in lacking}
        return {
            "recorded": self.recorded,
            "slots": sorted(self.sizes),
            "replays": self.replays,
            "replays_out_of_reach": self.unreached_replays,
            "replays_without_rows": self.unkeyed_replays,
            "sites_eager": len(eager),
            "sites_graph": len(graphed),
            "only_eager": reasons,
            "only_graph": sorted(graphed - eager) if eager else [],
            "out_of_reach": dict(sorted(self.unreached.items())),
        }


def _fetch(device: DeviceFrame, sites: list[GraphSite]) -> list[Pending]:
    """Where the digests of each site are on the host; neighbours in memory are copied together."""
    found: list[Pending] = []
    for _, group in itertools.groupby(enumerate(_runs(sites)), key=lambda item: item[1][0]):
        members = [sites[i] for i, _ in group]
        start, stop = members[0].start, members[-1].start + members[-1].rows
        whole = device.fetch(members[0].arena[start:stop])
        found.extend(Pending(whole.part, whole.start + m.start - start, m.rows) for m in members)
    return found


def _runs(sites: list[GraphSite]) -> list[tuple[int, GraphSite]]:
    """Number of the run of adjacent memory each site lies in."""
    runs, number = [], 0
    for i, site in enumerate(sites):
        if i:
            last = sites[i - 1]
            number += not (last.arena is site.arena and last.start + last.rows == site.start)
        runs.append((number, site))
    return runs
