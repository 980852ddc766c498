"""Sites that are read together again, as in the step before: recognised at a glance, and launched.

Whether a site is read as it was before depends on what its tensor is like, on where the rows of the frame lie and on
which of the sites share memory. Where all of that is what it was, nothing else has to be worked out or looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zkl_debug.capture.device import Pending
from zkl_debug.capture.frame import Deferred, OpenFrame
from zkl_debug.capture.twins import Reading, memory_key
from zkl_debug.schema import U64, SiteBlock

if TYPE_CHECKING:
    from zkl_debug.capture.postponed import Waiting
    from zkl_debug.capture.session import CaptureSession
    from zkl_debug.capture.together import Launch, Worked

#: Name, shape, strides (None without gaps) and type of a site's tensor, its device, and how it is read.
Like = tuple[str, torch.Size, tuple[int, ...] | None, torch.dtype, int, str, bool]


def like(site: Waiting) -> Like:
    """What the reading of a site depends on, but for the place of rows and memory."""
    tensor = site.tensor
    stride = None if tensor.is_contiguous() else tensor.stride()
    return site.name, tensor.shape, stride, tensor.dtype, tensor.get_device(), site.layout, site.flatten


@dataclass(frozen=True)
class Several(Deferred):
    """Sites of a frame that were read together, and where their digests are; made into blocks when it is filed.

    Attributes:
        worked: the sites.
        places: of each, the chunk its digests are in, and the first of them there.
    """

    worked: Worked
    places: Sequence[tuple[int, int]]

    def blocks(self, frame: OpenFrame, parts: list[U64]) -> list[SiteBlock]:  # noqa: ARG002
        """The sites, from the digests of each chunk."""
        return [
            SiteBlock(meta, row, parts[part][start : start + len(row)])
            for meta, row, (part, start) in zip(self.worked.metas, self.worked.rows, self.places, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Script:
    """What was done for some sites, when none of their memory had been read before in the frame.

    Attributes:
        likes: of the sites, in order.
        shared: of each, the first site with the same memory.
        counted: names of the sites, each once.
        worked: what they take.
        unique: of each tensor that is read, the first site that sees it.
        offsets: of each site, its first digest among those made.
        total: digests that are made.
        launch: makes them.
        device: where.
    """

    likes: tuple[Like, ...]
    shared: tuple[int, ...]
    counted: dict[str, int]
    worked: Worked
    unique: tuple[int, ...]
    offsets: tuple[int, ...]
    total: int
    launch: Launch
    device: torch.device

    @classmethod
    def of(cls, sites: Sequence[Waiting], worked: Worked, which: Sequence[int], launch: Launch) -> Script:
        """The script of sites, of which ``launch`` reads every tensor once; ``which``: of each site, that tensor."""
        unique = [which.index(at) for at in range(len(worked.entries))]
        starts = [0]
        for entry in worked.entries:
            starts.append(starts[-1] + entry.count)
        return cls(
            tuple(like(site) for site in sites),
            _shared([site.address for site in sites]),
            dict.fromkeys(worked.names, 1),
            worked,
            tuple(unique),
            tuple(starts[at] for at in which),
            starts[-1],
            launch,
            sites[0].tensor.device,
        )

    def follow(self, session: CaptureSession, frame: OpenFrame, sites: Sequence[Waiting]) -> bool:
        """Read sites by it; False where they are not what it is for, or were written to: nothing was done then."""
        addresses = []
        for site, (name, shape, stride, dtype, index, layout, flatten) in zip(sites, self.likes, strict=True):
            tensor, address, version = site.tensor, site.address, site.version
            if (
                site.name != name
                or site.first is not None
                or tensor.data_ptr() != address
                or (version >= 0 and (frame.twins or tensor._version != version))
                or tensor.shape != shape
                or not (tensor.is_contiguous() if stride is None else tensor.stride() == stride)
                or tensor.dtype is not dtype
                or tensor.get_device() != index
                or site.layout != layout
                or site.flatten is not flatten
            ):
                return False
            addresses.append(address)
        if _shared(addresses) != self.shared or not all(
            seen.isdisjoint(self.counted) for seen in (frame.seen.keys(), *frame.replayed_names)
        ):
            return False
        read = [addresses[at] for at in self.unique]
        pending = session.device_frame(frame).launch_several(self.launch, read, self.total, self.device)
        if pending is None:
            return False
        frame.seen.update(self.counted)
        places = [(pending.part, pending.start + offset) for offset in self.offsets]
        frame.deferred.append(Several(self.worked, places))
        for at, entry in zip(self.unique, self.worked.entries, strict=True):
            site = sites[at]
            if site.version >= 0:
                key = memory_key(site.tensor, entry.take, entry.slots)
                if key is not None:
                    made = Pending(*places[at], entry.count)
                    frame.remember(key, Reading(site.tensor, site.version, site.name, made))
        return True


def _shared(addresses: Sequence[int]) -> tuple[int, ...]:
    """Of each address, the index of the first that is the same."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(address, at) for at, address in enumerate(addresses)])
