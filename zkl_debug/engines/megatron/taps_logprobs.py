"""Taps behind the logits: request admission (tokens of each prompt), log-softmax, the label and its log-prob."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.device import to_device
from zkl_debug.capture.labels import make_label_rows, record_late_labels
from zkl_debug.engines.megatron.frames import scoring_rows
from zkl_debug.schema import RowFlag

if TYPE_CHECKING:
    from zkl_debug.capture.api import Capture
    from zkl_debug.capture.frame import OpenFrame
    from zkl_debug.engines.megatron.adapter import MegatronAdapter
    from zkl_debug.engines.megatron.frames import StepRequests

LOG_SOFTMAX = "logprobs/log_softmax"
SELECTED = "logprobs/selected:out.0"


def install(capture: Capture, adapter: MegatronAdapter) -> None:
    """Install the taps on the dynamic context and on this project's scoring functions."""
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    from zkl_debug.engines.megatron import scoring

    taps = capture.taps
    taps.wrap(DynamicInferenceContext, "add_request", functools.partial(_add_request, capture, adapter))
    taps.wrap(DynamicInferenceContext, "_processed_log_probs", functools.partial(_processed, capture))
    taps.wrap(
        DynamicInferenceContext, "calculate_log_probs_tensors", functools.partial(_selected_dynamic, capture, adapter)
    )
    taps.wrap(scoring, "forward_logits", functools.partial(_score_forward, capture, adapter))
    taps.wrap(scoring, "log_softmax", functools.partial(_score_log_softmax, capture))
    taps.wrap(scoring, "select_logprobs", functools.partial(_score_selected, capture))


def _active(capture: Capture) -> bool:
    return capture.session.enabled and capture.session.frame is not None


# ---- dynamic engine -----------------------------------------------------------------------------------------------
def _add_request(capture: Capture, adapter: MegatronAdapter, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(context: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        if not capture.session.enabled:
            return function(context, req, *args, **kwargs)
        tokens = req.prompt_tokens
        # All at once: of a tensor on a GPU, each element by itself would be a wait for the device.
        prompt = [int(t) for t in (tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens)]
        adapter.history.add(int(req.request_id), prompt, first_chunk=int(req.finished_chunk_token_count) == 0)
        return function(context, req, *args, **kwargs)

    return tapped


def _processed(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(context: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _active(capture):
            with capture.session.guarded(LOG_SOFTMAX):
                capture.session.record(f"{LOG_SOFTMAX}:in.0", logits, semantic="log_softmax")
        result = function(context, logits, *args, **kwargs)
        if _active(capture):
            with capture.session.guarded(LOG_SOFTMAX):
                capture.session.record(f"{LOG_SOFTMAX}:out.0", result, semantic="log_softmax")
        return result

    return tapped


def _selected_dynamic(capture: Capture, adapter: MegatronAdapter, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(context: Any, logits: torch.Tensor, new_tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        selected, log_probs = function(context, logits, new_tokens, *args, **kwargs)
        step = adapter.step_requests
        if _active(capture) and step is not None:
            with capture.session.guarded(SELECTED):
                if not _record_decode(capture, step, new_tokens, selected, log_probs):
                    _record_dynamic(capture, adapter, new_tokens, selected, log_probs)
        return selected, log_probs

    return tapped


def _record_decode(
    capture: Capture, step: StepRequests, new_tokens: torch.Tensor, selected: torch.Tensor, log_probs: torch.Tensor
) -> bool:
    """Label rows of a step that ran the last token of every request: each is scored against the token just sampled.

    All of it on the device, without waiting for it; False where it must go the long way.
    """
    ends, n = step.prompt_len, len(step.request)
    if (
        ends is None
        or not selected.shape[0] == new_tokens.shape[0] == n
        or not capture.session.late(selected, new_tokens)
    ):
        return False
    sampled = new_tokens.detach().to(torch.int64)
    value = selected.detach().float()
    table = log_probs.detach()
    inside = sampled.clamp(0, table.shape[-1] - 1)
    found = table[:n].gather(1, inside[:, None]).squeeze(1).float()
    matches = (found.view(torch.int32) == value.view(torch.int32)) & (sampled >= 0)
    used = torch.where(matches, sampled, -1)
    both = capture.session.to_host(torch.stack([used, sampled]))
    made = step.position + 1 >= ends
    flags = np.where(made, np.uint32(RowFlag.GENERATED), np.uint32(0))

    def intended(_rows: NDArray[np.void]) -> tuple[NDArray[np.integer], NDArray[Any]]:
        return both[1].numpy(), flags

    return record_late_labels(capture.session, SELECTED, step.keyed, used, selected.detach(), intended, both[0])


def _record_dynamic(
    capture: Capture,
    adapter: MegatronAdapter,
    new_tokens: torch.Tensor,
    selected: torch.Tensor,
    log_probs: torch.Tensor,
) -> None:
    """Label rows of a step. Which label was used is read off the values: the one whose log-prob was returned."""
    step = adapter.step_requests
    frame = capture.session.frame
    assert step is not None
    assert frame is not None
    sampled = new_tokens.detach().cpu().numpy().astype(np.int64)
    intended = adapter.label_of(sampled)
    requests, request_index = _by_request(step.request)
    position_of = np.arange(len(step.request))
    n_selected = int(selected.shape[0])
    if n_selected == len(requests) and n_selected != len(step.request):
        # Only the last row of each request was scored.
        position_of = np.zeros(len(requests), np.int64)
        position_of[request_index] = np.arange(len(step.request))  # the last row that is written stays
    elif n_selected < len(step.request):
        capture.session.not_rows.setdefault(SELECTED, f"{n_selected} log-probs for {len(step.request)} rows")
        return
    labels = intended[position_of]
    alternative = sampled[np.minimum(request_index[position_of], len(sampled) - 1)]
    value = selected.detach()[: len(position_of)]
    table = log_probs.detach()
    used = _label_used(value, table, labels, alternative)
    row_of = np.full(len(step.request), -1, np.int64)
    row_of[step.keyed] = np.arange(len(step.keyed))
    keep = np.flatnonzero((row_of[position_of] >= 0) & (labels >= 0))
    if len(keep) == 0:
        return
    at = position_of[keep]
    parents = row_of[at]
    known = [adapter.history.requests.get(rid) for rid in requests]
    prompt_lens = np.array([entry.prompt_len if entry is not None else 0 for entry in known], np.int64)
    made = step.position[at] + 1 >= prompt_lens[request_index[at]]
    generated = np.where(made, np.uint32(RowFlag.GENERATED), np.uint32(0))
    rows = make_label_rows(capture.session, parents, labels[keep], generated)
    index = torch.from_numpy(keep).to(value.device)
    # The whole table is only wanted by teacher forcing; a plain capture must not copy it.
    forced = table.index_select(0, index) if capture.session.forcing is not None else None
    capture.session.record_labels(SELECTED, rows, value.index_select(0, index), torch.from_numpy(used[keep]), forced)


def _by_request(request: np.ndarray[Any, Any]) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Requests of a step in the order of their first row, and of each row the index of its request."""
    found, first, inverse = np.unique(request, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(found), np.int64)
    rank[order] = np.arange(len(found))
    return found[order].tolist(), rank[inverse]


def _label_used(
    value: torch.Tensor, table: torch.Tensor, intended: np.ndarray[Any, Any], sampled: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """The label each log-prob belongs to: the intended one if its value matches, else the sampled one, else -1."""
    bits = value.float().contiguous().view(torch.int32).cpu().numpy()
    rows = np.arange(len(bits))
    used = np.full(len(bits), -1, np.int64)
    for candidate in (intended,) if np.array_equal(sampled, intended) else (sampled, intended):
        ids = np.clip(candidate, 0, table.shape[-1] - 1)
        at = torch.from_numpy(rows).to(table.device), torch.from_numpy(ids).to(table.device)
        found = table[at].float().contiguous().view(torch.int32).cpu().numpy()
        used = np.where((found == bits) & (candidate >= 0), candidate, used)
    return used.astype(np.int64)


# ---- scoring ------------------------------------------------------------------------------------------------------
def _score_forward(capture: Capture, adapter: MegatronAdapter, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(model: Any, mb: Any, *args: Any, **kwargs: Any) -> Any:
        if capture.session.enabled and model is capture.model:
            with capture.session.guarded("scoring rows"):
                capture.next_rows(scoring_rows(mb, adapter.prompt_lens))
        return function(model, mb, *args, **kwargs)

    return tapped


def _score_log_softmax(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _active(capture):
            with capture.session.guarded(LOG_SOFTMAX):
                capture.session.record(f"{LOG_SOFTMAX}:in.0", logits, semantic="log_softmax", layout="bs")
        result = function(logits, *args, **kwargs)
        if _active(capture):
            with capture.session.guarded(LOG_SOFTMAX):
                capture.session.record(f"{LOG_SOFTMAX}:out.0", result, semantic="log_softmax", layout="bs")
        return result

    return tapped


def _score_selected(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    """``select_logprobs(log_probs [b, s, V], labels [b, s - 1]) -> [b, s - 1]``: slot t is scored against label t."""

    @functools.wraps(function)
    def tapped(log_probs: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = function(log_probs, labels, *args, **kwargs)
        frame = capture.session.frame
        if _active(capture) and frame is not None:
            with capture.session.guarded(SELECTED):
                batch = frame.rows.grid[1]
                column = frame.rows.slot // batch
                width = int(result.shape[1])
                has_label = np.flatnonzero(column < width)
                at = torch.from_numpy((frame.rows.slot[has_label] % batch) * width + column[has_label])
                if _record_scored_late(capture, has_label, at, labels, result):
                    return result
                used = np.full(len(column), -1, np.int64)
                used[has_label] = labels.reshape(-1).cpu()[at].numpy()
                value = torch.zeros(len(column), dtype=result.dtype)
                value[torch.from_numpy(has_label)] = result.detach().reshape(-1).cpu()[at]
                _record_scored(capture, used, value)
        return result

    return tapped


def _record_scored_late(
    capture: Capture, has_label: NDArray[np.int64], at: torch.Tensor, labels: torch.Tensor, result: torch.Tensor
) -> bool:
    """:func:`_record_scored` on the device, without waiting for it; False where it must go the long way."""
    if labels.dtype != torch.int64 or not capture.session.late(labels, result):
        return False
    where = to_device(at.numpy(), result.device)
    used = labels.detach().reshape(-1).index_select(0, where)
    value = result.detach().reshape(-1).index_select(0, where)

    frame = capture.session.frame

    def intended(rows: NDArray[np.void]) -> tuple[NDArray[np.integer], NDArray[Any]]:
        following, generated = _following(rows, frame)
        return following[has_label], generated[has_label]

    return record_late_labels(capture.session, SELECTED, has_label, used, value, intended)


def _record_scored(capture: Capture, used: np.ndarray[Any, Any], value: torch.Tensor) -> None:
    """Label rows of a scoring frame: the intended label of a row is the token of its sample's next row."""
    following, generated = _following(capture.session.parent_rows(), capture.session.frame)
    keep = np.flatnonzero((following >= 0) & (used >= 0))
    if len(keep) == 0:
        return
    rows = make_label_rows(capture.session, keep, following[keep], generated[keep])
    capture.session.record_labels(SELECTED, rows, value[torch.from_numpy(keep)], torch.from_numpy(used[keep]))


def _following(parents: NDArray[np.void], frame: OpenFrame | None) -> tuple[NDArray[np.integer], NDArray[Any]]:
    """Of each row the token of its sample's next row, or -1, and ``GENERATED`` where that token was generated.

    Where this rank has a part of each sequence, its frame knows the tokens behind it.
    """
    if frame is not None and frame.rows.following is not None:
        return frame.rows.following, frame.rows.cache["following_flags"]
    following = np.full(len(parents), -1, np.int64)
    same = (parents["sample"][1:] == parents["sample"][:-1]) & (parents["position"][1:] == parents["position"][:-1] + 1)
    following[:-1] = np.where(same, parents["token"][1:], -1)
    generated = np.zeros(len(parents), np.uint32)
    generated[:-1] = np.where(same, parents["flags"][1:] & np.uint32(RowFlag.GENERATED), 0)
    return following, generated
