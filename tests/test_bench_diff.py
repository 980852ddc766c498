"""The bench of the diff: it measures what it says, and it can fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from zkl_debug.bench import diff_bench
from zkl_debug.bench.diff_bench import DiffBench, bench_diff
from zkl_debug.bench.linear import describe, growth
from zkl_debug.bench.measure import run_measured
from zkl_debug.cli.bench import command
from zkl_debug.errors import UsageError

TINY = DiffBench(sizes=(6_000, 12_000), ranks=2, layers=1, trials=1, jobs=1, join_rows=8192, payload_bytes=32 << 20)


def test_figures_of_a_tiny_bench(tmp_path: Path) -> None:
    found = bench_diff(TINY, tmp_path)
    assert [size["digests"] for size in found["sizes"]] == [6000, 12000]
    assert found["met"]["found"]
    assert found["met"]["trials"]
    assert found["trials"]["found"] == 1
    assert found["join"]["rows"] == 8192
    assert found["payload"]["bytes"] == 32 << 20
    assert found["growth"]["seconds"]["off_line"] == pytest.approx(1)  # two sizes are always on a line
    assert not list(tmp_path.iterdir())


def test_growth_of_costs() -> None:
    """A fixed part is no growth; what grows faster than the size is seen in the line and between the largest sizes."""
    sizes = [10**6, 3 * 10**6, 10**7, 3 * 10**7, 10**8]
    straight = growth(sizes, [2 + 0.15 * n / 1e6 for n in sizes])
    assert straight is not None
    assert straight["fixed"] == pytest.approx(2)
    assert straight["per_million"] == pytest.approx(0.15)
    assert straight["off_line"] == pytest.approx(1)
    assert straight["marginal_ratio"] == pytest.approx(1)
    assert straight["over_proportional"] < 1
    bent = growth(sizes, [0.1 * (n / 1e6) ** 1.3 for n in sizes])
    assert bent is not None
    assert bent["over_proportional"] > 1.3
    assert bent["off_line"] > 1.3
    assert bent["marginal_ratio"] > 2
    assert "off the line" in describe(bent)
    assert growth([10], [1.0]) is None


def test_files_grow_with_the_size(tmp_path: Path) -> None:
    what = DiffBench(**{**TINY.__dict__, "sizes": (6_000, 18_000), "ranks": 3, "rank_size": 6_000, "trials": 0})
    found = bench_diff(what, tmp_path)
    assert [size["ranks"] for size in found["sizes"]] == [1, 3]
    assert found["met"]["found"]


def test_a_bit_that_is_not_found_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures without the bit: everything is identical, and the bench says that it was missed."""
    write = diff_bench._write
    monkeypatch.setattr(diff_bench, "_write", lambda root, size, _flips: write(root, size, ()))
    found = bench_diff(DiffBench(**{**TINY.__dict__, "sizes": (6_000,), "trials": 0}), tmp_path)
    assert not found["met"]["found"]
    assert found["trials"] is None


def test_memory_and_time_of_a_command_and_its_children() -> None:
    child = "import time; x = bytearray(60 << 20); time.sleep(0.5)"
    parent = f"import subprocess, sys; x = bytearray(40 << 20); subprocess.run([sys.executable, '-c', {child!r}])"
    measured = run_measured([sys.executable, "-c", parent])
    assert measured.peak_rss > 100 << 20
    assert measured.seconds > 0.5
    with pytest.raises(UsageError, match="status 7: oh"):
        run_measured([sys.executable, "-c", "import sys; sys.stderr.write('oh'); sys.exit(7)"])


def test_the_command_refuses_no_rows() -> None:
    result = CliRunner().invoke(command, ["diff", "--rows", "0"], standalone_mode=False)
    assert isinstance(result.exception, UsageError)
