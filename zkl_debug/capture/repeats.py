"""Steps of an engine: forwards so short, and with so many sites alike, that working each site out would be felt.

What a kind of tensor takes is worked out when it is seen first: for the next layer of the same step, and for every step
with the same token slots and rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.frame import Block, OpenFrame
from zkl_debug.capture.kernels import Again
from zkl_debug.capture.layout import RowView, dtype_name
from zkl_debug.capture.rows import FrameRows
from zkl_debug.schema import SiteKind

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession

#: Shape, strides and type of a tensor, its device, how it is read; token slots and rows of the frame.
Key = tuple[torch.Size, tuple[int, ...], torch.dtype, int, str, bool, tuple[int, int], int]

_MOST = 4096  # kinds that are kept: every length of a prompt makes new ones


@dataclass(frozen=True)
class Worked:
    """What a kind of tensor takes.

    Attributes:
        dtype: torch's name.
        row_shape: shape of one row.
        again: issues the digests.
        row: rows of the frame, uint32 [n].
    """

    dtype: str
    row_shape: tuple[int, ...]
    again: Again
    row: NDArray[np.uint32]


class Repeats:
    """The kinds of tensors of one session that were worked out.

    To be asked of inference tensors only: others have a version counter, by which one reading may serve several sites.
    """

    def __init__(self, session: CaptureSession) -> None:
        self._session = session
        self._known: dict[Key, Worked] = {}
        #: Whether nothing is done with a site but to digest it.
        self.allowed = session.forcing is None and session.options.level == "digest"

    def record(
        self,
        frame: OpenFrame,
        name: str,
        tensor: torch.Tensor,
        kind: SiteKind,
        semantic: str,
        layout: str,
        flatten: bool,
    ) -> bool:
        """Record a site the short way; False where it must go the long way."""
        rows = frame.rows
        if rows.warmup or not rows.leading:
            return False
        worked = self._known.get(_key(tensor, rows, layout, flatten))
        if worked is None:
            return False
        session, n = self._session, len(worked.row)
        pending = session.device_frame(frame).launch_again(tensor, n, worked.again)
        if pending is None:
            return False
        meta = session.metas.get(name)
        if meta is None or meta.torch_dtype != worked.dtype or meta.row_shape != worked.row_shape:
            meta = session.meta_for(name, worked.dtype, worked.row_shape, kind, semantic)
        filed = session.occurrence(frame, name)
        if filed != name:
            meta = session.meta_like(filed, meta)
        frame.blocks.append(Block(meta, worked.row, pending=pending))
        return True

    def remember(self, rows: FrameRows, tensor: torch.Tensor, view: RowView, layout: str, flatten: bool) -> None:
        """Work out a tensor that went the long way, if others like it could go the short way."""
        if not rows.leading or self._session.shard_of is not None:
            return
        n = rows.n_rows
        row = np.arange(n, dtype=np.uint32)
        in_order = np.array_equal(view.row, row) and (view.take is None or np.array_equal(view.take, row))
        whole = int(view.tensor.shape[0]) in (n, rows.n_slots) and in_order and view.shard is None
        kernels = self._session.kernels
        if not (whole and view.tensor.data_ptr() == tensor.data_ptr() and kernels.takes(tensor)):
            return
        again = kernels.again(view.tensor[:n].detach(), n)
        if again is not None:
            if len(self._known) >= _MOST:
                self._known.clear()
            worked = Worked(dtype_name(tensor), view.row_shape, again, row)
            self._known[_key(tensor, rows, layout, flatten)] = worked


def _key(tensor: torch.Tensor, rows: FrameRows, layout: str, flatten: bool) -> Key:
    at = tensor.get_device()
    return tensor.shape, tensor.stride(), tensor.dtype, at, layout, flatten, rows.grid, rows.n_rows
