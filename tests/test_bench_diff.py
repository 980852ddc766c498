"""The bench of the diff: it measures what it says, and it can fail."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from zkl_debug.bench import diff_bench
from zkl_debug.bench.diff_bench import DiffBench, bench_diff
from zkl_debug.bench.linear import describe, growth
from zkl_debug.bench.measure import run_measured
from zkl_debug.bench.synthetic import Synthetic, write_side, writing_command
from zkl_debug.cli.bench import command
from zkl_debug.cli.bench_print import print_diff
from zkl_debug.cli.main import main
from zkl_debug.errors import UsageError

RUN = {"seconds": 2.5, "cpu_seconds": 2.25, "peak_rss": 300e6, "found": True}
SIZE = {"digests": 10**6, "bytes": 10**8, "ranks": 8, "memcmp_seconds": 0.125, "full": RUN, "first": RUN}
JOIN = {"rows_per_min_core": 30e6}
PAYLOAD = {"over_memcmp": 0.7, "bytes": 512 << 20}
TINY = DiffBench(sizes=(6_000, 12_000), ranks=2, layers=1, trials=1, jobs=1, join_rows=8192, payload_bytes=32 << 20)


def test_figures_of_a_tiny_bench(tmp_path: Path) -> None:
    found = bench_diff(TINY, tmp_path)
    assert [size["digests"] for size in found["sizes"]] == [6000, 12000]
    assert found["met"]["found"]
    assert found["met"]["trials"]
    assert found["trials"]["found"] == 1
    assert found["join"]["rows"] == 8192
    assert found["payload"]["bytes"] == 32 << 20
    assert found["growth"]["seconds"]["off_line"] == pytest.approx(1)  # two sizes are always on a line,
    assert found["judged"]["over_linear"] is None  # which says nothing
    assert found["met"]["over_linear"] is None
    assert found["met"]["seconds_100M"] is None
    assert found["met"]["payload_over_memcmp"] is None  # too little payload to say
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


@pytest.mark.parametrize(("last", "met"), [(3.0, True), (30.0, False)])
def test_growth_is_judged_from_three_sizes_on(last: float, met: bool) -> None:
    line = growth([1, 2, 3], [1.0, 2.0, last])
    found = {"growth": {"cpu_seconds": line}, "sizes": [SIZE] * 3, "trials": None, "join": JOIN, "payload": PAYLOAD}
    judged = diff_bench._judged(found)
    assert diff_bench._is_met("over_linear", judged["over_linear"]) is met
    two = growth([1, 2], [1.0, 30.0])
    assert diff_bench._judged({**found, "growth": {"cpu_seconds": two}})["over_linear"] is None
    assert two is not None
    assert "not judged" in describe(two)


@pytest.mark.parametrize("width", [80, 40])
def test_what_is_printed_fits(width: int) -> None:
    """Goals come last, each with its figure and what was wanted."""
    growths = {unit: growth([10**6, 2 * 10**6, 3 * 10**6], [1.0, 2.0, 3.0]) for unit in ("seconds", "cpu_seconds")}
    parts = {"growth": growths, "sizes": [SIZE] * 3, "trials": {"found": 19, "of": 20}}
    found: dict[str, Any] = {**parts, "join": JOIN, "payload": PAYLOAD}
    judged = diff_bench._judged(found)
    met = {name: None if value is None else diff_bench._is_met(name, value) for name, value in judged.items()}
    console = Console(file=io.StringIO(), width=width)
    print_diff(console, {**found, "goals": diff_bench.GOALS, "judged": judged, "met": met})
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert "{" not in text
    if width == 80:
        lines = [" ".join(line.split()) for line in text.splitlines()]
        assert "flipped bits found, trials 19 of 20 all missed" in lines
        assert "peak memory 300 MB <= 2.15 GB met" in lines
        assert "payload compared, over memcmp 0.70 x >= 0.80 x missed" in lines
        assert "100 million digests - <= 120 s not judged" in lines


@pytest.mark.parametrize(
    ("arguments", "found", "expected"),
    [
        (["--rows", "nan"], "--rows nan", "such as 3e5"),
        (["--rows", "inf"], "--rows inf", "such as 3e5"),
        (["--rows", "many"], "--rows many", "such as 3e5"),
        (["--rank-rows", "nan"], "--rank-rows nan", "such as 3e5"),
        (["--trial-rows", "-inf"], "--trial-rows -inf", "such as 3e5"),
        (["--rows", "1"], "--rows 1", "at least 11,520: one row at each of 1440 sites in 8 files"),
        (["--rows", "-3e5"], "--rows -300000", "at least 11,520"),
        (["--rank-rows", "0"], "--rank-rows 0", "at least 1,440"),
        (["--rank-rows", "7"], "--rank-rows 7", "at least 1,440"),
        (["--trial-rows", "0"], "--trial-rows 0", "at least 11,520"),
        (["--trial-rows", "11519"], "--trial-rows 11519", "at least 11,520"),
        (["--rows", "20000", "--rows", "21000"], "are both 23,040 digests", "steps of 11,520"),
        (["--rows", "1e15"], "TB to write, ", "room for it"),
        (["--rows", "1e300"], "TB to write, ", "room for it"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(
    arguments: list[str], found: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff_bench, "bench_join", lambda *_: pytest.fail("it began"))
    result = CliRunner().invoke(command, ["diff", *arguments, "--folder", str(tmp_path)], standalone_mode=False)
    assert isinstance(result.exception, UsageError), result.exception
    assert found in result.exception.found
    assert expected in result.exception.expected
    assert result.exception.next_step
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_least_size_is_measured(tmp_path: Path) -> None:
    what = DiffBench(**{**TINY.__dict__, "sizes": (60, 120, 180), "trials": 1})
    found = bench_diff(what, tmp_path)
    assert found["met"]["found"]
    assert found["met"]["trials"]
    assert found["met"]["over_linear"] is not None
    with pytest.raises(UsageError, match="at least 60"):
        bench_diff(DiffBench(**{**TINY.__dict__, "sizes": (59,)}), tmp_path)


def test_bytes_on_disk_are_foretold(tmp_path: Path) -> None:
    for size in (Synthetic(300_000, 2, 2), Synthetic(6_000, 4, 1)):
        root = tmp_path / str(size.digests)
        for side in ("train", "gen"):
            write_side(root / side, size, side)
        written = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        assert written < size.nbytes < 1.6 * written


def test_small_sizes_write_little_payload() -> None:
    assert DiffBench(sizes=(100_000,)).payload == 64 << 20
    assert DiffBench(sizes=(6_000,), ranks=2, layers=1).payload == 64 << 20
    assert DiffBench().payload == 512 << 20
    assert DiffBench(sizes=(6_000,), ranks=2, layers=1).nbytes == 3 * (64 << 20)


def test_a_full_disk_is_told_as_it_helps_a_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The captures are gone: nothing is there to be repaired. In this process and in one that writes a side."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("zkl_debug.store.pipeline._write_all", full)
        arguments = ["store", "--size", "32MiB", "--folder", str(tmp_path)]
        result = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert isinstance(result.exception, UsageError), result.exception
    assert "No space left" in result.exception.found
    assert result.exception.next_step == "free space, or --folder elsewhere"
    assert not list(tmp_path.iterdir())
    code = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)); "
    code += "runpy.run_module('zkl_debug.bench.synthetic', run_name='__main__')"
    command_of = "zkl_debug.bench.diff_bench.writing_command"
    monkeypatch.setattr(command_of, lambda *a: [sys.executable, "-c", code, writing_command(*a)[-1]])
    with pytest.raises(UsageError, match=r"could not be written: .*File too large") as told:
        bench_diff(DiffBench(**{**TINY.__dict__, "sizes": (60_000,)}), tmp_path)
    assert told.value.next_step == "free space, or --folder elsewhere"
    assert "repair" not in str(told.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_capture_bench_on_a_full_disk_does_not_name_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("zkl_debug.store.pipeline._write_all", full)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "capture", "--layers", "1", "--hidden", "64", "--tokens", "8", "--folder", str(tmp_path)])
    told = capsys.readouterr().err
    assert stop.value.code == 2
    assert "No space left" in told
    assert told.endswith("next: free space, or --folder elsewhere\n")
    assert "repair" not in told
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
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
