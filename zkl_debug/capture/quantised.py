"""Sites of several tensors: values in a block format are data, scales, and sometimes one more scale over them."""

from __future__ import annotations

import torch

from zkl_debug.capture.experts import record_expert_rows
from zkl_debug.capture.layout import dtype_name
from zkl_debug.capture.session import CaptureSession
from zkl_debug.capture.state import tensor_digest
from zkl_debug.schema import SiteKind, StateRecord

_SEEN = "quantised_weights"


def record_source(session: CaptureSession, owner: str, rows: torch.Tensor) -> None:
    """Record what an operator is about to put into a block format, as its port ``in.0``.

    Args:
        session: the session.
        owner: site name without a port, e.g. ``decoder.layers.1.mlp.linear_fc1/quantize``.
        rows: [m, k].
    """
    _record(session, f"{owner}:in.0", rows, "quantised.in")


def record_quantised(
    session: CaptureSession, owner: str, data: torch.Tensor, scale: torch.Tensor, overall: torch.Tensor | None = None
) -> None:
    """Record rows in a block format.

    Ports in order of computation: ``out.2`` the scale of the whole row (where there is one), ``out.1`` the scales of
    its blocks, ``out.0`` the data.

    Args:
        session: the session.
        owner: as for :func:`record_source`.
        data: [m, k], or [m, k / 2] where two values share a byte.
        scale: [m, blocks].
        overall: [m], or None. One scale for all rows together is no row of anything and is not recorded.
    """
    if overall is not None and overall.shape[0] == data.shape[0]:
        _record(session, f"{owner}:out.2", overall, "quantised.overall")
    _record(session, f"{owner}:out.1", scale, "quantised.scale")
    _record(session, f"{owner}:out.0", data, "quantised.data")


def _record(session: CaptureSession, name: str, rows: torch.Tensor, semantic: str) -> None:
    if ".experts." in name:
        record_expert_rows(session, name, rows, SiteKind.TAP, semantic)
    else:
        session.record(name, rows, semantic=semantic)


def record_quantised_weight(
    session: CaptureSession, name: str, data: torch.Tensor, scale: torch.Tensor, overall: torch.Tensor | None = None
) -> None:
    """Keep digests of a weight's parts with the state of the current event, once per weight and event.

    Args:
        session: the session.
        name: of the parameter.
        data, scale, overall: its parts, any shape.
    """
    if session.writer is None or session.recording:
        return
    seen: set[tuple[int, str]] = session.meta.setdefault(_SEEN, set())
    if (session.event_seq, name) in seen:
        return
    seen.add((session.event_seq, name))
    parts = {"scale": scale, "data": data} | ({} if overall is None else {"overall": overall})
    session.state(
        [
            StateRecord(f"{name}:{part}", "quantised", dtype_name(value), tuple(value.shape), tensor_digest(value))
            for part, value in parts.items()
        ]
    )
