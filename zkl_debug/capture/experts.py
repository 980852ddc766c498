"""Expert-side tensors have no token order of their own: bring their rows back through the permutation map."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.layout import RowView
from zkl_debug.capture.session import CaptureSession
from zkl_debug.schema import SiteKind

_EXPERT = re.compile(r"(?P<moe>.*)\.experts\.local_experts\.(?P<index>\d+)(?:\.|:|$)")
_SCRATCH = "expert_permutation"


@dataclass(frozen=True)
class Permutation:
    """Token slot and expert of each permuted row, in the order the experts see them.

    Attributes:
        slot: token slot of each permuted row, shape [m].
        expert: global expert id of each permuted row, shape [m].
        first_expert: global id of this rank's first local expert.
    """

    slot: NDArray[np.int64]
    expert: NDArray[np.int64]
    first_expert: int = 0

    def per_token(self, n_slots: int) -> NDArray[np.int64] | None:
        """Permuted rows of each slot in ascending expert order, shape [n_slots, k]; None if k is not uniform."""
        counts = np.bincount(self.slot, minlength=n_slots)
        if n_slots == 0 or len(counts) != n_slots or counts[0] == 0 or (counts != counts[0]).any():
            return None
        order = np.lexsort((self.expert, self.slot))
        return order.reshape(n_slots, int(counts[0]))


def set_permutation(session: CaptureSession, moe_path: str, permutation: Permutation) -> None:
    """Remember the permutation of an MoE layer for the rest of the frame."""
    if session.frame is not None:
        session.frame.scratch.setdefault(_SCRATCH, {})[moe_path] = permutation


def get_permutation(session: CaptureSession, moe_path: str) -> Permutation | None:
    """The permutation of an MoE layer in the open frame, if one was seen."""
    if session.frame is None:
        return None
    found: Permutation | None = session.frame.scratch.get(_SCRATCH, {}).get(moe_path)
    return found


def record_expert_rows(session: CaptureSession, name: str, tensor: torch.Tensor, kind: SiteKind, semantic: str) -> bool:
    """Record an expert-side tensor by token.

    A tensor over all permuted rows becomes rows [k, *] per token (ascending expert id); a tensor of one local expert
    becomes rows of the tokens routed to it.

    Returns:
        Whether rows were recorded; a tensor that fits neither form is listed as having no token rows.
    """
    frame = session.frame
    if frame is None:
        session.outside[name] = session.outside.get(name, 0) + 1
        return False
    if session.recording or frame.rows.warmup:
        session.out_of_reach(name, "its rows are in expert order, which is not known inside a graph")
        return False
    head = name.rsplit(":", 1)[0]
    match = _EXPERT.match(head + ".")
    moe_path = match.group("moe") if match else re.split(r"[./](?:experts|permute|unpermute)", head)[0]
    permutation = get_permutation(session, moe_path)
    view = None
    if permutation is not None and match is not None:
        view = _one_expert(frame.rows.slot, permutation, int(match.group("index")), tensor)
    elif permutation is not None:
        view = _all_experts(frame.rows.slot, frame.rows.n_slots, permutation, tensor)
    if view is None:
        session.not_rows.setdefault(name, f"{tuple(tensor.shape)}: no expert permutation fits")
        return False
    session.record_view(name, view, kind=kind, semantic=semantic)
    return True


def _all_experts(
    slots: NDArray[np.int64], n_slots: int, permutation: Permutation, tensor: torch.Tensor
) -> RowView | None:
    if tensor.shape[0] != len(permutation.slot):
        return None
    table = permutation.per_token(n_slots)
    if table is None:
        return None
    wanted = table[slots]  # [n, k]
    index = torch.from_numpy(np.ascontiguousarray(wanted.reshape(-1))).to(tensor.device)
    gathered = tensor.detach().index_select(0, index).reshape(len(slots), wanted.shape[1], *tensor.shape[1:])
    return RowView(gathered, None, np.arange(len(slots), dtype=np.uint32), tuple(gathered.shape[1:]))


def _one_expert(slots: NDArray[np.int64], permutation: Permutation, index: int, tensor: torch.Tensor) -> RowView | None:
    mine = permutation.slot[permutation.expert == permutation.first_expert + index]
    if tensor.shape[0] != len(mine):
        return None
    row_of_slot = {int(s): i for i, s in enumerate(slots)}
    pairs = [(i, row_of_slot[int(s)]) for i, s in enumerate(mine) if int(s) in row_of_slot]
    take = np.array([p[0] for p in pairs], np.int64)
    row = np.array([p[1] for p in pairs], np.uint32)
    return RowView(tensor, take, row, tuple(tensor.shape[1:]))
