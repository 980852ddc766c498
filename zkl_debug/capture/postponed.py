"""Sites that are read later than they are passed: many in one launch, worked out once, while the device is busy.

What the probe does when a site is passed costs the program's thread tens of microseconds, of which a short forward, or
the beginning of a long one, waits for each. So a site only leaves its tensor behind, which keeps its memory from being
given to another, and is read with others

- where a part of a numbered block ends (the attention or the MLP of a layer), in a forward that replays no graph;
- when the forward has been issued, in one that replays graphs; what follows the model there, when the next has been.

That nothing was written to it in between is not assumed: as with a pair of :class:`~zkl_debug.capture.twins.Twins`, a
site is read at both times until the two were equal, again in the first frames that have another number of rows, and in
every frame whose number is a multiple of :data:`~zkl_debug.capture.twins.RECHECK`. Writes that torch itself counts are
seen in every frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from zkl_debug.capture.device import Pending
from zkl_debug.capture.frame import OpenFrame
from zkl_debug.capture.layout import flattened, resolve
from zkl_debug.capture.together import Together
from zkl_debug.capture.twins import END, Pair
from zkl_debug.schema import SiteKind

if TYPE_CHECKING:
    from zkl_debug.capture.beginning import Beginning
    from zkl_debug.capture.session import CaptureSession


#: Sites that wait at most; bytes of their tensors, in a forward that replays graphs and in one that does not.
MOST = 32
MOST_BYTES, MOST_BYTES_OF_PARTS = 64 << 20, 2 << 30


#: Where nothing has ended, but what waits must be read: in time.
_ROOM = "#"


class Waiting(NamedTuple):
    """A site that is read later; arguments as those of ``CaptureSession.record``.

    Attributes:
        tensor: kept until then, so that its memory is given to no other.
        version, address: its version counter, -1 where it has none, and its memory when the site was passed.
        first: what was read then, if it was.
    """

    name: str
    tensor: torch.Tensor
    kind: SiteKind
    semantic: str
    layout: str
    flatten: bool
    version: int = -1
    address: int = 0
    first: Pending | None = None


class Errand(NamedTuple):
    """What is done later for a site that is more than a tensor.

    Attributes:
        name: the site.
        issue: reads it on the device.
        file: files what was read, unless ``first`` was.
        marks: tensors it reads, their version counters and their memory when the site was passed.
        first: what was read then, if it was.
    """

    name: str
    issue: Callable[[], Pending]
    file: Callable[[Pending], None]
    marks: tuple[tuple[torch.Tensor, int, int], ...]
    first: Pending | None = None


def wait(
    frame: OpenFrame | Beginning,
    name: str,
    tensor: torch.Tensor,
    kind: SiteKind,
    semantic: str = "",
    layout: str = "",
    flatten: bool = False,
) -> bool:
    """Have a trusted site wait; False where it did already (a further occurrence), or no more may wait."""
    if name in frame.names or not _pass(frame, tensor.nbytes):
        return False
    waiting = Waiting(name, tensor, kind, semantic, layout, flatten, _version(tensor), tensor.data_ptr())
    frame.names.add(name)
    frame.waiting.append(waiting)
    return True


def _version(tensor: torch.Tensor) -> int:
    """Its version counter, -1 where it has none."""
    return -1 if tensor.is_inference() else tensor._version


def _pass(frame: OpenFrame | Beginning, nbytes: int) -> bool:
    """Count a site, whether it waits or not, so that all frames of a kind read at the same places."""
    total = frame.passed_bytes + nbytes
    if frame.passed >= MOST or total > (MOST_BYTES_OF_PARTS if frame.parts else MOST_BYTES):
        return False
    frame.passed += 1
    frame.passed_bytes = total
    return True


class Postponed:
    """What waits in the frames of one session.

    Attributes:
        written: sites that waited and were written to meanwhile, by what torch counts.
        unproven: sites that were read where what is read had never been compared.
    """

    def __init__(self, session: CaptureSession) -> None:
        self._session = session
        self._together = Together(session)
        self._too_many: set[int] = set()  # kinds of frames
        #: Whether nothing is done with a site but to digest it.
        self._allowed = session.forcing is None and session.options.level == "digest" and not session.options.at_once
        self.written: set[str] = set()
        self.unproven: set[str] = set()

    def begin(self, frame: OpenFrame) -> None:
        """A frame is opened: which of its sites may wait."""
        given, session = frame.given, self._session
        kind = frame.kind
        if not self._allowed or given.warmup or session.shard_of is not None or kind in self._too_many:
            return
        frame.parts = given.graph < 0
        frame.may_wait = session.kernels.anywhere()
        if not frame.may_wait:
            return
        frame.stream = session.kernels.stream()
        frame.fresh = session.twins.is_fresh(kind, frame.shape)
        if not frame.fresh:
            frame.trusted = session.twins.until_end(kind, frame.index)

    def behind(self, frame: OpenFrame) -> None:
        """The forward has ended: what follows it waits for the next one, where the forward replayed graphs."""
        frame.ended = True
        if frame.parts:
            frame.may_wait, frame.trusted = False, ()

    # ---- sites ----------------------------------------------------------------------------------------------------
    def waits(
        self,
        name: str,
        tensor: torch.Tensor,
        kind: SiteKind,
        semantic: str = "",
        layout: str = "",
        flatten: bool = False,
    ) -> bool:
        """Whether a site is one that is read later, and now waits; arguments as those of ``CaptureSession.record``.

        To be asked without a guard before that is called under one, for it takes next to nothing.
        """
        session = self._session
        frame, graphs = session.beginning or session.frame, session.graphs
        if frame is None or name not in frame.trusted or (graphs is not None and graphs.recording is not None):
            return False
        try:
            return not self._elsewhere(frame) and wait(frame, name, tensor, kind, semantic, layout, flatten)
        except Exception:  # a tensor that cannot be asked: what is wrong with it is found under the guard
            return False

    def record(self, frame: OpenFrame, site: Waiting) -> bool:
        """Record a site of a frame in which sites may wait, now or later; whether it has rows."""
        if not self._session.kernels.takes(site.tensor) or self._elsewhere(frame):
            if site.name in frame.names:  # an earlier occurrence comes first
                self.settle(frame, _ROOM)
            return self._now(frame, site)
        if site.name in frame.trusted:
            if wait(frame, *site[:6]):
                return True
            if site.name in frame.names:  # another occurrence: no more than one was looked at
                self._session.twins.refuse(frame.kind, site.name, END)
                self.settle(frame, _ROOM)
                return self._now(frame, site)
            self._make_room(frame)
            return (frame.may_wait and wait(frame, *site[:6])) or self._now(frame, site)
        if not _pass(frame, site.tensor.nbytes):
            self._make_room(frame)
            if not (frame.may_wait and _pass(frame, site.tensor.nbytes)):
                return self._now(frame, site)
        recorded = self._now(frame, site)
        if recorded:
            self._look(frame, site)
        return recorded

    def later(
        self,
        frame: OpenFrame,
        name: str,
        issue: Callable[[], Pending],
        file: Callable[[Pending], None],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Do what a site takes, which reads these tensors, when it may be done; now where that may not be the same."""
        marks = tuple((tensor, _version(tensor), tensor.data_ptr()) for tensor in tensors)
        here = not self._elsewhere(frame)
        if here and name in frame.trusted:
            frame.errands.append(Errand(name, issue, file, marks))
            return
        first = issue()
        file(first)
        if here and frame.may_wait and not self._session.twins.refuses(frame.kind, name, END):
            frame.errands.append(Errand(name, issue, file, marks, first))

    def part_ended(self, path: str) -> None:
        """A part of a block has ended, and its sites were passed."""
        frame = self._session.frame
        if frame is not None and frame.parts and not self._session.recording and not self._elsewhere(frame):
            self.settle(frame, path)
            frame.early = False

    def _elsewhere(self, frame: OpenFrame | Beginning) -> bool:
        """Whether another stream is current than when the frame began: what is read on one is not ordered by others."""
        return self._session.kernels.stream() != frame.stream

    def _now(self, frame: OpenFrame, site: Waiting) -> bool:
        """Record a site as if none could wait: in its frame, which may be another than the one that is open."""
        session = self._session
        running, session.frame = session.frame, frame
        may_wait, frame.may_wait = frame.may_wait, False
        try:
            return session.record(
                site.name,
                site.tensor,
                kind=site.kind,
                semantic=site.semantic,
                layout=site.layout,
                flatten=site.flatten,
            )
        finally:
            session.frame, frame.may_wait = running, may_wait

    def _make_room(self, frame: OpenFrame) -> None:
        """Read what waits, for no more may: in frames with graphs, none waits from here on."""
        if not frame.parts:
            self._too_many.add(frame.kind)
        frame.early = frame.early or frame.passed < MOST
        self.settle(frame, _ROOM)
        if not frame.parts:
            frame.may_wait, frame.trusted = False, ()

    def _look(self, frame: OpenFrame, site: Waiting) -> None:
        """It was read: have it read again when it would be, to know whether it may wait in later frames."""
        block = frame.blocks[-1] if frame.blocks else None
        if block is None or block.pending is None or not block.meta.name.startswith(site.name.rpartition(":")[0]):
            return
        twins = self._session.twins
        if block.meta.name != site.name:
            twins.refuse(frame.kind, site.name, END)
        elif not twins.refuses(frame.kind, site.name, END):
            version, address = _version(site.tensor), site.tensor.data_ptr()
            frame.waiting.append(site._replace(version=version, address=address, first=block.pending))

    # ---- reading --------------------------------------------------------------------------------------------------
    def settle(self, frame: OpenFrame, at: str = "") -> None:
        """Read what waits; ``at``: the part of the model that has ended, none at the end of all of it."""
        waiting, frame.waiting = frame.waiting, []
        errands, frame.errands = frame.errands, []
        frame.passed = frame.passed_bytes = 0
        if not (waiting or errands):
            return
        elsewhere, kernels = self._elsewhere(frame), self._session.kernels
        if elsewhere:
            kernels.follow(frame.stream)
        if waiting and (elsewhere or not self._together.follow(frame, waiting, at)):
            self._read(frame, waiting, at)
        for errand in errands:
            self._run(frame, errand)
        if elsewhere:  # the memory of what waited may be given to others there from here on
            kernels.settle()
            kernels.lead(frame.stream)

    def _read(self, frame: OpenFrame, waiting: list[Waiting], at: str) -> None:
        late = self._intact(frame, [site for site in waiting if site.first is None])
        if at != _ROOM:
            self._prove(frame, [site.name for site in late], at)
        for site in self._together.record(frame, late, None if at == _ROOM else at):
            self._now(frame, site)
        again = [s for s in waiting if s.first is not None and self._again(frame, s, s.first, at)]
        if again:
            self._together.prepare(frame, again)

    def _run(self, frame: OpenFrame, errand: Errand) -> None:
        name, issue, file, marks, first = errand
        moved = any(tensor.data_ptr() != address for tensor, _, address in marks)
        if moved or (first is None and any(_version(tensor) != version for tensor, version, _ in marks)):
            if first is None:
                self.written.add(name)
            self._session.twins.refuse(frame.kind, name, END)
        if moved:
            return
        pending = issue()
        if first is None:
            file(pending)
        else:
            frame.pairs.append(Pair(name, END, first, pending, self._late_as_any(frame)))

    def _late_as_any(self, frame: OpenFrame) -> bool:
        """Whether what waits is read no earlier than in any frame of its kind.

        Not where a long one had to be read in between, as a shorter one is not, nor before a forward that may follow.
        """
        return not frame.early if frame.parts else frame.followed or not frame.ended

    def _prove(self, frame: OpenFrame, names: list[str], at: str) -> None:
        """Tell which sites are read where they were never compared: the part that should have ended was left out."""
        twins = self._session.twins
        for name in names:
            if not twins.proven(frame.kind, name, at):
                self.unproven.add(name)
                twins.refuse(frame.kind, name, END)

    def _intact(self, frame: OpenFrame, sites: list[Waiting]) -> list[Waiting]:
        """The sites that can be read; tells which were written to since they were passed, as far as torch counts it.

        A tensor whose memory was taken away, or that was given other memory, cannot be read any more.
        """
        found = []
        for site in sites:
            moved = site.tensor.data_ptr() != site.address
            if moved or _version(site.tensor) != site.version:
                self.written.add(site.name)
                self._session.twins.refuse(frame.kind, site.name, END)
            if not moved:
                found.append(site)
        return found

    def _again(self, frame: OpenFrame, site: Waiting, first: Pending, at: str) -> bool:
        """Read a site again that was read when it was passed; whether it may turn out to be the same."""
        if site.tensor.data_ptr() != site.address or _version(site.tensor) != site.version:
            self._session.twins.refuse(frame.kind, site.name, END)
            return False
        view = resolve(site.tensor, self._session.geometry_of(frame), site.layout)
        assert view is not None, "it was read once"
        again = self._session.device_frame(frame).launch(flattened(view) if site.flatten else view, False)
        if again is not None:
            frame.pairs.append(Pair(site.name, END, first, again, self._late_as_any(frame), at))
        return again is not None
