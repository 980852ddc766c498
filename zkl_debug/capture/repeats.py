"""Decode steps: thousands of forwards that are alike, each so short that working out what a site takes would be felt.

What a site takes is worked out in the first step and used again as long as steps are alike in everything it rests on:
shape, type and place of the tensor, token slots and rows of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.device import Again
from zkl_debug.capture.frame import Block, OpenFrame
from zkl_debug.capture.layout import RowView
from zkl_debug.capture.rows import FrameRows
from zkl_debug.schema import SiteMeta

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession


@dataclass(frozen=True)
class KnownSite:
    """A site, worked out.

    Attributes:
        shape, dtype, device: of the tensor.
        grid, n_rows: of the frame, whose rows are the first token slots.
        meta: the site.
        again: issues its digests.
        row: rows of the frame, uint32 [n_rows].
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    grid: tuple[int, int]
    n_rows: int
    meta: SiteMeta
    again: Again
    row: NDArray[np.uint32]


class Repeats:
    """The sites of one session that were worked out.

    Only those of inference tensors: others have a version counter, by which one reading may serve several sites.
    """

    def __init__(self, session: CaptureSession) -> None:
        self._session = session
        self._known: dict[str, KnownSite] = {}
        #: Whether nothing is done with a site but to digest it.
        self.allowed = session.forcing is None and session.options.level == "digest"

    def record(self, frame: OpenFrame, name: str, tensor: torch.Tensor) -> bool:
        """Record a site the short way; False where it must go the long way."""
        known = self._known.get(name)
        if known is None:
            return False
        rows = frame.rows
        if (
            tensor.shape != known.shape
            or tensor.dtype != known.dtype
            or rows.grid != known.grid
            or rows.n_rows != known.n_rows
            or rows.warmup
            or not rows.leading
            or not tensor.is_inference()
            or not tensor.is_contiguous()
            or tensor.device != known.device
        ):
            if not rows.warmup:
                del self._known[name]  # the steps have changed
            return False
        session = self._session
        pending = session.device_frame(frame).launch_again(tensor, known.n_rows, known.again)
        if pending is None:
            return False
        meta = known.meta
        filed = session.occurrence(frame, name)
        if filed != name:
            meta = session.meta_like(filed, meta)
        frame.blocks.append(Block(meta, known.row, pending=pending))
        return True

    def remember(self, rows: FrameRows, name: str, tensor: torch.Tensor, view: RowView, meta: SiteMeta) -> None:
        """Work a site out that went the long way, if a step like this one could go the short way."""
        if not self.allowed or name in self._known or not tensor.is_inference() or not rows.leading:
            return
        n = rows.n_rows
        whole = int(view.tensor.shape[0]) in (n, rows.n_slots) and len(view.row) == n and view.shard is None
        kernels = self._session.kernels
        if not (whole and tensor.is_contiguous() and kernels.takes(tensor)):
            return
        again = kernels.again(view.tensor[:n].detach(), n)
        if again is not None:
            self._known[name] = KnownSite(
                tensor.shape, tensor.dtype, tensor.device, rows.grid, n, meta, again, np.arange(n, dtype=np.uint32)
            )
