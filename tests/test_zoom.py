"""Zoom and drill on real captures: megatron-core's unfused attention against the paged reference, and known defects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from zkl_debug.beds.bed import BedOptions
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.beds.zoom import Zoom, zoom
from zkl_debug.cli.main import main
from zkl_debug.errors import Refused, UsageError

CORE = "decoder.layers.0.self_attention.core_attention:out"


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captures of both sides with the stack off, bf16, digests alone."""
    folder = tmp_path_factory.mktemp("off") / "run"
    options = BedOptions(bed="tiny-gpt", dtype="bf16", stack=False, reprefill=False)
    record_bed(options, folder, RecordOptions(level="digest", certify=False))
    return folder


def test_unfused_attention_against_the_paged_reference(off: Path) -> None:
    found = zoom(off / "train", off / "gen", CORE)
    assert found.reproduced == (True, True)
    assert found.differs
    assert found.inputs == {"in": True, "in.1": True, "in.2": True}
    left, right = found.aligned.first
    assert left is not None
    assert right is not None
    assert (left.name, left.dtype) == ("aten.baddbmm", "bfloat16")
    assert left.file == "megatron/core/transformer/dot_product_attention.py"
    assert left.line > 0
    assert (right.name, right.dtype) == ("aten.bmm", "float32")
    assert right.file == "zkl_debug/engines/paged_attention.py"
    relation = found.aligned.relation
    assert relation is not None
    assert relation.equal_after == "bfloat16"  # the scaled scores, rounded once
    assert relation.elements == 4 * (found.position + 1)
    kept = [op.name for op in found.roundings[0]]
    assert kept == ["aten.baddbmm", "aten._to_copy"]  # scores, probabilities; both round the output
    assert "aten._softmax" in [op.name for op in found.aligned.left]


@pytest.mark.slow
def test_a_whole_layer_names_the_same_operator(off: Path) -> None:
    """The generation side splits q, K and V elsewhere, goes through a cache, and through other sequences as well."""
    found = zoom(off / "train", off / "gen", "decoder.layers.0:out")
    left, right = found.aligned.first
    assert left is not None
    assert right is not None
    assert (left.name, right.name) == ("aten.baddbmm", "aten.bmm")
    assert right.file == "zkl_debug/engines/paged_attention.py"
    assert len(found.aligned.anchors) > 15
    assert found.aligned.relation is not None
    assert found.aligned.relation.equal_after == "bfloat16"


@pytest.mark.parametrize(
    ("site", "found"),
    [
        ("decoder.layers.0.self_attention.core_attentoin:out", "no site"),
        ("decoder.layers.0.input_layernorm:in", "is an input"),
        ("logprobs/selected:out.0", "is looked up"),
    ],
)
def test_sites_that_cannot_be_looked_into(off: Path, site: str, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        zoom(off / "train", off / "gen", site)


def test_captures_that_do_not_come_from_a_bed(off: Path, tmp_path: Path) -> None:
    shutil.copytree(off / "gen", tmp_path / "elsewhere")
    with pytest.raises(Refused, match=r"different runs|no run\.json"):
        zoom(off / "train", tmp_path / "elsewhere", CORE)


@pytest.mark.slow
def test_drill_adds_the_bits_the_operator_and_a_reason(off: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["diff", str(off / "train"), str(off / "gen"), "--drill", "--json"])
    assert stop.value.code == 1
    document = json.loads(capfd.readouterr().out)
    assert document["first"]["site"] == CORE
    assert document["first"]["max_ulp"] > 0
    assert document["explanations"][0]["name"] == "extra-rounding"
    assert document["drill"]["confirmed"]
    assert document["drill"]["zoom"]["first"][0]["operator"] == "aten.baddbmm"
    assert document["drill"]["zoom"]["relation"]["equal_after_rounding_to"] == "bfloat16"
    assert not any("--drill" in command for command in document["next"])


def zoomed(folder: Path, fault: str, bed: str, dtype: str) -> Zoom:
    record_bed(BedOptions(bed=bed, dtype=dtype, fault=fault), folder, RecordOptions(level="digest", certify=False))
    return zoom(folder / "train", folder / "gen")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "bed", "dtype", "left", "right", "anchors"),
    [
        ("K7", "tiny-moe", "bf16", ("aten.add", "ordered_unpermute"), ("aten.add", "ordered_unpermute"), 3),
        ("K2", "tiny-gpt", "fp32", ("aten.mm", "linear"), ("aten.mm", "linear"), 0),
        ("P4", "tiny-gpt", "bf16", ("aten.mul", ""), ("aten._to_copy", "forward"), 4),
        ("P5", "tiny-gpt", "bf16", ("aten.add_", ""), ("aten.add_", ""), 3),
        ("P5", "tiny-gpt", "fp32", ("aten.add_", ""), ("aten.add_", ""), 2),
        ("P1", "tiny-gpt", "fp32", None, ("aten._to_copy", "bf16_logits"), 1),
    ],
)
def test_known_defects(
    fault: str,
    bed: str,
    dtype: str,
    left: tuple[str, str] | None,
    right: tuple[str, str],
    anchors: int,
    tmp_path: Path,
) -> None:
    found = zoomed(tmp_path / "run", fault, bed, dtype)
    assert found.reproduced == (True, True)
    assert all(found.inputs.values())
    assert len(found.aligned.anchors) >= anchors
    for op, expected in zip(found.aligned.first, (left, right), strict=True):
        assert (op is None) == (expected is None)
        if op is not None and expected is not None:
            assert op.name == expected[0]
            assert expected[1] in op.function


@pytest.mark.slow
def test_an_equal_site_has_no_first_operator(tmp_path: Path) -> None:
    record_bed(BedOptions(bed="tiny-gpt", fault="K4"), tmp_path / "run", RecordOptions(certify=False))
    found = zoom(tmp_path / "run" / "train", tmp_path / "run" / "gen", "decoder.layers.0.input_layernorm:out")
    assert not found.differs
    assert found.aligned.first == (None, None)
    assert len(found.aligned.anchors) >= 4


def test_identical_captures_have_nothing_to_zoom(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = BedOptions(bed="tiny-gpt", dtype="bf16", reprefill=False)
    record_bed(options, tmp_path / "run", RecordOptions(layers=(0, 0), certify=False))
    sides = [str(tmp_path / "run" / side) for side in ("train", "gen")]
    for more in ([], ["--site", "decoder.layers.0.input_layernorm:out"]):
        with pytest.raises(SystemExit) as stop:
            main(["zoom", *sides, *more])
        assert stop.value.code == 0
        assert capfd.readouterr().out == "identical, nothing to zoom\n"


def test_drill_where_nothing_can_be_run_again(off: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Captures of a program, as those away from their run are: the verdict stands, and why there is no pass 2."""
    for side in ("train", "gen"):
        shutil.copytree(off / side, tmp_path / side)
    sides = [str(tmp_path / side) for side in ("train", "gen")]
    with pytest.raises(SystemExit) as stop:
        main(["diff", *sides, "--drill"])
    assert stop.value.code == 1
    told = capfd.readouterr().out
    assert "DIVERGED" in told
    assert "drill     not possible: no run.json beside the capture" in told
    with pytest.raises(SystemExit) as stop:
        main(["diff", *sides, "--drill", "--json"])
    assert stop.value.code == 1
    document = json.loads(capfd.readouterr().out)
    assert document["first"]["site"] == CORE
    assert document["drill"]["note"].startswith("not possible: ")
