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
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from zkl_debug.capture.frame import OpenFrame
from zkl_debug.capture.graph_plans import GraphSite, Plan, Reading, Replay
from zkl_debug.capture.kernels import Kernels
from zkl_debug.capture.late import Arena, Held, LateReadings, Light, Templates, ends_part, generators, written_behind
from zkl_debug.capture.layout import RowView, resolve
from zkl_debug.capture.rows import Places, warmup_rows
from zkl_debug.capture.twins import RECHECK, gaps
from zkl_debug.errors import ProbeError
from zkl_debug.schema import Json, SiteMeta

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession
    from zkl_debug.capture.taps import TapSet

_ATTRIBUTE = "_zkl_plan"
_ARENA_ROWS = 1 << 18  # 4 MiB of digests
_ARENA_SPARE = 1 << 15


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
        self.rows_given: Callable[[], bool] = lambda: False
        self.opener: Callable[[], None] = lambda: None  # of a frame of rows that were given
        #: Whether nothing is written between a graph and the next: then what one reads at its end may be left to that.
        self.in_a_row: Callable[[], bool] = lambda: False
        self.recording: Plan | None = None
        self.recorded = self.replays = 0
        self.unreached_replays = self.unkeyed_replays = 0
        self.unreached: dict[str, str] = {}
        self.sizes: set[int] = set()
        self.left_out = self.read_at_once = 0
        self.refused = ""
        #: Of the graph recorded last in the running forward: its readings, and what was read at its end.
        self.handing: tuple[LateReadings, dict[object, Held]] | None = None
        self._arena: Arena | None = None
        self._templates: Templates | None = None
        self._settled: list[tuple[LateReadings, list[GraphSite]]] = []
        self._readings: dict[tuple[int, ...], Reading] = {}

    # ---- patches --------------------------------------------------------------------------------------------------
    def install(self, taps: TapSet) -> None:
        """Watch every graph of the process until the taps are removed."""
        taps.wrap(self.graph_class, "capture_begin", self._begin)
        taps.wrap(self.graph_class, "capture_end", self._end)
        taps.wrap(self.graph_class, "replay", self._replay)
        options = self.session.options
        if options.level == "digest" and not options.at_once and self.kernels.edits(self.graph_class):
            self._templates = Templates()
            taps.wrap(self.graph_class, "__init__", self._templates.made)
            if hasattr(self.graph_class, "register_generator_state"):
                taps.wrap(self.graph_class, "register_generator_state", self._templates.registered)

    def _begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            session = self.session
            if session.enabled:
                with session.guarded("graph:begin"):
                    session.open_begun()  # not in the recording
                    if not session.inside():
                        session.end_frame()  # nothing of an earlier frame may be read out into the recording
                    self._prepare()
                    self.recording = Plan(self, late=self._late(graph))
                    self._hand_on(self.recording)
            try:
                session.read_out.hold()  # not before: a frame may have been handed over just now
                return original(graph, *args, **kwargs)
            except BaseException:
                session.read_out.go_on()
                raise

        return capture_begin

    def _end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            plan, session = self.recording, self.session
            try:
                if plan is not None and plan.late is not None:
                    with session.guarded("graph:end"):
                        held = plan.late.end(self.kernels)
                        self.handing = (plan.late, held) if held and session.in_forward and self.in_a_row() else None
                self.recording = None
                result = original(graph, *args, **kwargs)
            finally:
                session.read_out.go_on()
            if self._templates is not None:
                self._templates.ended(graph)
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
            session = self.session
            if not session.enabled:
                return original(graph, *args, **kwargs)
            plan: Plan | None = getattr(graph, _ATTRIBUTE, None)
            if session.beginning is not None and plan is not None and (written := self._launch(plan)) is not None:
                frame = session.frame  # opened now, while the device works
                if frame is not None:
                    self._replayed(frame, plan, written)
                return None
            if plan is not None and plan.owner is self and self.rows_given():
                with session.guarded("graph:rows"):
                    self.opener()  # rows that were given for a graph of the whole model, which runs no hook
            frame = session.frame
            unknown = plan is None or frame is None or plan.owner is not self or plan in frame.replayed
            if unknown or plan is None or frame is None or frame.given.warmup:
                with session.guarded("graph:replay"):
                    self._replaying(plan)
                return original(graph, *args, **kwargs)
            # The common case: nothing to ask of the device.
            if frame.index % RECHECK and (written := self._launch(plan)) is not None:
                self._replayed(frame, plan, written)
                return None
            self._replayed(frame, plan, plan)
            if plan.late is None or not plan.late.due:
                return original(graph, *args, **kwargs)
            drawn = self.kernels.drawn(generators(graph))
            result = original(graph, *args, **kwargs)
            with session.guarded("graph:settle"):
                # What draws random numbers is prepared by the replay itself, so it stays the only way.
                self._settle(graph, plan, plan.late, drawn == self.kernels.drawn(generators(graph)))
            return result

        return replay

    def _launch(self, plan: Plan) -> Plan | None:
        """Launch what stands for a graph in frames that are no recheck: what it writes; None where nothing was."""
        light = plan.light
        if plan.owner is not self or light is None or not light.usable:
            return None
        try:
            light.executable.launch()
        except OSError as error:
            plan.light, self.refused = None, str(error)  # the graph itself does as well
            return None
        return light.plan

    def _replayed(self, frame: OpenFrame, plan: Plan, written: Plan) -> None:
        self.replays += 1
        frame.replayed.add(plan)
        frame.plans.append(written)

    def _prepare(self) -> None:
        """Memory for the digests of the coming graph, outside the graph's own pool."""
        if self._arena is None or self._arena.room < _ARENA_SPARE:
            with torch.inference_mode(mode=False):
                self._arena = Arena(self.kernels.slots(_ARENA_ROWS))

    def _late(self, graph: Any) -> LateReadings | None:
        """Room for the second readings of a graph, where one without the first can be made."""
        if self._templates is None or not self._templates.has(graph) or self._arena is None:
            return None
        return LateReadings(self._arena.memory, self._arena.take_late)

    def _hand_on(self, plan: Plan) -> None:
        """Have what was read at the end of the graph before read once more by this one."""
        handing, self.handing = self.handing, None
        if handing is not None and plan.late is not None:
            plan.late.adopt(*handing)

    def _settle(self, graph: Any, plan: Plan, late: LateReadings, repeatable: bool) -> None:
        """Make a graph without the launches that second readings stand for."""
        late.tried = True  # whatever comes of it
        if late.taker is not None and not self.in_a_row():
            late.forsake()
        gone = late.superfluous()
        try:
            made = self.kernels.without(graph, gone) if gone and repeatable else None
        except OSError as error:  # some graphs cannot be copied: those that allocate, for one
            made, self.refused = None, str(error)
        if made is not None:
            executable, nodes = made
            plan.light = Light(executable, late.settled(plan, nodes), late)
            self.left_out += len(nodes)
            self._settled.append((late, plan.sites))
        self.read_at_once += len({site.start for site in plan.sites} - late.trusted)

    # ---- while a graph is being recorded --------------------------------------------------------------------------
    @property
    def active(self) -> bool:
        """Whether what is issued now becomes part of a graph."""
        return self.recording is not None and self.kernels.capturing()

    def resolve(self, frame: Places, tensor: torch.Tensor, layout: str) -> RowView | None:
        """All token slots of a tensor, padding included: which of them are rows is known at each replay only."""
        return resolve(tensor, warmup_rows(frame.grid), layout)

    def record(self, name: str, meta: SiteMeta, view: RowView, payload: bool) -> None:
        """Record the digest kernel of a site into the graph."""
        plan = self.recording
        assert plan is not None
        rows = len(view.row)
        tensor = view.tensor.detach()
        if view.take is not None:
            self.unreach(name, "its rows are not in the order of the token slots")
            return
        same = (tensor.data_ptr(), tensor.numel(), gaps(tensor), tensor.dtype, rows)
        moment = self.kernels.moment()
        if moment is None or moment != plan.moment:
            plan.fresh.clear()
        known = plan.fresh.get(same)
        if known is not None and not payload:
            plan.sites.append(replace(known, name=name, meta=meta))
            self._before_write(plan, name)
            return
        if not self.kernels.ready(tensor, rows):
            self.unreach(
                name, "its kernel was not loaded before the recording: run the model once under the probe first"
            )
            return
        start = None if self._arena is None else self._arena.take(rows)
        if start is None or self._arena is None:
            self.unreach(name, "no memory was left for its digests; recorded graphs are larger than expected")
            return
        if not self.kernels.digest(tensor, rows, self._arena.memory, start, None, clear=True):
            self.unreach(name, "the kernel cannot read it without a copy (row bytes not a multiple of 4)")
            return
        if plan.late is not None:
            plan.late.read(start)
            if not payload and self.kernels.can_wait(tensor):
                plan.late.wait(same, tensor, rows, start)
            if not self.kernels.holding:
                plan.late.issued(1, self.kernels.moment())
        kept = self.kernels.keep(tensor) if payload else None
        plan.sites.append(GraphSite(name, meta, self._arena.memory, start, rows, kept))
        plan.slots = max(plan.slots, rows)
        plan.fresh[same] = plan.sites[-1]
        plan.moment = self.kernels.moment()
        self._before_write(plan, name)

    def issued(self, launches: int) -> None:
        """Digests that were held are in the recording now: what comes behind them is news, they are not."""
        plan = self.recording
        if plan is not None:
            plan.moment = self.kernels.moment()
            if plan.late is not None:
                plan.late.issued(launches, plan.moment)
                if plan.late.full():
                    self._flush(plan, plan.late)

    def ended(self, path: str) -> None:
        """A module has ended, and its sites are recorded."""
        plan = self.recording
        if plan is not None and plan.late is not None and ends_part(path):
            self._flush(plan, plan.late)

    def _before_write(self, plan: Plan, site: str) -> None:
        if plan.late is not None and written_behind(site):
            self._flush(plan, plan.late)

    def _flush(self, plan: Plan, late: LateReadings) -> None:
        same = plan.moment is not None and plan.moment == self.kernels.moment()
        if late.flush(self.kernels) and same:
            plan.moment = self.kernels.moment()

    def unreach(self, name: str, reason: str) -> None:
        """A site that cannot be recorded inside a graph."""
        self.unreached.setdefault(name, reason)

    # ---- at replay ------------------------------------------------------------------------------------------------
    def _replaying(self, plan: Plan | None) -> None:
        frame = self.session.frame
        if frame is not None and frame.given.warmup:
            return
        self.replays += 1
        if plan is None or plan.owner is not self:
            self.unreached_replays += 1
            return
        if frame is None:
            self.unkeyed_replays += 1
            return
        if plan in frame.replayed:
            self.collect(frame)  # the replay that comes overwrites what the one before it wrote
        frame.plans.append(plan)
        frame.replayed.add(plan)

    def collect(self, frame: OpenFrame) -> None:
        """Issue the read-out of the graphs replayed in a frame; its sites are made when the frame is filed.

        A decode step replays the same graphs as the one before: what that takes is worked out once.
        """
        plans, frame.plans = frame.plans, []
        frame.replayed.clear()
        if not plans:
            return
        key = tuple(id(plan) for plan in plans)
        if key not in self._readings:
            self._readings[key] = Reading.of(plans)
        reading = self._readings[key]
        if reading.astray:
            raise ProbeError(
                "CUDA graphs were replayed in another order than in the frames before, in which each read the output "
                "of the one before it, or a forward ended between two of them; capture with --at-once (at_once=True), "
                "which does not rely on the order"
            )
        if not reading.names.isdisjoint(frame.names):  # named as if they had not waited
            self.session.postponed.settle(frame)
        device = self.session.device_frame(frame)
        fetched = [device.fetch(copied.memory, copied.index) for copied in reading.copies]
        payloads = [None if s.payload is None else s.payload.clone() for s in reading.sites] if reading.payload else []
        if reading.rows != {frame.rows.n_slots}:
            for site in reading.sites:
                if site.rows != frame.rows.n_slots:
                    text = f"recorded for {site.rows} token slots, replayed with {frame.rows.n_slots}"
                    self.unreach(site.name, text)
        metas = None
        before = (frame.seen, *frame.replayed_names)
        if len(reading.names) < len(reading.sites) or not all(reading.names.isdisjoint(names) for names in before):
            metas = [self._renamed(frame, site) for site in reading.sites]
        else:
            frame.replayed_names.append(reading.names)
        frame.deferred.append(Replay(reading, fetched, frame.rows.slot, frame.rows.n_slots, metas, payloads))

    def _renamed(self, frame: OpenFrame, site: GraphSite) -> SiteMeta:
        name = self.session.occurrence(frame, site.name)
        return site.meta if name == site.name else self.session.meta_like(name, site.meta)

    def betrayed(self) -> list[str]:
        """Sites whose readings turned out to be unequal after one of them had been given up."""
        return sorted({s.name for late, sites in self._settled if late.betrayed for s in sites if late.unequal(s)})

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
            "launches_left_out": self.left_out,
            "read_at_once": self.read_at_once,
            "light_refused": self.refused,
        }
