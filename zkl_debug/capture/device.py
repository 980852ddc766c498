"""Digests and payloads of tensors on an accelerator: computed where the tensor is, read out once a frame.

Nothing here waits for the device while the model runs. The digest kernel and the clone are issued on the current stream
right behind the kernel that made the tensor, so a later write in place cannot reach them. Digests land in chunks of one
size, already in the order of the frame's rows; when the frame ends each chunk is copied once, on a stream of its own,
to page-locked memory, and a chunk is used again only after its copy was seen to be done.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.layout import I64, RowView, raw_bits

#: Digests of a chunk: 16 MiB.
CHUNK_ROWS = 1 << 20


class Kernels:
    """What the probe asks of a device; the one implementation runs the Triton kernel, tests put in their own."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether digests of this tensor are computed on its device."""
        return tensor.device.type == "cuda" and _triton() is not None

    def capturing(self) -> bool:
        """Whether the current stream is recording a graph."""
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    def slots(self, rows: int) -> torch.Tensor:
        """Zeroed memory for ``rows`` digests that graphs write to, int64 [rows, 2], on the current device."""
        kernel = _triton()
        if kernel is not None:
            kernel.weights_on(torch.device("cuda", torch.cuda.current_device()), 1)  # none may be made in a recording
        return torch.zeros((rows, 2), dtype=torch.int64, device="cuda")

    def warm(self, tensor: torch.Tensor, rows: int) -> None:
        """Load the kernel that :meth:`digest` takes for such a tensor; nothing can be loaded while recording."""
        kernel = _triton()
        if kernel is not None and tensor.device.type == "cuda":
            kernel.digest_device(tensor, rows)

    def ready(self, tensor: torch.Tensor, rows: int) -> bool:
        """Whether :meth:`digest` of such a tensor can be recorded into a graph now."""
        kernel = _triton()
        view = kernel.lane_view(tensor, rows)
        return view is None or kernel.is_loaded(view)

    def moment(self) -> tuple[int, ...] | None:
        """What a recording has come to: unchanged as long as nothing is added to it; None when that is not known."""
        from zkl_debug.capture.capture_info import last_nodes

        return last_nodes()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a tensor; made anew at each replay when it is issued while a graph is recorded."""
        return tensor.clone(memory_format=torch.contiguous_format)

    def digest(
        self, tensor: torch.Tensor, rows: int, out: torch.Tensor, dest: torch.Tensor | None, *, clear: bool
    ) -> bool:
        """Issue the digests of ``rows`` rows into ``out`` [n, 2] int64, row i at ``dest[i]``; False if it cannot.

        Args:
            tensor: any layout the kernel can read without a copy.
            rows: rows of the tensor.
            out: where digests go.
            dest: output row of each row, int64 [rows], -1 to drop it; None when in order.
            clear: ``out`` may hold something: set it to zero first where the kernel adds.
        """
        kernel = _triton()
        view = kernel.lane_view(tensor, rows)
        if view is None:
            return False
        if clear and kernel.needs_zeros(view):
            out.zero_()
        kernel.digest_into(view, out.data_ptr(), 0 if dest is None else dest.data_ptr())
        return True


def _triton() -> Any:
    try:
        from zkl_debug import digest_triton
    except ImportError:
        return None
    return digest_triton


@dataclass
class Chunk:
    """Device memory for digests and the page-locked memory they are copied to, both int64 [n, 2]."""

    device: torch.Tensor
    host: torch.Tensor
    used: int = 0

    @property
    def room(self) -> int:
        """Digests that still fit."""
        return int(self.device.shape[0]) - self.used


class ChunkPool:
    """Chunks that are free; taken by the program's thread, given back by the one that read them out."""

    def __init__(self) -> None:
        self._free: list[Chunk] = []
        self._lock = threading.Lock()
        self._stream: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, device: torch.device, rows: int) -> Chunk:
        """A zeroed chunk of at least ``rows`` digests."""
        with self._lock:
            at = next((i for i, c in enumerate(self._free) if c.device.device == device and c.room >= rows), None)
            chunk = self._free.pop(at) if at is not None else None
        if chunk is None:
            size = max(CHUNK_ROWS, rows)
            with torch.inference_mode(mode=False):
                host = torch.empty((size, 2), dtype=torch.int64, pin_memory=device.type == "cuda")
                return Chunk(torch.zeros((size, 2), dtype=torch.int64, device=device), host)
        return chunk

    def give(self, chunk: Chunk) -> None:
        """A chunk whose contents were read."""
        chunk.used = 0
        with self._lock:
            self._free.append(chunk)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of the copies."""
        if device not in self._stream:
            self._stream[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream[device]


@dataclass(frozen=True)
class Pending:
    """Digests of a site that are still on the device: rows ``start`` .. ``start + rows`` of part ``part``.

    ``take`` picks rows on the host, None for all; ``payload`` is a clone of the rows.
    """

    part: int
    start: int
    rows: int
    take: I64 | None = None
    payload: torch.Tensor | None = None


@dataclass
class DeviceFrame:
    """What one frame has on the device.

    Attributes:
        pool: where chunks come from.
        kernels: the device.
        chunks: in order; a pending digest names one by its index.
        ready: recorded behind the last copy.
    """

    pool: ChunkPool
    kernels: Kernels
    chunks: list[Chunk] = field(default_factory=list)
    ready: Any = None
    _dest: dict[tuple[int, int], tuple[Any, torch.Tensor]] = field(default_factory=dict)

    def launch(self, view: RowView, payload: bool) -> Pending | None:
        """Issue digest and clone of the view's rows; None when the device has no kernel for this tensor."""
        tensor = view.tensor.detach()
        n_view, n = int(tensor.shape[0]), len(view.row)
        dest = None if view.take is None else self._dest_of(view.take, n_view, tensor.device)
        chunk = self.reserve(n, tensor.device)
        out = chunk.device[chunk.used : chunk.used + n]
        if not self.kernels.digest(tensor, n_view, out, dest, clear=False):
            return None
        start, chunk.used = chunk.used, chunk.used + n
        kept = _picked(tensor, view.take) if payload else None
        return Pending(len(self.chunks) - 1, start, n, None, kept)

    def reserve(self, rows: int, device: torch.device) -> Chunk:
        """The last chunk if ``rows`` digests fit, or a new one."""
        if not self.chunks or self.chunks[-1].room < rows or self.chunks[-1].device.device != device:
            self.chunks.append(self.pool.take(device, rows))
        return self.chunks[-1]

    def fetch(self, slots: torch.Tensor) -> Pending:
        """Issue the copy of graph slots [m, 2] to the host, on the current stream: the next replay overwrites them."""
        rows = int(slots.shape[0])
        chunk = self.reserve(rows, slots.device)
        start, chunk.used = chunk.used, chunk.used + rows
        chunk.device[start : chunk.used].copy_(slots)
        return Pending(len(self.chunks) - 1, start, rows)

    def copy_out(self) -> None:
        """Issue the copies of all chunks to the host; :meth:`arrays` waits for them."""
        for chunk in self.chunks:
            if chunk.device.device.type != "cuda":
                chunk.host[: chunk.used].copy_(chunk.device[: chunk.used])
                chunk.device[: chunk.used].zero_()
                continue
            stream = self.pool.stream(chunk.device.device)
            stream.wait_stream(torch.cuda.current_stream(chunk.device.device))
            with torch.cuda.stream(stream):
                chunk.host[: chunk.used].copy_(chunk.device[: chunk.used], non_blocking=True)
                chunk.device[: chunk.used].zero_()  # kernels of the next frame add into it
                self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self.ready.record(stream)

    def arrays(self) -> list[NDArray[np.uint64]]:
        """Digests of each chunk on the host, uint64 [used, 2]; waits for the copies and gives the chunks back."""
        if self.ready is not None:
            self.ready.synchronize()
        found = []
        for chunk in self.chunks:
            found.append(chunk.host[: chunk.used].numpy().copy().view(np.uint64))
            self.pool.give(chunk)
        self.chunks = []
        return found

    def _dest_of(self, take: I64, n_view: int, device: torch.device) -> torch.Tensor:
        """Where row i of the view goes among the rows that are taken, or -1; sent to the device once a frame."""
        key = (id(take), n_view)
        known = self._dest.get(key)
        if known is None:
            inverse = np.full(n_view, -1, np.int64)
            inverse[take] = np.arange(len(take))
            assert int((inverse >= 0).sum()) == len(take), "a row is taken twice"
            known = (take, torch.from_numpy(inverse).to(device, non_blocking=True))
            self._dest[key] = known  # holds ``take``, so that its id is not given to another array
        return known[1]


def _picked(tensor: torch.Tensor, take: I64 | None) -> torch.Tensor:
    if take is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.index_select(0, torch.from_numpy(take).to(tensor.device, non_blocking=True))


def payload_bits(pending: Pending) -> NDArray[Any] | None:
    """The payload of a site as raw bits on the host, [n, W], or None."""
    return None if pending.payload is None else raw_bits(pending.payload)
