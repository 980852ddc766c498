"""Expert-side tensors have no token order of their own: bring their rows back through the permutation map."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.layout import RowView, share_of
from zkl_debug.capture.session import CaptureSession
from zkl_debug.schema import ROW_DTYPE, RowFlag, SiteKind

if TYPE_CHECKING:
    from zkl_debug.capture.frame import OpenFrame

_EXPERT = re.compile(r"(?P<moe>.*)\.experts\.local_experts\.(?P<index>\d+)(?:\.|:|$)")
_SCRATCH = "expert_permutation"


@dataclass(frozen=True)
class Permutation:
    """Token slot and expert of each permuted row, in the order the experts see them.

    Attributes:
        slot: token slot of each permuted row, shape [m].
        expert: global expert id of each permuted row, shape [m].
        first_expert: what to add to the expert number in a site's name for the global id.
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
    if frame.rows.split[1] > 1:
        slots, rows = share_of(frame.rows)
    else:
        slots, rows = frame.rows.slot, np.arange(len(frame.rows.slot), dtype=np.uint32)
    n_slots = frame.rows.n_slots // frame.rows.split[1]
    head = name.rsplit(":", 1)[0]
    match = _EXPERT.match(head + ".")
    moe_path = match.group("moe") if match else re.split(r"[./](?:experts|permute|unpermute)", head)[0]
    permutation = get_permutation(session, moe_path)
    view = None
    sent = get_sent(session, moe_path)
    if match is not None and sent is not None:
        view = sent.view(frame, int(match.group("index")), tensor)
    elif permutation is not None and match is not None:
        view = _one_expert(slots, permutation, int(match.group("index")), tensor, rows)
    elif permutation is not None and (sent is None or not head.endswith(".experts")):
        view = _all_experts(slots, n_slots, permutation, tensor, rows)
    if view is None:
        session.not_rows.setdefault(name, f"{tuple(tensor.shape)}: no expert permutation fits")
        return False
    session.record_view(name, view, kind=kind, semantic=semantic)
    return True


def _all_experts(
    slots: NDArray[np.int64],
    n_slots: int,
    permutation: Permutation,
    tensor: torch.Tensor,
    row: NDArray[np.uint32],
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
    return RowView(gathered, None, row, tuple(gathered.shape[1:]))


def _one_expert(
    slots: NDArray[np.int64], permutation: Permutation, index: int, tensor: torch.Tensor, rows: NDArray[np.uint32]
) -> RowView | None:
    mine = permutation.slot[permutation.expert == permutation.first_expert + index]
    if tensor.shape[0] != len(mine):
        return None
    row_of_slot = {int(s): i for i, s in enumerate(slots)}
    pairs = [(i, row_of_slot[int(s)]) for i, s in enumerate(mine) if int(s) in row_of_slot]
    take = np.array([p[0] for p in pairs], np.int64)
    row = rows[np.array([p[1] for p in pairs], np.int64)]
    return RowView(tensor, take, row, tuple(tensor.shape[1:]))


# ---- expert parallel: rows that came from other ranks --------------------------------------------------------------
_SENT = "expert_sent"


@dataclass(frozen=True)
class Sent:
    """What the experts of this rank were sent: how many tokens by each rank of the expert-parallel group.

    Attributes:
        counts: tokens by source (its place in the group) and local expert, shape [sources, experts]. Of each expert the
            rows come source by source, and of each source in the order of its own tokens.
        first_expert: global id of the first local expert.
    """

    counts: NDArray[np.int64]
    first_expert: int

    def view(self, frame: OpenFrame, expert: int, tensor: torch.Tensor) -> RowView | None:
        """All rows of one expert, each under a placeholder row that says whose token it is."""
        local = expert - self.first_expert
        if not 0 <= local < self.counts.shape[1] or tensor.shape[0] != int(self.counts[:, local].sum()):
            return None
        known: dict[int, NDArray[np.uint32]] = frame.scratch.setdefault(_SENT + str(id(self)), {})
        row = known.get(expert)
        if row is None:
            row = known[expert] = self._placeholders(frame, expert, local)
        return RowView(tensor, None, row, tuple(tensor.shape[1:]))

    def _placeholders(self, frame: OpenFrame, expert: int, local: int) -> NDArray[np.uint32]:
        """Rows of the frame for (source, expert, how-manieth); made once a frame, for layers of equal counts shared."""
        table: dict[tuple[int, int, int], int] = frame.scratch.setdefault(_SENT, {})
        made: list[tuple[int, int, int]] = []
        places: list[int] = []
        for source, count in enumerate(self.counts[:, local].tolist()):
            for number in range(count):
                at = table.get((source, expert, number))
                if at is None:
                    at = table[source, expert, number] = frame.n_rows + len(made)
                    made.append((source, expert, number))
                places.append(at)
        if made:
            rows = np.zeros(len(made), ROW_DTYPE)
            rows["sample"], rows["token"], rows["position"] = np.array(made, np.int64).T
            rows["flags"] = int(frame.rows.phase) & int(RowFlag.PHASE_MASK) | int(RowFlag.SENT)
            frame.labels.append(rows)
        return np.array(places, np.uint32)


def set_sent(session: CaptureSession, moe_path: str, sent: Sent) -> None:
    """Remember what the experts of an MoE layer were sent, for the rest of the frame."""
    if session.frame is not None:
        session.frame.scratch.setdefault(_SENT + "by_layer", {})[moe_path] = sent


def get_sent(session: CaptureSession, moe_path: str) -> Sent | None:
    """What the experts of an MoE layer were sent by other ranks, None where they see the rank's own tokens only."""
    if session.frame is None:
        return None
    found: Sent | None = session.frame.scratch.get(_SENT + "by_layer", {}).get(moe_path)
    return found


def record_dispatch(session: CaptureSession, moe_path: str, permutation: Permutation) -> None:
    """Record where the rank sends its tokens: of each token (expert, how-manieth of the rank's tokens for it), int32.

    Only with this can the rows that experts of other ranks saw be given back to their tokens, so it is recorded with
    its values at every level.
    """
    frame = session.frame
    if frame is None:
        return
    slots, rows = (
        share_of(frame.rows)
        if frame.rows.split[1] > 1
        else (frame.rows.slot, np.arange(len(frame.rows.slot), dtype=np.uint32))
    )
    table = permutation.per_token(frame.rows.n_slots // frame.rows.split[1])
    if table is None:
        session.not_rows.setdefault(f"{moe_path}/dispatch:out.0", "a token with another number of experts")
        return
    order = np.lexsort((permutation.slot, permutation.expert))
    number = np.empty(len(order), np.int64)
    first = np.searchsorted(permutation.expert[order], permutation.expert[order])
    number[order] = np.arange(len(order)) - first
    chosen = table[slots]
    value = np.stack([permutation.expert[chosen], number[chosen]], -1).astype(np.int32)
    value[chosen < 0] = -1  # a token that was dropped there
    view = RowView(torch.from_numpy(value), None, rows, tuple(value.shape[1:]))
    session.record_view(f"{moe_path}/dispatch:out.0", view, kind=SiteKind.TAP, semantic="dispatch", always=True)
