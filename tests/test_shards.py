"""Captures of several ranks: shards that add up, partial sums, rows of other ranks, and worlds that are not whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zkl_debug.diff import Outcome, diff_captures
from zkl_debug.digest import digest_array, digest_pieces, wrong_rows
from zkl_debug.engines.megatron.shard_map import even_spans
from zkl_debug.engines.megatron.shard_sites import flat_pieces
from zkl_debug.errors import CaptureInvalid
from zkl_debug.schema import Phase, RowFlag, Shard, SiteBlock, SiteKind, SiteMeta, StateRecord
from zkl_debug.store.build import make_frame, make_rows, write_capture
from zkl_debug.store.manifest import finalize_manifest
from zkl_debug.store.reader import open_capture, verify_payload

TOKENS = np.arange(3, 15)
N = len(TOKENS)
LINEAR = "decoder.layers.0.mlp.linear_fc1"
PROJ = "decoder.layers.0.mlp.linear_fc2"


# ---- digests --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_digests_of_shards_add_up_to_that_of_the_whole_row(dtype: Any, ranks: int, blocks: int) -> None:
    rng = np.random.default_rng(ranks * 10 + blocks)
    width = ranks * blocks * 10
    whole = rng.integers(0, np.iinfo(dtype).max, (7, width)).astype(dtype)
    total = np.zeros((7, 2), np.uint64)
    for rank in range(ranks):
        spans = even_spans(width, rank, ranks, blocks)
        runs = flat_pieces((width,), 0, spans, whole.itemsize)
        assert len(runs) == blocks
        own = np.concatenate([whole[:, first : first + count] for first, count in spans], axis=1)
        lanes = tuple((first * whole.itemsize // 4, count * whole.itemsize) for first, count in runs)
        digest = digest_pieces(own, lanes)
        assert not wrong_rows(own, digest, lanes).any()
        assert wrong_rows(own, digest_array(own), lanes).all() or rank == 0
        total += digest
    assert np.array_equal(total, digest_array(whole))


def test_pieces_that_are_no_whole_lanes_are_not_placed() -> None:
    assert flat_pieces((6,), 0, even_spans(6, 1, 2), 2) == ()
    assert flat_pieces((6,), 0, even_spans(6, 1, 2), 4) == ((3, 3),)


def test_a_cut_of_a_later_axis_is_one_run_a_row() -> None:
    assert flat_pieces((2, 8), 1, even_spans(8, 1, 2), 4) == ((4, 4), (12, 4))


# ---- synthetic worlds -----------------------------------------------------------------------------------------------
def values(seed: int, width: int) -> np.ndarray[Any, Any]:
    """Random float32 bits of every row."""
    return np.random.default_rng(seed).standard_normal((N, width)).astype(np.float32).view(np.uint32)


WHOLE = {"in": values(1, 8), "fc1": values(2, 8), "fc2": values(4, 8)}
PARTIAL = [values(10 + rank, 8) for rank in range(4)]


def block(
    name: str, bits: np.ndarray[Any, Any], order: int, shard: Shard | None = None, semantic: str = ""
) -> SiteBlock:
    """A float32 site; the digest of a shard is that of its pieces."""
    meta = SiteMeta(
        name,
        SiteKind.MODULE,
        0,
        order,
        name.rpartition(":")[2],
        "float32",
        bits.shape[1:],
        semantic=semantic,
        shard=shard,
    )
    digest = digest_pieces(bits, shard.lanes(4) if shard is not None else ())
    return SiteBlock(meta, np.arange(len(bits), dtype=np.uint32), digest, bits)


def place(tp: int, size: int, dp: int = 0, dps: int = 1) -> dict[str, Any]:
    """The ``parallel`` metadata of a rank."""
    coords = {"tp": tp, "pp": 0, "cp": 0, "ep": 0, "dp": dp}
    return {"tp": size, "pp": 1, "cp": 1, "ep": 1, "dp": dps, "coords": coords, "groups": {"tp": list(range(size))}}


def sites(rank: int, size: int, changed: Mapping[str, np.ndarray[Any, Any]]) -> list[SiteBlock]:
    """What one of ``size`` tensor-parallel ranks records of a gated MLP; size 1: the whole model."""
    have = {**WHOLE, **changed}
    spans = even_spans(8, rank, size, 2)
    own = np.concatenate([have["fc1"][:, first : first + count] for first, count in spans], axis=1)
    shard = Shard("tp", rank, size, (8,), flat_pieces((8,), 0, spans, 4)) if size > 1 else None
    found = [
        block("embedding:out", have["in"], 0),
        block(f"{LINEAR}:in", have.get(f"in@{rank}", have["in"]), 1),
        block(f"{LINEAR}:out", own, 2, shard),
    ]
    if size > 1:
        partial = Shard("tp", rank, size, (8,), partial=True)
        found.append(
            block(f"{PROJ}/tp.reduce:in.0", have.get(f"partial@{rank}", PARTIAL[rank]), 3, partial, "tp.reduce")
        )
    found.append(block(f"{PROJ}/tp.reduce:out.0", have["fc2"], 4, semantic="tp.reduce"))
    found.append(block(f"{PROJ}:out", have["fc2"], 5))
    return found


def world(root: Path, size: int, changed: Mapping[str, np.ndarray[Any, Any]] | None = None, **more: Any) -> Path:
    """A capture of ``size`` tensor-parallel ranks in ``root``; ``more``: ``places``, ``skip`` (ranks), ``states``."""
    rows = make_rows(0, TOKENS, flags=int(Phase.SCORE))
    for rank in range(size):
        if rank in more.get("skip", ()):
            continue
        own = more.get("places", {}).get(rank, place(rank, size))
        states = more.get("states", {}).get(rank)
        write_capture(
            root,
            "train",
            [make_frame(0, Phase.SCORE, n_rows=N, n_padded=N, n_seqs=1, micro_batch=0)],
            [rows],
            [sites(rank, size, changed or {})],
            {"parallel": own} if size > 1 else {},
            rank=rank,
            world=size,
            states={0: states} if states else None,
        )
    if size > 1 and not more.get("skip"):
        finalize_manifest(root, size)
    return root


def test_one_rank_and_two_are_identical_without_a_gather(tmp_path: Path) -> None:
    verdict = diff_captures(world(tmp_path / "a", 1), world(tmp_path / "b", 2), verify_bytes=True)
    assert verdict.outcome is Outcome.IDENTICAL
    table = verdict.site_counts
    compared = {str(r["site"]): int(r["compared"]) for r in table if r["edge"] == "score-score"}
    assert compared[f"{LINEAR}:out"] == N
    assert compared[f"{PROJ}/tp.reduce:out.0"] == N
    assert not any("tp.reduce:in" in name for name in compared)
    assert any("never compared with a full value" in skip.reason for skip in verdict.coverage.skipped)
    assert verdict.claim.equality == "bytes"


def test_a_changed_shard_names_its_site_and_says_which_elements(tmp_path: Path) -> None:
    other = WHOLE["fc1"].copy()
    other[4, 6] ^= 1  # in the second half of the up block: the second rank's
    verdict = diff_captures(world(tmp_path / "a", 1), world(tmp_path / "b", 2, {"fc1": other}))
    assert verdict.first is not None
    assert verdict.first.site == f"{LINEAR}:out"
    assert (verdict.first.position, verdict.first.kind.label) == (4, "own")
    assert (verdict.first.stats.mismatched_elements, verdict.first.stats.first_element) == (1, 6)
    assert verdict.checks["first_on_ranks"]["ranks"] == [1]
    everywhere = WHOLE["fc1"] ^ np.uint32(1)
    verdict = diff_captures(world(tmp_path / "c", 1), world(tmp_path / "d", 2, {"fc1": everywhere}))
    assert "first_on_ranks" not in verdict.checks


def test_equal_partial_sums_put_the_blame_on_the_reduction(tmp_path: Path) -> None:
    other = WHOLE["fc2"].copy()
    other[:, 0] ^= 1
    verdict = diff_captures(world(tmp_path / "a", 2), world(tmp_path / "b", 2, {"fc2": other}))
    assert verdict.first is not None
    assert verdict.first.site == f"{PROJ}/tp.reduce:out.0"
    assert verdict.first.kind.label == "own"
    assert verdict.first.last_equal == f"{PROJ}/tp.reduce:in.1"


def test_a_partial_sum_that_differs_is_named_with_its_rank(tmp_path: Path) -> None:
    other = PARTIAL[1].copy()
    other[2, 0] ^= 1
    verdict = diff_captures(world(tmp_path / "a", 2), world(tmp_path / "b", 2, {"partial@1": other}))
    assert verdict.first is not None
    assert verdict.first.site == f"{PROJ}/tp.reduce:in.1"


def test_partial_sums_of_other_numbers_of_ranks_are_not_compared(tmp_path: Path) -> None:
    a, b = world(tmp_path / "a", 2), world(tmp_path / "b", 4)
    verdict = diff_captures(a, b)
    assert verdict.outcome is Outcome.IDENTICAL
    assert not any("tp.reduce:in" in str(r["site"]) for r in verdict.site_counts if r["edge"])


def test_ranks_that_should_be_alike_and_are_not(tmp_path: Path) -> None:
    """A value every rank has whole differs on one of them: the side does not agree with itself, whatever the other."""
    other = WHOLE["in"].copy()
    other[5, 3] ^= 1
    verdict = diff_captures(world(tmp_path / "a", 1), world(tmp_path / "b", 2, {"in@1": other}))
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.first is not None
    assert verdict.edge == "within-b"
    assert (verdict.first.site, verdict.first.position) == (f"{LINEAR}:in", 5)
    assert "rank 1 and rank 0" in verdict.checks["ranks_b"]["first"]


def test_weights_of_shards_are_compared_as_whole_tensors(tmp_path: Path) -> None:
    whole = np.random.default_rng(7).integers(0, 2**32, (8, 4), dtype=np.uint32)

    def record(bits: np.ndarray[Any, Any], first: int = 0, shard: Any = None) -> StateRecord:
        low, high = digest_pieces(bits.reshape(1, -1), ((first, bits.nbytes),))[0]
        return StateRecord(
            "w", "parameter", "float32", bits.shape, (int(low), int(high)), detail={"shard": shard} if shard else {}
        )

    def part(index: int) -> dict[str, Any]:
        return {"index": index, "count": 2, "shape": [8, 4], "adds": True}

    halves = {0: [record(whole[:4], 0, part(0))], 1: [record(whole[4:], 16, part(1))]}
    alone = write_one(tmp_path / "a", [record(whole)])
    two = world(tmp_path / "b", 2, states=halves)
    verdict = diff_captures(alone, two)
    assert verdict.outcome is Outcome.IDENTICAL
    assert verdict.checks["weights"] == "equal"
    halves[1] = [record(whole[4:] ^ np.uint32(1), 16, part(1))]
    verdict = diff_captures(alone, world(tmp_path / "c", 2, states=halves))
    assert verdict.outcome is Outcome.REFUSED
    assert verdict.refusal is not None
    assert verdict.refusal.code == "weights-differ"
    halves = {rank: [record(whole ^ np.uint32(rank))] for rank in (0, 1)}
    verdict = diff_captures(alone, world(tmp_path / "d", 2, states=halves))
    assert verdict.refusal is not None
    assert verdict.refusal.code == "ranks-hold-other-weights"


def write_one(root: Path, states: list[StateRecord]) -> Path:
    """A capture of one rank with a state snapshot."""
    rows = make_rows(0, TOKENS, flags=int(Phase.SCORE))
    frame = make_frame(0, Phase.SCORE, n_rows=N, n_padded=N, n_seqs=1, micro_batch=0)
    write_capture(root, "train", [frame], [rows], [sites(0, 1, {})], states={0: states})
    return root


# ---- worlds that are not whole --------------------------------------------------------------------------------------
def test_a_missing_rank_is_refused_by_its_name_and_partial_says_what_is_left(tmp_path: Path) -> None:
    from zkl_debug.store.repair import repair

    alone = world(tmp_path / "a", 1)
    root = world(tmp_path / "b", 2, skip=(1,))
    repair(root)
    verdict = diff_captures(alone, root)
    assert verdict.outcome is Outcome.REFUSED
    assert verdict.refusal is not None
    assert "rank 1" in verdict.refusal.text
    verdict = diff_captures(alone, root, partial=True)
    assert verdict.outcome is Outcome.IDENTICAL
    what = [skip.what + ": " + skip.reason for skip in verdict.coverage.skipped]
    assert any(text.startswith("lost in B: rank 1") for text in what)
    assert any(f"{LINEAR}:out" in text and "part 1 of 2" in text for text in what)
    assert verdict.claim.scope == "captured-sites"
    assert {str(r["site"]) for r in verdict.site_counts if r["edge"]} >= {"embedding:out", f"{PROJ}:out"}


def test_a_rank_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    root = world(tmp_path / "b", 2, places={1: place(0, 2)})
    verdict = diff_captures(world(tmp_path / "a", 1), root)
    assert verdict.refusal is not None
    assert "rank 1 says that it is tp 0, and so does rank 0" in verdict.refusal.found


def test_a_segment_named_twice_in_the_manifest_is_refused(tmp_path: Path) -> None:
    root = world(tmp_path / "b", 2)
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["segments"].append(manifest["segments"][0])
    path.write_text(json.dumps(manifest))
    with pytest.raises(CaptureInvalid, match=r"rank 0 .* twice"):
        open_capture(root)


def test_shards_that_overlap_are_no_row(tmp_path: Path) -> None:
    rows = make_rows(0, TOKENS, flags=int(Phase.SCORE))
    for rank in range(2):
        shard = Shard("tp", rank, 2, (8,), ((0, 4),))
        bits = [block("embedding:out", WHOLE["in"], 0), block(f"{LINEAR}:out", WHOLE["fc1"][:, :4], 1, shard)]
        frame = make_frame(0, Phase.SCORE, n_rows=N, n_padded=N, n_seqs=1)
        write_capture(
            tmp_path / "b", "train", [frame], [rows], [bits], {"parallel": place(rank, 2)}, rank=rank, world=2
        )
    finalize_manifest(tmp_path / "b", 2)
    verdict = diff_captures(world(tmp_path / "a", 1), tmp_path / "b")
    assert verdict.refusal is not None
    assert "do not make up one row" in verdict.refusal.text


def test_one_rank_whose_probe_failed_spoils_the_world(tmp_path: Path) -> None:
    rows = make_rows(0, TOKENS, flags=int(Phase.SCORE))
    for rank in range(2):
        good = rank == 0
        manifest = {
            "probe": {"ok": good, "errors": [] if good else ["boom"]},
            "self_repeat": {"a0_a1": {"equal": True, "values": 4, "mismatched": 0, "first": ""}},
        }
        frame = make_frame(0, Phase.SCORE, n_rows=N, n_padded=N, n_seqs=1, micro_batch=0)
        write_capture(
            tmp_path / "b",
            "train",
            [frame],
            [rows],
            [sites(rank, 2, {})],
            {"parallel": place(rank, 2)},
            rank=rank,
            world=2,
            manifest=manifest,
        )
    finalize_manifest(tmp_path / "b", 2)
    verdict = diff_captures(world(tmp_path / "a", 1), tmp_path / "b")
    assert verdict.refusal is not None
    assert verdict.refusal.code == "probe-failed"
    assert "rank 1: boom" in verdict.refusal.found


def test_payload_of_a_shard_is_checked_at_its_lanes(tmp_path: Path) -> None:
    root = world(tmp_path / "b", 2)
    with open_capture(root) as capture:
        assert verify_payload(capture) == []
        assert all(own.sites[f"{LINEAR}:out"].meta.shard is not None for own in capture.by_rank().values())


# ---- expert parallel ------------------------------------------------------------------------------------------------
def test_rows_that_were_sent_to_experts_go_back_to_their_tokens(tmp_path: Path) -> None:
    """Two replicas with other tokens; all experts of rank 1 see tokens of both, padding of rank 0 in between."""
    from zkl_debug.diff.world import fold

    name = "decoder.layers.1.mlp.experts.local_experts.4:in"
    ends = {rank: {"coords": {"tp": 0, "pp": 0, "cp": 0, "ep": rank, "dp": rank}} for rank in range(2)}
    for rank in range(2):
        tokens = TOKENS[:3] + rank
        rows = make_rows(rank, tokens, flags=int(Phase.SCORE))
        # token t of rank 0 is the (t + 1)-th for expert 4: a padding token came first
        chosen = np.array([[[4, t + (rank == 0)]] for t in range(3)], np.int32).reshape(3, 2)
        meta = SiteMeta("decoder.layers.1.mlp/dispatch:out.0", SiteKind.TAP, 1, 0, "out.0", "int32", (1, 2))
        blocks = [SiteBlock(meta, np.arange(3, dtype=np.uint32), digest_array(chosen), chosen.view(np.uint32))]
        if rank == 1:
            sent = np.zeros(7, rows.dtype)
            sent["sample"] = [0, 0, 0, 0, 1, 1, 1]
            sent["position"] = [0, 1, 2, 3, 0, 1, 2]
            sent["token"] = 4
            sent["flags"] = int(RowFlag.SENT)
            rows = np.concatenate([rows, sent])
            bits = np.arange(14, dtype=np.uint32).reshape(7, 2)
            site = SiteMeta(name, SiteKind.MODULE, 1, 1, "in", "float32", (2,))
            blocks.append(SiteBlock(site, np.arange(3, 10, dtype=np.uint32), digest_array(bits), bits))
        parallel = {**ends[rank], "ep": 2, "dp": 2, "tp": 1, "pp": 1, "cp": 1, "groups": {"ep": [0, 1]}}
        frame = make_frame(0, Phase.SCORE, n_rows=len(rows), n_padded=4, n_seqs=1, micro_batch=rank)
        write_capture(tmp_path / "b", "train", [frame], [rows], [blocks], {"parallel": parallel}, rank=rank, world=2)
    finalize_manifest(tmp_path / "b", 2)
    with open_capture(tmp_path / "b") as capture:
        folded = fold(capture)
        assert set(folded.sites) == {name}
        joined = folded.sites[name]
        rows = folded.rows[joined.rows]
        assert rows["sample"].tolist() == [0, 0, 0, 1, 1, 1]
        assert rows["position"].tolist() == [0, 1, 2, 0, 1, 2]
        assert joined.payload(joined.payload_index)[:, 0].tolist() == [2, 4, 6, 8, 10, 12]
