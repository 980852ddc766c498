"""What the probe asks of a device: digests, also inside of graphs, and what recordings and streams have come to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zkl_debug.capture import graph_edit
from zkl_debug.capture.graph_edit import Executable
from zkl_debug.digest_gpu import digest_device, gpu_digest, target
from zkl_debug.lanes import LaneView, lane_view

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

    def pick(self, tokens: torch.Tensor, selected: torch.Tensor, table: torch.Tensor, out: int) -> bool:
        """Copy a step's labels to an address, see :meth:`DeviceFrame.fetch_labels`; False where there is no kernel."""
        kernel = gpu_digest(tokens.device)
        return kernel is not None and kernel.pick(tokens, selected, table, out)

    def copy(self, tensor: torch.Tensor, out: int) -> bool:
        """Copy a contiguous tensor to an address on its device; False where torch has to.

        Torch takes several times as long to find out that this is all it has to do.
        """
        kernel = gpu_digest(tensor.device)
        return kernel is not None and kernel.copy(tensor.data_ptr(), out, tensor.nbytes)

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


def _told(stream: tuple[int, int]) -> torch.cuda.Stream:
    """The stream of a device and a handle."""
    device, handle = stream
    if not handle:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]
