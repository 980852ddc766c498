"""The beginning of a forward that goes like the one before it: its frame is opened later, when a graph was launched.

Until its first graph is launched a device has nothing to do, so whatever the probe does before that is time of the
program. Sites passed by then wait in any case; opening a frame for them can wait as well.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from zkl_debug.capture.frame import OpenFrame
from zkl_debug.capture.rows import FrameRows, Sketch
from zkl_debug.capture.twins import RECHECK

if TYPE_CHECKING:
    from zkl_debug.capture.postponed import Waiting
    from zkl_debug.capture.session import CaptureSession


@dataclass(slots=True)
class Beginning:
    """What a frame that is opened later takes over; made when the forward before it was issued, and time is plenty.

    Attributes:
        last: the frame before.
        open: opens the frame.
        trusted, stream, waiting, names, passed, passed_bytes: as those of :class:`OpenFrame`.
    """

    last: OpenFrame
    trusted: Container[str]
    stream: tuple[int, int]
    open: Callable[[], None] | None = None
    waiting: list[Waiting] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    passed: int = 0
    passed_bytes: int = 0
    parts: ClassVar[bool] = False

    @classmethod
    def behind(cls, last: OpenFrame, session: CaptureSession) -> Beginning | None:
        """That of a forward like the one of this frame; None where every frame is opened at once.

        It is not fresh where the one before was not, and its sites may wait where those did.
        """
        first_looks = last.fresh or session.next_frame % RECHECK == 0
        if last.parts or first_looks or not last.may_wait or session.options.requests:
            return None
        return cls(last, session.twins.until_end(last.kind, session.next_frame), last.stream)

    def fits(self, rows: FrameRows | Sketch, last: OpenFrame | None, stream: tuple[int, int]) -> bool:
        """Whether a forward of these rows, which begins on this stream behind this frame, is the one expected."""
        return (
            last is self.last
            and not last.plans
            and isinstance(rows, Sketch)
            and (rows.graph, rows.n_rows) == last.shape
            and rows.phase is last.given.phase
            and stream == self.stream
        )

    def into(self, frame: OpenFrame) -> None:
        """Have the frame that was opened go on from here."""
        frame.trusted, frame.stream = self.trusted, self.stream
        frame.waiting, frame.names = self.waiting, self.names
        frame.passed, frame.passed_bytes = self.passed, self.passed_bytes
