"""Sites that are read together in step after step: what they take is worked out once, and is one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.device import Pending
from zkl_debug.capture.frame import OpenFrame
from zkl_debug.capture.layout import I64, dtype_name, flattened, resolve
from zkl_debug.capture.rows import Geometry
from zkl_debug.capture.script import Script, Several
from zkl_debug.capture.twins import Reading, memory_key
from zkl_debug.lanes import LaneView, lane_view
from zkl_debug.schema import SiteMeta

if TYPE_CHECKING:
    from zkl_debug.capture.postponed import Waiting
    from zkl_debug.capture.session import CaptureSession

_MOST = 32
_MOST_KNOWN = 512

#: Issues digests, one tensor's behind the other's: addresses of the tensors and of the output; False where it cannot.
Launch = Callable[[Sequence[int], int], bool]

#: Kind of a frame, part of a model, how many sites and the first of them, and where the rows lie.
_Key = tuple[int, str, int, str, Geometry]


@dataclass(frozen=True, eq=False)
class Entry:
    """How tensors of one kind are read, in frames whose rows lie in the same slots; there is one of each kind.

    Attributes:
        lanes: how, but for the address; it keeps no tensor.
        take: rows of it that are rows of the frame, int64 [n]; None for the first n.
        dest: where its rows go, on the device; None when in order.
        slots: rows that are told to the key of its memory.
        dtype, row_shape: of the sites that see it.
        row: their rows in the frame, uint32 [n].
    """

    lanes: LaneView
    take: I64 | None
    dest: torch.Tensor | None
    slots: int
    dtype: str
    row_shape: tuple[int, ...]
    row: NDArray[np.uint32]

    @property
    def count(self) -> int:
        """Digests that are made of it."""
        return self.lanes.rows if self.dest is None else len(self.row)


@dataclass(frozen=True)
class Worked:
    """What some sites take.

    Attributes:
        metas: of the sites, in order.
        names: of the sites.
        rows: of each site, its rows in the frame, uint32 [n].
        entries: the tensors that are read.
        launches: by which of them are.
    """

    metas: tuple[SiteMeta, ...]
    names: frozenset[str]
    rows: tuple[NDArray[np.uint32], ...]
    entries: tuple[Entry, ...]
    launches: dict[tuple[int, ...], Launch | None] = field(default_factory=dict)


class Together:
    """The sets of sites of one session that were worked out."""

    def __init__(self, session: CaptureSession) -> None:
        self._session = session
        self._known: dict[Any, Worked | None] = {}
        self._entries: dict[Any, Entry | None] = {}
        self._scripts: dict[_Key, Script] = {}

    def follow(self, frame: OpenFrame, sites: Sequence[Waiting], at: str) -> bool:
        """Record sites as others like them were the last time ``at`` this part of a model; whether that was done."""
        script = self._scripts.get(self._key(frame, sites, at))
        return script is not None and script.follow(self._session, frame, sites)

    def record(self, frame: OpenFrame, sites: Sequence[Waiting], at: str | None) -> list[Waiting]:
        """Record sites; returns those that must be recorded one by one.

        Args:
            frame: their frame.
            sites: all that are read now.
            at: the part of the model that has ended, None where it is only its turn to be read.
        """
        fit, rest = self._sorted(frame, sites)
        worked, which, unique = self._find(fit)
        if worked is None or any(not worked.names.isdisjoint(seen) for seen in (frame.seen, *frame.replayed_names)):
            return list(sites)
        found = self._read(frame, worked, unique)
        if found is None:
            return list(sites)
        frame.seen.update(dict.fromkeys(worked.names, 1))
        frame.deferred.append(Several(worked, [(found[at].part, found[at].start) for at in which]))
        if at is not None and not rest:
            self._remember(frame, sites, at, worked, which)
        return rest

    def _remember(
        self, frame: OpenFrame, sites: Sequence[Waiting], at: str, worked: Worked, which: Sequence[int]
    ) -> None:
        """Keep what was done, where every tensor was read and every site may be read here."""
        launch = worked.launches.get(tuple(range(len(worked.entries))))
        proven = all(self._session.twins.proven(frame.kind, name, at) for name in worked.names)
        if launch is None or not proven:
            return
        if len(self._scripts) >= _MOST_KNOWN:
            self._scripts.clear()
        self._scripts[self._key(frame, sites, at)] = Script.of(sites, worked, which, launch)

    def _key(self, frame: OpenFrame, sites: Sequence[Waiting], at: str) -> _Key:
        return frame.kind, at, len(sites), sites[0].name, self._session.geometry_of(frame)

    def prepare(self, frame: OpenFrame, sites: Sequence[Waiting]) -> None:
        """Work out what sites take that were recorded already, for the first frame in which they wait."""
        fit, _ = self._sorted(frame, sites)
        worked, _, unique = self._find(fit)
        if worked is None:
            return
        shared = {pair.second for pair in frame.pairs}
        self._launch(worked, unique, tuple(at for at, site in enumerate(unique) if site.name not in shared))

    def _sorted(self, frame: OpenFrame, sites: Sequence[Waiting]) -> tuple[list[tuple[Waiting, Entry]], list[Waiting]]:
        """The sites that can be worked out, and how each is read; and those that cannot."""
        fit: list[tuple[Waiting, Entry]] = []
        rest: list[Waiting] = []
        for site in sites:
            entry = self._entry(frame, site)
            if entry is None:
                rest.append(site)
            else:
                fit.append((site, entry))
        return fit, rest

    def _find(self, sites: Sequence[tuple[Waiting, Entry]]) -> tuple[Worked | None, list[int], list[Waiting]]:
        """What the sites take, of each the index of the tensor it sees, and the first site of each tensor."""
        if not 0 < len(sites) <= _MOST or len({entry.lanes.owner.get_device() for _, entry in sites}) > 1:
            return None, [], []
        # Sites of one memory are one reading: what each saw is what is there now.
        first: dict[tuple[int, Entry], int] = {}
        which: list[int] = []
        unique: list[Waiting] = []
        for site, entry in sites:
            at = first.setdefault((site.tensor.data_ptr(), entry), len(unique))
            if at == len(unique):
                unique.append(site)
            which.append(at)
        key = (tuple(which), tuple((site.name, entry) for site, entry in sites))
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._work_out(sites, [entry for _, entry in first])
        return self._known[key], which, unique

    def _read(self, frame: OpenFrame, worked: Worked, unique: Sequence[Waiting]) -> list[Pending] | None:
        """Where the digests of each tensor are or will be; None where it cannot be told."""
        found: dict[int, Pending] = {}
        keys = [memory_key(site.tensor, e.take, e.slots) for site, e in zip(unique, worked.entries, strict=True)]
        for at, (site, key) in enumerate(zip(unique, keys, strict=True)):
            earlier = None if key is None else frame.known(key, site.tensor, site.name, self._session.twins)
            if earlier is not None:
                found[at] = earlier
        read = tuple(at for at in range(len(unique)) if at not in found)
        if read:
            launch = self._launch(worked, unique, read)
            tensors, entries = [unique[at].tensor for at in read], [worked.entries[at] for at in read]
            made = None if launch is None else self._issue(frame, launch, tensors, entries)
            if made is None:
                return None
            found.update(zip(read, made, strict=True))
        for at, (site, key) in enumerate(zip(unique, keys, strict=True)):
            if key is not None:
                frame.remember(key, Reading(site.tensor, site.version, site.name, found[at]))
        return [found[at] for at in range(len(unique))]

    def _issue(
        self, frame: OpenFrame, launch: Launch, tensors: Sequence[torch.Tensor], entries: Sequence[Entry]
    ) -> list[Pending] | None:
        counts = [entry.count for entry in entries]
        addresses = [tensor.data_ptr() for tensor in tensors]
        device = self._session.device_frame(frame)
        pending = device.launch_several(launch, addresses, sum(counts), tensors[0].device)
        if pending is None:
            return None
        made, start = [], pending.start
        for count in counts:
            made.append(Pending(pending.part, start, count))
            start += count
        return made

    def _launch(self, worked: Worked, unique: Sequence[Waiting], read: tuple[int, ...]) -> Launch | None:
        """What reads some of the tensors."""
        if not read:
            return None
        if read not in worked.launches:
            entries = [worked.entries[at] for at in read]
            lanes = [
                replace(entry.lanes, address=unique[at].tensor.data_ptr())
                for at, entry in zip(read, entries, strict=True)
            ]
            dests, counts = [entry.dest for entry in entries], [entry.count for entry in entries]
            worked.launches[read] = self._session.kernels.several(lanes, dests, counts)
        return worked.launches[read]

    def _work_out(self, sites: Sequence[tuple[Waiting, Entry]], read: Sequence[Entry]) -> Worked | None:
        names = frozenset(site.name for site, _ in sites)
        if len(names) < len(sites):
            return None
        metas = [self._session.meta_for(s.name, e.dtype, e.row_shape, s.kind, s.semantic) for s, e in sites]
        return Worked(tuple(metas), names, tuple(entry.row for _, entry in sites), tuple(read))

    def _entry(self, frame: OpenFrame, site: Waiting) -> Entry | None:
        """How a tensor is read; None where it must go the long way."""
        tensor = site.tensor
        like = (tensor.shape, tensor.stride(), tensor.dtype, site.layout, site.flatten)
        key = (self._session.geometry_of(frame), tensor.get_device(), like)
        if key not in self._entries:
            if len(self._entries) >= _MOST_KNOWN:
                self._entries.clear()
            self._entries[key] = self._make_entry(frame, site)
        return self._entries[key]

    def _make_entry(self, frame: OpenFrame, site: Waiting) -> Entry | None:
        session, tensor = self._session, site.tensor
        view = resolve(tensor, session.geometry_of(frame), site.layout)
        if view is None or not session.kernels.takes(tensor) or len(view.row) == 0:
            return None
        view = flattened(view) if site.flatten else view
        if view.shard is not None or view.tensor.data_ptr() != tensor.data_ptr():
            return None
        slots, n, take = int(view.tensor.shape[0]), len(view.row), view.take
        leading = take is None or bool(np.array_equal(take, np.arange(n)))
        lanes = lane_view((view.tensor[:n] if leading else view.tensor).detach(), n if leading else slots)
        if lanes is None:
            return None
        dest = None if leading or take is None else session.device_frame(frame).dest_of(take, slots, tensor.device)
        none = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return Entry(replace(lanes, owner=none), take, dest, slots, dtype_name(view.tensor), view.row_shape, view.row)
