"""Steps of an engine: forwards so short, and with so many sites alike, that working each site out would be felt.

What a kind of tensor takes is worked out when it is seen first: for the next layer of the same step, and for every step
with the same token slots and rows.

In a step that replays graphs, the few sites outside them are passed while the device waits for its first graph. They
are read when the forward has been issued, once that is known to be the same: like a pair of
:class:`~zkl_debug.capture.twins.Twins`, a site is read at both times until the two were equal, and again now and then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.device import Again, Pending
from zkl_debug.capture.frame import Block, OpenFrame
from zkl_debug.capture.layout import RowView, dtype_name
from zkl_debug.capture.rows import FrameRows
from zkl_debug.schema import SiteKind, SiteMeta

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession

#: Shape, strides and type of a tensor, its device, how it is read; token slots and rows of the frame.
Key = tuple[torch.Size, tuple[int, ...], torch.dtype, int, str, bool, tuple[int, int], int]

#: The second of a pair: the site as it is when the forward has been issued.
END = "the end of the forward"

_ALIGNED = 16
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


@dataclass(frozen=True)
class Waiting:
    """A site that is read when the forward has been issued; ``first`` is what was read when it was passed, if it was.

    Its tensor is kept until then, so that its memory is given to no other.
    """

    name: str
    tensor: torch.Tensor
    worked: Worked
    meta: SiteMeta
    first: Pending | None


class Repeats:
    """The kinds of tensors of one session that were worked out.

    Only inference tensors: others have a version counter, by which one reading may serve several sites.
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
        if not tensor.is_inference() or rows.warmup or not rows.leading:
            return False
        worked = self._known.get(_key(tensor, rows, layout, flatten))
        if worked is None:
            return False
        session = self._session
        waits = rows.graph >= 0 and session.in_forward and tensor.data_ptr() % _ALIGNED == 0
        if waits and session.twins.trusted(frame.kind, frame.index, name, END):
            pending = None
        else:
            pending = session.device_frame(frame).launch_again(tensor, len(worked.row), worked.again)
            if pending is None:
                return False
            waits = waits and not session.twins.refuses(frame.kind, name, END)
        meta = session.metas.get(name)
        if meta is None or meta.torch_dtype != worked.dtype or meta.row_shape != worked.row_shape:
            meta = session.meta_for(name, worked.dtype, worked.row_shape, kind, semantic)
        filed = session.occurrence(frame, name)
        if filed != name:
            meta = session.meta_like(filed, meta)
        if waits:
            frame.waiting.append(Waiting(name, tensor, worked, meta, pending))
        if pending is not None:
            frame.blocks.append(Block(meta, worked.row, pending=pending))
        return True

    def settle(self, frame: OpenFrame) -> None:
        """Read what waits."""
        waiting, frame.waiting = frame.waiting, []
        if not waiting:
            return
        device = self._session.device_frame(frame)
        for site in waiting:
            pending = device.launch_again(site.tensor, len(site.worked.row), site.worked.again)
            assert pending is not None, "a launch that fits one aligned tensor of a kind fits every other"
            if site.first is None:
                frame.blocks.append(Block(site.meta, site.worked.row, pending=pending))
            else:
                frame.pairs.append((site.name, END, site.first, pending))

    def remember(self, rows: FrameRows, tensor: torch.Tensor, view: RowView, layout: str, flatten: bool) -> None:
        """Work out a tensor that went the long way, if others like it could go the short way."""
        if not tensor.is_inference() or not rows.leading or self._session.shard_of is not None:
            return
        n = rows.n_rows
        whole = int(view.tensor.shape[0]) in (n, rows.n_slots) and len(view.row) == n and view.shard is None
        kernels = self._session.kernels
        if not (whole and view.tensor.data_ptr() == tensor.data_ptr() and kernels.takes(tensor)):
            return
        again = kernels.again(view.tensor[:n].detach(), n)
        if again is not None:
            if len(self._known) >= _MOST:
                self._known.clear()
            row = np.arange(n, dtype=np.uint32)
            worked = Worked(dtype_name(tensor), view.row_shape, again, row)
            self._known[_key(tensor, rows, layout, flatten)] = worked


def _key(tensor: torch.Tensor, rows: FrameRows, layout: str, flatten: bool) -> Key:
    at = tensor.get_device()
    return tensor.shape, tensor.stride(), tensor.dtype, at, layout, flatten, rows.grid, rows.n_rows
