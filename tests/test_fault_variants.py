"""Diagnosis of variants of the known faults, on real captures."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_variants import VARIANTS

from zkl_debug.beds.faults import FAULTS, Fault
from zkl_debug.bench.faults_bench import Case, run_case


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
