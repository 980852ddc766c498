"""A capture session: frames are opened by an adapter, sites are recorded by hooks and taps, rows go to the store."""

from __future__ import annotations

import fnmatch
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import _disable_current_modes

from zkl_debug.capture.device import ChunkPool, DeviceFrame, Kernels
from zkl_debug.capture.drain import Drain
from zkl_debug.capture.frame import Block, OpenFrame
from zkl_debug.capture.graphs import GraphWatch
from zkl_debug.capture.layout import RowView, dtype_name, raw_rows, resolve
from zkl_debug.capture.rows import FrameRows, label_rows
from zkl_debug.capture.twins import Twins
from zkl_debug.capture.viewing import ShardOf, digest_view, sharded, with_shard
from zkl_debug.digest_torch import digest_tensor
from zkl_debug.errors import ProbeError, UsageError
from zkl_debug.schema import (
    EventRecord,
    Json,
    Phase,
    SiteBlock,
    SiteKind,
    SiteMeta,
    StateRecord,
    parse_site,
    row_phase,
)

if TYPE_CHECKING:
    from zkl_debug.capture.forcing import Forcing
    from zkl_debug.store.writer import CaptureWriter


@dataclass(frozen=True)
class CaptureOptions:
    """What to record.

    Attributes:
        level: ``digest`` (16 bytes a row and site), ``payload`` (digests and raw bits) or ``off`` (attached, silent).
        sites: shell-style patterns of canonical site names; empty means all.
        layers: inclusive range of layers whose sites are recorded; sites outside any layer always are.
        budget: cap on payload bytes; None for no cap.
        strict: raise probe failures instead of disabling the probe.
        requests: record while one of the first so many generation requests runs; 0 for all.
    """

    level: str = "digest"
    sites: tuple[str, ...] = ()
    layers: tuple[int, int] | None = None
    budget: int | None = None
    strict: bool = False
    requests: int = 0

    def __post_init__(self) -> None:
        if self.level not in ("digest", "payload", "off"):
            raise UsageError(f"capture level {self.level!r}", "digest, payload or off")


class CaptureSession:
    """Collects the sites of each frame and hands them to the store.

    One session observes one model on one thread of control. Recording outside a frame is counted, not stored.
    """

    def __init__(self, writer: CaptureWriter | None, options: CaptureOptions, forcing: Forcing | None = None) -> None:
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
        self.not_recorded = 0  # frames beyond the requests that were asked for
        self._requests: set[int] = set()
        self.in_forward = False  # between the model's first hook and its last
        self.kernels = Kernels()
        self.graphs: GraphWatch | None = None
        self.twins = Twins()
        self.seen_eager: set[str] = set()
        self.seen_graph: set[str] = set()
        self._pool = ChunkPool()
        self._drain: Drain | None = None
        self._frame: OpenFrame | None = None
        self._next_frame = 0
        self.shard_of: ShardOf | None = None
        self._wanted: dict[str, bool] = {}
        self._lock = threading.RLock()
        self.path: list[str] = []  # modules being run, outermost first

    # ---- failure of the probe -------------------------------------------------------------------------------------
    @contextmanager
    def guarded(self, where: str) -> Any:
        """Run probe code: an exception disables the probe (or is raised when strict), never the program."""
        try:
            with torch.no_grad(), _disable_current_modes():
                yield
        except Exception as error:
            self.fail(where, error)

    def fail(self, where: str, error: BaseException) -> None:
        """Disable the probe, remember why and say so on stderr.

        Raises:
            ProbeError: in strict mode.
        """
        text = f"{where}: {type(error).__name__}: {error}"
        self.errors.append(text)
        self.enabled = False
        self._frame = None
        if self.options.strict:
            raise ProbeError(f"the probe failed at {text}") from error
        print(f"zkl-debug: the probe failed and is off from here on; the program goes on. {text}", file=sys.stderr)
        for line in traceback.format_exception(error)[-4:]:
            print("  " + line.rstrip().replace("\n", "\n  "), file=sys.stderr)

    # ---- frames ---------------------------------------------------------------------------------------------------
    @property
    def frame(self) -> OpenFrame | None:
        """The open frame, if any."""
        return self._frame

    def begin_frame(self, rows: FrameRows) -> None:
        """Open a frame; the one before it, if still open, is written."""
        self.end_frame()
        if self.options.requests and not self._admits(rows):
            return
        if self.step >= 0 and rows.step < 0:
            rows.step = self.step
        rows.weight_version = self.weight_version
        self._frame = OpenFrame(self._next_frame, rows)
        self._next_frame += not rows.warmup

    def _admits(self, rows: FrameRows) -> bool:
        """Whether one of the first ``requests`` generation requests is in a frame; scoring frames have none."""
        generated = row_phase(rows.rows["flags"]) != Phase.SCORE
        if rows.warmup or not generated.any():
            return True
        samples = dict.fromkeys(rows.rows["sample"][generated].tolist())
        room = self.options.requests - len(self._requests)
        self._requests.update([sample for sample in samples if sample not in self._requests][:room])
        if self._requests.isdisjoint(samples):
            self.not_recorded += 1
            return False
        return True

    def end_frame(self) -> None:
        """Write the open frame, if any; a warm-up is dropped."""
        frame = self._frame
        if frame is None or self.writer is None or frame.rows.warmup:
            self._frame = None
            return
        with self.guarded("read-out"):
            if self.graphs is not None:
                self.graphs.collect(frame)
            self._check_drain()
        self._frame = None
        if not self.enabled:
            return
        (self.seen_eager if frame.rows.graph < 0 else self.seen_graph).update(frame.seen)
        self.frames_written += 1
        record = frame.rows.frame_record(frame.index, self.event_seq, frame.n_rows)

        def file(table: NDArray[np.void], blocks: list[SiteBlock]) -> None:
            assert self.writer is not None
            self.writer.write_frame(record, table, blocks)

        if frame.device is None and self._drain is None:
            file(frame.table(), frame.finished())
            return
        with self.guarded("read-out"):
            self._drain = self._drain or Drain()
            self._drain.submit(frame.job(self.device_frame(frame), file, self.twins))

    def _check_drain(self) -> None:
        if self._drain is not None and self._drain.failure is not None:
            raise self._drain.failure

    def flush(self) -> None:
        """Write the open frame and wait until every frame so far is durable."""
        self.end_frame()
        if self._drain is not None:
            self._drain.flush()
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        """Hand every frame to the writer and end the read-out."""
        self.end_frame()
        drain, self._drain = self._drain, None
        if drain is not None:
            drain.close()
        if self.twins.betrayed:
            pairs = ", ".join(f"{a} = {b}" for _, a, b in sorted(self.twins.betrayed)[:3])
            self.errors.append(f"sites that shared one reading turned out to differ later: {pairs}")

    def device_frame(self, frame: OpenFrame) -> DeviceFrame:
        """What the frame has on the device; made when first asked for."""
        if frame.device is None:
            frame.device = DeviceFrame(self._pool, self.kernels)
        return frame.device

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
        frame = self._frame
        if frame is None:
            self.outside[name] = self.outside.get(name, 0) + 1
            return False
        if not self.wants(name):
            return False
        recording = self.recording
        if frame.rows.warmup and not recording:
            view = resolve(tensor, frame.rows, layout)
            if view is not None:  # keeps the order of execution among the sites inside the graphs
                self._meta(name, self._flat(view) if flatten else view, kind, semantic)
                self.kernels.warm(view.tensor.detach(), int(view.tensor.shape[0]))
            return False
        if recording and self.graphs is not None:
            view = self.graphs.resolve(frame.rows, tensor, layout)
        else:
            view = resolve(tensor, frame.rows, layout)
        if view is None:
            self.not_rows.setdefault(name, str(tuple(tensor.shape)))
            return False
        if flatten:
            view = self._flat(view)
        view = sharded(self.shard_of, name, view, semantic)
        if recording and view.shard is not None:
            self.out_of_reach(name, "a shard: the kernels inside a graph know no place in the whole row")
            return False
        if recording and self.graphs is not None:
            meta = self._meta(name, view, kind, semantic)
            self.graphs.record(name, meta, view, self.options.level == "payload")
            return True
        self.record_view(name, view, kind=kind, semantic=semantic, source=tensor)
        return True

    @staticmethod
    def _flat(view: RowView) -> RowView:
        width = int(np.prod(view.row_shape, dtype=np.int64))
        return RowView(view.tensor.reshape(view.tensor.shape[0], width), view.take, view.row, (width,))

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
        frame = self._frame
        if frame is None or frame.rows.warmup or len(view.row) == 0 or not (always or self.wants(name)):
            return
        if self.recording:
            self.out_of_reach(name, "its rows are known on the host only, after the call")
            return
        view = sharded(self.shard_of, name, view, semantic)
        name = self.occurrence(frame, name) if not part else name
        frame.seen.setdefault(name, 1)
        meta = self._meta(name, view, kind, semantic)
        if self.forcing is not None:
            table = np.concatenate([frame.rows.rows, *frame.labels]) if frame.labels else frame.rows.rows
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
        frame = self._frame
        unread = self.options.level != "payload" or self.forcing is not None or self.recording
        if frame is None or unread or len(frame.rows.rows) == 0:
            return
        view = RowView(value.detach().reshape(1, -1), None, np.zeros(1, np.uint32), (value.numel(),))
        self.record_view(name, view, kind=SiteKind.CALL, semantic=semantic)

    def record_labels(
        self,
        label_site: str,
        rows: NDArray[np.void],
        selected: torch.Tensor,
        used: torch.Tensor,
        table: torch.Tensor | None = None,
    ) -> None:
        """Record selected log-probs on label rows, with the label that was really used.

        Args:
            label_site: site of the selected log-prob, e.g. ``logprobs/selected:out.0``.
            rows: label rows from :func:`zkl_debug.capture.rows.label_rows`, shape [n].
            selected: log-probs, shape [n], float32.
            used: label ids that were used, shape [n], int64; teacher forcing writes the other side's into it.
            table: log-probs of the whole vocabulary, shape [n, V]. Where a label was put right, the log-prob is
                looked up again in it; without it the old label's stays.
        """
        frame = self._frame
        if frame is None or frame.rows.warmup or len(rows) == 0:
            return
        index = (frame.n_rows + np.arange(len(rows))).astype(np.uint32)
        frame.labels.append(rows)
        before = used.clone() if self.forcing is not None else used
        self.record_view("logprobs/label:out.0", RowView(used, None, index, ()), kind=SiteKind.TAP, semantic="label")
        again = getattr(self.forcing, "looked_up_again", None)  # others that only look on change no label
        if again is not None and table is not None:
            selected = again(selected, table, before, used)
        view = RowView(selected.contiguous(), None, index, ())
        self.record_view(label_site, view, kind=SiteKind.TAP, semantic="selected")

    def parent_rows(self) -> NDArray[np.void]:
        """Rows of the open frame without label rows."""
        if self._frame is None:
            raise ProbeError("no frame is open")
        return self._frame.rows.rows

    def occurrence(self, frame: OpenFrame, name: str) -> str:
        """The name under which this occurrence of a site in the frame is filed."""
        count = frame.seen.get(name, 0)
        frame.seen[name] = count + 1
        if count == 0:
            return name
        head, port = name.rsplit(":", 1)
        return f"{head}#{count}:{port}"

    def _meta(self, name: str, view: RowView, kind: SiteKind, semantic: str) -> SiteMeta:
        known = self.metas.get(name)
        dtype = dtype_name(view.tensor)
        if known is None:
            site = parse_site(name)
            known = SiteMeta(
                name, kind, site.layer, len(self.metas), site.port, dtype, view.row_shape, semantic=semantic
            )
            known = with_shard(known, view)
            self.metas[name] = known
        elif known.torch_dtype != dtype or known.row_shape != view.row_shape:
            # The writer files it beside the first form and notes it.
            other = SiteMeta(name, kind, known.layer, known.order, known.port, dtype, view.row_shape, semantic=semantic)
            return with_shard(other, view)
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
        return {
            "probe": {"ok": not self.errors, "errors": list(self.errors)},
            "level": self.options.level,
            "filtered_sites": len(self.filtered),
            "not_rows": dict(sorted(self.not_rows.items())),
            "outside_frames": dict(sorted(self.outside.items())),
            "unkeyed_rows": self.unkeyed_rows,
            "frames": self.frames_written,
            "notes": self._notes(),
            "graphs": self.graphs.summary(self.seen_eager, self.seen_graph) if self.graphs is not None else None,
        }

    def _notes(self) -> list[str]:
        if not self.not_recorded:
            return []
        return [f"{self.not_recorded} forwards ran none of the first {self.options.requests} requests: not recorded"]


def make_label_rows(
    session: CaptureSession,
    parents: NDArray[np.integer],
    labels: NDArray[np.integer],
    extra_flags: NDArray[Any] | int = 0,
) -> NDArray[np.void]:
    """Label rows for some rows of the open frame.

    Args:
        session: the session with an open frame.
        parents: indices into the frame's rows, shape [n].
        labels: label token of each, shape [n].
        extra_flags: flags to add to each row, a scalar or shape [n].
    """
    rows = label_rows(session.parent_rows()[parents], labels)
    rows["flags"] |= np.asarray(extra_flags, np.uint32)
    return rows
