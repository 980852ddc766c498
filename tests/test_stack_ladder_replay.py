"""Patches 5 and 6 against the true defect of megatron-core 0.19.2 (FAULTS R0), in its real engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from zkl_debug.beds import workload
from zkl_debug.beds.bed import BEDS, BedOptions
from zkl_debug.engines.cpu import cpu_backend
from zkl_debug.engines.patching import patched
from zkl_debug.stack.applying import by_config
from zkl_debug.stack.switches import applied, switch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """tiny-moe with routing replay on."""
    fields: dict[str, Any] = {"fixes": "", "owner": "mcore", "group": "router replay"}
    replay = by_config("replay", "TransformerConfig", {"moe_enable_routing_replay": True}, **fields)
    with ExitStack() as stack:
        stack.enter_context(cpu_backend())
        from zkl_debug.engines.megatron import model, world

        stack.enter_context(world.world())
        stack.enter_context(replay.apply())
        yield model.build_model(model.ModelSpec(**BEDS["tiny-moe"].model), "fp32", 0)


def routing(model: Any, *names: str) -> tuple[dict[int, Any], dict[int, int]]:
    """Routing of every finished request, and the number of tokens that were routed."""
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

    from zkl_debug.engines.megatron import generation

    found: dict[int, Any] = {}

    def watch(original: Any) -> Any:
        def post_process(self: Any, *args: Any, **kwargs: Any) -> Any:
            active, records = original(self, *args, **kwargs)
            found.update({r.requests[-1].request_id: r.requests[-1].routing_indices for r in records})
            return active, records

        return post_process

    with applied(switch(name) for name in names), patched(DynamicInferenceEngine, "post_process_requests", watch):
        generator = generation.DynamicGenerator(model, generation.GenConfig(max_tokens=64, chunked_prefill=True))
        done = generator.generate(workload.requests(BedOptions(bed="tiny-moe", neighbours=12), 128))
    return found, {r.sample: len(r.tokens) - 1 for r in done}


def test_the_patches_keep_the_routing_that_block_reuse_loses(model: Any) -> None:
    plain, lengths = routing(model)
    lost = [request for request, indices in plain.items() if indices is None]
    assert lost, "megatron-core loses no routing here any more: patches 5 and 6 can go"
    mended, again = routing(model, "routing-before-update", "routing-on-bookkeep")
    assert again == lengths
    assert {request: len(indices) for request, indices in mended.items()} == lengths
    for request, indices in plain.items():
        assert indices is None or np.array_equal(indices, mended[request])
