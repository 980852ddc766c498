"""Every fault changes the operator of its answer first, given equal inputs, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import pytest
from test_engines_probe import Comparison, Key, key_of, observe

from zkl_debug.beds import BedOptions, run_bed
from zkl_debug.beds.faults import FAULTS
from zkl_debug.errors import UsageError

# One bed and dtype each in the default run; everything else is slow.
DEFAULT = (
    ("K2", "tiny-gpt", "bf16"),
    ("K4", "tiny-gpt", "bf16"),
    ("K7", "tiny-moe", "bf16"),
    ("K12", "tiny-gpt", "fp32"),
    ("P1", "tiny-gpt", "fp32"),
    ("P4", "tiny-gpt", "bf16"),
    ("P7", "tiny-gpt", "bf16"),
    ("X2", "tiny-gpt", "fp32"),
    ("M12", "tiny-gpt", "bf16"),
)
EVERY = [
    (f.id, bed, dtype)
    for f in FAULTS.values()
    for bed in f.beds
    for dtype in f.dtypes
    if f.answer.sites
    and not f.answer.sites[0].startswith("routing/")  # what is handed over is no row of a site
    and "layout" not in f.options  # several processes: tests/test_shards_real.py
]


def _matches(site: str | None, patterns: Iterable[str]) -> bool:
    return site is not None and any(fnmatchcase(site, p) for p in patterns)


def _check(fault: str, bed: str, dtype: str, seed: int) -> Comparison:
    seen = observe(BedOptions(bed=bed, dtype=dtype, fault=fault, seed=seed))
    assert _matches(seen.first(), FAULTS[fault].answer.sites), seen.first()
    return seen


def _sequence(seen: Comparison, sample: int) -> Key:
    assert seen.run.gen is not None
    return key_of(seen.run.gen.sequences[sample])


@pytest.mark.parametrize(("fault", "bed", "dtype"), DEFAULT)
def test_first_difference_is_the_answer(fault: str, bed: str, dtype: str) -> None:
    seen = _check(fault, bed, dtype, 0)
    site = seen.first()
    assert site is not None
    rows = seen.differing(site)
    if fault == "K2":
        odd = _sequence(seen, 2)
        assert all(odd.startswith(key) for key in rows)
        assert not seen.within_gen(site)
    elif fault == "K4":
        assert seen.first(("prefill",)) is None
        assert seen.first(("decode",)) == site
        assert len(seen.within_gen(site)) > 20
    elif fault in ("P7", "X2"):
        assert min(len(key) for key in rows) > len(key_of([0]))
    elif fault == "M12":
        first_of_pack = _sequence(seen, 4)
        assert not any(first_of_pack.startswith(key) for key in rows)
        assert len(rows) > 40
    else:
        assert len(rows) > 0.5 * seen.compared(site)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("fault", "bed", "dtype"), EVERY)
def test_every_fault_over_seeds(fault: str, bed: str, dtype: str, seed: int) -> None:
    _check(fault, bed, dtype, seed)


def test_part_one_faults_are_there() -> None:
    part_one = {"K2", "K4", "K7", "K12", "P1", "P4", "P7", "X2", "M12", "Z0"}
    assert part_one <= set(FAULTS)
    for f in FAULTS.values():
        assert f.title
        assert f.answer.verdict in {"diverged", "identical", "refused"}
        assert f.answer.sites or f.answer.verdict != "diverged"


def test_nothing_of_a_fault_stays() -> None:
    for fault in ("K4", "P4", "P7"):
        run_bed(BedOptions(fault=fault, dtype="bf16", reprefill=False))
    assert run_bed(BedOptions(dtype="bf16")).zero


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fault": "K99"}, "no fault 'K99'"),
        ({"fault": "K7"}, "fault K7 in bed tiny-gpt"),
        ({"fault": "P4", "dtype": "fp32"}, "fault P4 in bed tiny-gpt, fp32"),
    ],
)
def test_faults_are_refused_where_they_do_not_apply(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_bed(BedOptions(**options))
