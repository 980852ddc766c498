"""Sites outside the graphs of a step that replays graphs.

They are passed while the device waits for its first graph, so each microsecond spent on them is one of the step. They
are read when the forward has been issued, and the device is busy, once that is known to be the same: as with a pair of
:class:`~zkl_debug.capture.twins.Twins`, a site is read at both times until the two were equal, and again now and then.
Steps that have many sites outside graphs, or large ones, are left as they are: their memory would be held too long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from zkl_debug.capture.device import Pending
from zkl_debug.capture.frame import OpenFrame
from zkl_debug.capture.layout import flattened, resolve
from zkl_debug.capture.together import Together
from zkl_debug.capture.twins import END
from zkl_debug.schema import SiteKind

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession


#: Sites that wait at most, and bytes of their tensors.
MOST, MOST_BYTES = 32, 64 << 20


class Waiting(NamedTuple):
    """A site that is read when the forward has been issued; arguments as those of ``CaptureSession.record``.

    Attributes:
        tensor: kept until then, so that its memory is given to no other.
        first: what was read when the site was passed, if it was.
    """

    name: str
    tensor: torch.Tensor
    kind: SiteKind
    semantic: str
    layout: str
    flatten: bool
    first: Pending | None = None


def wait(frame: OpenFrame, site: Waiting) -> bool:
    """Have a site that is trusted wait; False where it is a further occurrence, or too many or too large ones wait."""
    nbytes = site.tensor.nbytes
    if site.name in frame.waiting_names or len(frame.waiting) >= MOST or frame.waiting_bytes + nbytes > MOST_BYTES:
        return False
    frame.waiting_names.add(site.name)
    frame.waiting.append(site)
    frame.waiting_bytes += nbytes
    return True


class Postponed:
    """What waits in the frames of one session."""

    def __init__(self, session: CaptureSession) -> None:
        self._session = session
        self._together = Together(session)
        self._too_many: set[int] = set()  # kinds of frames
        #: Whether nothing is done with a site but to digest it.
        self._allowed = session.forcing is None and session.options.level == "digest" and not session.options.at_once

    def begin(self, frame: OpenFrame) -> None:
        """A frame is opened: which of its sites may wait."""
        rows = frame.rows
        frame.may_wait = self._allowed and rows.graph >= 0 and not rows.warmup and self._session.shard_of is None
        frame.may_wait &= frame.kind not in self._too_many
        if frame.may_wait:
            frame.trusted = self._session.twins.until_end(frame.kind, frame.index)

    def takes(self, frame: OpenFrame, site: Waiting) -> bool:
        """A site of a frame in which sites may wait: whether it is recorded, now or later."""
        if site.name in frame.trusted:
            if wait(frame, site):
                return True
            if site.name in frame.waiting_names:  # another occurrence: no more than one was looked at
                self._session.twins.refuse(frame.kind, site.name, END)
            else:
                self._too_many.add(frame.kind)
            self.settle(frame)
            return False
        frame.may_wait = False
        recorded = self._record(site)
        frame.may_wait = True
        self._look(frame, site)  # may be the last that waits
        return recorded

    def _record(self, site: Waiting) -> bool:
        tensor, layout = site.tensor, site.layout
        return self._session.record(
            site.name, tensor, kind=site.kind, semantic=site.semantic, layout=layout, flatten=site.flatten
        )

    def _look(self, frame: OpenFrame, site: Waiting) -> None:
        """It was read: read it again when the forward has been issued, to know whether it may wait in later frames."""
        block = frame.blocks[-1] if frame.blocks else None
        if block is None or block.pending is None or not block.meta.name.startswith(site.name.rpartition(":")[0]):
            return
        twins = self._session.twins
        if block.meta.name != site.name:
            twins.refuse(frame.kind, site.name, END)
        elif not twins.refuses(frame.kind, site.name, END):
            frame.waiting.append(site._replace(first=block.pending))
            frame.waiting_bytes += site.tensor.nbytes
            if len(frame.waiting) > MOST or frame.waiting_bytes > MOST_BYTES:
                self._too_many.add(frame.kind)
                self.settle(frame)

    def settle(self, frame: OpenFrame) -> None:
        """The forward has been issued: read what waits."""
        frame.may_wait, frame.trusted = False, ()
        waiting, frame.waiting = frame.waiting, []
        if all(site.first is None for site in waiting) and self._together.record(frame, waiting):
            return
        for site in waiting:
            if site.first is None:
                self._record(site)
                continue
            view = resolve(site.tensor, frame.rows, site.layout)
            assert view is not None, "it was read once"
            again = self._session.device_frame(frame).launch(flattened(view) if site.flatten else view, False)
            if again is not None:
                frame.pairs.append((site.name, END, site.first, again))
