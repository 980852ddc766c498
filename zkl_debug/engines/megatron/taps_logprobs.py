"""Taps behind the logits: request admission (tokens of each prompt), log-softmax, the label and its log-prob."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.labels import make_label_rows, record_labels
from zkl_debug.capture.rows import FrameRows, Sketch
from zkl_debug.engines.megatron.frames import scoring_places, scoring_rows
from zkl_debug.engines.megatron.labels_dynamic import SELECTED, record_decode, record_dynamic
from zkl_debug.engines.megatron.labels_scored import label_places, record_scored
from zkl_debug.schema import Phase, RowFlag, SiteKind

if TYPE_CHECKING:
    from zkl_debug.capture.api import Capture
    from zkl_debug.engines.megatron.adapter import MegatronAdapter

LOG_SOFTMAX = "logprobs/log_softmax"
_LOGITS, _LOG_PROBS = f"{LOG_SOFTMAX}:in.0", f"{LOG_SOFTMAX}:out.0"


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


def _log_softmax(capture: Capture, name: str, tensor: torch.Tensor, layout: str = "") -> None:
    session = capture.session
    if not session.enabled or session.postponed.waits(name, tensor, SiteKind.TAP, "log_softmax", layout):
        return
    if session.frame is not None:
        with session.guarded(LOG_SOFTMAX):
            session.record(name, tensor, semantic="log_softmax", layout=layout)


def _processed(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(context: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _log_softmax(capture, _LOGITS, logits)
        result = function(context, logits, *args, **kwargs)
        _log_softmax(capture, _LOG_PROBS, result)
        return result

    return tapped


def _selected_dynamic(capture: Capture, adapter: MegatronAdapter, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(context: Any, logits: torch.Tensor, new_tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        selected, log_probs = function(context, logits, new_tokens, *args, **kwargs)
        step = adapter.step_requests
        if _active(capture) and step is not None:
            with capture.session.guarded(SELECTED):
                if not record_decode(capture, step, new_tokens, selected, log_probs):
                    record_dynamic(capture, adapter, new_tokens, selected, log_probs)
        return selected, log_probs

    return tapped


# ---- scoring ------------------------------------------------------------------------------------------------------
def _score_forward(capture: Capture, adapter: MegatronAdapter, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(model: Any, mb: Any, *args: Any, **kwargs: Any) -> Any:
        if capture.session.enabled and model is capture.model:
            with capture.session.guarded("scoring rows"):
                make = functools.partial(scoring_rows, mb, adapter.prompt_lens)
                capture.next_rows(Sketch(Phase.SCORE, -1, sum(mb.lengths), make, places=scoring_places(mb)))
        return function(model, mb, *args, **kwargs)

    return tapped


def _score_log_softmax(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _log_softmax(capture, _LOGITS, logits, "bs")
        result = function(logits, *args, **kwargs)
        _log_softmax(capture, _LOG_PROBS, result, "bs")
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
                if record_scored(capture.session, labels, result, _following):
                    return result
                has_label, at = label_places(frame.rows, int(result.shape[1]))
                used = np.full(len(frame.rows.slot), -1, np.int64)
                used[has_label] = labels.reshape(-1).cpu().numpy()[at]
                value = torch.zeros(len(used), dtype=result.dtype)
                value[torch.from_numpy(has_label)] = result.detach().reshape(-1).cpu()[torch.from_numpy(at)]
                _record_scored(capture, used, value)
        return result

    return tapped


def _record_scored(capture: Capture, used: np.ndarray[Any, Any], value: torch.Tensor) -> None:
    """Label rows of a scoring frame: the intended label of a row is the token of its sample's next row."""
    frame = capture.session.frame
    following, generated = _following(capture.session.parent_rows(), None if frame is None else frame.rows)
    keep = np.flatnonzero((following >= 0) & (used >= 0))
    if len(keep) == 0:
        return
    rows = make_label_rows(capture.session, keep, following[keep], generated[keep])
    record_labels(capture.session, SELECTED, rows, value[torch.from_numpy(keep)], torch.from_numpy(used[keep]))


def _following(parents: NDArray[np.void], rows: FrameRows | None) -> tuple[NDArray[np.integer], NDArray[Any]]:
    """Of each row the token of its sample's next row, or -1, and ``GENERATED`` where that token was generated.

    Where this rank has a part of each sequence, its frame knows the tokens behind it.
    """
    if rows is not None and rows.following is not None and rows.following_flags is not None:
        return rows.following, rows.following_flags
    following = np.full(len(parents), -1, np.int64)
    same = (parents["sample"][1:] == parents["sample"][:-1]) & (parents["position"][1:] == parents["position"][:-1] + 1)
    following[:-1] = np.where(same, parents["token"][1:], -1)
    generated = np.zeros(len(parents), np.uint32)
    generated[:-1] = np.where(same, parents["flags"][1:] & np.uint32(RowFlag.GENERATED), 0)
    return following, generated
