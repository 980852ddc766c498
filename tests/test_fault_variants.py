"""Diagnosis of variants of the known faults, on real captures."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_breaks import combine, early_rounding, norm_forward
from fault_variants import VARIANTS

from zkl_debug.beds import BedOptions
from zkl_debug.beds.faults import FAULTS, Answer, Fault
from zkl_debug.beds.operators import scan_operators
from zkl_debug.bench.faults_bench import Case, run_case
from zkl_debug.stack.combine import ordered_unpermute


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "dtype"), [pytest.param(f, dtype, id=f"{f.id}-{dtype}") for f in VARIANTS for dtype in f.dtypes]
)
def test_variant(fault: Fault, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAULTS, fault.id, fault)
    score = run_case(Case(fault, fault.beds[0], dtype, 0), tmp_path)
    assert not score.failure
    assert score.told is not None
    wrong = [name for name, right in score.right.items() if right is False]
    assert not wrong, (wrong, score.told)


@contextmanager
def two_at_once(context: object) -> Iterator[None]:
    """The combine of layer 2 in another order, and a norm of layer 5 that rounds before its weight."""
    reverse = combine(2, functools.partial(ordered_unpermute, reverse=True))
    with reverse(context), norm_forward("decoder.layers.5.input_layernorm", early_rounding)(context):
        yield


@pytest.mark.slow
def test_two_independent_faults_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diff can only say that the second one inherits the first; one teacher-forced pass names both, nothing else."""
    fault = Fault(
        "two", "two at once", "", ("tiny-moe",), ("bf16",), ("gen",), two_at_once, Answer(), model={"layers": 6}
    )
    monkeypatch.setitem(FAULTS, fault.id, fault)
    scan = scan_operators(BedOptions(bed="tiny-moe", dtype="bf16", fault="two"))
    assert [found.site for found in scan.operators] == [
        "decoder.layers.2.mlp/unpermute:out.0",
        "decoder.layers.5.input_layernorm:out",
    ]
    assert all(found.inputs_equal for found in scan.operators)
