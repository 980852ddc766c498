"""Beds captured and compared through the public commands: what the project promises, run for real."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zkl_debug.beds import BedOptions
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.beds.run import open_bed
from zkl_debug.capture.api import Capture
from zkl_debug.cli.main import main
from zkl_debug.diff import diff_captures
from zkl_debug.store.reader import open_capture, verify_payload

QUICK = RecordOptions(certify=False, strict=True)
CORE = "decoder.layers.0.self_attention.core_attention"


def verdict_of(options: BedOptions, out: Path, record: RecordOptions = QUICK) -> dict[str, Any]:
    record_bed(options, out, record)
    document: dict[str, Any] = diff_captures(out / "train", out / "gen").to_json()
    return document


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-gpt bf16, stack on, payload level, certified."""
    out = tmp_path_factory.mktemp("clean") / "run"
    record_bed(BedOptions(), out, RecordOptions(level="payload", strict=True))
    return out


def run_cli(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    text = capsys.readouterr()
    return int(stop.value.code or 0), text.out, text.err


def assert_identical(document: dict[str, Any], payload: bool = False) -> None:
    assert document["verdict"] == "identical"
    assert document["claim"]["scope"] == "all-sites"
    sites = document["coverage"]["sites"]
    assert sites["matched"] == sites["expected"] == sites["captured"] > 100
    rows = document["coverage"]["rows"]
    assert rows["prompt"]["percent"] > 99
    assert rows["generated"]["percent"] > 99
    for name in ("score-prefill", "score-decode", "prefill-decode", "within-a", "within-b"):
        assert document["edges"][name]["compared"] > 0, name
        assert document["edges"][name]["mismatched"] == 0, name
    if payload:
        assert document["claim"]["equality"] == "bytes"


def test_clean_bed_is_identical_and_certified(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, "diff", str(clean / "train"), str(clean / "gen"), "--json", "--verify-bytes")
    document = json.loads(out)
    assert code == 0
    assert_identical(document, payload=True)
    assert document["certification"] == {
        "a": {"a0_a1": True, "a0_a2": True},
        "b": {"a0_a1": True, "a0_a2": True},
    }
    code, out, _ = run_cli(capsys, "diff", str(clean / "train"), str(clean / "gen"))
    assert code == 0
    assert "A0" in out
    assert "A2" in out


def test_payload_and_digests_agree_in_every_row(clean: Path) -> None:
    for side in ("train", "gen"):
        with open_capture(clean / side) as capture:
            assert verify_payload(capture) == []


def test_sites_reach_the_operators_hooks_cannot_see(clean: Path) -> None:
    with open_capture(clean / "gen") as capture:
        names = set(capture.sites)
    for site in (
        "decoder.layers.0.self_attention/rope.q:out.0",
        "decoder.layers.0.self_attention/rope.k:out.0",
        f"{CORE}:in",
        f"{CORE}:in.1",
        f"{CORE}:in.2",
        f"{CORE}:out",
        "decoder.layers.0/self_attn_bda:out.0",
        "decoder.layers.3/mlp_bda:out.0",
        "decoder.final_layernorm:out",
        "output_layer:out",
        "logprobs/log_softmax:out.0",
        "logprobs/selected:out.0",
    ):
        assert site in names, site


def test_manifest_says_what_ran(clean: Path) -> None:
    with open_capture(clean / "gen") as capture:
        meta = capture.meta
    assert meta["versions"]["megatron-core"] == "0.19.2"
    assert meta["config"]["num_layers"] == 4
    assert meta["process"]["threads"] >= 1
    assert meta["inference_mode"] is False  # the engine is suspended when the probe attaches
    assert "fault" not in json.dumps(capture.manifest)


def test_moe_bed_is_identical(tmp_path: Path) -> None:
    document = verdict_of(BedOptions(bed="tiny-moe", dtype="bf16"), tmp_path / "run")
    assert_identical(document)
    with open_capture(tmp_path / "run" / "gen") as capture:
        names = set(capture.sites)
    for operator in (
        "mlp/router.gating:out.0",
        "mlp/router.topk:out.0",
        "mlp/router.topk:out.1",
        "mlp/permute:out.0",
        "mlp.experts:out",
        "mlp/unpermute:in.0",
        "mlp/unpermute:out.0",
    ):
        assert f"decoder.layers.1.{operator}" in names, operator


@pytest.mark.slow
@pytest.mark.parametrize("bed", ["tiny-gpt", "tiny-moe"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_bed_and_dtype_is_identical(bed: str, dtype: str, tmp_path: Path) -> None:
    record = RecordOptions(level="payload", strict=True)
    assert_identical(verdict_of(BedOptions(bed=bed, dtype=dtype), tmp_path / "run", record))


def test_stack_off_blames_core_attention_and_nothing_else(tmp_path: Path) -> None:
    document = verdict_of(BedOptions(stack=False), tmp_path / "run", RecordOptions(level="payload", certify=False))
    first = document["edges"]["score-prefill"]["first"]
    assert document["verdict"] == "diverged"
    assert first["site"] == f"{CORE}:out"
    assert (first["layer"], first["kind"], first["operator"]) == (0, "own", "core_attention")
    assert first["mismatched_elements"] > 0
    assert first["max_ulp"] > 0
    with open_capture(tmp_path / "run" / "train") as a, open_capture(tmp_path / "run" / "gen") as b:
        for port in ("in", "in.1", "in.2"):
            assert _equal_where_joined(a, b, f"{CORE}:{port}")
        assert not _equal_where_joined(a, b, f"{CORE}:out")


def _equal_where_joined(a: Any, b: Any, site: str) -> bool:
    """Joined here by a plain dictionary: an independent check of the engine's join."""

    def table(capture: Any) -> dict[tuple[int, int, int], tuple[int, int]]:
        found, rows = capture.sites[site], capture.rows
        keys = rows[found.rows]
        return {
            (int(k["position"]), int(k["prefix"][0]), int(k["prefix"][1])): (int(d[0]), int(d[1]))
            for k, d in zip(keys, found.digest, strict=True)
        }

    left, right = table(a), table(b)
    common = left.keys() & right.keys()
    assert len(common) > 200
    return all(left[key] == right[key] for key in common)


FAULTS = [
    ("K2", "tiny-gpt", "bf16", "decoder.layers.0.self_attention.linear_qkv:out"),
    ("K4", "tiny-gpt", "bf16", f"{CORE}:out"),
    ("K7", "tiny-moe", "fp32", "decoder.layers.1.mlp/unpermute:out.0"),
    ("K12", "tiny-gpt", "fp32", "logprobs/log_softmax:out.0"),
    ("P1", "tiny-gpt", "fp32", "output_layer:out"),
    ("P4", "tiny-gpt", "bf16", "decoder.layers.0.input_layernorm:out"),
    ("P7", "tiny-gpt", "bf16", "decoder.layers.0.self_attention/rope.q:out.0"),
    ("X2", "tiny-gpt", "bf16", "decoder.layers.0.self_attention/rope.q:out.0"),
    ("M12", "tiny-gpt", "bf16", f"{CORE}:out"),
]
EDGES = {"K4": "prefill-decode"}


@pytest.mark.parametrize(("fault", "bed", "dtype", "site"), FAULTS, ids=[f[0] for f in FAULTS])
def test_fault_gets_its_answer(fault: str, bed: str, dtype: str, site: str, tmp_path: Path) -> None:
    document = verdict_of(BedOptions(bed=bed, dtype=dtype, fault=fault), tmp_path / "run")
    first = document["first"]
    assert document["verdict"] == "diverged"
    assert first["site"] == site
    assert first["kind"] == "own"
    assert document["edge"] == EDGES.get(fault, "score-prefill")
    assert document["edges"]["within-a"]["mismatched"] == 0
    # Nothing before the first site differs on any edge, and everything behind it inherits.
    with_first = [e for e in document["edges"].values() if e["first"]]
    assert all(e["first"]["site"] == site for e in with_first)


def test_same_requests_otherwise_arranged_change_nothing(clean: Path, tmp_path: Path) -> None:
    options = BedOptions(permute=3, neighbours=2, pad_multiple=24, pack_multiple=4, chunk=128, micro_batch=3)
    assert_identical(verdict_of(options, tmp_path / "run"))
    # ... and across the two arrangements as well: the first run's training side against this one's generation side.
    crossed = diff_captures(clean / "train", tmp_path / "run" / "gen").to_json()
    assert crossed["verdict"] == "identical"
    # The neighbours of this run have no training rows in the other one.
    assert crossed["coverage"]["rows"]["generated"]["percent"] > 90


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_clean_seeds_get_no_blame(seed: int, tmp_path: Path) -> None:
    bed = ("tiny-gpt", "tiny-moe")[seed % 2]
    dtype = ("bf16", "fp32")[seed // 2 % 2]
    document = verdict_of(BedOptions(bed=bed, dtype=dtype, seed=seed, fault="Z0", permute=seed), tmp_path / "run")
    assert document["verdict"] == "identical"
    assert document["first"] is None


def score(options: BedOptions, out: Path, change: Callable[[Any], None], tokens: dict[int, tuple[int, ...]]) -> Path:
    """Capture the scoring side of a bed after ``change`` was done to it."""
    with open_bed(options) as context:
        change(context)
        with Capture(context.model, out, "train", strict=True):
            context.run_train(tokens)
    return out


@pytest.fixture(scope="module")
def tokens(clean: Path) -> dict[int, tuple[int, ...]]:
    """The sequences of the clean run, read back from its capture."""
    with open_capture(clean / "train") as capture:
        rows = capture.rows[capture.sites["inputs/token_ids:in.0"].rows]
    found: dict[int, tuple[int, ...]] = {}
    for sample in sorted(set(rows["sample"].tolist())):
        mine = rows[rows["sample"] == sample]
        found[sample] = tuple(mine["token"][np.argsort(mine["position"])].tolist())
    return found


def test_other_tokens_are_refused(clean: Path, tokens: dict[int, tuple[int, ...]], tmp_path: Path) -> None:
    changed = dict(tokens)
    changed[3] = (*tokens[3][:40], (tokens[3][40] + 1) % 128, *tokens[3][41:])
    train = score(BedOptions(), tmp_path / "train", lambda _: None, changed)
    verdict = diff_captures(train, clean / "gen")
    document = verdict.to_json()
    assert verdict.exit_code == 3
    assert document["verdict"] == "refused"
    assert "token" in document["refusal"]["code"]
    assert "40" in document["refusal"]["text"]
    assert document["first"] is None


def test_other_weights_are_refused(clean: Path, tokens: dict[int, tuple[int, ...]], tmp_path: Path) -> None:
    def bump(context: Any) -> None:
        weight = dict(context.model.named_parameters())["decoder.layers.2.mlp.linear_fc2.weight"]
        weight.data.view(-1)[5] *= 1.5

    train = score(BedOptions(), tmp_path / "train", bump, tokens)
    verdict = diff_captures(train, clean / "gen")
    document = verdict.to_json()
    assert verdict.exit_code == 3
    assert "weight" in document["refusal"]["code"]
    assert "decoder.layers.2.mlp.linear_fc2.weight" in document["refusal"]["text"]


def test_other_positions_are_refused(
    clean: Path, tokens: dict[int, tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zkl_debug.engines.megatron import scoring

    original = scoring.padded_batch

    def shifted(*args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        batch.position_ids.add_(1)
        return batch

    monkeypatch.setattr(scoring, "padded_batch", shifted)
    train = score(BedOptions(), tmp_path / "train", lambda _: None, tokens)
    verdict = diff_captures(train, clean / "gen")
    assert verdict.exit_code == 3
    assert "position" in verdict.to_json()["refusal"]["code"]


def test_captures_without_a_common_row_are_refused(clean: Path, tmp_path: Path) -> None:
    other = {50: (9, 8, 7, 6, 5, 4, 3, 2, 1), 51: (127, 3, 127, 3, 127, 3, 127)}
    train = score(BedOptions(), tmp_path / "train", lambda _: None, other)
    verdict = diff_captures(train, clean / "gen")
    assert verdict.exit_code == 3
    assert verdict.to_json()["verdict"] == "refused"


def test_a_recorder_that_reads_one_reused_buffer_is_refused(
    clean: Path, tokens: dict[int, tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H1: what every site held was read when the buffer already had the last layer's values."""
    import torch

    from zkl_debug.digest_torch import digest_tensor

    buffer: dict[str, Any] = {}

    def stale(tensor: torch.Tensor, rows: int, lane_offset: int = 0) -> Any:
        shape = str(tuple(tensor.shape))
        buffer.setdefault(shape, tensor.detach().clone())
        return digest_tensor(buffer[shape], rows, lane_offset)

    monkeypatch.setattr("zkl_debug.capture.session.digest_tensor", stale)
    train = score(BedOptions(), tmp_path / "train", lambda _: None, tokens)
    monkeypatch.undo()
    verdict = diff_captures(train, clean / "gen")
    assert verdict.exit_code == 3
    assert "buffer" in verdict.to_json()["refusal"]["code"]


def test_capture_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    args = ["capture", "--bed", "tiny-gpt", "--side", "gen", "--layers", "0-1", "--no-certify", "--out", str(out)]
    code, text, _ = run_cli(capsys, *args, "--json")
    document = json.loads(text)
    assert code == 0
    assert set(document["sides"]) == {"gen"}
    with open_capture(out / "gen") as capture:
        assert {s.meta.layer for s in capture.sites.values()} == {-1, 0, 1}
    code, _, err = run_cli(capsys, *args)
    assert code == 2
    assert "not empty" in err


@pytest.mark.parametrize(
    "args",
    [
        ("capture", "--bed", "no-such-bed", "--out", "x"),
        ("capture", "--bed", "tiny-gpt", "--switch", "nonsense", "--out", "x"),
        ("capture", "--bed", "tiny-gpt", "--switch", "nonsense=on", "--out", "x"),
        ("capture", "--bed", "tiny-gpt", "--fault", "K999", "--out", "x"),
        ("capture", "--bed", "tiny-gpt", "--layers", "5-3", "--out", "x"),
        ("capture", "--bed", "tiny-gpt", "--chunk", "7", "--out", "x"),
        ("capture", "--bed", "tiny-gpt", "--budget", "many", "--out", "x"),
        ("diff",),
        ("no-such-command",),
    ],
)
def test_bad_usage_is_explained(
    args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run_cli(capsys, *args)
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    assert err.strip()
    assert list(tmp_path.iterdir()) == []


def test_beds_and_doctor_print_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, "beds", "--json")
    assert code == 0
    assert {"tiny-gpt", "tiny-moe"} <= {b["name"] for b in json.loads(out)["beds"]}
    code, out, _ = run_cli(capsys, "doctor", "--json")
    assert code == 0
    assert json.loads(out)["ok"] is True
