"""A capture session: frames are opened by an adapter, sites are recorded by hooks and taps, rows go to the store."""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.beginning import Beginning, goes_on
from zkl_debug.capture.betrayed import betrayed
from zkl_debug.capture.device import DeviceFrame
from zkl_debug.capture.forcing import Visitor
from zkl_debug.capture.frame import Block, OpenFrame
from zkl_debug.capture.graphs import GraphWatch
from zkl_debug.capture.guard import Guard
from zkl_debug.capture.kernels import Kernels
from zkl_debug.capture.layout import RowView, dtype_name, flattened, raw_rows, resolve
from zkl_debug.capture.options import CaptureOptions, FirstRequests
from zkl_debug.capture.postponed import Postponed, Waiting
from zkl_debug.capture.readout import ReadOut
from zkl_debug.capture.repeats import Repeats
from zkl_debug.capture.rows import FrameRows, Geometries, Geometry, Sketch
from zkl_debug.capture.summary import summary_of
from zkl_debug.capture.twins import Twins
from zkl_debug.capture.viewing import ShardOf, digest_view, sharded, with_shard
from zkl_debug.digest_torch import digest_tensor
from zkl_debug.errors import ProbeError
from zkl_debug.schema import EventRecord, Json, SiteKind, SiteMeta, StateRecord, parse_site

if TYPE_CHECKING:
    from zkl_debug.store.writer import CaptureWriter

#: Tensors of a forward that what follows it may see again, such as logits.
_BEHIND = 2


class CaptureSession:
    """Collects the sites of each frame and hands them to the store.

    One session observes one model on one thread of control. Recording outside a frame is counted, not stored.
    """

    def __init__(self, writer: CaptureWriter | None, options: CaptureOptions, forcing: Visitor | None = None) -> None:
        self.writer = writer
        self.forcing = forcing
        self.options = options
        self.enabled = options.level != "off"
        self.errors: list[str] = []
        self.metas: dict[str, SiteMeta] = {}
        self.not_rows: dict[str, str] = {}
        self.outside: dict[str, int] = {}
        self.filtered: set[str] = set()
        self.unkeyed_rows = 0
        self.frames_written = 0
        self.event_seq = 0
        self.step = -1
        self.weight_version = 0
        self.meta: dict[str, Json] = {}
        self.requests = FirstRequests(options.requests)
        self.in_forward = False  # between the model's first hook and its last; to be asked by :meth:`inside`
        self.calls: Callable[[], int] = lambda: 1  # of the model, that are under way
        self.broken_off = 0  # forwards
        self.kernels = Kernels()
        self.graphs: GraphWatch | None = None
        self.twins = Twins(options.at_once)
        self.seen_eager: set[str] = set()
        self.seen_graph: set[str] = set()
        self.read_out = ReadOut(self)
        self._geometries = Geometries()
        self.beginning: Beginning | None = None  # of a frame that is still to be opened
        self._frame: OpenFrame | None = None
        self._ended: OpenFrame | None = None  # still to be finished, while another is open already
        self._next_frame = 0
        self.shard_of: ShardOf | None = None
        self._wanted: dict[str, bool] = {}
        self._repeats = Repeats(self)
        self.postponed = Postponed(self)
        self._lock = threading.RLock()
        self.path: list[str] = []  # modules being run, outermost first

    # ---- failure of the probe -------------------------------------------------------------------------------------
    def guarded(self, where: str) -> Guard:
        """Run probe code: an exception disables the probe (or is raised when strict), never the program."""
        return Guard(self, where)

    def release(self, kernels: Kernels) -> None:
        """End a :meth:`~zkl_debug.capture.kernels.Kernels.hold`."""
        launches = kernels.release()
        if launches and self.graphs is not None:
            self.graphs.issued(launches)

    def drop_frames(self) -> None:
        """Let go of the frames that are open or put aside; they are not written."""
        self.frame = self._ended = None

    # ---- frames ---------------------------------------------------------------------------------------------------
    @property
    def frame(self) -> OpenFrame | None:
        """The frame that is open; one that has only begun is opened now."""
        if self.beginning is not None:
            self.open_begun()
        return self._frame

    @frame.setter
    def frame(self, frame: OpenFrame | None) -> None:
        self._frame, self.beginning = frame, None

    def begin(self, rows: FrameRows | Sketch, opens: Callable[[], None]) -> None:
        """A forward begins, whose frame ``opens`` opens by :meth:`begin_frame`: later, if it goes as the last one."""
        last = self.frame
        if last is not None and goes_on(last, rows) and self._ended is None and not self.options.requests:
            trusted, stream = self.twins.until_end(last.kind, self._next_frame), self.kernels.stream()
            if trusted and stream == last.stream:
                self.beginning = Beginning(opens, trusted, stream)
                return
        opens()

    def open_begun(self) -> None:
        """Open a frame that has only begun, if there is one."""
        beginning, self.beginning = self.beginning, None
        if beginning is None:
            return
        with self.guarded("model:in"):
            beginning.open()
            assert self._frame is not None, "nothing is left out where a frame was not opened at once"
            beginning.into(self._frame)

    def begin_frame(self, rows: FrameRows | Sketch) -> None:
        """Open a frame; the one before it, if still open, is written.

        Before one that replays graphs it is only put aside: until the first is launched, a device has nothing to do.
        """
        last = self.frame
        late = isinstance(rows, Sketch) and rows.graph >= 0 and not self.read_out.due
        if late and last is not None and last.ended and not last.plans:
            self._finish_ended()
            last.event_seq, self._ended, self.frame = self.event_seq, last, None
        else:
            self.end_frame()
        if self.options.requests and isinstance(rows, Sketch):
            rows = rows.rows()
        if isinstance(rows, FrameRows) and not self.requests.admit(rows):
            self._finish_ended()  # for nobody will when this forward has been issued
            return
        if rows.step < 0:
            rows.step = self.step
        rows.weight_version = self.weight_version
        self.frame = frame = OpenFrame(self._next_frame, rows)
        self.postponed.begin(frame)
        self._next_frame += not rows.warmup

    def forward_ended(self, *, failed: bool = False) -> None:
        """The model has issued all it will: issue what can wait until then, while a device still works on the rest."""
        frame = self.frame
        if frame is not None:
            frame.failed = failed
        if frame is None or self.writer is None or frame.given.warmup or self.recording:
            return
        self.rows_of(frame)
        self._finish_ended(followed=True)
        self._issue(frame)
        if frame.device is not None and frame.given.graph < 0:
            frame.device.copy_so_far()
            frame.forget(keep=_BEHIND)  # now, for what follows a forward waits for it
        self.postponed.behind(frame)

    def rows_of(self, frame: OpenFrame) -> FrameRows:
        """The rows of a frame, worked out now if they were not yet."""
        rows = frame.rows
        if rows.geometry is None and not rows.warmup:
            self._geometries.share(rows, frame.places)
        return rows

    def geometry_of(self, frame: OpenFrame) -> Geometry:
        """Where the rows of a frame lie; known before they are, where they lie as those of one before it."""
        if frame.geometry is None:
            frame.geometry = self._geometries.of(frame.given) or self.rows_of(frame).geometry
        assert frame.geometry is not None, "rows of a warm-up mean nothing"
        return frame.geometry

    def end_frame(self) -> None:
        """Write the open frame, if any; a warm-up is dropped, and so is a forward that broke off."""
        self.inside()
        frame = self.frame
        with self.guarded("read-out"):
            self._finish_ended()
        if frame is None or self.writer is None or frame.given.warmup:
            self.frame = None
            return
        with self.guarded("read-out"):
            self.rows_of(frame)
            self._issue(frame)
            self.read_out.check()
        self.frame = None
        if not self.enabled:
            return
        frame.event_seq = self.event_seq
        with self.guarded("read-out"):
            self._add(frame)

    def inside(self, calls: int = 0) -> bool:
        """Whether the model runs, by more than so many calls.

        A forward may break off without its last hook: an interrupt that the program survives. It is left out, for what
        its rows were may be another batch by now; unless another thread has begun the next one meanwhile.
        """
        frame, begun = self._frame, self.beginning
        runs = not self.in_forward or torch.compiler.is_compiling() or self.calls() > calls
        if runs or frame is not self._frame or begun is not self.beginning:
            return self.in_forward
        self.in_forward = False
        if self.graphs is not None:
            self.graphs.handing = None
        if begun is not None:
            self.beginning, self.broken_off = None, self.broken_off + 1
        elif frame is not None and not frame.ended:
            if not frame.given.warmup:
                self._next_frame, self.broken_off = frame.index, self.broken_off + 1
            self.frame = None
        return self.in_forward

    def _finish_ended(self, *, followed: bool = False) -> None:
        """Write the frame that was put aside, if any; ``followed``: the next forward has been issued."""
        frame = self._ended
        if frame is None:
            return
        frame.followed = followed
        self._issue(frame)
        self.read_out.check()
        if (frame.parts or frame.may_wait) and self.kernels.stream() != frame.stream:
            self.kernels.follow(frame.stream)  # what is copied now was made there
        self._ended = None  # not before: an interrupt that the program survives must not lose it
        self._add(frame)

    def _issue(self, frame: OpenFrame) -> None:
        """Issue what of a frame was put off."""
        if self.graphs is not None:
            self.graphs.collect(frame)
        self.postponed.settle(frame)

    def _add(self, frame: OpenFrame) -> None:
        self.frames_written += 1
        self.read_out.add(frame, self.frame)

    def flush(self) -> None:
        """Write the open frame and wait until every frame so far is durable."""
        self.end_frame()
        self.read_out.flush()
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        """Hand every frame to the writer and end the read-out."""
        self.end_frame()
        self.read_out.close()
        self.errors += betrayed(self)

    def device_frame(self, frame: OpenFrame) -> DeviceFrame:
        """What the frame and those read out with it have on the device; made when first asked for."""
        return self.read_out.device_frame(frame)

    # ---- sites ----------------------------------------------------------------------------------------------------
    def wants(self, name: str) -> bool:
        """Whether the site passes the ``sites`` and ``layers`` filters."""
        known = self._wanted.get(name)
        if known is not None:
            return known
        ok = not self.options.sites or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.options.sites)
        if ok and self.options.layers is not None:
            layer = parse_site(name).layer
            ok = layer < 0 or self.options.layers[0] <= layer <= self.options.layers[1]
        if not ok:
            self.filtered.add(name)
        self._wanted[name] = ok
        return ok

    def record(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        kind: SiteKind = SiteKind.TAP,
        semantic: str = "",
        layout: str = "",
        flatten: bool = False,
    ) -> bool:
        """Record a tensor whose leading dimensions are the frame's token slots.

        Args:
            name: canonical site name; a second occurrence in the same frame becomes ``operator#1`` and so on.
            tensor: see :func:`zkl_debug.capture.layout.resolve` for the shapes.
            kind: how it was observed.
            semantic: operator class.
            layout: ``"bs"`` or ``"sb"`` where the shape alone is ambiguous.
            flatten: store the row as one dimension (sites whose two sides keep heads apart or not).

        Returns:
            Whether rows were recorded.
        """
        frame = self.frame
        if frame is None:
            self.outside[name] = self.outside.get(name, 0) + 1
            return False
        if not self.wants(name):
            return False
        recording = self.recording
        if frame.may_wait and not recording:
            return self.postponed.record(frame, Waiting(name, tensor, kind, semantic, layout, flatten))
        short = self._repeats.allowed and not recording and tensor.is_inference()
        places = self.rows_of(frame) if short or frame.given.warmup else self.geometry_of(frame)
        if short and self._repeats.record(frame, name, tensor, kind, semantic, layout, flatten):
            return True
        if frame.given.warmup and not recording:
            view = resolve(tensor, places, layout)
            if view is not None:  # keeps the order of execution among the sites inside the graphs
                self.meta_of(name, flattened(view) if flatten else view, kind, semantic)
                self.kernels.warm(view.tensor.detach(), int(view.tensor.shape[0]))
            return False
        if recording and self.graphs is not None:
            view = self.graphs.resolve(places, tensor, layout)
        else:
            view = resolve(tensor, places, layout)
        if view is None:
            self.not_rows.setdefault(name, str(tuple(tensor.shape)))
            return False
        if flatten:
            view = flattened(view)
        view = sharded(self.shard_of, name, view, semantic)
        if recording and view.shard is not None:
            self.out_of_reach(name, "a shard: the kernels inside a graph know no place in the whole row")
            return False
        if recording and self.graphs is not None:
            meta = self.meta_of(name, view, kind, semantic)
            self.graphs.record(name, meta, view, self.options.level == "payload")
            return True
        self.record_view(name, view, kind=kind, semantic=semantic, source=tensor)
        if short:
            self._repeats.remember(frame.rows, tensor, view, layout, flatten)
        return True

    def record_view(
        self,
        name: str,
        view: RowView,
        *,
        kind: SiteKind,
        semantic: str = "",
        source: torch.Tensor | None = None,
        part: bool = False,
        always: bool = False,
    ) -> None:
        """Record rows that were resolved by the caller (expert-permuted rows, label rows).

        ``always``: with payload, whatever the level.

        ``source`` is the tensor the view was taken of; when the next hook sees the very same object its digests are
        used again. ``part``: other rows of the site come, or came, in other calls of the frame.
        """
        frame = self.frame
        if frame is None or frame.given.warmup or len(view.row) == 0 or not (always or self.wants(name)):
            return
        if self.recording:
            self.out_of_reach(name, "its rows are known on the host only, after the call")
            return
        view = sharded(self.shard_of, name, view, semantic)
        name = self.occurrence(frame, name) if not part else name
        frame.seen.setdefault(name, 1)
        meta = self.meta_of(name, view, kind, semantic)
        if self.forcing is not None:
            rows = self.rows_of(frame).rows
            table = np.concatenate([rows, *frame.labels]) if frame.labels else rows
            self.forcing.visit(name, view, kind, table[view.row], view.tensor if source is None else source)
            return
        wanted = self.options.level == "payload" or always
        if view.shard is None and self.kernels.takes(view.tensor):
            self.device_frame(frame)
            pending = frame.launch(name, view, source, wanted, self.twins)
            if pending is not None:
                frame.blocks.append(Block(meta, view.row, pending=pending))
                return
        payload = raw_rows(view) if wanted else None
        digest = digest_view(frame, view, source, digest_tensor)
        frame.blocks.append(Block(meta, view.row, digest, payload))

    def record_call(self, name: str, value: torch.Tensor, semantic: str = "") -> None:
        """Keep a fact of the open call, beside its first row; at payload level only, for it is read and not compared.

        Args:
            name: canonical site name.
            value: shape [W].
            semantic: operator class.
        """
        frame = self.frame
        unread = self.options.level != "payload" or self.forcing is not None or self.recording
        if frame is None or unread or frame.rows.n_rows == 0:
            return
        view = RowView(value.detach().reshape(1, -1), None, np.zeros(1, np.uint32), (value.numel(),))
        self.record_view(name, view, kind=SiteKind.CALL, semantic=semantic)

    def late(self, *tensors: torch.Tensor) -> bool:
        """Whether what is recorded of these tensors may be worked out when the frame is filed."""
        frame = self.frame
        if frame is None or frame.given.warmup or self.forcing is not None or self.recording:
            return False
        return self.shard_of is None and all(map(self.kernels.takes, tensors))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor on the host, to be read when the open frame is filed."""
        if self.frame is None:
            raise ProbeError("no frame is open")
        return self.device_frame(self.frame).to_host(tensor)

    def parent_rows(self) -> NDArray[np.void]:
        """Rows of the open frame without label rows."""
        if self.frame is None:
            raise ProbeError("no frame is open")
        return self.frame.rows.rows

    def occurrence(self, frame: OpenFrame, name: str) -> str:
        """The name under which this occurrence of a site in the frame is filed."""
        count = frame.seen.get(name)
        if count is None:
            count = sum(name in names for names in frame.replayed_names)
        frame.seen[name] = count + 1
        if count == 0:
            return name
        head, port = name.rsplit(":", 1)
        return f"{head}#{count}:{port}"

    def meta_of(self, name: str, view: RowView, kind: SiteKind, semantic: str) -> SiteMeta:
        """The meta of a site, made when it is seen first."""
        meta = self.meta_for(name, dtype_name(view.tensor), view.row_shape, kind, semantic, view)
        return meta if meta is self.metas[name] else with_shard(meta, view)

    def meta_for(
        self,
        name: str,
        dtype: str,
        row_shape: tuple[int, ...],
        kind: SiteKind,
        semantic: str,
        view: RowView | None = None,
    ) -> SiteMeta:
        """The meta of a site whose rows are of this type and shape."""
        known = self.metas.get(name)
        if known is None:
            site = parse_site(name)
            known = SiteMeta(name, kind, site.layer, len(self.metas), site.port, dtype, row_shape, semantic=semantic)
            known = self.metas[name] = known if view is None else with_shard(known, view)
        elif known.torch_dtype != dtype or known.row_shape != row_shape:
            # The writer files it beside the first form and notes it.
            return SiteMeta(name, kind, known.layer, known.order, known.port, dtype, row_shape, semantic=semantic)
        return known

    def meta_like(self, name: str, meta: SiteMeta) -> SiteMeta:
        """The meta of a further occurrence of a site."""
        return self.metas.setdefault(name, replace(meta, name=name, order=len(self.metas)))

    # ---- state and events -----------------------------------------------------------------------------------------
    def event(self, name: str, detail: Mapping[str, Json] | None = None) -> int:
        """Note an event; returns its sequence number."""
        self.end_frame()
        self.event_seq += 1
        if self.writer is not None:
            last = self._next_frame - 1
            self.writer.write_event(
                EventRecord(self.event_seq, name, self.step, self.weight_version, last, dict(detail or {}))
            )
        return self.event_seq

    def state(self, records: Sequence[StateRecord]) -> None:
        """Store a state snapshot under the current event."""
        if self.writer is not None:
            self.writer.write_state(self.event_seq, records)

    # ---- graphs ---------------------------------------------------------------------------------------------------
    @property
    def recording(self) -> bool:
        """Whether a CUDA graph is being recorded: nothing may be read from the device now."""
        return self.graphs is not None and self.graphs.active

    def out_of_reach(self, name: str, reason: str) -> None:
        """List a site that cannot be recorded inside a graph."""
        if self.graphs is not None:
            self.graphs.unreach(name, reason)

    # ---- module path ----------------------------------------------------------------------------------------------
    def current_path(self) -> str:
        """Path of the innermost module being run, or an empty string."""
        return self.path[-1] if self.path else ""

    def summary(self) -> dict[str, Json]:
        """What the probe saw and could not see; goes into the manifest."""
        return summary_of(self)
