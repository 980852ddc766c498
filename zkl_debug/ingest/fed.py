"""Row keys from what a model was fed, under the names that tools dump it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zkl_debug.ingest.calls import BadCallError, Call, Keys, packed_bounds, padded_bounds
from zkl_debug.ingest.raw import I64, RawTensor
from zkl_debug.schema import Phase


def key_call(keys: Keys, fed: Mapping[str, Any], phase: Phase = Phase.SCORE) -> Call:
    """The keyed rows of one forward.

    Args:
        keys: samples and requests so far.
        fed: ``input_ids``, and either ``seq_lens`` with ``positions`` and ``rids`` or ``req_pool_indices`` (a step of
            an engine), or ``cu_seqlens_q`` (packed), ``attention_mask`` (padded) or nothing more (whole lines).
        phase: of a call that holds whole sequences.

    Raises:
        BadCallError: when these do not fit together, or there are no token ids.
    """
    ids = _integers(fed, "input_ids")
    if ids is None:
        raise BadCallError("no input_ids, and so no row has a key")
    totals = _integers(fed, "seq_lens")
    if totals is None:
        return keys.scored(ids, _integers(fed, "position_ids"), _bounds(fed, ids), phase)
    positions = _integers(fed, "positions")
    if positions is None:
        raise BadCallError("no positions beside seq_lens")
    names, slots = fed.get("rids"), _integers(fed, "req_pool_indices")
    if isinstance(names, list) and len(names) == len(totals):
        return keys.engine_step(ids, positions, totals, [str(name) for name in names], True)
    if slots is None or len(slots) != len(totals):
        raise BadCallError("neither rids nor req_pool_indices, which say what goes on from what")
    return keys.engine_step(ids, positions, totals, [str(slot) for slot in slots.tolist()], False)


def _bounds(fed: Mapping[str, Any], ids: I64) -> list[tuple[int, int]]:
    cumulative = _integers(fed, "cu_seqlens_q")
    if cumulative is not None:
        return packed_bounds(cumulative)
    mask = _integers(fed, "attention_mask")
    if mask is None:
        return []
    if mask.shape != ids.shape or mask.ndim != 2:
        raise BadCallError(f"attention_mask of shape {list(mask.shape)} for ids of {list(ids.shape)}")
    return padded_bounds(mask)


def _integers(fed: Mapping[str, Any], name: str) -> I64 | None:
    value = fed.get(name)
    if value is None:
        return None
    if not isinstance(value, RawTensor):
        raise BadCallError(f"{name} is no tensor")
    try:
        return value.integers()
    except ValueError as error:
        raise BadCallError(f"{name}: {error}") from None
