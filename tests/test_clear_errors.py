"""What cannot be run as asked is refused before it runs, with what was found, what was expected and what to do next."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from zkl_debug.beds.bed import BedOptions
from zkl_debug.beds.faults import FAULTS
from zkl_debug.beds.ranks import last_words
from zkl_debug.beds.run import open_bed
from zkl_debug.cli.bench import command as bench
from zkl_debug.diff.naming import load_map
from zkl_debug.errors import UsageError

# faults --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "asked", "told"),
    [
        ("C1", {"layout": {"tp": 2}}, "fault C1 with layout tp 2"),
        ("C1", {"gen_layout": {"tp": 2}}, "fault C1 with gen_layout tp 2"),
        ("C4", {"bed": "tiny-moe", "layout": {"ep": 4, "dp": 4}}, "fault C4 with layout ep 4, dp 4"),
        ("Q1", {"bed": "tiny-moe", "switches": {"mxfp8-experts": False}}, "switches mxfp8-experts False"),
        ("Q5", {"bed": "tiny-moe", "one_sided": {"nvfp4-experts": "train"}}, "one_sided nvfp4-experts train"),
        ("K9", {"rescore": 2}, "rescore 2"),
        ("M1", {"packing": False}, ""),
    ],
)
def test_a_fault_takes_nothing_over_that_was_asked_for(fault: str, asked: dict[str, object], told: str) -> None:
    options = BedOptions(**{"fault": fault, **asked})  # type: ignore[arg-type]
    if not told:
        assert FAULTS[fault].adjust(options) == options
        return
    with pytest.raises(UsageError) as error:
        FAULTS[fault].adjust(options)
    assert told in error.value.found
    assert "by itself" in error.value.expected


def test_a_fault_brings_its_own_options_along() -> None:
    for fault in FAULTS.values():
        options = BedOptions(bed=fault.beds[0], dtype=fault.dtypes[0], fault=fault.id, switches={"mxfp8-linear": True})
        once = fault.adjust(options)
        assert fault.adjust(once) == once, fault.id
        assert once.switches["mxfp8-linear"], "what the fault does not need stays as it was asked for"


@pytest.mark.parametrize("asked", [{"switches": {"mxfp8-experts": True}}, {"one_sided": {"nvfp4-experts": "gen"}}])
def test_a_format_of_experts_needs_experts(asked: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="has no experts") as error, open_bed(BedOptions(**asked)):  # type: ignore[arg-type]
        pass
    assert "-linear" in error.value.expected


# ranks ---------------------------------------------------------------------------------------------------------------

WARNED = """\
/site/torch/x.py:12: FutureWarning: this will go
  return f(x)
[rank1]:[W930 12:00:00 socket.cpp:1] Warning: the client socket cannot be initialised
"""
FAILED = """\
Traceback (most recent call last):
  File "rank.py", line 3, in <module>
ValueError: tokens 3 and 4
"""


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("", "it said nothing of it"),
        (WARNED, "it said nothing of it"),
        (FAILED + WARNED, "ValueError: tokens 3 and 4"),
        (WARNED + FAILED + WARNED, "ValueError: tokens 3 and 4"),
        ("zkl-debug: no bed\nexpected: one\nnext: beds\n" + WARNED, "zkl-debug: no bed; expected: one; next: beds"),
        ("torch.cuda.OutOfMemoryError: 3 GiB\n", "torch.cuda.OutOfMemoryError: 3 GiB"),
        ("loading\n" + WARNED + "step 3\n", "loading; step 3"),
    ],
)
def test_the_reason_of_a_rank_is_an_error_and_no_warning(log: str, told: str) -> None:
    assert last_words(log) == told


# files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"\xff\xfe\x00", "it is no text"),
        (b"sites = [", "cannot be read as a map"),
        (b"sites = 3", "'3' is not a list of pairs"),
        (b'sites = "ab"', "'ab' is not a list of pairs"),
        (b'sites = ["ab"]', "'ab' is not a pair"),
        (b'sites = [["a"]]', "is not a pair"),
        (b"sites = [[1, 2]]", "'1' is not a name"),
        (b'sites = [["a", "b.{i}"]]', "more numbers"),
        (b'names = [["a", "b"]]', "unknown key 'names'"),
        (b"detect = 5", "not iterable"),
        (b"detect = [[1]]", "'1' is not a name"),
        (b"rules = [3]", "'int' object"),
        (b'rules = [{when = "a"}]', "'a' is not a list of names"),
        (b'lanes = [{site = "a"}]', "has no parts"),
        (b'lanes = [{site = "a", parts = ["q"], layout = "odd"}]', "layout 'odd'"),
        (b'lanes = [{site = "a", parts = [1], layout = "halves"}]', "'1' is not a name"),
        (b"sparse = [{width = 1}]", "'1' is not a name"),
    ],
)
def test_maps_that_are_none(text: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "map.toml"
    file.write_bytes(text)
    with pytest.raises(UsageError) as error:
        load_map(file)
    assert why in error.value.found
    assert "TOML" in error.value.expected or "one of" in error.value.expected


def test_maps_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(UsageError, match="cannot be read"):
            load_map(path)
    good = tmp_path / "good.toml"
    good.write_text('sites = [["a:out", "b:out"]]\n')
    assert load_map(good).rules[0].sites == (("a:out", "b:out"),)


@pytest.mark.parametrize("kind", ["diff", "peers"])
def test_a_folder_for_a_bench_is_looked_at_first(kind: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(bench, [kind, "--folder", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "does not exist" in done.output
