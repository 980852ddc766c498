"""Taps on the operands of products in a block format: scales and data of activations and weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zkl_debug.capture.quantised import record_quantised, record_quantised_weight, record_source
from zkl_debug.engines import microscaling

if TYPE_CHECKING:
    from zkl_debug.capture.api import Capture


def install(capture: Capture) -> None:
    """Install the taps into ``capture.taps``."""
    capture.taps.wrap(microscaling, "quantise_rows", functools.partial(_rows, capture))
    capture.taps.wrap(microscaling, "quantise_weight", functools.partial(_weight, capture))


def _rows(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    session = capture.session

    @functools.wraps(function)
    def tapped(rows: Any, *args: Any, **kwargs: Any) -> Any:
        path = session.current_path()
        if not (session.enabled and session.frame is not None and path):
            return function(rows, *args, **kwargs)
        with session.guarded("quantize"):
            record_source(session, f"{path}/quantize", rows)
        found = function(rows, *args, **kwargs)
        if session.enabled:
            with session.guarded("quantize"):
                record_quantised(session, f"{path}/quantize", found.data, found.scale, found.overall)
        return found

    return tapped


def _weight(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    session = capture.session

    @functools.wraps(function)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        path = session.current_path()
        if session.enabled and session.frame is not None and path:
            with session.guarded("quantize weight"):
                record_quantised_weight(session, f"{path}.weight", found.data, found.scale, found.overall)
        return found

    return tapped
