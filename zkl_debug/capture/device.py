"""Digests and payloads of tensors on an accelerator: computed where the tensor is, read out once a frame.

Nothing here waits for the device while the model runs. The digest kernel and the clone are issued on the current stream
right behind the kernel that made the tensor, so a later write in place cannot reach them. Digests land in chunks of one
size, already in the order of the frame's rows; they are copied to page-locked memory, many of them on a stream of their
own, and a chunk is used again only after its copy was seen to be done.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.kernels import Again, Kernels
from zkl_debug.capture.layout import I64, RowView, raw_bits

#: Digests of a chunk: 16 MiB.
CHUNK_ROWS = 1 << 20
_MOST_DESTS = 64
_WORTH_A_COPY = 1 << 16


@dataclass
class Chunk:
    """Device memory for digests and the page-locked memory they are copied to, both int64 [n, 2].

    Attributes:
        used: digests in it.
        copied: of these, the first so many whose copy was issued.
    """

    device: torch.Tensor
    host: torch.Tensor
    used: int = 0
    copied: int = 0

    def __post_init__(self) -> None:
        self.words = self.device.view(-1).view(torch.int32)

    def address(self, row: int) -> int:
        """Where a digest lies on the device."""
        return self.device.data_ptr() + 16 * row

    @property
    def room(self) -> int:
        """Digests that still fit."""
        return int(self.device.shape[0]) - self.used


class ChunkPool:
    """Chunks that are free; taken by the program's thread, given back by the one that read them out."""

    def __init__(self) -> None:
        self._free: list[Chunk] = []
        self._lock = threading.Lock()
        self._stream: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}
        self._dest: dict[tuple[int, int, torch.device], tuple[I64, torch.Tensor]] = {}

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
        """A chunk whose contents were read: what is not written next time must not be taken for a digest."""
        used = chunk.device[: chunk.used]
        stream = self.stream(used.device, clears=True) if used.is_cuda else None
        with torch.cuda.stream(stream):
            used.zero_()
        if stream is not None:
            stream.synchronize()
        chunk.used = chunk.copied = 0
        with self._lock:
            self._free.append(chunk)

    def dest_of(self, take: I64, n_view: int, device: torch.device) -> torch.Tensor:
        """See :meth:`DeviceFrame.dest_of`; frames whose rows lie in the same slots take by the very same arrays."""
        key = (id(take), n_view, device)
        known = self._dest.get(key)
        if known is None:
            inverse = np.full(n_view, -1, np.int64)
            inverse[take] = np.arange(len(take))
            assert int((inverse >= 0).sum()) == len(take), "a row is taken twice"
            if len(self._dest) >= _MOST_DESTS:
                self._dest.clear()
            known = self._dest[key] = (
                take,
                to_device(inverse, device),
            )  # ``take`` is held, so that its id stays its own
        return known[1]

    def stream(self, device: torch.device, *, clears: bool = False) -> torch.cuda.Stream:
        """The stream of the copies, or the one that clears: a copy may be told to wait for what the program does."""
        with self._lock:
            if (device, clears) not in self._stream:
                self._stream[device, clears] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return self._stream[device, clears]


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
    """What frames that are read out together have on the device.

    Attributes:
        pool: where chunks come from.
        kernels: the device.
        chunks: in order; a pending digest names one by its index.
        ready: events behind the copies.
        device: where something was issued that is no digest, such as :meth:`to_host`.
    """

    pool: ChunkPool
    kernels: Kernels
    chunks: list[Chunk] = field(default_factory=list)
    ready: list[Any] = field(default_factory=list)
    device: torch.device | None = None

    def launch(self, view: RowView, payload: bool) -> Pending | None:
        """Issue digest and clone of the view's rows; None when the device has no kernel for this tensor."""
        tensor = view.tensor.detach()
        n_view, n = int(tensor.shape[0]), len(view.row)
        dest = None if view.take is None else self.dest_of(view.take, n_view, tensor.device)
        chunk = self.reserve(n, tensor.device)
        start = chunk.used
        if not self.kernels.digest(tensor, n_view, chunk.device, start, dest, clear=False):
            return None
        chunk.used = start + n
        kept = _picked(tensor, view.take) if payload else None
        return Pending(len(self.chunks) - 1, start, n, None, kept)

    def launch_again(self, tensor: torch.Tensor, rows: int, again: Again) -> Pending | None:
        """Issue the digests of the first ``rows`` rows of a tensor by a launch that was worked out for its kind."""
        chunk = self.reserve(rows, tensor.device)
        start = chunk.used
        if not again(tensor, chunk.device, start):
            return None
        chunk.used = start + rows
        return Pending(len(self.chunks) - 1, start, rows)

    def launch_several(
        self, launch: Callable[[Sequence[int], int], bool], addresses: Sequence[int], rows: int, device: torch.device
    ) -> Pending | None:
        """Issue ``rows`` digests of tensors at these addresses, one behind the other, by what was worked out."""
        chunk = self.reserve(rows, device)
        start = chunk.used
        if not launch(addresses, chunk.address(start)):
            return None
        chunk.used = start + rows
        return Pending(len(self.chunks) - 1, start, rows)

    def reserve(self, rows: int, device: torch.device) -> Chunk:
        """The last chunk if ``rows`` digests fit, or a new one; a full one is copied out while the program goes on."""
        if not self.chunks or self.chunks[-1].room < rows or self.chunks[-1].device.device != device:
            if self.chunks:
                self.kernels.settle()
                self._copy(self.chunks[-1])
            self.chunks.append(self.pool.take(device, rows))
        return self.chunks[-1]

    def fetch(self, slots: torch.Tensor, index: torch.Tensor | None = None) -> Pending:
        """Issue the copy of graph slots to the host, on the current stream: the next replay overwrites them.

        Args:
            slots: int64 [m, 2].
            index: rows of it, int64 [k]; None for all.
        """
        rows = int(slots.shape[0] if index is None else index.shape[0])
        chunk = self.reserve(rows, slots.device)
        start, chunk.used = chunk.used, chunk.used + rows
        if index is not None:
            torch.index_select(slots, 0, index, out=chunk.device[start : chunk.used])
        elif not self.kernels.copy(slots, chunk.address(start)):
            chunk.device[start : chunk.used].copy_(slots)
        return Pending(len(self.chunks) - 1, start, rows)

    def fetch_words(self, words: list[torch.Tensor]) -> Pending:
        """Issue the copy of int32 tensors [k], one behind the other, to the host, as digests of four words each."""
        count = sum(int(tensor.shape[0]) for tensor in words)
        rows = -(-count // 4)
        chunk = self.reserve(rows, words[0].device)
        start, chunk.used = chunk.used, chunk.used + rows
        address = chunk.address(start)
        for tensor in words:
            if tensor.nbytes and not (tensor.is_contiguous() and self.kernels.copy(tensor, address)):
                torch.cat(words, out=chunk.words[4 * start : 4 * start + count])
                break
            address += tensor.nbytes
        return Pending(len(self.chunks) - 1, start, rows)

    def fetch_labels(self, tokens: torch.Tensor, selected: torch.Tensor, table: torch.Tensor) -> Pending:
        """Issue the copy of a step's labels to the host, as :meth:`fetch_words` of three tensors would.

        Args:
            tokens: sampled tokens, int64 [n].
            selected: log-probs that were returned, float32 [n].
            table: log-probs of all tokens, float32 [>= n, v]; those of ``tokens`` are the third.
        """
        n = tokens.shape[0]
        chunk = self.reserve(n, tokens.device)
        if self.kernels.pick(tokens, selected, table, chunk.address(chunk.used)):
            start, chunk.used = chunk.used, chunk.used + n
            return Pending(len(self.chunks) - 1, start, n)
        found = table[:n].gather(1, tokens.clamp(0, table.shape[1] - 1)[:, None])
        return self.fetch_words([each.detach().reshape(-1).view(torch.int32) for each in (tokens, selected, found)])

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host, to be read behind :meth:`arrays`; nothing is waited for."""
        if not tensor.is_cuda:
            return tensor.clone()
        self.device = tensor.device
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def copy_so_far(self) -> None:
        """Issue the copies of what is there, if it is worth a copy of its own: less is left for the end."""
        if self.chunks and self.chunks[-1].used - self.chunks[-1].copied >= _WORTH_A_COPY:
            self.kernels.settle()
            self._copy(self.chunks[-1])

    def copy_out(self) -> None:
        """Issue the copies that were not issued yet; :meth:`arrays` waits for them and for all work before them."""
        if self.chunks:
            self.kernels.settle()
            self._copy(self.chunks[-1])
        elif self.device is not None:
            self._on_side_stream(self.device, lambda: None)

    def _copy(self, chunk: Chunk) -> None:
        """Issue the copy of what a chunk has come to hold: a little of it with the program's work, which is quicker."""
        rows = slice(chunk.copied, chunk.used)
        chunk.copied = chunk.used

        def copy() -> None:
            chunk.host[rows].copy_(chunk.device[rows], non_blocking=True)

        device = chunk.device.device
        if device.type == "cuda" and rows.stop - rows.start >= _WORTH_A_COPY:
            self._on_side_stream(device, copy)
            return
        copy()
        if device.type == "cuda":
            self._ends(torch.cuda.current_stream(device))

    def _ends(self, stream: torch.cuda.Stream) -> None:
        """Remember the end of what was issued on a stream."""
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(stream)
        self.ready.append(ready)

    def _on_side_stream(self, device: torch.device, work: Callable[[], None]) -> None:
        """Issue work behind what the program has issued so far, and remember its end."""
        stream, current = self.pool.stream(device), torch.cuda.current_stream(device.index)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(current)
        stream.wait_event(ready)
        if torch._C._cuda_getDevice() == device.index:  # what the context manager does, in a tenth of its time
            torch.cuda.set_stream(stream)
            try:
                work()
            finally:
                torch.cuda.set_stream(current)
        else:
            with torch.cuda.stream(stream):
                work()
        self._ends(stream)

    def arrays(self) -> list[NDArray[np.uint64]]:
        """Digests of each chunk on the host, uint64 [used, 2]; waits for the copies and gives the chunks back."""
        device = next((chunk.device.device for chunk in self.chunks if chunk.device.is_cuda), self.device)
        found = []
        # On a thread that never used a device, the first would be taken otherwise, by every process of a machine.
        with contextlib.nullcontext() if device is None else torch.cuda.device(device):
            for ready in self.ready:
                ready.synchronize()
            for chunk in self.chunks:
                # By numpy: without the interpreter lock, as torch would do it, too, but with threads of its own.
                found.append(chunk.host[: chunk.used].numpy().view(np.uint64).copy())
                self.pool.give(chunk)
        self.chunks = []
        return found

    def dest_of(self, take: I64, n_view: int, device: torch.device) -> torch.Tensor:
        """Where row i of a view goes among the rows that are taken, or -1: int64 [n_view] on the device."""
        return self.pool.dest_of(take, n_view, device)


def to_device(array: I64, device: torch.device) -> torch.Tensor:
    """A host array on a device, without waiting for the device: from pageable memory the copy would."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _picked(tensor: torch.Tensor, take: I64 | None) -> torch.Tensor:
    if take is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.index_select(0, to_device(take, tensor.device))


def payload_bits(pending: Pending) -> NDArray[Any] | None:
    """The payload of a site as raw bits on the host, [n, W], or None."""
    return None if pending.payload is None else raw_bits(pending.payload)
