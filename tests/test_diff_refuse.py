"""Every reason not to compare, and that nothing is refused without one."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from test_diff_edges import TRAIN, WORLD, gen
from test_diff_world import (
    MemoryCapture,
    Options,
    World,
    default_world,
    generation,
    memory,
    plant,
    scoring,
    write,
)

from zkl_debug.diff import Verdict, diff_captures


def refusal(verdict: Verdict, code: str, exit_code: int = 3) -> dict[str, Any]:
    """Check that a verdict is this refusal and blames nothing; returns the refusal object of the document."""
    document = verdict.to_json()
    assert document["refusal"] is not None, document["verdict"]
    assert document["refusal"]["code"] == code, document["refusal"]
    assert document["verdict"] == ("refused" if exit_code == 3 else "inconclusive")
    assert (int(verdict.exit_code), document["first"], document["edge"]) == (exit_code, None, None)
    assert document["sites"] == []
    assert all(edge["first"] is None for edge in document["edges"].values())
    for part in ("text", "found", "expected"):
        assert document["refusal"][part]
    found: dict[str, Any] = document["refusal"]
    return found


def with_meta(capture: MemoryCapture, **facts: Any) -> MemoryCapture:
    return replace(capture, manifest={**capture.manifest, **facts})


def changed_world(sample: int, position: int, token: int) -> World:
    tokens = {s: list(t) for s, t in WORLD.tokens.items()}
    tokens[sample][position] = token
    return World(tokens, WORLD.prompts, WORLD.seed)


def test_weights_that_differ_are_named() -> None:
    other = default_world()
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    other.weights[name] = other.weights[name].copy()
    other.weights[name][0, 0] += np.float32(1)
    found = refusal(diff_captures(TRAIN, memory(other, "gen", generation(other))), "weights-differ")
    assert found["detail"] == {"parameters": [name], "count": 1, "of": len(WORLD.weights)}
    assert name in found["text"]


def test_weights_with_no_common_name() -> None:
    engine = gen()
    engine.states = {0: [replace(record, name="x." + record.name) for record in engine.states[0]]}
    refusal(diff_captures(TRAIN, engine), "no-common-weights")


def test_weights_on_one_side_only_and_buffers_are_mentioned() -> None:
    engine, train = gen(), copy.deepcopy(TRAIN)
    buffer = replace(train.states[0][0], name="rope.inv_freq", kind="buffer")
    train.states[0] += [replace(train.states[0][0], name="value_head.weight"), buffer]
    engine.states[0].append(replace(buffer, digest=(1, 2)))
    verdict = diff_captures(train, engine)
    assert verdict.verdict == "identical"
    assert verdict.checks["on_one_side"] == ["value_head.weight"]
    assert verdict.checks["buffers_differ"] == ["rope.inv_freq"]
    engine.states = {}
    assert diff_captures(train, engine).checks["weights"] == "not captured on B"


@pytest.mark.parametrize(("sample", "position"), [(2, 6), (0, 3), (1, 6)])
def test_token_ids_that_differ(sample: int, position: int) -> None:
    """(1, 6) is the last token of its sample, never forwarded by the engine: its log-prob row tells."""
    old = WORLD.tokens[sample][position]
    other = changed_world(sample, position, old % 39 + 1)
    found = refusal(diff_captures(TRAIN, memory(other, "gen", generation(other))), "token-ids-differ")
    assert found["detail"]["position"] == position
    assert found["detail"]["sample"] == sample
    assert (found["detail"]["token_a"], found["detail"]["token_b"]) == (old, old % 39 + 1)


def test_token_ids_that_differ_without_common_sample_numbers() -> None:
    other = changed_world(2, 6, WORLD.tokens[2][6] % 39 + 1)
    engine = memory(other, "gen", generation(other))
    engine.rows["sample"] += 100
    found = refusal(diff_captures(TRAIN, engine), "token-ids-differ")
    assert (found["detail"]["sample"], found["detail"]["sample_b"], found["detail"]["position"]) == (2, 102, 6)


def test_another_request_on_one_side_is_no_token_mismatch() -> None:
    more = World({**WORLD.tokens, 7: [*WORLD.tokens[0][:6], 1, 2, 3]}, {**WORLD.prompts, 7: 6}, WORLD.seed)
    assert diff_captures(TRAIN, memory(more, "gen", generation(more))).verdict == "identical"
    fewer = memory(WORLD, "gen", generation(WORLD, [0, 2]))
    assert diff_captures(TRAIN, fewer).verdict == "identical"


def test_token_ids_fed_to_the_model_differ() -> None:
    def wrong(ctx: Any, value: Any) -> Any:
        hit = ctx.site == "inputs/token_ids:in.0" and (ctx.sample, ctx.position) == (2, 1)
        return value + 3 if hit else value

    found = refusal(diff_captures(TRAIN, gen(record=wrong)), "token-ids-differ")
    assert (found["detail"]["sample"], found["detail"]["position"], found["detail"]["shift"]) == (2, 1, 3)


def test_positions_that_differ_are_refused_with_their_shift() -> None:
    engine = gen(feed=lambda sample, p: p + 4 if sample == 2 else p)
    found = refusal(diff_captures(TRAIN, engine), "positions-differ")
    assert (found["detail"]["sample"], found["detail"]["position"], found["detail"]["shift"]) == (2, 0, 4)


def test_row_keys_that_contradict_their_tokens() -> None:
    engine = gen()
    engine.rows["token"][3] += 1
    refusal(diff_captures(TRAIN, engine), "row-keys-inconsistent")


def test_no_row_in_common() -> None:
    other = World({s: [39 - t for t in tokens] for s, tokens in WORLD.tokens.items()}, WORLD.prompts, WORLD.seed)
    verdict = diff_captures(TRAIN, memory(other, "gen", generation(other)))
    refusal(verdict, "no-rows-matched")
    assert verdict.coverage.compared == 0


def test_no_site_in_common() -> None:
    engine = gen()
    engine.sites = {"model." + name: site for name, site in engine.sites.items() if not name.startswith("inputs/")}
    refusal(diff_captures(TRAIN, engine), "no-sites-matched")


def test_common_rows_and_sites_but_no_common_row_at_a_site() -> None:
    train, engine = copy.deepcopy(TRAIN), gen()
    for capture, low in ((train, True), (engine, False)):
        for site in capture.sites.values():
            keep = (capture.rows["position"][site.rows] < 2) == low
            assert site.bits is not None
            site.rows, site.digest, site.bits = site.rows[keep], site.digest[keep], site.bits[keep]
    refusal(diff_captures(train, engine), "nothing-compared")


def test_the_probe_failed() -> None:
    engine = with_meta(gen(), probe={"ok": False, "errors": ["mlp:out: RuntimeError"]})
    found = refusal(diff_captures(TRAIN, engine), "probe-failed")
    assert found["detail"] == {"capture": "B", "errors": ["mlp:out: RuntimeError"]}


def test_training_that_does_not_repeat() -> None:
    """Dropout left on: refused, with the first operator that varies between copies of a row."""
    site = "decoder.layers.0/self_attn_bda:out.0"
    calls = [*scoring(WORLD), *scoring(WORLD)]
    train = memory(WORLD, "train", calls, Options(tweak=plant(site, lambda ctx: ctx.frame >= 2)))
    train = with_meta(train, self_repeat={"a0_a1": {"equal": False}, "a0_a2": {"equal": False}})
    found = refusal(diff_captures(train, gen()), "does-not-repeat")
    assert found["detail"] == {"capture": "A", "first_stochastic": site}
    assert "train does not repeat" in found["text"]
    assert site in found["text"]


def test_an_engine_that_does_not_repeat_is_inconclusive() -> None:
    engine = with_meta(gen(), self_repeat={"a0_a1": {"equal": False}})
    refusal(diff_captures(TRAIN, engine), "does-not-repeat", exit_code=4)


def test_the_probe_changed_results() -> None:
    engine = with_meta(gen(), self_repeat={"a0_a1": {"equal": True}, "a0_a2": {"equal": False}})
    refusal(diff_captures(TRAIN, engine), "probe-changes-results")


def test_self_repeat_that_holds_is_part_of_the_claim() -> None:
    good = {"a0_a1": {"equal": True}, "a0_a2": {"equal": True}}
    verdict = diff_captures(with_meta(TRAIN, self_repeat=good), with_meta(gen(), self_repeat=good))
    assert verdict.claim.repeats == 2
    assert verdict.certification == {"a": {"a0_a1": True, "a0_a2": True}, "b": {"a0_a1": True, "a0_a2": True}}


def _alias(capture: MemoryCapture, source: str, names: list[str]) -> None:
    for name in names:
        own, other = capture.sites[name], capture.sites[source]
        own.rows, own.digest, own.bits = other.rows, other.digest, other.bits


def test_layers_that_view_one_buffer() -> None:
    engine = gen()
    tail = "self_attention.linear_qkv:out"
    _alias(engine, f"decoder.layers.1.{tail}", [f"decoder.layers.0.{tail}"])
    found = refusal(diff_captures(TRAIN, engine), "one-buffer")
    assert found["detail"]["sites"] == [f"decoder.layers.0.{tail}", f"decoder.layers.1.{tail}"]


def test_all_sites_that_view_one_buffer() -> None:
    engine = gen()
    keep = ["decoder.final_layernorm:in", "decoder.final_layernorm:out", "output_layer:in"]
    keep.append("embedding.word_embeddings:out")
    engine.sites = {name: engine.sites[name] for name in keep}
    assert diff_captures(TRAIN, engine).verdict == "identical"
    _alias(engine, "output_layer:in", keep)
    refusal(diff_captures(TRAIN, engine), "one-buffer")


def test_a_layer_that_adds_nothing_is_no_trap() -> None:
    """Zero-initialised projections: both layers hand the residual stream on unchanged."""
    world = default_world()
    for name, value in world.weights.items():
        if "linear_proj" in name or "linear_fc2" in name:
            world.weights[name] = value * 0
    verdict = diff_captures(memory(world, "train", scoring(world)), memory(world, "gen", generation(world)))
    assert verdict.verdict == "identical"


# ---- on disk ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    drop = Options(drop=("decoder.layers.*",))
    return write(root / "train", WORLD, "train", scoring(WORLD), drop), write(
        root / "gen", WORLD, "gen", generation(WORLD), drop
    )


def _copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_files_give_the_same_answer(folders: tuple[Path, Path]) -> None:
    verdict = diff_captures(*folders)
    assert verdict.verdict == "identical"
    assert verdict.claim.equality == "digest"
    checked = diff_captures(str(folders[0]), str(folders[1]), verify_bytes=True)
    assert (checked.verdict, checked.claim.equality) == ("identical", "bytes")


@pytest.mark.parametrize("damage", ["missing", "truncated", "manifest", "nothing"])
def test_folders_that_are_not_whole(folders: tuple[Path, Path], tmp_path: Path, damage: str) -> None:
    bad = _copy(folders[1], tmp_path / "bad")
    segment = next(bad.glob("*.h5"))
    if damage == "missing":
        segment.unlink()
    elif damage == "truncated":
        segment.write_bytes(segment.read_bytes()[:-100])
    elif damage == "manifest":
        (bad / "manifest.json").unlink()
    else:
        bad = tmp_path / "no such folder"
    found = refusal(diff_captures(folders[0], bad), "capture-invalid")
    assert found["detail"]["capture"] == "B"
    refusal(diff_captures(bad, folders[0]), "capture-invalid")


def test_a_flipped_payload_byte(folders: tuple[Path, Path], tmp_path: Path) -> None:
    bad = _copy(folders[1], tmp_path / "bad")
    segment = next(bad.glob("*.h5"))
    with h5py.File(segment) as file:
        group = next(g for g in file["sites"].values() if g.attrs["name"] == b"decoder.final_layernorm:out")
        at = group["payload"].id.get_offset()
    data = bytearray(segment.read_bytes())
    data[at + 5] ^= 0x10
    segment.write_bytes(data)
    found = refusal(diff_captures(folders[0], bad, verify_bytes=True), "payload-damaged")
    assert found["detail"]["site"] == "decoder.final_layernorm:out"
    assert found["detail"]["position"] == 0


def test_bytes_that_differ_under_equal_digests_are_found() -> None:
    engine = gen()
    site = engine.sites["output_layer:out"]
    assert site.bits is not None
    site.bits[0, 0] ^= 1
    assert diff_captures(TRAIN, engine).verdict == "identical"
    verdict = diff_captures(TRAIN, engine, verify_bytes=True)
    assert verdict.first is not None
    assert verdict.first.site == "output_layer:out"


def test_incomplete_captures_need_partial(folders: tuple[Path, Path], tmp_path: Path) -> None:
    bad = _copy(folders[1], tmp_path / "bad")
    manifest = bad / "manifest.json"
    text = manifest.read_text().replace('"complete": true', '"complete": false,\n "reason": "killed"')
    manifest.write_text(text)
    refusal(diff_captures(folders[0], bad), "capture-invalid")
    verdict = diff_captures(folders[0], bad, partial=True)
    assert verdict.verdict == "identical"
    assert (verdict.partial, verdict.claim.scope) == (True, "captured-sites")
    assert verdict.exit_code == 5, "what is lost may differ"
    whole = diff_captures(*folders, partial=True)
    assert (whole.verdict, whole.exit_code) == ("identical", 0), "nothing is lost"
    assert any("end of the capture" in skip.what for skip in verdict.coverage.skipped)


def test_files_of_log_probs_are_for_another_command(folders: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = tmp_path / "a b.npz", tmp_path / "b.jsonl"
    for path in (one, two):
        path.write_bytes(b"")
    told = refusal(diff_captures(one, two), "not-captures")
    assert told["next"] == f"zkl-debug logprobs '{one}' {two}"
    told = refusal(diff_captures(folders[0], two), "capture-invalid")
    assert told["next"] == f"log-probs of a file: zkl-debug logprobs {two}"
    told = refusal(diff_captures(folders[0] / "manifest.json", folders[1]), "capture-invalid")
    assert str(folders[0]) in told["next"]
    assert "logprobs" not in refusal(diff_captures(tmp_path / "none.npz", two), "capture-invalid")["next"]


def test_losses_a_capture_admits_are_listed() -> None:
    engine = with_meta(gen(), unkeyed_rows=3, not_rows={"rotary_pos_emb:out": "(64, 1, 1, 8)"}, filtered_sites=2)
    engine = with_meta(engine, ended_by="KeyboardInterrupt", dropped={"rank 3": "queue full"}, notes=["budget reached"])
    verdict = diff_captures(TRAIN, engine)
    assert verdict.claim.scope == "captured-sites"
    text = str(verdict.to_json()["coverage"]["skipped"])
    for word in ("unkeyed_rows", "rotary_pos_emb:out", "filtered_sites", "KeyboardInterrupt", "queue full", "budget"):
        assert word in text
