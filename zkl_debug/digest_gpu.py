"""The digest kernel of a GPU: CUDA where NVRTC is there, Triton where it is not; the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from zkl_debug.lanes import LaneView, lane_view

if TYPE_CHECKING:
    from zkl_debug.digest_cuda import Target


class GpuDigest(Protocol):
    """Issues digests on the current stream."""

    name: str

    def launch(self, view: LaneView, out: int, dest: int) -> None:
        """Write the digest of row i to row i of ``out`` (int64 [n, 2]), or to row ``dest[i]``, -1 to drop it."""

    def launch_all(self, targets: Sequence[Target]) -> int:
        """:meth:`launch` of several views, in as few launches as it takes; returns how many."""

    def again(self, view: LaneView) -> Callable[[int, int], bool] | None:
        """A launch for tensors like this one: addresses of lanes and output in, False where it does not fit them."""

    def several(self, targets: Sequence[Target]) -> Callable[[Sequence[int], int], bool] | None:
        """One launch for tensors like these, their ``out`` in bytes behind the output: addresses of each and of the
        output in, False where it does not fit."""

    def pick(self, tokens: torch.Tensor, selected: torch.Tensor, table: torch.Tensor, out: int) -> bool:
        """Write a step's labels as :meth:`zkl_debug.digest_cuda.Launcher.pick` does; False where there is no kernel."""

    def copy(self, address: int, out: int, nbytes: int) -> bool:
        """Copy memory of the device; False where it must go another way."""

    def adds(self, view: LaneView) -> bool:
        """Whether :meth:`launch` adds into ``out``, which must then hold zeros."""

    def loaded(self, view: LaneView) -> bool:
        """Whether :meth:`launch` of such a view loads nothing, so that it can be recorded into a graph."""


def target(view: LaneView, out: int, dest: int) -> Target:
    """One of the views of :meth:`GpuDigest.launch_all`; arguments as those of :meth:`GpuDigest.launch`."""
    from zkl_debug.digest_cuda import Target

    return Target(view, out, dest)


class _Cuda:
    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        from zkl_debug import digest_cuda

        self._launcher = digest_cuda.launcher(device)
        self.launch = self._launcher.launch_one
        self.again = self._launcher.again
        self.several = self._launcher.several
        self._most = digest_cuda.ENTRIES

    def launch_all(self, targets: Sequence[Target]) -> int:
        starts = range(0, len(targets), self._most)
        for at in starts:
            self._launcher.launch(targets[at : at + self._most])
        return len(starts)

    def pick(self, tokens: torch.Tensor, selected: torch.Tensor, table: torch.Tensor, out: int) -> bool:
        if not (tokens.is_contiguous() and selected.is_contiguous() and table.stride(1) == 1):
            return False
        self._launcher.pick(tokens, selected, table, out)
        return True

    def copy(self, address: int, out: int, nbytes: int) -> bool:
        if torch._C._cuda_getDevice() != self._launcher.index:  # the default stream would be another's
            return False
        self._launcher.copy(address, out, nbytes)
        return True

    def adds(self, view: LaneView) -> bool:  # noqa: ARG002
        return False

    def loaded(self, view: LaneView) -> bool:
        return self._launcher.weights(1).shape[1] >= view.lanes


class _Triton:
    name = "triton"

    def __init__(self, device: torch.device) -> None:
        from zkl_debug import digest_triton

        self._module: Any = digest_triton
        digest_triton.weights_on(device, 1)  # none may be made while a graph is recorded

    def launch(self, view: LaneView, out: int, dest: int) -> None:
        self._module.digest_into(view, out, dest)

    def launch_all(self, targets: Sequence[Target]) -> int:
        for target in targets:
            self.launch(target.view, target.out, target.dest)
        return len(targets)

    def again(self, view: LaneView) -> Callable[[int, int], bool] | None:  # noqa: ARG002
        return None

    def several(self, targets: Sequence[Target]) -> Callable[[Sequence[int], int], bool] | None:  # noqa: ARG002
        return None

    def pick(self, tokens: torch.Tensor, selected: torch.Tensor, table: torch.Tensor, out: int) -> bool:  # noqa: ARG002
        return False

    def copy(self, address: int, out: int, nbytes: int) -> bool:  # noqa: ARG002
        return False

    def adds(self, view: LaneView) -> bool:
        return bool(self._module.needs_zeros(view))

    def loaded(self, view: LaneView) -> bool:
        return bool(self._module.is_loaded(view))


@functools.cache
def gpu_digest(device: torch.device) -> GpuDigest | None:
    """The kernel of a device; None where there is none, and digests are made by torch or on the host."""
    if device.type != "cuda":
        return None
    from zkl_debug import digest_cuda

    if not digest_cuda.unavailable(device):
        return _Cuda(device)
    try:
        return _Triton(device)
    except ImportError:
        return None


def digest_device(tensor: torch.Tensor, rows: int) -> torch.Tensor | None:
    """Digest of each row, int64 [rows, 2] on the tensor's device; None where it takes a copy or there is no kernel."""
    kernel = gpu_digest(tensor.device)
    view = lane_view(tensor, rows)
    if kernel is None or view is None:
        return None
    make = torch.zeros if kernel.adds(view) else torch.empty
    out = make((rows, 2), dtype=torch.int64, device=tensor.device)
    kernel.launch(view, out.data_ptr(), 0)
    return out
