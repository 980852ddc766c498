"""Capture folders: what is written is read back, whatever the sizes, segments and ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from zkl_debug.errors import CaptureInvalid, Refused, UsageError
from zkl_debug.schema import (
    FRAME_DTYPE,
    ROW_DTYPE,
    EventRecord,
    Phase,
    RowFlag,
    SiteBlock,
    SiteKind,
    SiteMeta,
    StateRecord,
)
from zkl_debug.store.build import make_block, make_frame, make_rows, write_capture
from zkl_debug.store.layout import StoreError, fold_blocks, fold_digest, fold_hex, part_path, variant_name
from zkl_debug.store.manifest import finalize_manifest
from zkl_debug.store.reader import Capture, open_capture, verify_payload
from zkl_debug.store.wal import WalWriter
from zkl_debug.store.writer import CaptureWriter

Frame = tuple[NDArray[Any], NDArray[Any], list[SiteBlock]]


def meta(name: str = "decoder.layers.0.mlp:out", order: int = 0, **fields: Any) -> SiteMeta:
    given: dict[str, Any] = {"kind": SiteKind.MODULE, "layer": 0, "port": "out", "torch_dtype": "bfloat16"}
    return SiteMeta(name=name, order=order, **{**given, "row_shape": (8,), **fields})


def frames(count: int, rows: int, width: int, sites: int = 2, dtype: type = np.uint16, seed: int = 0) -> list[Frame]:
    """Frames of random bits."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        tokens = rng.integers(0, 50000, rows)
        bits: NDArray[Any] = rng.integers(0, np.iinfo(dtype).max, (sites, rows, width), dtype=dtype)
        blocks = [make_block(meta(f"layers.{k}.mlp:out", k, row_shape=(width,)), bits[k]) for k in range(sites)]
        made.append((make_frame(number, Phase.SCORE), make_rows(number, tokens), blocks))
    return made


def write(root: Path, made: list[Frame], **options: Any) -> Path:
    return write_capture(root, "train", *zip(*made, strict=True), **options)  # type: ignore[arg-type]


def same(capture: Capture, made: list[Frame]) -> None:
    """The capture holds exactly these frames."""
    assert len(capture.frames) == len(made)
    rows = np.concatenate([rows for _, rows, _ in made])
    rows["frame"] = np.repeat(np.arange(len(made)), [len(rows) for _, rows, _ in made])
    assert np.array_equal(capture.rows, rows)
    names = {block.meta.name for _, _, blocks in made for block in blocks}
    assert set(capture.sites) == names
    base = np.cumsum([0, *(len(rows) for _, rows, _ in made)])
    for name in names:
        site = capture.sites[name]
        mine = [(base[k], b) for k, (_, _, blocks) in enumerate(made) for b in blocks if b.meta.name == name]
        assert np.array_equal(site.rows, np.concatenate([start + b.row for start, b in mine]))
        assert np.array_equal(site.digest, np.concatenate([b.digest for _, b in mine]))
        have = np.concatenate([np.full(len(b.row), b.payload is not None) for _, b in mine])
        assert np.array_equal(site.payload_index, np.flatnonzero(have))
        assert site.has_payload == have.any()
        if have.any():
            payload = np.concatenate([b.payload for _, b in mine if b.payload is not None])
            assert np.array_equal(site.payload(site.payload_index), payload)
            blocks = list(site.payload_blocks())
            assert np.array_equal(np.concatenate([block for _, block in blocks]), payload)
            assert np.array_equal(np.concatenate([index for index, _ in blocks]), site.payload_index)
    assert verify_payload(capture) == []


@pytest.mark.parametrize(
    ("count", "rows", "width", "dtype"),
    [
        (1, 1, 1, np.uint8),
        (3, 5, 7, np.uint16),
        (4, 300, 1024, np.uint32),  # a frame is larger than a chunk
        (7, 130, 1000, np.uint64),  # chunks do not divide into pages or frames
        (5, 3, 300_000, np.uint32),  # a row is larger than a chunk
        (2, 20_000, 2, np.uint16),  # digests and row numbers fill chunks, payload does not
    ],
)
def test_round_trip(tmp_path: Path, count: int, rows: int, width: int, dtype: type) -> None:
    made = frames(count, rows, width, dtype=dtype)
    write(tmp_path / "c", made)
    with open_capture(tmp_path / "c") as capture:
        same(capture, made)


@pytest.mark.parametrize("segment_bytes", [1, 100_000, 3 << 20])
def test_segments(tmp_path: Path, segment_bytes: int) -> None:
    made = frames(6, 100, 512)
    write(tmp_path / "c", made, segment_bytes=segment_bytes)
    assert len(list((tmp_path / "c").glob("*.h5"))) > 1 or segment_bytes > 1 << 20
    with open_capture(tmp_path / "c") as capture:
        same(capture, made)
        site = capture.sites["layers.1.mlp:out"]
        everything = site.payload(slice(None))
        mixed = np.array([599, 0, 250, 251, 99, 100])
        assert np.array_equal(site.payload(mixed), everything[mixed])
        assert np.array_equal(site.payload(slice(90, 110)), everything[90:110])
        assert site.payload(slice(0, 0)).shape == (0, 512)


def test_small_captures_are_small_and_files_are_plain(tmp_path: Path) -> None:
    write(tmp_path / "c", frames(2, 4, 16, sites=10))
    (path,) = (tmp_path / "c").glob("*.h5")
    assert path.stat().st_size < 100_000
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["manifest.json", "rank00000.seg000.h5"]
    with h5py.File(path, "r") as file:  # any HDF5 program can read it
        assert file.attrs["format"] == b"zkl-capture"
        assert (file.attrs["version"], file.attrs["side"], file.attrs["rank"], file.attrs["world"]) == (
            1,
            b"train",
            0,
            1,
        )
        group = file["sites/00003"]
        assert group.attrs["name"] == b"layers.3.mlp:out"
        assert group.attrs["torch_dtype"] == b"bfloat16"
        assert group.attrs["row_shape"].tolist() == [16]
        assert set(group) == {"row", "digest", "payload"}
        assert group["payload"].dtype == np.uint16
        assert file["rows"].dtype == ROW_DTYPE
        assert file["frames"].dtype == FRAME_DTYPE


def test_payload_is_read_in_place(tmp_path: Path) -> None:
    write(tmp_path / "c", frames(3, 40, 64))
    with open_capture(tmp_path / "c") as capture:
        block = capture.sites["layers.0.mlp:out"].payload(slice(5, 20))
        assert not block.flags.writeable
        assert not block.flags.owndata
    assert block.sum() > 0  # still valid after closing


def test_payload_of_some_frames_only(tmp_path: Path) -> None:
    made = frames(6, 50, 8192)
    for k in (0, 3):
        made[k] = (made[k][0], made[k][1], [SiteBlock(b.meta, b.row, b.digest) for b in made[k][2]])
    write(tmp_path / "c", made, segment_bytes=4 << 20)
    with open_capture(tmp_path / "c") as capture:
        same(capture, made)
        site = capture.sites["layers.0.mlp:out"]
        with pytest.raises(Refused, match="some have no payload"):
            site.payload(np.array([60, 3]))
        assert site.payload(np.array([60])).shape == (1, 8192)


def test_no_payload_at_all(tmp_path: Path) -> None:
    made = [(f, r, [SiteBlock(b.meta, b.row, b.digest) for b in blocks]) for f, r, blocks in frames(2, 5, 4)]
    write(tmp_path / "c", made)
    with open_capture(tmp_path / "c") as capture:
        same(capture, made)
        with pytest.raises(Refused, match="no payload"):
            capture.sites["layers.0.mlp:out"].payload(slice(None))


def test_sites_of_some_rows_in_any_order_and_twice_a_frame(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    rows = make_rows(0, rng.integers(0, 9, 10))
    first = make_block(meta(), rng.integers(0, 99, (3, 8)).astype(np.uint16), np.array([7, 2, 5]))
    second = make_block(meta(), rng.integers(0, 99, (2, 8)).astype(np.uint16), np.array([2, 0]))
    late = make_block(meta("a.b/tap:in.1", -5, kind=SiteKind.TAP), rng.integers(0, 99, (1, 8)).astype(np.uint16))
    made = [(make_frame(0, Phase.SCORE), rows, [first, second, late])]
    write(tmp_path / "c", made)
    with open_capture(tmp_path / "c") as capture:
        same(capture, made)
        assert list(capture.sites) == ["a.b/tap:in.1", "decoder.layers.0.mlp:out"]  # execution order
        assert capture.sites["a.b/tap:in.1"].meta == late.meta


def test_empty_capture(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "c", "gen", [], [], [])
    assert json.loads(path.read_text())["counts"]["frames"] == 0
    with open_capture(tmp_path / "c") as capture:
        assert (len(capture.frames), len(capture.rows), capture.sites) == (0, 0, {})


def test_events_and_states(tmp_path: Path) -> None:
    events = [EventRecord(3, "refit", 1, 2, -1, {"why": "é", "n": [1]}), EventRecord(4, "sleep", frame=0)]
    states = {
        3: [StateRecord("w", "parameter", "float32", (2, 3), (1, 2**64 - 1), 2**63, {"alias": "v"})],
        -1: [StateRecord("b", "buffer", "int8", (), (0, 0))],
    }
    write(tmp_path / "c", frames(2, 3, 4), events=events, states=states)
    with open_capture(tmp_path / "c") as capture:
        assert capture.events == events
        assert capture.states == states
        assert capture.manifest["counts"]["states"] == 2


def test_manifest(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c",
        frames(3, 5, 4),
        meta={"versions": {"torch": "2"}, "odd": {1, 2}, "path": Path("x"), "np": np.int64(3)},
        manifest={"coverage": {"expected": 5}, "counts": "mine", "complete": False, "notes": ["a"]},
    )
    document = json.loads(path.read_text())
    assert document["counts"] == {
        "frames": 3, "rows": 15, "events": 0, "states": 0, "sites": 2, "digests": 30,
        "payload_rows": 30, "payload_bytes": 240, "payload_dropped_rows": 0,
    }  # fmt: skip
    assert document["complete"] is True
    assert document["coverage"] == {"expected": 5}
    assert document["notes"] == ["a"]
    assert document["meta"]["np"] == 3
    assert document["sites"]["layers.0.mlp:out"]["rows"] == 15


def test_budget(tmp_path: Path) -> None:
    made = frames(4, 10, 8)  # 160 payload bytes a block
    write(tmp_path / "c", made, budget_bytes=500)
    with open_capture(tmp_path / "c") as capture:
        sites = capture.manifest["sites"]
        assert [sites[f"layers.{k}.mlp:out"]["payload_dropped_rows"] for k in (0, 1)] == [20, 30]
        assert capture.manifest["counts"]["payload_bytes"] == 480
        assert "budget" in capture.manifest["notes"][0]
        assert [len(site) for site in capture.sites.values()] == [40, 40]
        assert capture.sites["layers.0.mlp:out"].payload_dropped == 20
    write(tmp_path / "none", made, budget_bytes=0)
    with open_capture(tmp_path / "none") as capture:
        assert not any(site.has_payload for site in capture.sites.values())


def test_a_site_that_changes_layout_is_kept_apart(tmp_path: Path) -> None:
    rows = make_rows(0, np.arange(3))
    kinds = [
        make_block(meta(), np.ones((3, 8), np.uint16)),
        make_block(meta(torch_dtype="float32"), np.ones((3, 8), np.uint32)),
        make_block(meta(row_shape=(4,)), np.ones((3, 4), np.uint16)),
        make_block(meta(), np.ones((3, 8), np.uint16)),
        make_block(meta(), np.ones((3, 16), np.uint8)),  # same dtype, stored another way
    ]
    made = [(make_frame(k, Phase.SCORE), rows, [block]) for k, block in enumerate(kinds)]
    write(tmp_path / "c", made)
    with open_capture(tmp_path / "c") as capture:
        sizes = {name: len(site) for name, site in capture.sites.items()}
        owner = "decoder.layers.0.mlp"
        assert sizes == {f"{owner}:out": 6, f"{owner}~2:out": 3, f"{owner}~3:out": 3, f"{owner}~4:out": 3}
        assert len(capture.manifest["notes"]) == 3
        assert verify_payload(capture) == []
    assert variant_name("plain", 2) == "plain~2"


def test_payload_layout_that_comes_late(tmp_path: Path) -> None:
    made = frames(2, 5, 4)
    made[0] = (made[0][0], made[0][1], [SiteBlock(b.meta, b.row, b.digest) for b in made[0][2]])
    write(tmp_path / "c", made)
    with open_capture(tmp_path / "c") as capture:
        same(capture, made)


def test_ranks(tmp_path: Path) -> None:
    root = tmp_path / "c"
    made = [frames(2, 4, 8, seed=rank) for rank in range(3)]
    for rank in (2, 0, 1):
        event = EventRecord(rank, "sleep", frame=1)
        assert write(root, made[rank], rank=rank, world=3, events=[event]) == part_path(root, rank)
    with pytest.raises(CaptureInvalid, match="not closed"):
        open_capture(root)
    finalize_manifest(root, 3)
    with open_capture(root) as capture:
        same(capture, [frame for own in made for frame in own])
        assert capture.frame_rank.tolist() == [0, 0, 1, 1, 2, 2]
        assert [event.frame for event in capture.events] == [1, 3, 5]
    assert not list(root.glob("rank*.json"))


def test_shards_of_a_site_are_kept_apart(tmp_path: Path) -> None:
    root = tmp_path / "c"
    for rank in range(2):
        block = make_block(meta(tp_axis=0, lane_offset=4 * rank), np.ones((3, 8), np.uint16))
        write(root, [(make_frame(0, Phase.SCORE), make_rows(0, np.arange(3)), [block])], rank=rank, world=2)
    finalize_manifest(root, 2)
    with open_capture(root) as capture:
        assert set(capture.sites) == {"decoder.layers.0.mlp:out", "decoder.layers.0.mlp@1:out"}


def test_missing_part_of_a_rank(tmp_path: Path) -> None:
    write(tmp_path / "c", frames(1, 2, 3), rank=0, world=2)
    with pytest.raises(CaptureInvalid, match=r"rank00001\.json is missing"):
        finalize_manifest(tmp_path / "c", 2)


def test_used_folders_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", frames(1, 2, 3))
    with pytest.raises(UsageError, match="not empty"):
        CaptureWriter(tmp_path / "c", side="train", meta={})
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        CaptureWriter(tmp_path / "file", side="train", meta={})
    with pytest.raises(UsageError, match="rank 2"):
        CaptureWriter(tmp_path / "d", side="train", rank=2, world=2, meta={})
    write(tmp_path / "r", frames(1, 2, 3), rank=0, world=2)
    with pytest.raises(UsageError, match="not empty"):
        CaptureWriter(tmp_path / "r", side="train", rank=0, world=2, meta={})


def test_bad_blocks_are_refused_in_the_callers_thread(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "c", side="train", meta={})
    good = make_block(meta(), np.ones((3, 8), np.uint16))
    rows = make_rows(0, np.arange(3))
    bad = [
        SiteBlock(meta(), np.array([0, 1, 3], np.uint32), good.digest, good.payload),
        SiteBlock(meta(), good.row, good.digest[:2], good.payload),
        SiteBlock(meta(), good.row, good.digest.astype(np.int64), good.payload),
        SiteBlock(meta(), good.row, good.digest, np.ones((3, 8), np.float32)),
        SiteBlock(meta(), good.row, good.digest, np.ones((2, 8), np.uint16)),
    ]
    for block in bad:
        with pytest.raises(StoreError, match=r"decoder\.layers\.0\.mlp:out"):
            writer.write_frame(make_frame(0, Phase.SCORE), rows, [block])
    writer.write_frame(make_frame(0, Phase.SCORE), rows, [good])
    writer.close(manifest={})
    with open_capture(tmp_path / "c") as capture:
        assert len(capture.frames) == 1


def test_failure_of_the_thread_is_raised_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    writer = CaptureWriter(tmp_path / "c", side="train", meta={})
    (frame,) = frames(1, 2, 3)
    writer.write_frame(*frame)
    writer.flush()
    monkeypatch.setattr(WalWriter, "frame", full)
    writer.write_frame(*frame)
    with pytest.raises(StoreError, match="No space left"):
        writer.flush()
    with pytest.raises(StoreError, match="repair"):
        writer.write_frame(*frame)
    with pytest.raises(StoreError, match="No space left"):
        writer.close(manifest={})
    writer.abort("disk full")


def test_calls_after_close(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "c", side="train", meta={})
    writer.close(manifest={})
    for call in (writer.flush, lambda: writer.close(manifest={}), lambda: writer.write_state(0, [])):
        with pytest.raises(StoreError, match="closed"):
            call()
    writer.abort("too late")
    open_capture(tmp_path / "c").close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_child_is_told(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "c", side="train", meta={})
    pid = os.fork()
    if pid == 0:
        try:
            writer.flush()
        except StoreError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    writer.close(manifest={})


def test_back_pressure_and_many_threads(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "c", side="train", meta={}, queue_bytes=10_000)
    made = frames(40, 20, 64)

    def feed(part: list[Frame]) -> None:
        for frame, rows, blocks in part:
            writer.write_frame(frame, rows, blocks)

    threads = [threading.Thread(target=feed, args=(made[k::4],)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close(manifest={})
    with open_capture(tmp_path / "c") as capture:
        assert sorted(set(capture.rows["sample"].tolist())) == list(range(40))
        assert verify_payload(capture) == []


def test_rows_are_built_with_prefixes() -> None:
    rows = make_rows(9, np.array([5, 6, 7, 8]), start=1, stop=3, flags=RowFlag.GENERATED | Phase.DECODE)
    assert rows["position"].tolist() == [1, 2]
    assert rows["token"].tolist() == [6, 7]
    assert np.array_equal(rows["prefix"], make_rows(0, np.array([5, 6, 7, 8]))["prefix"][1:3])
    assert rows["flags"].tolist() == [10, 10]


def test_check_values_do_not_depend_on_how_data_came() -> None:
    data = np.random.default_rng(0).integers(0, 99, (20_000, 2), dtype=np.uint64)
    parts = [fold_blocks(data[:4096]), fold_blocks(data[4096:8192]), fold_blocks(data[8192:])]
    assert fold_hex(np.concatenate(parts), data.nbytes) == fold_digest(data)
    assert fold_digest(data[:-1]) != fold_digest(data)
    assert fold_digest(data[:0]) != fold_digest(np.zeros((1, 2), np.uint64))


def test_reading_needs_no_torch() -> None:
    modules = "zkl_debug.store.reader, zkl_debug.store.repair, zkl_debug.store.build, zkl_debug.cli.inspect"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
