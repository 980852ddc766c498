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
        topk: experts a token has at most, where some may have fewer because tokens are dropped; 0: all have as many.
    """

    slot: NDArray[np.int64]
    expert: NDArray[np.int64]
    first_expert: int = 0
    topk: int = 0

    def per_token(self, n_slots: int) -> NDArray[np.int64] | None:
        """Permuted rows of each slot in ascending expert order, shape [n_slots, k], -1 behind the last of a slot.

        None where slots have different numbers of experts and ``topk`` is not known, or more than that.
        """
        counts = np.bincount(self.slot, minlength=n_slots)
        if n_slots == 0 or len(counts) != n_slots or counts.max() == 0:
            return None
        order = np.lexsort((self.expert, self.slot))
        k = self.topk or int(counts[0])
        if (counts == k).all():
            return order.reshape(n_slots, k)
        if not self.topk or (counts > k).any():
            return None
        table = np.full((n_slots, k), -1, np.int64)
        slot = self.slot[order]
        table[slot, np.arange(len(order)) - (np.cumsum(counts) - counts)[slot]] = order
        return table


def choice_as_map(weights: torch.Tensor, ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A router's choice told as ids, [t, k] each, in the form of training: weights [t, experts] and a map [t, experts].

    Ids outside 0 .. experts - 1 stand for no expert.
    """
    at = torch.where((ids >= 0) & (ids < experts), ids, experts).long()
    shape = (*ids.shape[:-1], experts + 1)
    spread = torch.zeros(shape, dtype=weights.dtype, device=weights.device).scatter(-1, at, weights.detach())
    chosen = torch.zeros(shape, dtype=torch.bool, device=ids.device).scatter(-1, at, True)
    return spread[..., :experts], chosen[..., :experts]


def is_choice_by_id(weights: object, ids: object, experts: int) -> bool:
    """Whether two tensors are a router's choice told as ids of fewer than all experts."""
    if not isinstance(weights, torch.Tensor) or not isinstance(ids, torch.Tensor):
        return False
    whole = ids.dtype in (torch.int16, torch.int32, torch.int64)
    return whole and weights.shape == ids.shape and ids.ndim >= 2 and ids.shape[-1] < experts


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

    A tensor over all permuted rows becomes rows [k, *] per token (ascending expert id; zeros where a token that was
    dropped somewhere has fewer experts); a tensor of one local expert becomes rows of the tokens routed to it.

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
    rows = tensor.detach()
    if (wanted < 0).any():
        rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        wanted = np.where(wanted < 0, len(tensor), wanted)
    index = torch.from_numpy(np.ascontiguousarray(wanted.reshape(-1))).to(tensor.device)
    gathered = rows.index_select(0, index).reshape(len(slots), wanted.shape[1], *tensor.shape[1:])
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
