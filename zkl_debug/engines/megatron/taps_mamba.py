"""Taps inside Mamba mixers: convolution, scan and its weights, gate and norm, and the recurrent state read and written.

Training, prefill and decode reach each of them through another kernel. In a step of the dynamic engine the decoding
requests come first; prefill works on a copy that starts behind them, so its rows are placed by hand. A state that is
read belongs to the first row that is run from it; a state that is written, to the last row that went into it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.layout import RowView
from zkl_debug.engines.megatron.taps_model import Tap, active, in_and_out, install_table, site
from zkl_debug.schema import Phase, SiteKind, row_phase

if TYPE_CHECKING:
    from zkl_debug.capture.api import Capture

_I64 = NDArray[np.int64]
_KEY = "mamba call"
_UNGATED = "mamba ungated"


@dataclass(frozen=True)
class Call:
    """Rows of one prefill or decode call of a mixer.

    Attributes:
        take: places in the call's buffer of the rows that have a key; ``row``: these rows in the frame.
        begin, end: (sequence of the call, row in the frame) of the first and the last row of each sequence.
        conv: data pointer of the convolution state, to tell it from the scan's.
    """

    take: _I64
    row: NDArray[np.uint32]
    begin: tuple[_I64, NDArray[np.uint32]]
    end: tuple[_I64, NDArray[np.uint32]]
    conv: int = 0


def install(capture: Capture) -> None:
    """Install the taps where the model has Mamba mixers."""
    mixers = [m for m in capture.model.modules() if type(m).__name__ == "MambaMixer"]
    if not mixers:
        return
    missing = install_table(capture, _TABLE)
    for mixer in mixers:
        if isinstance(getattr(mixer, "norm", None), torch.nn.Module):
            capture.taps.wrap(mixer.norm, "forward", functools.partial(_norm, capture))
    capture.add_manifest("taps_missing_mamba", missing)


# ---- rows of a call --------------------------------------------------------------------------------------------------
def _observed(capture: Capture) -> bool:
    """Whether rows can be read now: not while graphs are warmed up or recorded."""
    frame = capture.session.frame
    return active(capture) and frame is not None and not frame.rows.warmup and not capture.session.recording


def _rows_of(capture: Capture, phase: Phase) -> tuple[_I64, NDArray[np.uint32]]:
    """Slots and rows of the open frame in one phase."""
    frame = capture.session.frame
    assert frame is not None
    row = np.flatnonzero(row_phase(frame.rows.rows["flags"]) == np.uint32(phase))
    return frame.rows.slot[row], row.astype(np.uint32)


def _decode_call(capture: Capture) -> Call:
    slot, row = _rows_of(capture, Phase.DECODE)
    return Call(slot, row, (slot, row), (slot, row))


def _prefill_call(capture: Capture, edges: list[int], conv: int) -> Call:
    slot, row = _rows_of(capture, Phase.PREFILL)
    take = slot - int(capture.adapter.context.num_decode_requests)  # type: ignore[union-attr]
    bounds = np.asarray(edges, np.int64)
    sequence = np.searchsorted(bounds, take, side="right") - 1
    first, last = take == bounds[sequence], take == bounds[sequence + 1] - 1
    return Call(take, row, (sequence[first], row[first]), (sequence[last], row[last]), conv)


def _call(capture: Capture) -> Call | None:
    """The prefill or decode call being run; None in training."""
    frame = capture.session.frame
    return None if frame is None else frame.scratch.get(_KEY)


def _during(make: Callable[[Capture, Any, tuple[Any, ...], dict[str, Any]], Call | None]) -> Tap:
    """A wrap of a mixer's method that keeps its rows for the taps inside."""

    def tap(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def tapped(module: Any, *args: Any, **kwargs: Any) -> Any:
            frame = capture.session.frame
            if not _observed(capture):
                if active(capture):
                    for operator in ("conv", "scan"):
                        capture.session.out_of_reach(site(capture, operator, "out.0"), "inside a graph")
                return function(module, *args, **kwargs)
            assert frame is not None
            with capture.session.guarded("mamba rows"):
                frame.scratch[_KEY] = make(capture, module, args, kwargs)
            try:
                return function(module, *args, **kwargs)
            finally:
                frame.scratch.pop(_KEY, None)

        return tapped

    return tap


def _of_prefill(capture: Capture, _module: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    edges, state = kwargs.get("cu_seqlens"), kwargs.get("conv_state")
    if edges is None or state is None:  # the static engine
        return None
    return _prefill_call(capture, edges.tolist(), state.data_ptr())


def _of_decode(capture: Capture, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    tokens_each = args[0].shape[1] if args else kwargs["zxBCdt"].shape[1]
    return _decode_call(capture) if kwargs.get("batch_indices") is not None and tokens_each == 1 else None


# ---- recording -------------------------------------------------------------------------------------------------------
def _record(capture: Capture, operator: str, port: str, value: torch.Tensor, call: Call, semantic: str) -> None:
    """Record a buffer [n, *] of the call, its rows as one dimension."""
    flat = value.reshape(value.shape[0], -1)
    view = RowView(flat, call.take, call.row, (flat.shape[1],))
    capture.session.record_view(site(capture, operator, port), view, kind=SiteKind.TAP, semantic=semantic, part=True)


def _state(capture: Capture, which: str, value: torch.Tensor, at: tuple[_I64, NDArray[np.uint32]]) -> None:
    """Record states [n, *] of the sequences ``at``, as fp32: a state is compared by value whatever it is kept in."""
    sequence, row = at
    if len(row):
        # Not the kernel's own tensor: it is overwritten in place.
        flat = value[torch.from_numpy(sequence).to(value.device)].float().reshape(len(row), -1)
        view = RowView(flat, None, row, (flat.shape[1],))
        name, semantic = site(capture, which, "out.0"), f"state_{which.rpartition('.')[2]}"
        capture.session.record_view(name, view, kind=SiteKind.TAP, semantic=semantic, part=True)


def _weights(
    capture: Capture,
    a: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    row: NDArray[np.uint32],
) -> None:
    """What a scan was given of its weights, for each of its rows: decay, skip and bias of the step size, [h] each."""
    for port, value in (("out.0", a), ("out.1", d), ("out.2", dt_bias)):
        if len(row) and isinstance(value, torch.Tensor):
            flat = value.detach().float().reshape(1, -1).expand(len(row), -1).contiguous()
            view = RowView(flat, None, row, (flat.shape[1],))
            name = site(capture, "ssm_weights", port)
            # Not what the kernel reads: nothing can be put in its place here.
            capture.session.record_view(name, view, kind=SiteKind.TAP, semantic="ssm_weights", source=value, part=True)


def _batch(capture: Capture, operator: str, port: str, value: torch.Tensor, semantic: str) -> None:
    """Record a training tensor [batch, l, *], its rows as one dimension."""
    name = site(capture, operator, port)
    capture.session.record(name, value, semantic=semantic, layout="bs", flatten=True)


def _rmsnorm(capture: Capture) -> bool:
    return bool(getattr(capture.model.get_submodule(capture.session.current_path()), "rmsnorm", False))


# ---- training --------------------------------------------------------------------------------------------------------
def _conv(capture: Capture, port: str, value: torch.Tensor) -> None:
    _batch(capture, "conv", f"{port}.0", value, "conv")


def _scan_batch(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
        dt_bias: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        frame, seen = capture.session.frame, _observed(capture)
        if seen and frame is not None:
            with capture.session.guarded("scan"):
                _weights(capture, a, d, dt_bias, np.arange(len(frame.rows.rows), dtype=np.uint32))
                for index, value in enumerate((x, dt, b, c)):
                    _batch(capture, "scan", f"in.{index}", value, "scan")
        result = function(x, dt, a, b, c, d, dt_bias, *args, **kwargs)
        if seen and frame is not None:
            with capture.session.guarded("scan"):
                if _rmsnorm(capture):
                    rounded = result.to(x.dtype)
                    _batch(capture, "scan", "out.0", rounded, "scan")
                    frame.scratch[_UNGATED] = rounded
        return result

    return tapped


def _gate_batch(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    """The gate inside the training kernel; its z is what the norm is given elsewhere."""

    @functools.wraps(function)
    def tapped(y: torch.Tensor, z: torch.Tensor) -> Any:
        result = function(y, z)
        frame = capture.session.frame
        if _observed(capture) and frame is not None:
            with capture.session.guarded("gate"):
                if _rmsnorm(capture):
                    path = capture.session.current_path()
                    for port, value in (("in", frame.scratch.pop(_UNGATED, None)), ("in.1", z)):
                        if value is not None:
                            capture.session.record(
                                f"{path}.norm:{port}", value, semantic="gated", layout="bs", flatten=True
                            )
                else:
                    _batch(capture, "scan", "out.0", result.to(z.dtype), "scan")
        return result

    return tapped


# ---- prefill ---------------------------------------------------------------------------------------------------------
def _conv_prefill(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(*, x: torch.Tensor, initial_states: torch.Tensor, **kwargs: Any) -> Any:
        call = _call(capture)
        if call is not None:
            with capture.session.guarded("conv"):
                _state(capture, "conv_state.read", initial_states, call.begin)
                _record(capture, "conv", "in.0", x, call, "conv")
        result = function(x=x, initial_states=initial_states, **kwargs)
        if call is not None:
            with capture.session.guarded("conv"):
                _record(capture, "conv", "out.0", result, call, "conv")
        return result

    return tapped


def _scan_prefill(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(**kwargs: Any) -> Any:
        call = _call(capture)
        if call is not None:
            with capture.session.guarded("scan"):
                _weights(capture, kwargs["A"], kwargs.get("D"), kwargs.get("dt_bias"), call.row)
                _state(capture, "ssm_state.read", kwargs["initial_states"], call.begin)
                for index, name in enumerate(("x", "dt", "B", "C")):
                    _record(capture, "scan", f"in.{index}", kwargs[name], call, "scan")
        result = function(**kwargs)
        if call is not None:
            with capture.session.guarded("scan"):
                _record(capture, "scan", "out.0", kwargs["out"], call, "scan")
        return result

    return tapped


def _state_write(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    """``tensor_masked_update(states, indices, new)``: what prefill leaves in the slots."""

    @functools.wraps(function)
    def tapped(states: torch.Tensor, indices: torch.Tensor, new: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        call = _call(capture)
        if call is not None:
            with capture.session.guarded("state"):
                if states.data_ptr() == call.conv:  # the oldest of its inputs is never read
                    _state(capture, "conv_state.write", new[..., 1:].to(states.dtype), call.end)
                else:
                    _state(capture, "ssm_state.write", new.to(states.dtype), call.end)
        return function(states, indices, new, *args, **kwargs)

    return tapped


# ---- decode ----------------------------------------------------------------------------------------------------------
def _conv_decode(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(x: torch.Tensor, conv_state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        call, slots = _call(capture), kwargs.get("conv_state_indices")
        if call is not None and slots is not None:
            with capture.session.guarded("conv"):
                _state(capture, "conv_state.read", conv_state[slots.long()][..., 1:], call.begin)
                _record(capture, "conv", "in.0", x, call, "conv")
        result = function(x, conv_state, *args, **kwargs)
        if call is not None and slots is not None:
            with capture.session.guarded("conv"):
                _record(capture, "conv", "out.0", result, call, "conv")
                _state(capture, "conv_state.write", conv_state[slots.long()][..., 1:], call.end)
        return result

    return tapped


def _scan_decode(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(
        state: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        call, slots = _call(capture), kwargs.get("state_batch_indices")
        if call is not None and slots is not None:
            with capture.session.guarded("scan"):
                # All of these are repeated over the channels of a head, and the decay over its states.
                bias = kwargs.get("dt_bias")
                _weights(capture, a[:, 0, 0], d[:, 0], None if bias is None else bias[:, 0], call.row)
                _state(capture, "ssm_state.read", state[slots.long()], call.begin)
                for index, value in enumerate((x, dt[..., 0], b, c)):
                    _record(capture, "scan", f"in.{index}", value, call, "scan")
        result = function(state, x, dt, a, b, c, d, *args, **kwargs)
        if call is not None and slots is not None:
            with capture.session.guarded("scan"):
                _record(capture, "scan", "out.0", result, call, "scan")
                _state(capture, "ssm_state.write", state[slots.long()], call.end)
        return result

    return tapped


# ---- gate and norm ---------------------------------------------------------------------------------------------------
def _norm(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    """``norm(y, z)``, or ``norm(y)`` of what the training kernel gated already (its ports are recorded there)."""

    @functools.wraps(function)
    def tapped(y: torch.Tensor, z: torch.Tensor | None = None) -> Any:
        path, call, seen = capture.session.current_path(), _call(capture), _observed(capture)

        def record(port: str, value: torch.Tensor | None) -> None:
            if value is None:
                return
            if call is None:
                capture.session.record(f"{path}:{port}", value, semantic="gated")
                return
            flat = value.reshape(-1, value.shape[-1])
            view = RowView(flat, call.take, call.row, (flat.shape[1],))
            capture.session.record_view(f"{path}:{port}", view, kind=SiteKind.TAP, semantic="gated", part=True)

        if seen and z is not None:
            with capture.session.guarded("norm"):
                record("in", y)
                record("in.1", z)
        result = function(y, z)
        if seen:
            with capture.session.guarded("norm"):
                record("out", result)
        return result

    return tapped


# ---- which slot ------------------------------------------------------------------------------------------------------
def _slot_given(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    """Events: a request was given a recurrent slot, and who had it before."""
    had: dict[int, int] = {}

    @functools.wraps(function)
    def tapped(context: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        starts = capture.session.enabled and int(req.finished_chunk_token_count) == 0
        place = int(context.total_request_count)
        result = function(context, req, *args, **kwargs)
        if starts and getattr(context, "is_hybrid_model", False):
            with capture.session.guarded("slot"):
                slot, request = int(context.mamba_metadata.request_to_mamba_state_idx[place]), int(req.request_id)
                detail = {"slot": slot, "request": request, "previous": had.get(slot, -1)}
                capture.session.event("recurrent_slot", detail)
                had[slot] = request
        return result

    return tapped


_MIXER = "megatron.core.ssm.mamba_mixer"
_VARLEN = "megatron.core.ssm.ops.causal_conv1d_varlen"
_STAND_INS = "zkl_debug.engines.mamba_reference"
_DYNAMIC = "megatron.core.inference.contexts.dynamic_context:DynamicInferenceContext"

#: (owner, attribute, tap), as in ``taps_model``. The training kernel of mamba_ssm is fused: its stand-in shows parts.
_TABLE: tuple[tuple[str, str, Tap], ...] = (
    (f"{_MIXER}:MambaMixer", "_ssm_prefill", _during(_of_prefill)),
    (f"{_MIXER}:MambaMixer", "_ssm_decode", _during(_of_decode)),
    (_VARLEN, "causal_conv1d_varlen_fn", _conv_prefill),
    (_MIXER, "mamba_chunk_scan_combined_varlen", _scan_prefill),
    (_MIXER, "tensor_masked_update", _state_write),
    (_MIXER, "causal_conv1d_update", _conv_decode),
    (_MIXER, "selective_state_update", _scan_decode),
    (_STAND_INS, "conv_batch", in_and_out("conv", _conv, seen=_observed)),
    (_STAND_INS, "scan_batch", _scan_batch),
    (_STAND_INS, "gate_batch", _gate_batch),
    (_DYNAMIC, "add_request", _slot_given),
)
