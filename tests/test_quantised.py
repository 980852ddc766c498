"""Block formats: the stand-in's arithmetic, sites of several tensors, and which part of them is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from explain_evidence import evidence, values

from zkl_debug import bits
from zkl_debug.beds import BedOptions
from zkl_debug.beds.bundle import write_bundle
from zkl_debug.beds.bundle_script import load
from zkl_debug.beds.faults import FAULTS
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.beds.ruling import rule_first
from zkl_debug.beds.zoom import zoom
from zkl_debug.cli.capture import command as capture_command
from zkl_debug.diff import diff_captures
from zkl_debug.diff.explain.model import Operand, Quantised, Values
from zkl_debug.diff.explain.quantised import dequantised, quantisation
from zkl_debug.engines import microscaling
from zkl_debug.errors import UsageError
from zkl_debug.stack.switches import SwitchError

PAYLOAD = RecordOptions(level="payload", certify=False, strict=True)
EXPERT = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1"


def some_rows(seed: int = 0) -> torch.Tensor:
    rows = torch.randn(9, 64, generator=torch.Generator().manual_seed(seed)) * 3
    rows[0, :32] = 0
    rows[1] *= 1e-30
    rows[2] *= 1e30
    return rows


def operand(found: microscaling.Quantised) -> Operand:
    """The parts as a capture holds them."""
    parts = {"data": found.data, "scale": found.scale} | ({} if found.overall is None else {"overall": found.overall})
    raw: dict[str, Values] = {}
    for name, tensor in parts.items():
        width = {1: torch.uint8, 4: torch.int32}[tensor.element_size()]
        flat = tensor.reshape(len(tensor), -1).contiguous().view(width).numpy()
        raw[name] = Values(flat.view(f"u{flat.dtype.itemsize}"), str(tensor.dtype).removeprefix("torch."))
    return Operand({name: value.dtype for name, value in raw.items()}, **raw)


@pytest.mark.parametrize("form", list(microscaling.BLOCKS))
def test_a_format_is_what_its_bits_say_and_rows_do_not_depend_on_each_other(form: str) -> None:
    rows = some_rows()
    found = microscaling.quantise(rows, form)
    decoded = dequantised(operand(found))
    assert decoded is not None
    np.testing.assert_allclose(decoded, found.values().double().numpy(), rtol=2**-22)
    block = microscaling.BLOCKS[form]
    largest = rows.abs().reshape(9, -1, block).amax(-1).repeat_interleave(block, 1)
    step = 2**-3 if form == "mxfp8" else 2**-1
    assert bool(((found.values() - rows).abs() <= step * largest).all())
    alone = microscaling.quantise(rows[4:5], form)
    assert bytes(alone.data.view(torch.uint8).numpy()) == bytes(found.data[4:5].view(torch.uint8).numpy())
    assert bytes(alone.scale.view(torch.uint8).numpy()) == bytes(found.scale[4:5].view(torch.uint8).numpy())
    assert microscaling.quantise(rows[:0], form).values().shape == (0, 64)
    with pytest.raises(ValueError, match="blocks of"):
        microscaling.quantise(rows[:, :40], form)


def test_e2m1_codes_are_the_nearest_values_ties_to_even() -> None:
    grid = torch.arange(0, 8, 1 / 16)
    packed = bits.round_to(grid.numpy().astype(np.float64), "float4_e2m1fn_x2")
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(-1)
    assert codes.tolist() == microscaling.e2m1_codes(grid).tolist()
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    gap = np.abs(table[codes] - np.minimum(grid.numpy(), 6))
    assert bool((gap[:, None] <= np.abs(table[None] - np.minimum(grid.numpy(), 6)[:, None])).all())
    with pytest.raises(ValueError, match="NaN"):
        bits.round_to(np.array([np.nan, 1.0]), "float4_e2m1fn_x2")


def test_nothing_finite_stays_visible() -> None:
    rows = some_rows()
    rows[3, 5] = float("nan")
    found = microscaling.quantise(rows, "mxfp8")
    assert int(found.scale[3, 0].view(torch.uint8)) == 255
    assert bool(found.values()[3, :32].isnan().all())
    assert bool(found.values()[3, 32:].isfinite().all())


def test_the_backward_pass_is_straight_through() -> None:
    x, w = some_rows()[3:7].clone().requires_grad_(), torch.randn(8, 64, requires_grad=True)
    out = microscaling.linear(x, w, "mxfp8")
    weights = torch.randn_like(out)
    got = torch.autograd.grad((out * weights).sum(), (x, w))
    plain = torch.autograd.grad(((x @ w.t()) * weights).sum(), (x, w))
    assert not torch.equal(out, x @ w.t())
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
    with torch.no_grad():
        assert torch.equal(microscaling.linear(x, w, "mxfp8"), out)


# ---- explanations ---------------------------------------------------------------------------------------------------
def explained(left: Operand, right: Operand, source: torch.Tensor | None = None) -> Any:
    e = evidence(np.zeros((2, 4)), np.ones((2, 4)), site=f"{EXPERT}/quantize:out.1")
    wide = None if source is None else values(source.double().numpy())
    return quantisation(dataclasses.replace(e, quantised=Quantised(left, right, wide)))


def test_the_same_values_in_another_form_are_said_to_be_the_same() -> None:
    one = torch.ones(2, 32) * 3
    found = microscaling.quantise(one, "mxfp8")
    other = dataclasses.replace(
        found,
        data=(found.data.float() / 2).to(torch.float8_e4m3fn),
        scale=(found.scale.view(torch.uint8) + 1).view(torch.float8_e8m0fnu),
    )
    told = explained(operand(found), operand(other))
    assert told.evidence["same_values"] is True
    assert told.evidence["what"] == "scale and data and same values"
    assert told.evidence["blocks_with_other_scale"] == 2
    assert "the same values in every element" in told.text
    less = dataclasses.replace(other, data=found.data)
    assert "same_values" not in explained(operand(found), operand(less)).evidence


def test_scale_and_data_are_told_apart_in_numbers() -> None:
    rows = some_rows()[3:]
    found = microscaling.quantise(rows, "nvfp4")
    codes = found.scale.view(torch.uint8).clone()
    codes[2, 3] += 1
    other = dataclasses.replace(found, scale=codes.view(torch.float8_e4m3fn))
    told = explained(operand(found), operand(other), rows)
    assert told.evidence["what"] == "scale"
    assert (told.evidence["blocks_with_other_scale"], told.evidence["scale_max_steps"]) == (1, 1)
    assert told.evidence["elements_with_other_data"] == 0
    data = found.data.view(torch.uint8).clone()
    data[1, 7] ^= 1
    told = explained(operand(found), operand(dataclasses.replace(found, data=data.view(found.data.dtype))), rows)
    assert told.evidence["what"] == "data"
    assert told.evidence["elements_with_other_data"] == 1
    assert told.evidence["data_rounded_once"] == [True, False]
    assert "scales are equal" in told.text


def test_the_scale_of_a_row_is_told_from_those_of_its_blocks() -> None:
    rows = some_rows()[3:]
    found = microscaling.quantise(rows, "nvfp4")
    assert found.overall is not None
    raised = (found.overall.view(torch.int32) + 1).view(torch.float32)
    told = explained(operand(found), operand(dataclasses.replace(found, overall=raised)), rows)
    assert told.evidence["what"] == "row scale"
    assert told.evidence["row_scale_by_rule"] == [True, False]
    assert "not its input" not in told.text


def test_two_formats_are_two_formats() -> None:
    rows = some_rows()[3:]
    one, two = (operand(microscaling.quantise(rows, form)) for form in ("mxfp8", "nvfp4"))
    told = explained(one, two)
    assert told.evidence["what"] == "format"
    assert "mxfp8" in told.text
    assert "nvfp4" in told.text


# ---- beds -----------------------------------------------------------------------------------------------------------
def verdict_of(out: Path, record: RecordOptions = PAYLOAD, **options: Any) -> dict[str, Any]:
    record_bed(BedOptions(bed="tiny-moe", longest_prompt=12, **options), out, record)
    document: dict[str, Any] = diff_captures(out / "train", out / "gen").to_json()
    return document


def test_both_sides_quantised_are_identical(tmp_path: Path) -> None:
    document = verdict_of(tmp_path / "run", switches={"nvfp4-experts": True, "mxfp8-linear": True})
    assert document["verdict"] == "identical"
    assert document["claim"]["scope"] == "all-sites"
    assert document["checks"]["quantised_weights"] == "equal"
    with_parts = verdict_names(tmp_path / "run" / "gen")
    assert {f"{EXPERT}/quantize:{port}" for port in ("in.0", "out.0", "out.1", "out.2")} <= with_parts
    assert "decoder.layers.0.self_attention.linear_qkv/quantize:out.1" in with_parts
    assert "output_layer/quantize:out.0" not in with_parts


def verdict_names(folder: Path) -> set[str]:
    from zkl_debug.store.reader import open_capture

    with open_capture(folder) as capture:
        states = {r.torch_dtype for records in capture.states.values() for r in records if r.kind == "quantised"}
        assert states == {"float4_e2m1fn_x2", "float8_e4m3fn", "float8_e8m0fnu", "float32"}
        return set(capture.sites)


@pytest.mark.parametrize("level", ["payload", pytest.param("digest", marks=pytest.mark.slow)])
def test_one_side_alone_is_named_at_the_operand(tmp_path: Path, level: str) -> None:
    record = dataclasses.replace(PAYLOAD, level=level)
    document = verdict_of(tmp_path / "run", record, one_sided={"mxfp8-experts": "gen"})
    first = document["first"]
    assert (first["site"], first["kind"]) == (f"{EXPERT}/quantize:out.0", "own")
    assert first["differ"].startswith("A does not quantise")
    told = document["explanations"][0]
    assert (told["name"], told["evidence"]["what"]) == ("quantisation-differs", "one-side")
    assert told["strength"] == ("exact" if level == "payload" else "class")
    if level == "payload":
        check_what_comes_next(tmp_path, document)


def check_what_comes_next(tmp_path: Path, document: dict[str, Any]) -> None:
    """What is proposed looks into the product, which both sides run, and gives each side from its own operands."""
    sides = tmp_path / "run" / "train", tmp_path / "run" / "gen"
    both = " ".join(map(str, sides))
    assert document["next"][:2] == [
        f"zkl-debug zoom {both} --site {EXPERT}:out",
        f"zkl-debug bundle {both} --site {EXPERT}:out --out DIR",
    ]
    assert not any("--replay" in command for command in document["next"])
    done = write_bundle(*sides, tmp_path / "bundle")
    assert (done.site, done.formula) == (f"{EXPERT}:out", "linear")
    assert done.reproduced, done.notes
    assert "mxfp8 on b" in " ".join(done.notes)
    with pytest.raises(UsageError, match="one side does not run it") as error:
        zoom(*sides, f"{EXPERT}/quantize:out.0")
    assert f"--site {EXPERT}:out" in error.value.expected


FAULT_PARTS = [
    ("Q1", "scale and data"),
    pytest.param("Q3", "data", marks=pytest.mark.slow),
    pytest.param("Q4", "weight data and scale", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("fault", "what"), FAULT_PARTS)
def test_the_part_that_differs_is_named(tmp_path: Path, fault: str, what: str) -> None:
    document = verdict_of(tmp_path / "run", fault=fault)
    assert document["explanations"][0]["evidence"]["what"] == what
    site = document["first"]["site"]
    assert any(Path(site).match(pattern) for pattern in FAULTS[fault].answer.sites)
    assert document["first"]["kind"] == "own"
    sides = tmp_path / "run" / "train", tmp_path / "run" / "gen"
    done = write_bundle(*sides, tmp_path / "bundle")
    assert load(tmp_path / "bundle" / "tensors.safetensors").keys() >= {"out/a", "out/b"}
    if fault == "Q4":  # each side's own weight, as its quantiser makes it
        assert done.reproduced, done.notes
        assert "weight" in done.settings
        ruling = rule_first(diff_captures(*sides), *sides)
        assert (ruling.verdict, "block format" in ruling.reason) == ("no-ruling", True)


@pytest.mark.slow
def test_zoom_looks_into_an_expert(tmp_path: Path) -> None:
    """An expert sees its own tokens alone; the first operator that differs is where the scale's exponent is made."""
    record_bed(BedOptions(bed="tiny-moe", longest_prompt=12, fault="Q1"), tmp_path / "run", PAYLOAD)
    told = zoom(tmp_path / "run" / "train", tmp_path / "run" / "gen", f"{EXPERT}/quantize:out.1")
    left, right = told.aligned.first
    assert left is not None
    assert right is not None
    assert (left.name, right.name) == ("aten.div", "aten.frexp")
    assert "faults/quantised.py" in right.file


@pytest.mark.slow
def test_an_operator_of_one_side_alone_keeps_its_verdict_under_drill(tmp_path: Path) -> None:
    from zkl_debug.beds.drill import drill

    out = tmp_path / "run"
    record_bed(BedOptions(bed="tiny-moe", longest_prompt=12, one_sided={"mxfp8-experts": "gen"}), out, PAYLOAD)
    verdict = diff_captures(out / "train", out / "gen")
    drilled = drill(out / "train", out / "gen", verdict)
    assert drilled.confirmed
    assert drilled.verdict.first is not None
    assert drilled.verdict.first.site == f"{EXPERT}/quantize:out.0"
    assert drilled.zoom is not None
    assert drilled.zoom.site == f"{EXPERT}:out"
    assert drilled.zoom.reproduced == (True, True)


def test_a_switch_of_one_side_is_asked_for_on_the_command_line(tmp_path: Path) -> None:
    asked = ["--bed", "tiny-gpt", "--no-certify", "--out", str(tmp_path / "run"), "--switch"]
    done = CliRunner().invoke(capture_command, [*asked, "mxfp8-linear=sometimes"])
    assert "NAME=gen" in str(done.exception)
    with pytest.raises(SwitchError, match="both on"):
        record_bed(
            BedOptions(switches={"nvfp4-linear": True}, one_sided={"mxfp8-linear": "gen"}), tmp_path / "x", PAYLOAD
        )
