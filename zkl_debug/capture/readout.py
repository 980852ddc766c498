"""Frames that have ended on their way to the writer: at once, or when their digests have come from the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zkl_debug.capture.batch import Batch
from zkl_debug.capture.device import ChunkPool, DeviceFrame
from zkl_debug.capture.drain import Drain
from zkl_debug.capture.frame import OpenFrame
from zkl_debug.schema import U64

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession


class ReadOut:
    """What the ended frames of one session wait in."""

    def __init__(self, session: CaptureSession) -> None:
        self._session = session
        self._pool = ChunkPool()
        self._batch: Batch | None = None
        self._drain: Drain | None = None
        self._noted: set[tuple[int, bool]] = set()

    def device_frame(self, frame: OpenFrame) -> DeviceFrame:
        """What the frame and those read out with it have on the device; made when first asked for."""
        if frame.device is None:
            frame.device = self._open().device
        return frame.device

    def add(self, frame: OpenFrame, running: OpenFrame | None) -> None:
        """A frame has ended; ``running`` is the one that has begun since, if one has."""
        self._note(frame)
        if frame.device is None and self._drain is None and not self._batch:
            self._file(frame, [])
            return
        batch = self._open()
        batch.add(frame)
        # What the running frame has on the device belongs to the same batch: that cannot be read out under it.
        if batch.full and (running is None or running.device is not batch.device):
            self.submit()

    @property
    def due(self) -> bool:
        """Whether the frames so far wait to be read out: not before one that began in their batch has ended."""
        return self._batch is not None and self._batch.full

    def submit(self) -> None:
        """Have the frames so far read out."""
        batch, self._batch = self._batch, None
        if batch:
            self._drain = self._drain or Drain()
            self._drain.submit(batch.job())

    def check(self) -> None:
        """Raise what stopped the read-out, if anything did."""
        if self._drain is not None and self._drain.failure is not None:
            raise self._drain.failure

    def hold(self) -> None:
        """Read nothing out until :meth:`go_on`: a device refuses that on any thread while a graph is recorded."""
        if self._drain is not None:
            self._drain.hold()

    def go_on(self) -> None:
        """Take back :meth:`hold`."""
        if self._drain is not None:
            self._drain.go_on()

    def flush(self) -> None:
        """Read out and file every frame so far."""
        self.submit()
        if self._drain is not None:
            self._drain.flush()

    def close(self) -> None:
        """:meth:`flush`, and end the thread that does it."""
        self.submit()
        drain, self._drain = self._drain, None
        if drain is not None:
            drain.close()

    def _open(self) -> Batch:
        if self._batch is None:
            self._batch = Batch(self._pool, self._session.kernels, self._session.twins, self._file)
        return self._batch

    def _note(self, frame: OpenFrame) -> None:
        """Keep which sites eager frames and graph frames had; those of a graph once, however often it is replayed."""
        eager = frame.given.graph < 0
        seen = self._session.seen_eager if eager else self._session.seen_graph
        seen.update(frame.seen)
        for names in frame.replayed_names:
            if (id(names), eager) not in self._noted:
                self._noted.add((id(names), eager))  # whose id is its own: the watch keeps it
                seen.update(names)

    def _file(self, frame: OpenFrame, parts: list[U64]) -> None:
        """Hand a frame to the writer: on the program's thread, or on that of the drain."""
        writer = self._session.writer
        assert writer is not None
        blocks = frame.sites(parts)  # may add label rows, so it comes first
        record = frame.rows.frame_record(frame.index, frame.event_seq, frame.n_rows)
        writer.write_frame(record, frame.table(), blocks)
