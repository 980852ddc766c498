"""Routing replay: scoring takes the experts that generation chose, through megatron-core's ``RouterReplay``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zkl_debug.engines.megatron.scoring import MicroBatch
from zkl_debug.engines.patching import patched

#: Experts by sample: [rows, MoE layers, top-k], row p of the token at position p.
Routing = Mapping[int, NDArray[np.int64]]


def targets(mb: MicroBatch, routing: Routing) -> Tensor | None:
    """Expert ids for every token slot of a scoring call, in the order in which routers see them.

    Returns:
        int64 [MoE layers, slots, top-k]; -1 where generation recorded nothing: padding, and tokens it never ran. None
        where it recorded nothing of any sequence of the call.
    """
    known = [routing[sample] for sample in mb.samples if sample in routing]
    if not known:
        return None
    batch = mb.tokens.shape[0]
    found = np.full((known[0].shape[1], mb.n_slots, known[0].shape[2]), -1, np.int64)
    for which, sample in enumerate(mb.samples):
        if sample not in routing:
            continue
        row, start = mb.locate(which)
        count = min(mb.lengths[which], len(routing[sample]))
        slots = (start + np.arange(count)) * batch + row  # [s, b], flattened
        found[:, slots] = routing[sample][:count].transpose(1, 0, 2)
    return torch.from_numpy(found)


@contextmanager
def replaying(mb: MicroBatch, routing: Routing) -> Iterator[None]:
    """One scoring call whose routers replay; a token slot without recorded experts keeps the router's own choice."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    found = targets(mb, routing)
    if found is None:
        yield
        return
    routers = RouterReplay.global_router_replay_instances
    before = [(router.router_replay_action, router.target_topk_idx) for router in routers]
    with patched(RouterReplay, "get_replay_topk", _own_where_unknown):
        RouterReplay.set_replay_data(list(found))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
        finally:
            for router, (action, target) in zip(routers, before, strict=True):
                router.router_replay_action, router.target_topk_idx = action, target
                router.replay_backward_list.clear()


def _own_where_unknown(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_replay_topk(
        self: Any,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> Any:
        recorded = self.target_topk_idx
        if recorded is not None and bool((recorded < 0).any()):
            own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
            self.target_topk_idx = torch.where(recorded.to(own.device) < 0, own, recorded.to(own.device))
        return original(self, scores, topk, num_groups, group_topk, default_compute_topk)

    return get_replay_topk
