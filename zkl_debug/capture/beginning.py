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

if TYPE_CHECKING:
    from zkl_debug.capture.postponed import Waiting


@dataclass(slots=True)
class Beginning:
    """What a frame that is opened later takes over.

    Attributes:
        open: opens the frame.
        trusted, stream, waiting, names, passed, passed_bytes: as those of :class:`OpenFrame`.
    """

    open: Callable[[], None]
    trusted: Container[str]
    stream: tuple[int, int]
    waiting: list[Waiting] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    passed: int = 0
    passed_bytes: int = 0
    parts: ClassVar[bool] = False

    def into(self, frame: OpenFrame) -> None:
        """Have the frame that was opened go on from here."""
        assert frame.may_wait, "as in the one before"
        frame.trusted, frame.stream = self.trusted, self.stream
        frame.waiting, frame.names = self.waiting, self.names
        frame.passed, frame.passed_bytes = self.passed, self.passed_bytes


def goes_on(last: OpenFrame, rows: FrameRows | Sketch) -> bool:
    """Whether a forward of these rows goes like that of the last frame, in which sites could wait for its end.

    It is not fresh where the last was not, and its sites may wait where those still might.
    """
    return (
        last.ended
        and last.may_wait
        and not (last.parts or last.fresh or last.plans)
        and isinstance(rows, Sketch)
        and (rows.graph, rows.n_rows) == last.shape
        and rows.phase is last.given.phase
    )
