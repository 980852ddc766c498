"""Frames that are read out together.

A decode step leaves a few hundred kilobytes of digests. Reading each out by itself would cost the program more than the
digests did, so frames share one :class:`~zkl_debug.capture.device.DeviceFrame` until they are worth it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from zkl_debug.capture.device import CHUNK_ROWS, ChunkPool, DeviceFrame
from zkl_debug.capture.drain import Job
from zkl_debug.capture.frame import OpenFrame
from zkl_debug.capture.kernels import Kernels
from zkl_debug.capture.twins import Twins
from zkl_debug.schema import U64

#: What files a frame, given the digests of each chunk.
Filing = Callable[[OpenFrame, list[U64]], None]

_FRAMES = 16
_SECONDS = 0.5


class Batch:
    """Frames, in order, and what they have on the device.

    Args:
        pool: where chunks come from.
        kernels: the device.
        twins: told which pairs of sites were equal.
        file: files one frame.
    """

    def __init__(self, pool: ChunkPool, kernels: Kernels, twins: Twins, file: Filing) -> None:
        self.device = DeviceFrame(pool, kernels)
        self.twins = twins
        self._file = file
        self._frames: list[OpenFrame] = []
        self._begun = time.monotonic()
        self._payload = 0

    def add(self, frame: OpenFrame) -> None:
        """A frame has ended; lets go of the tensors it holds."""
        frame.forget()
        self._frames.append(frame)
        self._payload += frame.payload_bytes

    @property
    def full(self) -> bool:
        """Whether it is time to read them out."""
        if not self._frames:
            return False
        used = sum(chunk.used for chunk in self.device.chunks)
        late = time.monotonic() - self._begun > _SECONDS
        return late or bool(self._payload) or len(self._frames) >= _FRAMES or 2 * used >= CHUNK_ROWS

    def job(self) -> Job:
        """The frames as a job of the drain; issues their copies. The batch is used up."""
        frames, device, payload = self._frames, self.device, self._payload
        device.copy_out()

        def read() -> Callable[[], None]:
            parts = device.arrays()
            for frame in frames:
                frame.judge(self.twins, parts)

            def file() -> None:
                for frame in frames:
                    self._file(frame, parts)

            return file

        return Job(read, sum(chunk.used for chunk in device.chunks) * 16 + payload)

    def __len__(self) -> int:
        return len(self._frames)
