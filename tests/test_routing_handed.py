"""Routing that the engine hands back, and expert counts of padded steps: found from evidence, else silent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zkl_debug.beds import BedOptions
from zkl_debug.beds.faults import FAULTS, Answer, Fault
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.diff import diff_captures
from zkl_debug.diff.explain.counts import padding_counted
from zkl_debug.diff.explain.model import CallCounts, Evidence
from zkl_debug.diff.handed import Handed, finding, rule
from zkl_debug.diff.verdict import Verdict
from zkl_debug.engines.megatron import seams
from zkl_debug.engines.patching import patched
from zkl_debug.schema import Json, parse_site

PAYLOAD = RecordOptions(level="payload", certify=False, strict=True)


def diagnosed(fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    monkeypatch.setitem(FAULTS, fault.id, fault)
    options = BedOptions(bed="tiny-moe", dtype="fp32", fault=fault.id)
    record_bed(options, folder, PAYLOAD)
    return diff_captures(folder / "train", folder / "gen")


@contextmanager
def put_together_first(_context: object) -> Iterator[None]:
    """Routing of a block that is given away stays until its request has been handed over."""
    from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator

    def wrap(original: Any) -> Any:
        def allocate(self: Any, count: int) -> Any:
            kept = dict(self.block_routing)
            blocks = original(self, count)
            self.block_routing.update(kept)
            return blocks

        return allocate

    with patched(KVBlockAllocator, "allocate_memory_blocks", wrap):
        yield


@contextmanager
def swapped(_context: object) -> Iterator[None]:
    """Every request of 17 rows gets its routing back in reverse."""
    from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator

    def wrap(original: Any) -> Any:
        def put_together(self: Any, blocks: list[int], count: int) -> Any:
            found = original(self, blocks, count)
            return found[::-1].copy() if count == 17 else found

        return put_together

    with put_together_first(None), patched(KVBlockAllocator, "reconstruct_routing_from_blocks", wrap):
        yield


def test_routing_lost_with_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mcore itself loses it; with the blocks' routing kept, nothing is said; with other rows back, that is said."""
    found = diagnosed(FAULTS["R0"], tmp_path / "lost", monkeypatch)
    assert found.verdict == "diverged"
    assert found.first is not None
    assert found.first.site == "routing/indices:out.0"
    assert not found.by_rows
    assert found.explanations[0]["name"] == "routing-lost"
    events = found.explanations[0]["evidence"]["requests"]
    assert found.affected.samples == tuple(sorted(event["request"] for event in events))
    assert all(event["returned"] is None and event["given"] for event in events)
    assert all(given["owner"] not in (-1, event["request"]) for event in events for given in event["given"])
    assert found.to_json()["edges"]["within-b"]["first"]["site"] == "routing/indices:out.0"

    kept = replace(FAULTS["R0"], id="kept", sides=("gen",), breaks=put_together_first)
    assert diagnosed(kept, tmp_path / "kept", monkeypatch).verdict == "identical"

    other = diagnosed(replace(kept, id="other", breaks=swapped), tmp_path / "other", monkeypatch)
    assert other.verdict == "diverged"
    assert other.explanations[0]["name"] == "not-localised"
    assert "handed back with other experts, from position 0" in other.explanations[0]["text"]


def _event(request: int, returned: int | None, given: bool, wrong: int = 0) -> dict[str, Json]:
    taken: list[Json] = [{"block": 5, "place": 0, "owner": 9}] if given else []
    rows: dict[str, Json] = {"rows": 12, "recorded": 12, "returned": returned, "wrong": wrong, "first_wrong": -1}
    return {"request": request, "engine_step": 3, **rows, "blocks": [5, 6], "given": taken}


def test_a_lost_block_is_the_reason_only_where_it_is_true_of_no_other_request() -> None:
    lost, fine = _event(1, None, True), _event(2, 12, False)
    assert finding(Handed(1, (lost, fine), (lost,))).name == "routing-lost"
    assert rule(Handed(1, (lost, fine), (lost,))).text.startswith("only request 1: ")
    spared = _event(3, 12, True)  # it lost a block and has its routing all the same
    assert finding(Handed(1, (lost, fine, spared), (lost,))).name == "not-localised"
    unexplained = _event(4, None, False)
    assert not rule(Handed(1, (lost, fine, unexplained), (lost, unexplained))).found


@contextmanager
def small_buffers(context: Any) -> Iterator[None]:
    """mcore as it is, with room for 7 of 8 rows an expert."""
    context.model.config.moe_expert_capacity_factor = 1.75
    yield


@contextmanager
def padding_unrouted(context: Any) -> Iterator[None]:
    """The same, and padding is routed nowhere."""

    def wrap(original: Any) -> Any:
        def route(logits: Any, *args: Any, **kwargs: Any) -> Any:
            probs, chosen = (part.clone() for part in original(logits, *args, **kwargs))
            tokens = context.generator.context.active_token_count
            probs[tokens:], chosen[tokens:] = 0, False
            return probs, chosen

        return route

    with small_buffers(context), seams.topk_routing(wrap):
        yield


@pytest.mark.slow
def test_experts_overrun_by_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another consumer of the counts than the registered fault's: an expert's room, which padding takes from rows."""
    crowded = Fault("crowded", "", "", ("tiny-moe",), ("fp32",), ("gen",), small_buffers, Answer())
    found = diagnosed(crowded, tmp_path / "crowded", monkeypatch)
    assert found.first is not None
    assert found.first.site == "decoder.layers.1.mlp.router:out"
    assert found.explanations[0]["name"] == "padding-counted"
    assert "an expert was taken from it" in found.explanations[0]["text"]
    masked = replace(crowded, id="masked", breaks=padding_unrouted)
    assert diagnosed(masked, tmp_path / "masked", monkeypatch).verdict == "identical"


def _calls(padded: list[bool]) -> CallCounts:
    n = len(padded)
    counted = np.full((n, 4), 3.0) + np.array(padded)[:, None]
    engine = np.ones(n, np.bool_)
    return CallCounts("counts", counted, np.full((n, 4), 3.0), np.full(n, 6), np.full(n, 8), engine)


@pytest.mark.parametrize(
    ("left", "right", "clean", "told"),
    [
        ([False] * 20, [True] * 20, [False] * 20, True),
        ([True] * 20, [True] * 20, [False] * 20, False),  # both calls count padding: no reason to differ
        ([False] * 20, [True] * 19 + [False], [False] * 20, False),  # a row without padding differs as well
        ([False] * 20, [True] * 20, [True] * 20, False),  # rows with padding are equal too
        ([False] * 20, [True] * 20, [], False),  # nothing to tell it from
    ],
)
def test_padding_is_named_only_where_it_separates(
    left: list[bool], right: list[bool], clean: list[bool], told: bool
) -> None:
    site = parse_site("decoder.layers.1.mlp.experts.local_experts.0.linear_fc1:out")
    none = [False] * len(clean)
    counts = ((_calls(left), _calls(none)), (_calls(right), _calls(clean)))
    assert (padding_counted(Evidence(site, counts=counts)) is not None) == told
