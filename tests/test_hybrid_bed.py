"""The hybrid bed through the public functions: identical with the stack on, the right site with it off, its faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zkl_debug.beds import BedOptions
from zkl_debug.beds.faults import FAULTS
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.bench.scoreboard import judge, told
from zkl_debug.diff import Verdict, diff_captures
from zkl_debug.diff.explain.model import ScanRow
from zkl_debug.diff.explain.scan import distance, replay
from zkl_debug.store.reader import open_capture

MIXER = "decoder.layers.0.mixer"
PAYLOAD = RecordOptions(level="payload", certify=False, strict=True)


def verdict_of(out: Path, record: RecordOptions = PAYLOAD, **options: Any) -> Verdict:
    record_bed(BedOptions(bed="tiny-hybrid", **options), out, record)
    return diff_captures(out / "train", out / "gen")


def assert_identical(verdict: Verdict) -> None:
    document = verdict.to_json()
    assert document["verdict"] == "identical"
    assert document["claim"]["scope"] == "all-sites"
    sites = document["coverage"]["sites"]
    assert sites["matched"] == sites["expected"] == sites["captured"] > 150
    for name in ("score-prefill", "score-decode", "prefill-decode", "within-a", "within-b"):
        assert document["edges"][name]["compared"] > 0, name
        assert document["edges"][name]["mismatched"] == 0, name
    assert document["coverage"]["rows"]["crossed"]["chunk_edge"] > 3


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hybrid") / "run"
    record_bed(BedOptions(bed="tiny-hybrid", dtype="bf16"), out, PAYLOAD)
    return out


def test_stack_on_is_identical_with_chunked_prefill(clean: Path) -> None:
    assert_identical(diff_captures(clean / "train", clean / "gen"))


def test_states_are_read_as_they_were_written(clean: Path) -> None:
    """Every state that a call starts from is zero at position 0, and else what the call before it left."""
    with open_capture(clean / "gen") as capture:
        for layer in (0, 2):
            for state in ("ssm_state", "conv_state"):
                read, written = (
                    capture.sites[f"decoder.layers.{layer}.mixer/{state}.{end}:out.0"] for end in ("read", "write")
                )
                left: dict[tuple[int, int], bytes] = {}
                order = sorted(
                    [(int(r), 0, i) for i, r in enumerate(read.rows)]
                    + [(int(r), 1, i) for i, r in enumerate(written.rows)],
                    key=lambda entry: (int(capture.rows["frame"][entry[0]]), entry[1]),
                )
                seen = 0
                for row, writes, index in order:
                    sample, position = (int(capture.rows[name][row]) for name in ("sample", "position"))
                    if writes:
                        left[sample, position] = written.digest[index].tobytes()
                    elif position == 0:
                        assert not read.digest[index].any()
                    else:
                        assert read.digest[index].tobytes() == left[sample, position - 1]
                        seen += 1
                assert seen > 60


def test_slots_are_in_the_state_and_in_the_events(clean: Path) -> None:
    with open_capture(clean / "gen") as capture:
        last = capture.states[max(capture.states)]
        names = {record.name for record in last if record.kind == "ssm"}
        given = [event.detail for event in capture.events if event.name == "recurrent_slot"]
    assert {"ssm/slot.0000", "conv/slot.0000"} <= names
    assert len(names) == 16
    assert len(given) == 16
    assert any(detail["previous"] >= 0 for detail in given)


def test_sites_of_the_mixer(clean: Path) -> None:
    with open_capture(clean / "train") as train, open_capture(clean / "gen") as gen:
        for site in (
            *(f"{MIXER}/conv:{port}" for port in ("in.0", "out.0")),
            *(f"{MIXER}/scan:{port}" for port in ("in.0", "in.1", "in.2", "in.3", "out.0")),
            *(f"{MIXER}/ssm_weights:out.{i}" for i in range(3)),
            *(f"{MIXER}.norm:{port}" for port in ("in", "in.1", "out")),
            "decoder.layers.1.self_attention.core_attention:out",
            "decoder.layers.3.mlp/unpermute:out.0",
        ):
            assert site in train.sites, site
            assert site in gen.sites, site
            # Mixed steps run a mixer's operators once for decode and once for prefill: both under one name.
            assert len(gen.sites[site].rows) == len(np.unique(gen.sites[site].rows)), site
            assert site.replace(":", "#1:") not in gen.sites


def test_stack_off_is_blamed_on_the_scan_and_without_chunks_on_gate_and_norm(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path / "off", dtype="bf16", stack=False, switches={"no-chunked-prefill": True})
    firsts = {name: edge.first for name, edge in verdict.edges.items()}
    norm, scan = firsts["score-prefill"], firsts["prefill-decode"]
    assert norm is not None
    assert scan is not None
    assert (norm.site, norm.kind.label, norm.inputs) == (f"{MIXER}.norm:out", "own", "equal")
    assert (scan.site, scan.kind.label, scan.inputs) == (f"{MIXER}/scan:out.0", "own", "equal")
    assert firsts["within-b"] is None


def test_one_switch_off_is_named_with_its_mechanism(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path / "gate", dtype="bf16", switches={"ssm-gate-in-norm": False})
    said = told(verdict.to_json())
    assert (said.site, said.kind, said.edge) == (f"{MIXER}.norm:out", "own", "score-prefill")
    assert said.explanation == "gate-rounding-order"
    assert "B (prefill) gates what the scan gave after it was rounded" in said.text


QUICK = [("S7", "bf16"), ("S10", "fp32"), ("S15", "bf16"), ("K11", "fp32")]


@pytest.mark.parametrize(("fault", "dtype"), QUICK)
def test_fault_gets_its_answer(fault: str, dtype: str, tmp_path: Path) -> None:
    document = verdict_of(tmp_path / "run", dtype=dtype, fault=fault).to_json()
    right, edge = judge(FAULTS[fault].answer, told(document))
    assert set(right.values()) <= {True, None}, told(document)
    assert edge is not False
    if fault == "S15":  # the state that decode starts from was wrong already: decode itself is not to blame
        first = document["edges"]["score-decode"]["first"]
        assert (first["site"], first["kind"]) == (f"{MIXER}/scan:out.0", "propagated")
    if fault == "S10":
        handover = document["explanations"][0]["evidence"]["handovers"][0]
        assert handover["position"] == 0
        assert handover["previous_owner"] >= 0
        assert handover["slot"] >= 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", ["S7", "S10", "S15", "K11"])
def test_fault_gets_its_answer_over_seeds(fault: str, dtype: str, seed: int, tmp_path: Path) -> None:
    document = verdict_of(tmp_path / "run", dtype=dtype, fault=fault, seed=seed).to_json()
    right, _ = judge(FAULTS[fault].answer, told(document))
    assert set(right.values()) <= {True, None}, told(document)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"seed": 5},
        {"permute": 3, "neighbours": 3},
        {"chunk": 128, "pad_multiple": 1, "pack_multiple": 1},
        {"chunked_prefill": False, "packing": False},
        {"threads": 2, "micro_batch": 3},
    ],
)
def test_only_the_prompt_matters(dtype: str, change: dict[str, Any], tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path / "run", RecordOptions(certify=False, strict=True), dtype=dtype, **change)
    assert verdict.to_json()["verdict"] == "identical"


def _row(tokens: int, starts: tuple[int, ...] = ()) -> ScanRow:
    rng = np.random.default_rng(3)
    normal = rng.standard_normal
    decay = -np.exp(normal(2))
    return ScanRow(
        normal((tokens, 2, 4)),
        normal((tokens, 2)),
        normal((tokens, 1, 3)),
        normal((tokens, 1, 3)),
        decay,
        normal(2),
        normal(2),
        np.zeros((2, 4)),
        starts,
    )


def test_replay_is_the_recurrence_and_tells_where_it_began() -> None:
    whole = _row(9, (4,))
    exact, size = replay(whole, 0)
    late, _ = replay(whole, 4)
    assert (size >= np.abs(exact) - 1e-12).all()
    assert np.abs(exact - late).max() > 1e-3
    there = ScanRow(**{**vars(whole), "out": late.astype(np.float32).astype(np.float64)})
    assert distance(there, 4, "float32") < 1
    assert distance(there, 0, "float32") > 1000
    for start in (0, 4):  # by hand: a sum over the tokens that entered
        step = np.log1p(np.exp(whole.dt + whole.dt_bias))
        value = whole.d[:, None] * whole.x[-1]
        for t in range(start, 9):
            kept = np.exp((step[t + 1 :] * whole.a).sum(0))
            value = value + (kept * step[t])[:, None] * float(whole.b[t, 0] @ whole.c[-1, 0]) * whole.x[t]
        np.testing.assert_allclose(replay(whole, start)[0], value, rtol=1e-10)
