"""Label rows of the dynamic engine's steps: which token each row was scored against, and the log-prob it got.

Labels and log-probs stay on the device until the frame is read out; nothing here waits for it, but where there is no
device or another side's labels are put in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.device import Pending, to_device
from zkl_debug.capture.frame import Deferred, OpenFrame
from zkl_debug.capture.labels import (
    add_label_rows,
    label_blocks,
    label_metas,
    make_label_rows,
    record_labels,
    record_late_labels,
)
from zkl_debug.schema import U64, RowFlag, SiteBlock, SiteMeta

if TYPE_CHECKING:
    from zkl_debug.capture.api import Capture
    from zkl_debug.engines.megatron.adapter import MegatronAdapter
    from zkl_debug.engines.megatron.frames import StepRequests

I64 = NDArray[np.int64]
SELECTED = "logprobs/selected:out.0"


# ---- steps in which every request runs one token ------------------------------------------------------------------
@dataclass(frozen=True)
class DecodeLabels(Deferred):
    """Labels of a decode step, made when the frame is filed.

    Attributes:
        step: the step.
        pending: where its words are: sampled tokens (int64 [n]), log-probs returned and log-probs of the sampled tokens
            (float32 [n] each).
        metas: of the label's site and of the log-prob's, None where it is not wanted.
        payload: whether payload is kept.
    """

    step: StepRequests
    pending: Pending
    metas: tuple[SiteMeta | None, SiteMeta | None]
    payload: bool

    def blocks(self, frame: OpenFrame, parts: list[U64]) -> list[SiteBlock]:
        """The sites; adds the label rows to the frame. A row whose log-prob is not that of its label is left out."""
        step, at = self.step, self.pending
        n = len(step.request)
        words = parts[at.part][at.start : at.start + at.rows].reshape(-1).view(np.int32)
        sampled, value, found = words[: 2 * n].view(np.int64), words[2 * n : 3 * n], words[3 * n : 4 * n]
        keep = np.flatnonzero((sampled >= 0) & (value == found))
        if len(keep) == 0:
            return []
        assert step.prompt_len is not None
        generated = step.position[keep] + 1 >= step.prompt_len[keep]
        flags = np.where(generated, np.uint32(RowFlag.GENERATED), np.uint32(0))
        index = add_label_rows(frame, step.keyed[keep], sampled[keep], flags)
        return label_blocks(self.metas, index, sampled[keep], value[keep], self.payload)


def record_decode(
    capture: Capture, step: StepRequests, new_tokens: torch.Tensor, selected: torch.Tensor, log_probs: torch.Tensor
) -> bool:
    """Labels of a step that ran the last token of every request: each is scored against the token just sampled.

    Returns:
        False where they must go another way.
    """
    session, n = capture.session, len(step.request)
    frame = session.frame
    plain = (new_tokens.dtype, selected.dtype, log_probs.dtype) == (torch.int64, torch.float32, torch.float32)
    if (
        step.prompt_len is None
        or frame is None
        or not plain
        or not selected.shape[0] == new_tokens.shape[0] == n
        or not session.late(selected, new_tokens)
    ):
        return False
    payload = session.options.level == "payload"

    def issue() -> Pending:
        return session.device_frame(frame).fetch_labels(new_tokens, selected, log_probs)

    def file(pending: Pending) -> None:
        metas = label_metas(session, frame, SELECTED, new_tokens, selected)
        frame.deferred.append(DecodeLabels(step, pending, metas, payload))

    session.postponed.later(frame, SELECTED, issue, file, (new_tokens, selected, log_probs))
    return True


# ---- any step -----------------------------------------------------------------------------------------------------
def record_dynamic(
    capture: Capture,
    adapter: MegatronAdapter,
    new_tokens: torch.Tensor,
    selected: torch.Tensor,
    log_probs: torch.Tensor,
) -> None:
    """Label rows of a step. Which label was used is read off the values: the one whose log-prob was returned."""
    step = adapter.step_requests
    assert step is not None
    scored = _scored(capture, adapter, step, int(selected.shape[0]))
    if scored is None:
        return
    value, table = selected.detach(), log_probs.detach()
    if capture.session.late(selected, new_tokens):
        _record_late(capture, scored, new_tokens.detach(), value, table)
        return
    value = value.index_select(0, torch.from_numpy(scored.at).to(value.device))
    sampled = new_tokens.detach().cpu().numpy().astype(np.int64)
    labels = scored.labels(sampled)
    alternative = sampled[np.minimum(scored.owner, len(sampled) - 1)]
    used = _label_used(value, table, scored.at, labels, alternative)
    keep = np.flatnonzero(labels >= 0)
    if len(keep) == 0:
        return
    rows = make_label_rows(capture.session, scored.parents[keep], labels[keep], scored.generated[keep])
    index = torch.from_numpy(keep).to(value.device)
    # The whole table is only wanted by teacher forcing; a plain capture must not copy it.
    forced = None
    if capture.session.forcing is not None:
        forced = table.index_select(0, torch.from_numpy(scored.at[keep]).to(table.device))
    record_labels(capture.session, SELECTED, rows, value.index_select(0, index), torch.from_numpy(used[keep]), forced)


@dataclass(frozen=True)
class _Scored:
    """Rows of a step that were scored and have a key, each int64 [m].

    Attributes:
        at: index of each log-prob among those returned.
        parents: row of the frame.
        known: the token behind it where it is in the prompt, else -1: then the token just sampled is.
        owner: index of its request.
        generated: flags to add.
    """

    at: I64
    parents: I64
    known: I64
    owner: I64
    generated: NDArray[np.uint32]

    def labels(self, sampled: I64) -> I64:
        """The intended labels, -1 where there is none."""
        new = np.where(self.owner < len(sampled), sampled[np.minimum(self.owner, len(sampled) - 1)], -1)
        return np.where(self.known >= 0, self.known, new)


def _scored(capture: Capture, adapter: MegatronAdapter, step: StepRequests, count: int) -> _Scored | None:
    """Which rows ``count`` log-probs belong to; None where that is not known, or nothing has a key."""
    requests, owner = _by_request(step.request)
    position_of = np.arange(len(step.request))
    if count == len(requests) and count != len(step.request):
        # Only the last row of each request was scored.
        position_of = np.zeros(len(requests), np.int64)
        position_of[owner] = np.arange(len(step.request))  # the last row that is written stays
    elif count < len(step.request):
        capture.session.not_rows.setdefault(SELECTED, f"{count} log-probs for {len(step.request)} rows")
        return None
    row_of = np.full(len(step.request), -1, np.int64)
    row_of[step.keyed] = np.arange(len(step.keyed))
    at = np.flatnonzero(row_of[position_of] >= 0)
    if len(at) == 0:
        return None
    place = position_of[at]
    entries = [adapter.history.requests.get(rid) for rid in requests]
    prompt_lens = np.array([entry.prompt_len if entry is not None else 0 for entry in entries], np.int64)
    made = step.position[place] + 1 >= prompt_lens[owner[place]]
    generated = np.where(made, np.uint32(RowFlag.GENERATED), np.uint32(0))
    return _Scored(at, row_of[place], adapter.following(requests, owner)[place], owner[place], generated)


def _record_late(
    capture: Capture, scored: _Scored, new_tokens: torch.Tensor, value: torch.Tensor, table: torch.Tensor
) -> None:
    """:func:`record_dynamic` on the device, without waiting for it."""
    device = value.device
    known, owner, at = (to_device(array, device) for array in (scored.known, scored.owner, scored.at))
    value = value.index_select(0, at)
    sampled = new_tokens.to(torch.int64)
    own = sampled.index_select(0, owner.clamp(max=sampled.shape[0] - 1))
    label = torch.where(known >= 0, known, torch.where(owner < sampled.shape[0], own, -1))
    bits = value.float().contiguous().view(torch.int32)
    used = torch.full_like(label, -1)
    for candidate in (own, label):
        inside = candidate.clamp(0, table.shape[-1] - 1)
        found = table[at, inside].float().contiguous().view(torch.int32)
        used = torch.where((found == bits) & (candidate >= 0), candidate, used)
    host = capture.session.to_host(label)  # there once the frame's copies are done

    def intended(_rows: NDArray[np.void]) -> tuple[NDArray[np.integer], NDArray[Any]]:
        return host.numpy(), scored.generated

    record_late_labels(capture.session, SELECTED, scored.parents, used, value, intended)


def _by_request(request: I64) -> tuple[list[int], I64]:
    """Requests of a step in the order of their first row, and of each row the index of its request."""
    found, first, inverse = np.unique(request, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(found), np.int64)
    rank[order] = np.arange(len(found))
    return found[order].tolist(), rank[inverse]


def _label_used(value: torch.Tensor, table: torch.Tensor, at: I64, intended: I64, sampled: I64) -> I64:
    """The label each log-prob belongs to: the intended one if its value matches, else the sampled one, else -1."""
    bits = value.float().contiguous().view(torch.int32).cpu().numpy()
    used = np.full(len(bits), -1, np.int64)
    for candidate in (intended,) if np.array_equal(sampled, intended) else (sampled, intended):
        ids = np.clip(candidate, 0, table.shape[-1] - 1)
        where = torch.from_numpy(at).to(table.device), torch.from_numpy(ids).to(table.device)
        found = table[where].float().contiguous().view(torch.int32).cpu().numpy()
        used = np.where((found == bits) & (candidate >= 0), candidate, used)
    return used.astype(np.int64)
