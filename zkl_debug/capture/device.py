"""Digests and payloads of tensors on an accelerator: computed where the tensor is, read out once a frame.

Nothing here waits for the device while the model runs. The digest kernel and the clone are issued on the current stream
right behind the kernel that made the tensor, so a later write in place cannot reach them. Digests land in chunks of one
size, already in the order of the frame's rows; when the frame ends each chunk is copied once, on a stream of its own,
to page-locked memory, and a chunk is used again only after its copy was seen to be done.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture import graph_edit
from zkl_debug.capture.graph_edit import Executable
from zkl_debug.capture.layout import I64, RowView, raw_bits
from zkl_debug.digest_gpu import digest_device, gpu_digest, target
from zkl_debug.lanes import LaneView, lane_view

#: Digests of a chunk: 16 MiB.
CHUNK_ROWS = 1 << 20
_MOST_DESTS = 64
_WORTH_A_COPY = 1 << 16
_TEMPLATE = ("raw_cuda_graph", "raw_cuda_graph_exec", "instantiate")

#: A launch for tensors of one kind: the tensor, where its digests go and from which row on; False where it cannot.
Again = Callable[[torch.Tensor, torch.Tensor, int], bool]


class Kernels:
    """What the probe asks of a device; the one implementation runs the GPU's digest kernel, tests put in their own.

    Between :meth:`hold` and :meth:`release` no kernel of the program is issued: the digests asked for in between go out
    in one launch, which reads what a launch for each would have read.
    """

    def __init__(self) -> None:
        self._holds = 0
        self._held: list[Any] = []
        self._anywhere: bool | None = None

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether digests of this tensor are computed on its device."""
        return tensor.is_cuda and gpu_digest(tensor.device) is not None

    def anywhere(self) -> bool:
        """Whether there may be tensors that :meth:`takes` takes."""
        if self._anywhere is None:
            self._anywhere = torch.cuda.is_available()
        return self._anywhere

    def stream(self) -> tuple[int, int]:
        """The current device, and the handle of its current stream."""
        device = torch._C._cuda_getDevice()
        return device, torch._C._cuda_getCurrentRawStream(device)

    def follow(self, stream: tuple[int, int]) -> None:
        """What is issued from now on runs behind what was issued on a stream, told as by :meth:`stream`."""
        torch.cuda.current_stream(stream[0]).wait_stream(_told(stream))

    def lead(self, stream: tuple[int, int]) -> None:
        """What is issued on a stream from now on runs behind what was issued so far; the inverse of :meth:`follow`."""
        _told(stream).wait_stream(torch.cuda.current_stream(stream[0]))

    def capturing(self) -> bool:
        """Whether the current stream is recording a graph."""
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    def slots(self, rows: int) -> torch.Tensor:
        """Zeroed memory for ``rows`` digests that graphs write to, int64 [rows, 2], on the current device."""
        gpu_digest(torch.device("cuda", torch.cuda.current_device()))  # loads what may not be loaded in a recording
        return torch.zeros((rows, 2), dtype=torch.int64, device="cuda")

    def warm(self, tensor: torch.Tensor, rows: int) -> None:
        """Load the kernel that :meth:`digest` takes for such a tensor; nothing can be loaded while recording."""
        if tensor.is_cuda:
            digest_device(tensor, rows)

    def ready(self, tensor: torch.Tensor, rows: int) -> bool:
        """Whether :meth:`digest` of such a tensor can be recorded into a graph now."""
        kernel = gpu_digest(tensor.device)
        view = lane_view(tensor, rows)
        return kernel is None or view is None or kernel.loaded(view)

    def moment(self) -> tuple[int, ...] | None:
        """What a recording has come to: unchanged as long as nothing is added to it; None when that is not known."""
        from zkl_debug.capture.capture_info import last_nodes

        return last_nodes()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a tensor; made anew at each replay when it is issued while a graph is recorded."""
        return tensor.clone(memory_format=torch.contiguous_format)

    # ---- digests --------------------------------------------------------------------------------------------------
    @property
    def holding(self) -> bool:
        """Whether digests are being collected."""
        return self._holds > 0

    def hold(self) -> None:
        """Collect digests until :meth:`release`."""
        self._holds += 1

    def release(self) -> int:
        """Issue what was collected since the first :meth:`hold`; returns the number of launches."""
        self._holds -= 1
        return 0 if self._holds else self.settle()

    def settle(self) -> int:
        """Issue what was collected so far; returns the number of launches."""
        if not self._held:
            return 0
        held, self._held = self._held, []
        return self.issue(held)

    def digest(
        self, tensor: torch.Tensor, rows: int, out: torch.Tensor, start: int, dest: torch.Tensor | None, *, clear: bool
    ) -> bool:
        """Issue the digests of ``rows`` rows into ``out`` [n, 2] int64 from row ``start`` on; False if it cannot.

        Args:
            tensor: any layout the kernel can read without a copy.
            rows: rows of the tensor.
            out: where digests go: row i of the tensor to ``start + i``, or ``start + dest[i]``.
            start: see ``out``.
            dest: int64 [rows], -1 to drop a row; None when in order.
            clear: ``out`` may hold something: set it to zero first where the kernel adds.
        """
        made = self.job(tensor, rows, out, start, dest, clear=clear)
        if made is None:
            return False
        if self._holds:
            self._held.append(made)
        else:
            self.issue([made])
        return True

    def job(
        self, tensor: torch.Tensor, rows: int, out: torch.Tensor, start: int, dest: torch.Tensor | None, *, clear: bool
    ) -> Any:
        """What :meth:`issue` takes, for the arguments of :meth:`digest`; keeps the tensors alive. None if it cannot."""
        kernel = gpu_digest(tensor.device)
        view = lane_view(tensor, rows)
        if kernel is None or view is None:
            return None
        if clear and kernel.adds(view):
            out[start : start + rows].zero_()
        return kernel, view, out.data_ptr() + 16 * start, dest

    def issue(self, jobs: list[Any]) -> int:
        """Issue digests on the current stream, all in one launch where the device can; returns how many it took."""
        if len(jobs) == 1:
            kernel, view, out, dest = jobs[0]
            kernel.launch(view, out, 0 if dest is None else dest.data_ptr())
            return 1
        launches = 0
        for _, group in itertools.groupby(jobs, key=lambda job: id(job[0])):
            several = list(group)
            targets = [target(v, out, 0 if dest is None else dest.data_ptr()) for _, v, out, dest in several]
            launches += several[0][0].launch_all(targets)
        return launches

    # ---- recorded graphs ------------------------------------------------------------------------------------------
    def edits(self, graph_class: Any) -> bool:
        """Whether others can be made of recorded graphs of this class."""
        return torch.cuda.is_available() and all(hasattr(graph_class, name) for name in _TEMPLATE)

    def can_wait(self, tensor: torch.Tensor) -> bool:
        """Whether the digest of a tensor is one node of a graph, alone or with others."""
        kernel = gpu_digest(tensor.device)
        return kernel is not None and kernel.name == "cuda"

    def without(self, graph: Any, nodes: list[int]) -> tuple[Executable, set[int]] | None:
        """A graph like one that keeps its template, without some nodes, and the nodes it lacks; None if it lacks none.

        Raises:
            OSError: the driver refuses.
        """
        return graph_edit.without(graph.raw_cuda_graph(), graph.raw_cuda_graph_exec(), nodes)

    def drawn(self, generators: Sequence[torch.Generator]) -> tuple[int, ...]:
        """How far random generators are, those of the devices among them."""
        return tuple(int(generator.get_offset()) for generator in (*torch.cuda.default_generators, *generators))

    def again(self, tensor: torch.Tensor, rows: int) -> Again | None:
        """:meth:`digest` for further tensors that begin with rows like these, with all worked out that can be.

        Args:
            tensor: contiguous, [rows, ...]; a tensor given later may go on behind them.
            rows: how many.
        """
        kernel = gpu_digest(tensor.device)
        view = lane_view(tensor, rows)
        launch = kernel.again(view) if kernel is not None and view is not None else None
        if launch is None:
            return None

        def issue(like: torch.Tensor, out: torch.Tensor, start: int) -> bool:
            return launch(like.data_ptr(), out.data_ptr() + 16 * start)

        return issue

    def several(
        self, views: Sequence[LaneView], dests: Sequence[torch.Tensor | None], counts: Sequence[int]
    ) -> Callable[[Sequence[int], int], bool] | None:
        """Digests of further sets of tensors like these in one launch, with all but the addresses worked out.

        Args:
            views: the tensors.
            dests: of each, where its rows go, int64 [rows], -1 to drop one; None: in order. To be kept by the caller.
            counts: of each, the digests it makes.

        Returns:
            What takes the addresses of the tensors and of the output, int64 [n, 2], where the digests of the second
            tensor go behind those of the first, and tells whether it could; None where there is no such launch.
        """
        kernel = gpu_digest(views[0].owner.device)
        if kernel is None:
            return None
        starts = itertools.accumulate((16 * count for count in counts), initial=0)
        known = [0 if dest is None else dest.data_ptr() for dest in dests]
        return kernel.several([target(*each) for each in zip(views, starts, known, strict=False)])


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
        """A chunk whose contents were read."""
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
        if not launch(addresses, chunk.device.data_ptr() + 16 * start):
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
        to = chunk.device[start : chunk.used]
        if index is None:
            to.copy_(slots)
        else:
            torch.index_select(slots, 0, index, out=to)
        return Pending(len(self.chunks) - 1, start, rows)

    def fetch_words(self, words: list[torch.Tensor]) -> Pending:
        """Issue the copy of int32 tensors [k], one behind the other, to the host, as digests of four words each."""
        count = sum(int(tensor.shape[0]) for tensor in words)
        rows = -(-count // 4)
        chunk = self.reserve(rows, words[0].device)
        start, chunk.used = chunk.used, chunk.used + rows
        torch.cat(words, out=chunk.words[4 * start : 4 * start + count])
        return Pending(len(self.chunks) - 1, start, rows)

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
        rows = slice(chunk.copied, chunk.used)
        chunk.copied = chunk.used

        def copy() -> None:
            chunk.host[rows].copy_(chunk.device[rows], non_blocking=True)
            chunk.device[rows].zero_()  # kernels of the next frame may add into it

        if chunk.device.is_cuda:
            self._on_side_stream(chunk.device.device, copy)
        else:
            copy()

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
        ready.record(stream)
        self.ready.append(ready)

    def arrays(self) -> list[NDArray[np.uint64]]:
        """Digests of each chunk on the host, uint64 [used, 2]; waits for the copies and gives the chunks back."""
        for ready in self.ready:
            ready.synchronize()
        found = []
        for chunk in self.chunks:
            found.append(
                chunk.host[: chunk.used].clone().numpy().view(np.uint64)
            )  # copies without the interpreter lock
            self.pool.give(chunk)
        self.chunks = []
        return found

    def dest_of(self, take: I64, n_view: int, device: torch.device) -> torch.Tensor:
        """Where row i of a view goes among the rows that are taken, or -1: int64 [n_view] on the device."""
        return self.pool.dest_of(take, n_view, device)


def _told(stream: tuple[int, int]) -> torch.cuda.Stream:
    """The stream of a device and a handle."""
    device, handle = stream
    if not handle:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]


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
