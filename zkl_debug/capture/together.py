"""Sites that are read together in step after step: what they take is worked out once, and is one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.capture.device import Pending
from zkl_debug.capture.frame import Deferred, OpenFrame
from zkl_debug.capture.layout import flattened, resolve
from zkl_debug.lanes import LaneView, lane_view
from zkl_debug.schema import U64, SiteBlock, SiteMeta

if TYPE_CHECKING:
    from zkl_debug.capture.postponed import Waiting
    from zkl_debug.capture.session import CaptureSession

_FEWEST, _MOST = 2, 32
_MOST_KNOWN = 256


@dataclass(frozen=True)
class Worked:
    """What some sites take.

    Attributes:
        launch: issues their digests, one behind the other: addresses of the tensors and of the output; False where
            it cannot.
        metas: of the sites, in order.
        names: of the sites.
        row: rows of the frame, uint32 [n].
    """

    launch: Callable[[Sequence[int], int], bool]
    metas: tuple[SiteMeta, ...]
    names: frozenset[str]
    row: NDArray[np.uint32]


@dataclass(frozen=True)
class Several(Deferred):
    """Sites of a frame whose digests lie one behind the other; made into blocks when the frame is filed."""

    worked: Worked
    pending: Pending

    def blocks(self, frame: OpenFrame, parts: list[U64]) -> list[SiteBlock]:  # noqa: ARG002
        """The sites, from the digests of each chunk."""
        found, rows = parts[self.pending.part][self.pending.start :], len(self.worked.row)
        return [
            SiteBlock(meta, self.worked.row, found[i * rows : (i + 1) * rows])
            for i, meta in enumerate(self.worked.metas)
        ]


class Together:
    """The sets of sites of one session that were worked out."""

    def __init__(self, session: CaptureSession) -> None:
        self._session = session
        self._known: dict[Any, Worked | None] = {}

    def record(self, frame: OpenFrame, sites: Sequence[Waiting]) -> bool:
        """Record sites whose rows are the first token slots, in order; False where it must be done one by one."""
        rows = frame.rows
        if not (_FEWEST <= len(sites) <= _MOST and rows.leading):
            return False
        kinds = [(s.name, s.tensor.shape, s.tensor.stride(), s.tensor.dtype, s.layout, s.flatten) for s in sites]
        key = (rows.grid, rows.n_rows, sites[0].tensor.get_device(), *kinds)
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._work_out(frame, sites)
        worked = self._known[key]
        if worked is None or any(not worked.names.isdisjoint(seen) for seen in (frame.seen, *frame.replayed_names)):
            return False
        addresses = [site.tensor.data_ptr() for site in sites]
        device = self._session.device_frame(frame)
        pending = device.launch_several(worked.launch, addresses, len(sites) * len(worked.row), sites[0].tensor.device)
        if pending is None:
            return False
        frame.seen.update(dict.fromkeys(worked.names, 1))
        frame.deferred.append(Several(worked, pending))
        return True

    def _work_out(self, frame: OpenFrame, sites: Sequence[Waiting]) -> Worked | None:
        session, n = self._session, frame.rows.n_rows
        views: list[LaneView] = []
        metas: list[SiteMeta] = []
        for site in sites:
            view = resolve(site.tensor, frame.rows, site.layout)
            if view is None or not session.kernels.takes(site.tensor):
                return None
            view = flattened(view) if site.flatten else view
            whole = int(view.tensor.shape[0]) in (n, frame.rows.n_slots) and len(view.row) == n
            lanes = lane_view(view.tensor[:n].detach(), n) if whole else None
            if lanes is None or view.shard is not None or view.tensor.data_ptr() != site.tensor.data_ptr():
                return None
            views.append(lanes)
            metas.append(session.meta_of(site.name, view, site.kind, site.semantic))
        launch = session.kernels.several(views, [None] * len(views), [n] * len(views))
        names = frozenset(site.name for site in sites)
        if launch is None or len(names) < len(sites):
            return None
        return Worked(launch, tuple(metas), names, np.arange(n, dtype=np.uint32))
