"""Dumps of other tools become captures that ``diff`` reads; what cannot be trusted is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ingest_dumps import REQUESTS, SITES, Dumper, engine_dump, flip, training_dump, values

from zkl_debug.cli import main as cli
from zkl_debug.diff import diff_captures
from zkl_debug.errors import Refused, UsageError
from zkl_debug.ingest import sglang
from zkl_debug.ingest.pattern import Options
from zkl_debug.ingest.pattern import ingest as ingest_files
from zkl_debug.schema import Phase, RowFlag
from zkl_debug.store.reader import open_capture


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--json"])
    return int(stop.value.code or 0), json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dumps")
    training_dump(root / "dump_train")
    engine_dump(root / "dump_gen")
    sglang.ingest(root / "dump_train", root / "train", "train", payload=True)
    summary = sglang.ingest(root / "dump_gen", root / "gen", "gen", payload=True)
    assert summary["unkeyed"] == {}
    return root


def test_an_engine_dump_is_keyed_from_its_positions(both: Path) -> None:
    with open_capture(both / "gen") as gen, open_capture(both / "train") as train:
        for capture in (gen, train):
            rows = {(int(r["sample"]), int(r["position"])): int(r["token"]) for r in capture.rows}
            expected = {(s, p): t for s, tokens in enumerate(REQUESTS) for p, t in enumerate(tokens)}
            assert rows == expected
        flags = gen.rows["flags"]
        first = (flags & RowFlag.FIRST_DECODE) != 0
        assert sorted(zip(gen.rows["sample"][first].tolist(), gen.rows["position"][first].tolist(), strict=True)) == [
            (0, 2),
            (1, 2),
            (2, 3),
        ]
        assert list(gen.frames["phase"][:2]) == [Phase.PREFILL, Phase.PREFILL]
        assert set(train.frames["phase"]) == {Phase.SCORE}
        assert gen.sites["model.layers.0.self_attn.attn:out"].meta.semantic == "core_attention"
        assert gen.sites["model.layers.1.mlp:in"].meta.torch_dtype == "bfloat16"
        assert len(gen.sites) == len(SITES) + 2


def test_equal_dumps_are_identical_at_every_site(both: Path) -> None:
    verdict = diff_captures(both / "train", both / "gen", verify_bytes=True)
    assert verdict.verdict == "identical", verdict.refusal
    assert verdict.coverage.matched == verdict.coverage.expected == len(SITES) + 2
    assert verdict.edges["score-decode"].compared > 0
    assert verdict.edges["score-prefill"].compared > 0


def test_a_flipped_bit_is_found_where_it_is(both: Path, tmp_path: Path) -> None:
    engine_dump(tmp_path / "dump", tweak=flip("model.layers.1.self_attn.attn.output", step=5))
    sglang.ingest(tmp_path / "dump", tmp_path / "gen", "gen", payload=True)
    verdict = diff_captures(both / "train", tmp_path / "gen")
    assert verdict.first is not None
    assert verdict.first.site == "model.layers.1.self_attn.attn:out"
    assert (verdict.first.kind.label, verdict.first.inputs) == ("own", "equal")
    assert verdict.edge == "score-decode"
    assert verdict.affected.rows == 1, "the bit is of one request of the step"


def test_the_command_says_what_it_wrote(both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run(
        capsys, "ingest", str(both / "dump_gen"), "--side", "gen", "--out", str(tmp_path / "gen"), "--level", "digest"
    )
    assert code == 0
    assert document["kind"] == "sglang"
    with open_capture(tmp_path / "gen") as capture:
        assert document["rows"] == len(capture.rows) == sum(map(len, REQUESTS))
        assert not any(site.payload_rows for site in capture.sites.values())
    assert diff_captures(both / "train", tmp_path / "gen").verdict == "identical"


def test_older_files_and_request_slots(both: Path, tmp_path: Path) -> None:
    engine_dump(tmp_path / "old", rids=False, old=True)
    summary = sglang.ingest(tmp_path / "old", tmp_path / "gen", "gen", payload=True)
    assert summary["unkeyed"] == {}
    assert diff_captures(both / "train", tmp_path / "gen").verdict == "identical"


def test_rows_behind_unseen_tokens_have_no_key(tmp_path: Path) -> None:
    dumper = Dumper(tmp_path / "dump")
    whole, cached = REQUESTS[0], REQUESTS[2]
    fed = {"input_ids": torch.tensor(whole + cached[3:]), "positions": torch.tensor([0, 1, 2, 3, 4, 5, 3, 4])}
    fed |= {"seq_lens": torch.tensor([6, 5]), "rids": ["a", "b"]}  # type: ignore[dict-item]
    dumper.forward(fed, [(whole, 0), (cached, 3)], None)
    summary = sglang.ingest(tmp_path / "dump", tmp_path / "gen", "gen", payload=True)
    assert sum(summary["unkeyed"].values()) == 2
    with open_capture(tmp_path / "gen") as capture:
        assert len(capture.rows) == 6
        site = capture.sites["model.layers.0.mlp:out"]
        bits = np.asarray(site.payload(slice(0, 6)))
        expected = values("model.layers.0.mlp.output", whole, 0, None, 0)
        assert np.array_equal(bits.astype(np.uint32) << 16, expected.view(np.uint32)), "rows stay with their tokens"


def test_several_forwards_in_a_step_are_kept_apart(both: Path, tmp_path: Path) -> None:
    dumper = Dumper(tmp_path / "dump", packed=True)
    for tokens in REQUESTS:
        dumper.forward({"input_ids": torch.tensor([tokens])}, [(tokens, 0)], None)
        dumper.step = 0
    sglang.ingest(tmp_path / "dump", tmp_path / "train", "train", payload=True)
    with open_capture(tmp_path / "train") as capture:
        assert len(capture.frames) == 3
    assert diff_captures(tmp_path / "train", both / "gen").verdict == "identical"


def test_gradients_and_second_forwards_are_left_out(tmp_path: Path) -> None:
    dumper = training_dump(tmp_path / "dump")
    dumper.step = 0
    dumper.dump("grad__hidden", torch.zeros(15, 8))
    dumper.dump("non_intrusive__model.layers.0.mlp.output", torch.zeros(15, 1, 8), recompute_status="recompute")
    (tmp_path / "dump/readme.pt").write_bytes(b"x")
    summary = sglang.ingest(tmp_path / "dump", tmp_path / "train", "train", payload=True)
    assert sum(summary["left_out"].values()) == 3
    with open_capture(tmp_path / "train") as capture:
        assert any("gradients" in note for note in capture.manifest["notes"])


def test_a_tensor_that_only_happens_to_be_as_long_is_not_taken(tmp_path: Path) -> None:
    dumper = Dumper(tmp_path / "dump", packed=True)
    for tokens in REQUESTS:
        dumper.dump("input_ids", torch.tensor([tokens]))
        dumper.dump("table", torch.zeros(4, 8))  # as long as the second request
        dumper.dump("hidden", torch.ones(len(tokens), 8))
        dumper.step += 1
    sglang.ingest(tmp_path / "dump", tmp_path / "train", "train", payload=True)
    with open_capture(tmp_path / "train") as capture:
        assert "/hidden:out.0" in capture.sites
        assert not [name for name in capture.sites if "table" in name]
        assert "table" in json.dumps(capture.manifest["not_rows"])


def test_weights_in_a_dump_are_compared_first(tmp_path: Path) -> None:
    for name, weight in (("a", 1.0), ("b", 2.0)):
        dumper = Dumper(tmp_path / f"dump_{name}")
        dumper.dump("param__model.layers.0.mlp.weight", torch.full((4, 4), weight))
        dumper.forward({"input_ids": torch.tensor(REQUESTS[0])}, [(REQUESTS[0], 0)], None)
        sglang.ingest(tmp_path / f"dump_{name}", tmp_path / name, name, payload=True)
    verdict = diff_captures(tmp_path / "a", tmp_path / "b")
    assert verdict.refusal is not None
    assert verdict.refusal.code == "weights-differ"
    dumper = Dumper(tmp_path / "dump_a", step=1, index=100)
    dumper.dump("param__model.layers.0.mlp.weight", torch.full((4, 4), 3.0))
    with pytest.raises(Refused, match="two values of the weight"):
        sglang.ingest(tmp_path / "dump_a", tmp_path / "c", "a", payload=True)
    sglang.ingest(tmp_path / "dump_a", tmp_path / "c", "a", payload=True, steps=[0])


def test_ranks_and_shards_are_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        training_dump(tmp_path / "dump", rank=rank, meta={"megatron_parallel_info": {"dp_size": 2, "tp_size": 1}})
    with pytest.raises(Refused, match="holds ranks 0, 1"):
        sglang.ingest(tmp_path / "dump", tmp_path / "a", "train", payload=True)
    assert sglang.ingest(tmp_path / "dump", tmp_path / "a", "train", payload=True, rank=1)["rows"] == 15
    for key in ("tp_size", "attn_tp_size", "cp_size", "moe_ep_size"):
        training_dump(tmp_path / key, meta={"sglang_parallel_info": {key: 2, "tp_rank": 0}})
        with pytest.raises(Refused, match="may be shards"):
            sglang.ingest(tmp_path / key, tmp_path / f"{key}_out", "gen", payload=True)


@pytest.mark.parametrize("lost", ["input_ids", "positions"])
def test_a_dump_without_tokens_is_refused(lost: str, tmp_path: Path) -> None:
    engine_dump(tmp_path / "dump")
    for path in (tmp_path / "dump").glob(f"*name={lost}___*"):
        path.unlink()
    with pytest.raises(Refused, match="cannot be keyed"):
        sglang.ingest(tmp_path / "dump", tmp_path / "gen", "gen", payload=True)


# files by a pattern ---------------------------------------------------------------------------------------------------

NAMES = ("norm", "self_attn", "mlp")


def write_files(folder: Path, change: str = "") -> None:
    """One .npy for each tensor: [b, s, width], left padded, with masks."""
    folder.mkdir()
    width = max(map(len, REQUESTS))
    ids, mask = np.zeros((3, width), np.int64), np.zeros((3, width), np.int64)
    for line, tokens in enumerate(REQUESTS):
        ids[line, -len(tokens) :], mask[line, -len(tokens) :] = tokens, 1
    np.save(folder / "tokens_7.npy", ids)
    np.save(folder / "attention_mask_7.npy", mask)
    for layer in range(2):
        for name in NAMES:
            data = np.zeros((3, width, 8), np.float32)
            for line, tokens in enumerate(REQUESTS):
                data[line, -len(tokens) :] = values(f"{layer}.{name}", tokens, 0, None, 0)
            if change == f"{layer}.{name}":
                data[1, -1, 3] = np.nextafter(data[1, -1, 3], np.float32(9))
            np.save(folder / f"{layer}.{name}_7.npy", data)


def test_npy_files_by_pattern(tmp_path: Path) -> None:
    both_names = ("{layer}.{name}_{step}.npy", "{name}_{step}.npy")
    for side, change in (("train", ""), ("gen", "1.self_attn")):
        write_files(tmp_path / f"files_{side}", change)
        ingest_files(tmp_path / f"files_{side}", tmp_path / side, Options(both_names, side, order=NAMES))
    verdict = diff_captures(tmp_path / "train", tmp_path / "gen")
    assert verdict.first is not None
    assert verdict.first.site == "layers.1.self_attn:out"
    assert verdict.first.to_json()["max_ulp"] == 1
    assert verdict.affected.rows == 1


def test_safetensors_and_npz_with_masks(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write_files(tmp_path / "files")
    arrays = {path.stem.removesuffix("_7"): np.load(path) for path in (tmp_path / "files").glob("*.npy")}
    (tmp_path / "npz").mkdir()
    order = ["tokens", "attention_mask", *(f"{layer}.{name}" for layer in range(2) for name in NAMES)]
    np.savez_compressed(tmp_path / "npz/step7.npz", **{name: arrays[name] for name in order})
    (tmp_path / "st").mkdir()
    save_file({name: torch.from_numpy(data) for name, data in arrays.items()}, tmp_path / "st/step7.safetensors")
    npz = Options(("step{step}.npz::{name}",), "gen", phase=Phase.PREFILL)
    ingest_files(tmp_path / "npz", tmp_path / "gen", npz)
    globs = tuple(f"{layer}.{name}" for layer in range(2) for name in NAMES)
    ingest_files(tmp_path / "st", tmp_path / "train", Options(("step{step}.safetensors",), "train", order=globs))
    verdict = diff_captures(tmp_path / "train", tmp_path / "gen")
    assert verdict.verdict == "identical", verdict.refusal
    assert verdict.coverage.compared == 12, "three rows are of one prefix in two requests"
    with open_capture(tmp_path / "gen") as gen:
        assert [s.meta.order for s in gen.sites.values()] == sorted(s.meta.order for s in gen.sites.values())


def test_bfloat16_kept_as_integers(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tokens = REQUESTS[0]
    data = torch.from_numpy(values("x", tokens, 0, None, 0)).to(torch.bfloat16)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    save_file({"ids": torch.tensor(tokens), "x": data}, tmp_path / "a/f0.safetensors")
    np.savez(tmp_path / "b/f0.npz", ids=np.asarray(tokens), x=data.view(torch.uint16).numpy())
    ingest_files(tmp_path / "a", tmp_path / "train", Options(("f{step}.safetensors",), "train", order=("x",)))
    ingest_files(tmp_path / "b", tmp_path / "gen", Options(("f{step}.npz::{name}",), "gen", dtype="bfloat16"))
    with open_capture(tmp_path / "gen") as gen:
        assert gen.sites["x:out"].meta.torch_dtype == "bfloat16"
    assert diff_captures(tmp_path / "train", tmp_path / "gen").verdict == "identical"


def test_what_the_files_do_not_say_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path / "f")
    pattern = "{layer}.{name}_{step}.npy"
    with pytest.raises(Refused, match="no input_ids"):
        ingest_files(tmp_path / "f", tmp_path / "o", Options((pattern,), "train", order=NAMES))
    np.save(tmp_path / "ids.npy", np.load(tmp_path / "f/tokens_7.npy"))
    ids = str(tmp_path / "ids.npy")
    with pytest.raises(Refused, match="in which order"):
        ingest_files(tmp_path / "f", tmp_path / "o", Options((pattern,), "train", ids=ids))
    with pytest.raises(Refused, match="does not name"):
        ingest_files(tmp_path / "f", tmp_path / "o", Options((pattern,), "train", ids=ids, order=("norm",)))
    with pytest.raises(Refused, match=r"no file of .* fits"):
        ingest_files(tmp_path / "f", tmp_path / "o", Options(("x{layer}.{name}.npy",), "train", ids=ids))
    for bad in ("{layer}.{nme}.npy", "{layer}.npy", "{layer}{layer}{name}.npy"):
        with pytest.raises(UsageError):
            ingest_files(tmp_path / "f", tmp_path / "o", Options((bad,), "train", ids=ids))
    assert not (tmp_path / "o").exists()
    for rank in (0, 1):
        np.save(tmp_path / f"f/r{rank}.x.npy", np.zeros((3, 6, 8)))
    with pytest.raises(Refused, match="holds ranks"):
        ingest_files(tmp_path / "f", tmp_path / "o", Options(("r{rank}.{name}.npy",), "train", ids=ids))
