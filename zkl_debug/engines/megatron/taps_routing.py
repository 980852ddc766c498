"""Taps on routing capture: what the engine hands back of a request's routing, against what its steps recorded of it.

With ``moe_enable_routing_replay`` the engine keeps the experts of every token by KV block and puts them together when
a request finishes. Training then replays them, so a request whose routing is not there, or not its own, is trained
with other experts than it was generated with, though every layer agrees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.engines.megatron.rollout import block_table
from zkl_debug.schema import Json

if TYPE_CHECKING:
    from zkl_debug.capture.api import Capture

#: Name of the event of a finished request, see :func:`handed_back`.
EVENT = "routing_returned"


@dataclass
class Recorded:
    """Routing of the requests in flight as the steps recorded it, and blocks given away since the last step.

    Attributes:
        rows: by request, (positions [n], experts [n, layers, k]) of every step.
        given: blocks that held routing when they were allocated again.
        steps: engine steps so far.
    """

    rows: dict[int, list[tuple[NDArray[np.int64], NDArray[Any]]]] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    steps: int = 0

    def note(self, request: NDArray[np.int64], position: NDArray[np.int64], experts: NDArray[Any]) -> None:
        """Keep the routing of one step: request and position of each row, [n], and its experts [n, layers, k]."""
        self.steps += 1
        self.given.clear()
        for rid in np.unique(request).tolist():
            at = np.flatnonzero(request == rid)
            self.rows.setdefault(rid, []).append((position[at], experts[at].copy()))

    def compared(self, request: int, returned: NDArray[Any] | None) -> tuple[int, int, int]:
        """(rows recorded, rows of these that were returned otherwise, position of the first; -1 for none)."""
        parts = self.rows.pop(request, [])
        if not parts:
            return 0, 0, -1
        position = np.concatenate([p for p, _ in parts])
        experts = np.concatenate([e for _, e in parts])
        if returned is None:
            return len(position), 0, -1
        inside = position < len(returned)
        wrong = position[inside][(returned[position[inside]] != experts[inside]).any(axis=(1, 2))]
        return len(position), len(wrong), int(wrong.min()) if len(wrong) else -1


def install(capture: Capture) -> None:
    """Tap the block allocator and the engine; nothing where this build of megatron-core keeps no routing."""
    from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

    names = ("store_routing_per_block", "allocate_memory_blocks")
    if not all(hasattr(KVBlockAllocator, name) for name in names):
        return
    recorded = Recorded()
    store, allocate = (functools.partial(tap, capture, recorded) for tap in (_store, _allocate))
    capture.taps.wrap(KVBlockAllocator, names[0], store)
    capture.taps.wrap(KVBlockAllocator, names[1], allocate)
    capture.taps.wrap(DynamicInferenceEngine, "post_process_requests", functools.partial(_finished, capture, recorded))


def _store(capture: Capture, recorded: Recorded, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(allocator: Any, flat_routing: Any, *args: Any, **kwargs: Any) -> Any:
        if capture.session.enabled and flat_routing is not None:
            with capture.session.guarded("routing per block"):
                context = allocator.context
                n = len(flat_routing)
                request = context.request_ids[context.token_to_request_idx[:n].long()].cpu().numpy().astype(np.int64)
                position = context.token_to_pos_ids[:n].cpu().numpy().astype(np.int64)
                recorded.note(request, position, np.asarray(flat_routing))
        return function(allocator, flat_routing, *args, **kwargs)

    return tapped


def _allocate(capture: Capture, recorded: Recorded, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(allocator: Any, *args: Any, **kwargs: Any) -> Any:
        held = set(allocator.block_routing) if capture.session.enabled else set()
        blocks = function(allocator, *args, **kwargs)
        if held and blocks is not None:
            with capture.session.guarded("block allocation"):
                recorded.given |= held & set(blocks.tolist())
        return blocks

    return tapped


def _finished(capture: Capture, recorded: Recorded, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(engine, *args, **kwargs)
        if capture.session.enabled and recorded.steps:
            with capture.session.guarded("routing returned"):
                held = kwargs.get("finished_routing_block_ids") or {}
                owners = {block: rid for rid, blocks in block_table(engine.context).items() for block in blocks}
                for record in result[1]:
                    capture.session.event(EVENT, handed_back(record[-1], recorded, held, owners))
        return result

    return tapped


def handed_back(request: Any, recorded: Recorded, held: Any, owners: dict[int, int]) -> dict[str, Json]:
    """Facts of a finished request's routing.

    ``request``; ``rows``: rows that ran; ``recorded``: of these, rows whose routing a step of this request recorded;
    ``returned``: rows handed back, None for nothing; ``wrong``, ``first_wrong``: rows whose experts are others than
    recorded; ``blocks``: its KV blocks in order; ``given``: those of them that were allocated to somebody else in the
    step in which it finished, each with its ``place`` in the request and the ``owner`` now.
    """
    rid = int(request.request_id)
    rows = len(request.prompt_tokens) + len(request.generated_tokens) - 1
    returned = request.routing_indices
    count, wrong, first = recorded.compared(rid, None if returned is None else np.asarray(returned))
    blocks = [int(block) for block in held.get(rid, ())]
    given: list[Json] = [
        {"block": block, "place": place, "owner": owners.get(block, -1)}
        for place, block in enumerate(blocks)
        if block in recorded.given
    ]
    return {
        "request": rid,
        "engine_step": recorded.steps - 1,
        "rows": rows,
        "recorded": count,
        "returned": None if returned is None else len(returned),
        "wrong": wrong,
        "first_wrong": first,
        "blocks": blocks,
        "given": given,
    }
