"""The operator trace: rows found in any layout, the row's operators only, source lines, views left out."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from zkl_debug.beds.zoom import _op
from zkl_debug.capture.rows import padded_rows
from zkl_debug.capture.source import relative
from zkl_debug.capture.trace import OpTrace, Place, TracedOp, place_of, triton_launches, value_digest
from zkl_debug.diff.streams import align

GRID = Place(s=6, b=2, at=3, sequence=1, queries=6, query=3, position=3, start=0)
ENGINE = Place(s=8, b=1, at=5, sequence=0, queries=4, query=2, position=2, start=3)


def digest(values: torch.Tensor) -> str:
    told = value_digest(values)
    assert told is not None
    return told[0]


def traced(place: Place, run: Callable[[], object]) -> list[TracedOp]:
    with OpTrace() as trace:
        trace.open([place])
        run()
        ops: list[TracedOp] = trace.close()
    assert not trace.errors
    return ops


def test_rows_of_a_batch_in_every_layout() -> None:
    x = torch.randn(6, 2, 16)
    row = digest(x[3, 1] * 2)
    for shaped in (x, x.transpose(0, 1).contiguous(), x.reshape(12, 16)):
        (op,) = traced(GRID, functools.partial(torch.mul, shaped, 2))
        assert row in op.slices[0], tuple(shaped.shape)


def test_rows_of_scores_are_cut_to_the_keys_a_row_reads() -> None:
    scores = torch.randn(2, 4, 6, 6)  # batch, heads, query, key
    (op,) = traced(GRID, lambda: scores + 1)
    assert not op.slices  # nothing says yet that they belong to the row
    queries = torch.randn(6, 2, 4, 16)

    def attend() -> torch.Tensor:
        q = queries.permute(1, 2, 0, 3)
        return q @ q.transpose(2, 3)

    ops = traced(GRID, attend)
    product = attend()[1, :, 3, :4]
    assert digest(product) in ops[-1].slices[0]


def test_only_the_sequence_of_the_row_is_related() -> None:
    x = torch.randn(8, 16)

    def run() -> torch.Tensor:
        out = torch.zeros_like(x)
        for start, stop in ((0, 3), (3, 7)):
            out[start:stop] = x[start:stop].exp()
        return out.sum(-1)

    ops = traced(ENGINE, run)
    related = [(op.name, op.shape) for op in ops if op.related]
    assert ("aten.exp", (4, 16)) in related
    assert ("aten.exp", (3, 16)) not in related
    assert related[-1][0] == "aten.sum"
    assert [shape for name, shape in related if name == "aten.copy_"] == [(4, 16)]
    writer = next(op.index for op in ops if op.name == "aten.copy_" and op.related)
    assert writer in ops[-1].inputs
    assert not any(ops[i].name == "aten.copy_" and not ops[i].related for i in ops[-1].inputs)
    exp = next(op for op in ops if op.name == "aten.exp" and op.related)
    assert digest(x[5].exp()) in exp.slices[0]


def test_a_cache_does_not_relate_the_rows_of_others() -> None:
    """What one sequence reads from a cache has nothing to do with the row of another that was written into it."""
    x, cache = torch.randn(8, 16), torch.zeros(100, 16)

    def run() -> Tensor:
        cache[40:48] = x * 2
        other = cache[44:50].index_select(0, torch.tensor([1, 3])).exp()
        return x + 1 + other.sum()

    ops = traced(ENGINE, run)
    assert [op.name for op in ops if op.related] == ["aten.mul", "aten.copy_", "aten.add", "aten.add"]


def test_views_are_left_out_and_sources_are_told() -> None:
    x = torch.randn(12, 16)
    (op,) = traced(GRID, lambda: x.view(6, 2, 16).transpose(0, 1).neg())
    assert op.name == "aten.neg"
    assert op.where.file == "tests/test_trace.py"
    assert "lambda" in op.where.function


def test_inputs_are_the_operators_read() -> None:
    x = torch.randn(12, 16)
    ops = traced(GRID, lambda: (x * 2).add_(1).exp())
    assert [op.name for op in ops] == ["aten.mul", "aten.add_", "aten.exp"]
    assert ops[2].inputs == (0, 1)


def test_composite_operators_are_taken_apart_in_inference_mode() -> None:
    x, w = torch.randn(12, 16), torch.randn(8, 16)
    with torch.inference_mode():
        plain = torch.nn.functional.linear(x, w)
        with OpTrace() as trace:
            trace.open([GRID])
            out = torch.nn.functional.linear(x, w)
            ops = trace.close()
    assert torch.equal(out, plain)
    assert [op.name for op in ops] == ["aten.mm"]


def test_another_thread_than_the_one_it_was_entered_in() -> None:
    """Engines run their steps in a thread of their own where an event loop is running already."""
    x = torch.randn(12, 16)
    with OpTrace() as trace:

        def step() -> None:
            with _disable_current_modes():  # as the probe does
                trace.open([GRID])
            torch.mul(x, 2)

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        assert [op.name for op in trace.close()] == ["aten.mul"]


def test_silent_while_closed() -> None:
    with OpTrace() as trace:
        torch.ones(3) + 1
    assert not trace.ops


def test_values_do_not_depend_on_dtype_layout_or_repetition() -> None:
    x = torch.randn(4, 8).bfloat16()
    assert digest(x) == digest(x.float().t()) == digest(x.repeat_interleave(2, 0))
    assert digest(x) != digest(x.float() * (1 + 2**-20))
    assert value_digest(torch.zeros(5)) is None
    assert value_digest(torch.ones(8)) is None
    masked = torch.cat([x.float(), torch.full((1, 8), float("-inf"))])
    assert digest(masked) == digest(x)


def test_a_value_rounded_to_its_neighbour_is_told() -> None:
    row = torch.tensor([1.0, 1.0, 2.0, 3.0, 4.0, 4.0])
    moved = torch.tensor([1.0, 1.0, 2.0, 3.0, 3.0, 4.0])  # the same distinct values
    assert digest(row) != digest(moved)
    assert digest(row) == digest(row.flip(0)) == digest(row.repeat_interleave(3)) == digest(torch.cat([row, row]))


def test_codes_of_narrow_formats_are_values() -> None:
    """A format that torch cannot compute with is made and mended in its bytes."""
    x = torch.randn(12, 16)

    def run() -> Tensor:
        codes = x.to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.where(codes > 3, codes - 1, codes).view(torch.float8_e4m3fn)

    names = [op.name for op in traced(GRID, run) if op.slices and op.slices[0]]
    assert names == ["aten._to_copy", "aten.sub", "aten.where"]
    packed = torch.arange(1, 17, dtype=torch.uint8)
    assert digest(packed.view(torch.float4_e2m1fn_x2)) == digest(packed)


@pytest.mark.parametrize("place", ["copied", "rounded"])
def test_rows_that_are_written_in_place_by_a_piece_are_named(place: str) -> None:
    x = torch.randn(8, 16)
    row = Place(s=8, b=1, at=5, sequence=0, queries=8, query=5, position=5, start=0)

    def clean() -> Tensor:
        return x * 2 + 1

    def broken() -> Tensor:
        y = x * 2
        if place == "copied":
            y[5:6] = y[4:5]  # the neighbour's row
        else:
            y[4:6] = y[4:6].to(torch.float8_e4m3fn).float()
        return y + 1

    left, right = ([_op(op) for op in traced(row, run)] for run in (clean, broken))
    _, first = align(left, right, ((), ()), ([digest(clean()[5])], [digest(broken()[5])])).first
    assert first is not None
    assert first.name == "aten.copy_"


def test_place_of_a_row() -> None:
    tokens = np.arange(10).reshape(2, 5)
    frame = padded_rows(tokens, samples=[7, 9], lengths=[5, 3], offsets=[0, 2])
    place = place_of(frame, 9, 1)
    assert place is not None
    assert (place.at, place.sequence, place.slot, place.queries, place.query, place.start) == (3, 1, 7, 3, 1, 2)
    assert place_of(frame, 9, 3) is None


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("/x/lib/python3.12/site-packages/megatron/core/a.py", "megatron/core/a.py"),
        ("/some/where/else/deep/b.py", "else/deep/b.py"),
    ],
)
def test_no_machine_paths(file: str, told: str) -> None:
    assert relative(file) == told


def test_triton_launches_are_noted_with_the_line_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    launches: list[object] = []

    def run(kernel: object, *_args: object, **_options: object) -> None:
        launches.append(kernel)

    monkeypatch.setattr(jit.JITFunction, "run", run)

    def doubled(x_pointer: int) -> None:
        del x_pointer

    kernel = jit.JITFunction(doubled)
    before = jit.JITFunction.run
    with OpTrace() as trace, triton_launches(trace):
        trace.open([GRID])
        kernel.run(1, grid=(1,), warmup=False)
        (op,) = trace.close()
        kernel.run(1, grid=(1,), warmup=False)
    assert len(launches) == 2
    assert op.name == "triton.doubled"
    assert (op.where.file, op.where.line) == ("tests/test_trace.py", doubled.__code__.co_firstlineno)
    assert jit.JITFunction.run is before
