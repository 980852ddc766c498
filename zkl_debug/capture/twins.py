"""Sites that see the very same tensor: a module's output is the next one's input, and need not be read twice.

On a CPU the version counter of a tensor tells of every write. A kernel on a GPU may write in place without touching it,
so there the counter alone is no proof. A pair of sites is read once only after it was read twice and found equal in
every row of a frame of the same phase; it is read twice again in every frame whose number is a multiple of
``RECHECK``, and a pair that was once unequal is never trusted again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from zkl_debug.schema import U64

#: Every so many frames, all sites are read.
RECHECK = 32

Key = tuple[int, int, int, tuple[int, ...], torch.dtype, int]


def tensor_key(tensor: torch.Tensor, take: object) -> Key | None:
    """Key of a tensor's bytes as they are now; None where nothing tells of writes (inference tensors).

    Whoever keeps a key must keep the tensor too: its memory is then not given to another.
    """
    if tensor.is_inference():
        return None
    return (tensor.data_ptr(), tensor._version, tensor.numel(), tensor.stride(), tensor.dtype, id(take))


@dataclass
class Twins:
    """Pairs of sites by frame class (phase and whether a graph was replayed)."""

    known: set[tuple[int, str, str]] = field(default_factory=set)
    refuted: set[tuple[int, str, str]] = field(default_factory=set)
    betrayed: set[tuple[int, str, str]] = field(default_factory=set)  # refuted after they had been trusted

    def trusted(self, phase: int, frame: int, first: str, second: str) -> bool:
        """Whether ``second`` may take the digests of ``first`` in this frame."""
        return frame % RECHECK != 0 and (phase, first, second) in self.known

    def judge(self, phase: int, first: str, second: str, a: U64, b: U64) -> None:
        """Both were read: remember whether they were equal."""
        pair = (phase, first, second)
        if pair in self.refuted:
            return
        if len(a) and np.array_equal(a, b):
            self.known.add(pair)
        else:
            if pair in self.known:
                self.known.discard(pair)
                self.betrayed.add(pair)
            self.refuted.add(pair)
