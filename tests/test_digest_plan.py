"""How a launch of the digest kernel is cut up: a model of the kernel's blocks reads every part of every row once."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from zkl_debug import digest_cuda
from zkl_debug.lanes import LaneView


@dataclass(frozen=True)
class Shape:
    """What a plan needs to know of a tensor, at an address made up."""

    rows: int
    lanes: int
    address: int = 0
    stride: int = 0
    inner: int = 0
    group_stride: int = 0

    def target(self) -> digest_cuda.Target:
        stride = self.stride or self.lanes
        owner = torch.empty(0)
        return digest_cuda.Target(
            LaneView(self.address, self.rows, self.lanes, stride, owner, self.inner, self.group_stride), 0
        )


def _read(buffer: Any, entries: int) -> list[tuple[int, ...]]:
    return [digest_cuda._ENTRY.unpack_from(buffer, 24 + 64 * i) for i in range(entries)]


def _parts(plan: digest_cuda.Plan, shapes: list[Shape]) -> list[np.ndarray[Any, Any]]:
    """For each tensor and row, a set of bits: the parts of the row that warps of the launch read, as the kernel does.

    A part that is read twice is an error.
    """
    targets = [shape.target() for shape in shapes]
    buffer = ctypes.create_string_buffer(24 + 64 * 32)
    digest_cuda.fill(buffer, targets, plan, 0, 0)
    table = _read(buffer, len(targets))
    side, blocks = {"few": (digest_cuda.FEW_ROWS, 1), "many": (8, 1), "cluster": (digest_cuda.CLUSTER_ROWS, 8)}[
        plan.kind
    ]
    seen = [np.zeros(shape.rows, np.uint64) for shape in shapes]
    assert plan.blocks % blocks == 0
    for at in range(plan.blocks):
        which = sum(at >= table[i][9] for i in range(1, len(table)))
        first, run = table[which][9:11]
        block = (at - first) // blocks
        which, block = (which - block % run, block // run) if run > 1 else (which, block)
        rows, lanes, shift, reverse = *table[which][4:6], table[which][11], table[which][13]
        assert (rows, lanes) == (shapes[plan.slots[which].target].rows, shapes[plan.slots[which].target].lanes)
        assert shift <= (6 if blocks > 1 else 3)
        together = (8 * blocks >> shift) * side
        if reverse:
            block = -(-rows // together) - 1 - block
        for warp in range(at % blocks * 8, at % blocks * 8 + 8):
            row0 = block * together + (warp >> shift) * side
            bit = np.uint64(1 << (warp & ((1 << shift) - 1)))
            assert row0 >= 0
            own = seen[plan.slots[which].target][row0 : row0 + side]
            assert not (own & bit).any()
            own |= bit
    return seen


def _lanes_once(lanes: int, shift: int) -> bool:
    """Whether 2^shift warps, each thread four lanes at a time, pass each lane exactly once."""
    starts = [np.arange(thread * 4, lanes, 128 << shift) for thread in range(32 << shift)]
    lane = np.concatenate(starts)[:, None] + np.arange(4)
    return bool((np.bincount(lane.reshape(-1), minlength=lanes)[:lanes] == 1).all())


def _check_plan(shapes: list[Shape], clusters: bool) -> digest_cuda.Plan:
    plan = digest_cuda.arrange([shape.target() for shape in shapes], clusters)
    assert sorted(slot.target for slot in plan.slots) == list(range(len(shapes)))
    seen = _parts(plan, shapes)
    for slot in plan.slots:
        shape = shapes[slot.target]
        assert (seen[slot.target] == np.uint64((1 << (1 << slot.shift)) - 1)).all(), (shape, slot, plan)
        assert _lanes_once(shape.lanes, slot.shift)
    return plan


@pytest.mark.parametrize("clusters", [False, True])
def test_every_part_of_every_row_is_read_exactly_once(clusters: bool) -> None:
    kinds = set()
    for rows in (1, 7, 63, 64, 65, 200, 512, 513, 2047, 2048, 2049, 16384):
        for lanes in (1, 3, 128, 129, 512, 1024, 4096, 4097, 8192, 8193, 40000):
            kinds.add(_check_plan([Shape(rows, lanes)], clusters).kind)
    assert kinds == ({"few", "many", "cluster"} if clusters else {"few", "many"})


@pytest.mark.parametrize("clusters", [False, True])
def test_every_part_is_read_exactly_once_in_launches_of_unlike_tensors(clusters: bool) -> None:
    rng = np.random.default_rng(3)
    sizes = set()
    for most in (300, 600, 2047, 5000):
        for count in (2, 5, 8, 9, 32):
            shapes = [
                Shape(
                    int(rng.integers(1, most + 1)), int(rng.choice([1, 2, 33, 256, 1024, 2048, 8192, 12000])), i << 40
                )
                for i in range(count)
            ]
            plan = _check_plan(shapes, clusters)
            sizes.add((plan.kind, plan.size))
    assert {("many", 8), ("many", 32), ("cluster" if clusters else "few", 8)} <= sizes


def _projection(rows: int, base: int) -> list[Shape]:
    """Queries, keys and values inside a fused projection, then the projection: four groups of 512 lanes a row."""
    parts = [Shape(rows, 1024, base, 2048, 256, 512), Shape(rows, 512, base + 1024, 2048, 128, 512)]
    parts.append(Shape(rows, 512, base + 1536, 2048, 128, 512))
    return [*parts, Shape(rows, 2048, base)]


def test_tensors_inside_another_take_turns_with_it() -> None:
    shapes = [Shape(4096, 1024, 1 << 40), *_projection(4096, 2 << 40), Shape(4096, 8192, 3 << 40)]
    plan = _check_plan(shapes, True)
    assert [slot.target for slot in plan.slots] == [5, 4, 1, 2, 3, 0]
    assert [slot.run for slot in plan.slots] == [1, 4, 4, 4, 4, 1]
    assert len({slot.first for slot in plan.slots[1:5]}) == 1
    # The same memory twice, and one with more rows, which is by itself.
    twice = [Shape(3000, 64, 1 << 40), Shape(3000, 64, 1 << 40), Shape(3001, 64, 1 << 40)]
    assert sorted(slot.run for slot in _check_plan(twice, True).slots) == [1, 2, 2]
    assert all(slot.run == 1 for slot in _check_plan(_projection(64, 0), True).slots)


def test_blocks_that_read_most_come_first_and_the_longest_rows_are_shared() -> None:
    shapes = [Shape(16384, lanes, i << 40) for i, lanes in enumerate((1024, 8192, 512, 32768, 2048, 4096, 1024))]
    plan = _check_plan(shapes, True)
    read = [(64 >> slot.shift) * shapes[slot.target].lanes * 4 for slot in plan.slots]
    assert read == sorted(read, reverse=True)
    assert {slot.target: slot.shift for slot in plan.slots} == {0: 0, 1: 0, 2: 0, 3: 3, 4: 0, 5: 0, 6: 0}


def test_how_an_entry_is_packed() -> None:
    """Reads of sixteen bytes are a property of each tensor, not of the launch."""
    assert digest_cuda._HEADER.size == 24
    assert digest_cuda._ENTRY.size == 64
    assert digest_cuda._SINGLE.size == 88
    targets = [Shape(64, 8, 64).target(), Shape(64, 8, 68).target(), Shape(64, 6, 64).target()]
    targets += [Shape(64, 8, 64, 10).target(), Shape(64, 8, 64, 16, 4, 8).target(), Shape(64, 8, 64, 16, 2, 8).target()]
    targets.append(dataclasses.replace(targets[0], lane_offset=3))
    plan = digest_cuda.arrange(targets, True)
    buffer = ctypes.create_string_buffer(24 + 64 * 32)
    digest_cuda.fill(buffer, targets, plan, 0, 0)
    assert [entry[12] for entry in _read(buffer, len(targets))] == [1, 0, 0, 0, 1, 0, 0]
