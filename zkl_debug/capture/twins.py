"""Sites that see the very same tensor: a module's output is the next one's input, and need not be read twice.

On a CPU the version counter of a tensor tells of every write. A kernel on a GPU may write in place without touching it,
so there the counter alone is no proof. A pair of sites is read once only after it was read twice and found equal in
every row of a frame of the same phase; it is read twice again in every frame whose number is a multiple of
``RECHECK``, and a pair that was once unequal is never trusted again.
"""

from __future__ import annotations

import threading
from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from zkl_debug.capture.device import Pending
from zkl_debug.schema import U64

#: Every so many frames, all sites are read; a prime, so that it falls on all kinds of frames of a program that repeats.
RECHECK = 31
#: Shapes of a kind of frame for which what is read later is compared: a program may go other ways for another shape.
SHAPES = 8
#: Equal readings it takes before a site of a forward that replays graphs is read later only: its memory may be that of
#: a graph, and be written over by the next one but not by the one that came by then.
AUDITS = 4
#: Equal readings that prove nothing, after which a site is read when it is passed and not again.
UNPROVEN = 16
#: The second of a pair: the first as it is when it is read later.
END = "what was read of it later"

Key = tuple[int, int, tuple[int, ...], torch.dtype, int, int]


def memory_key(tensor: torch.Tensor, take: object, rows: int) -> Key | None:
    """Key of the memory of a tensor, seen as ``rows`` rows; None where nothing tells of writes (inference tensors).

    Views of one shape or another that lie in the same memory without gaps are the same. Whoever keeps a key must keep
    the tensor too: its memory is then not given to another.
    """
    if tensor.is_inference():
        return None
    return (tensor.data_ptr(), tensor.numel(), gaps(tensor), tensor.dtype, id(take), rows)


def gaps(tensor: torch.Tensor) -> tuple[int, ...]:
    """Nothing for a tensor without gaps; its shape and strides for others, which may cut other elements out of one."""
    return () if tensor.is_contiguous() else (*tensor.shape, *tensor.stride())


@dataclass(frozen=True)
class Reading:
    """The last reading of some memory in a frame: what was read, its version then, for which site, and where it is.

    ``doubted``: another site read this memory since and it is not known yet whether that was the same.
    """

    tensor: torch.Tensor
    version: int
    site: str
    pending: Pending
    doubted: bool = False

    def written_since(self, tensor: torch.Tensor) -> bool:
        """Whether the version counter says so. A lower one belongs to a new tensor over the same memory: it says
        nothing, and whether the two are one is for :class:`Twins` to find out."""
        return tensor._version > self.version


class Pair(NamedTuple):
    """Two sites that saw the same memory, or a site and what was read of it later, and where both digests are.

    ``proof``: whether that they are equal is a reason to read only one of them; that they are not always counts.
    ``at``: the part of the model whose end the later one was read at.
    """

    first: str
    second: str
    a: Pending
    b: Pending
    proof: bool = True
    at: str = ""


@dataclass
class Twins:
    """Pairs of sites by frame class (phase and whether a graph was replayed).

    Judged by the thread that reads frames out, while the program's asks and refuses.

    Attributes:
        never: trust none.
    """

    never: bool = False
    known: set[tuple[int, str, str]] = field(default_factory=set)
    refuted: set[tuple[int, str, str]] = field(default_factory=set)
    betrayed: set[tuple[int, str, str]] = field(default_factory=set)  # refuted after they had been trusted
    _until_end: dict[int, set[str]] = field(default_factory=dict)  # by phase, the known pairs with END
    _shown: dict[int, frozenset[str]] = field(default_factory=dict)  # the same, as it was told last
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _shapes: dict[int, set[tuple[int, int]]] = field(default_factory=dict)  # by phase, those that were judged
    _equal: dict[tuple[tuple[int, str, str], bool], int] = field(default_factory=dict)  # readings, of proof and not
    _places: dict[tuple[int, str], set[str]] = field(default_factory=dict)  # where sites were read later, and equal

    def trusted(self, phase: int, frame: int, first: str, second: str) -> bool:
        """Whether ``second`` may take the digests of ``first`` in this frame."""
        return frame % RECHECK != 0 and not self.never and (phase, first, second) in self.known

    def until_end(self, phase: int, frame: int) -> Container[str]:
        """The sites that may be read when the forward of this frame has been issued.

        It does not change: of the occurrences of a site in one frame, all are trusted or none is.
        """
        if frame % RECHECK == 0 or self.never:
            return ()
        with self._lock:
            if phase not in self._shown:
                self._shown[phase] = frozenset(self._until_end.get(phase, ()))
            return self._shown[phase]

    def is_fresh(self, phase: int, shape: tuple[int, int]) -> bool:
        """Whether no frame of a shape was judged so far, and its first are to be looked at."""
        judged = self._shapes.get(phase, ())
        return shape not in judged and len(judged) < SHAPES

    def judged(self, phase: int, shape: tuple[int, int]) -> None:
        """A frame of a shape was judged."""
        self._shapes.setdefault(phase, set()).add(shape)

    def refuses(self, phase: int, first: str, second: str) -> bool:
        """Whether the two were once unequal."""
        return (phase, first, second) in self.refuted

    def proven(self, phase: int, site: str, at: str) -> bool:
        """Whether what is read of a site here was equal to what was read when it was passed."""
        return at in self._places.get((phase, site), ())

    def judge(self, phase: int, pair: Pair, a: U64, b: U64, *, fresh: bool = False, audits: int = 1) -> None:
        """Both were read: remember whether they were equal.

        Args:
            phase: class of the frame.
            pair: what was read.
            a, b: the digests, uint64 [n, 2] each.
            fresh: it is the first frame of its shape, in which no site waited; earlier ones had shapes of their own.
            audits: equal readings it takes before one may stand for the other.
        """
        key = (phase, pair.first, pair.second)
        equal = len(a) > 0 and np.array_equal(a, b)
        with self._lock:
            if key in self.refuted:
                return
            if not equal:
                if key in self.known and not self.never and not (fresh and pair.second == END):
                    self.betrayed.add(key)
                self.refuse(*key)
                return
            count = self._equal[key, pair.proof] = self._equal.get((key, pair.proof), 0) + 1
            if pair.proof and pair.second == END:
                self._places.setdefault(key[:2], set()).add(pair.at)
            if pair.proof and count >= audits and key not in self.known:
                self.known.add(key)
                if pair.second == END:
                    self._until_end.setdefault(phase, set()).add(pair.first)
                    self._shown.pop(phase, None)
            elif not pair.proof and count >= UNPROVEN and key not in self.known:
                self.refuse(*key)

    def refuse(self, phase: int, first: str, second: str) -> None:
        """Never trust a pair again."""
        pair = (phase, first, second)
        with self._lock:
            self.known.discard(pair)
            self.refuted.add(pair)
            if second == END:
                self._until_end.get(phase, set()).discard(first)
                self._shown.pop(phase, None)
