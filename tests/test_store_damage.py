"""Damaged, hostile and unfinished capture folders are refused with a reason, never with a traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from test_store import frames, same, write

from zkl_debug.errors import CaptureInvalid, ZklError
from zkl_debug.store.reader import BadRow, open_capture, verify_payload
from zkl_debug.store.repair import repair

SEGMENT = "rank00000.seg000.h5"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "c"
    write(root, frames(4, 100, 1024), segment_bytes=500_000)
    return root


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A fresh copy of a capture of two segments, with columns of both layouts."""
    return Path(shutil.copytree(whole, tmp_path / "c"))


def refused(root: Path, why: str) -> None:
    with pytest.raises(CaptureInvalid, match=why) as caught:
        open_capture(root)
    assert caught.value.exit_code == 3


def edit(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = root / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def fix_size(root: Path) -> None:
    """Make the manifest agree with the sizes of the files, so that what lies behind that check is reached."""
    edit(root, lambda m: [s.update(bytes=(root / s["file"]).stat().st_size) for s in m["segments"]])


def drop(document: dict[str, Any], key: str) -> None:
    del document[key]


def test_not_a_capture(tmp_path: Path) -> None:
    refused(tmp_path, "not a capture")
    refused(tmp_path / "missing", "not a folder")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "manifest.json").write_text("{}")
    with pytest.raises(CaptureInvalid, match=r"one of its captures: .*train"):
        open_capture(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "{}", "nonsense", '{"format": "zkl-capture"}', "[" * 100_000, "\x00\xff"])
def test_manifest_that_is_not_one(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    refused(folder, "manifest")


@pytest.mark.parametrize("data", [bytes(2048), b"\xff\xfe\x00", b"\x00{\xd8"], ids=["zeros", "mark", "half"])
def test_manifest_that_is_no_text(folder: Path, data: bytes) -> None:
    """No word of an encoding: it was only guessed from the first bytes."""
    (folder / "manifest.json").write_bytes(data)
    with pytest.raises(CaptureInvalid) as caught:
        open_capture(folder)
    assert caught.value.found == f"{folder / 'manifest.json'} is not JSON text"
    assert "codec" not in str(caught.value)


def test_manifest_fields(folder: Path) -> None:
    edit(folder, lambda m: m.update(version=2))
    refused(folder, "format version 2")
    edit(folder, lambda m: m.update(version=1, complete=False, reason="killed"))
    refused(folder, "incomplete: killed")
    open_capture(folder, partial=True).close()
    edit(folder, lambda m: m.update(complete=True, world=2))
    refused(folder, "disagree about rank, side or world")
    edit(folder, lambda m: m.update(world="1"))
    refused(folder, "'world'")


@pytest.mark.parametrize("key", ["segments", "sites", "meta", "counts", "side", "notes"])
def test_manifest_without_a_field(folder: Path, key: str) -> None:
    edit(folder, lambda m: drop(m, key))
    refused(folder, key)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("file", "../c/rank00000.seg000.h5", "outside the folder"),
        ("file", "/etc/passwd", "outside the folder"),
        ("file", "", "not a regular file"),
        ("file", None, "damaged"),
        ("file", "rank00000.seg007.h5", "is missing"),
        ("bytes", 5, "the manifest says 5"),
        ("frames", 99, "frames or rows"),
        ("check", "0" * 32, "not what was written"),
        ("rank", 3, "rank, side or world"),
    ],
)
def test_segment_entries(folder: Path, field: str, value: Any, why: str) -> None:
    edit(folder, lambda m: m["segments"][0].update({field: value}))
    if field == "file" and value == "":
        edit(folder, lambda m: m["segments"][0].update(bytes=folder.stat().st_size))
    refused(folder, why)


def test_missing_segment_and_missing_rank(folder: Path, tmp_path: Path) -> None:
    (folder / SEGMENT).unlink()
    refused(folder, "is missing")
    for rank in range(2):
        write(tmp_path / "two", frames(1, 3, 4), rank=rank, world=2)
    refused(tmp_path / "two", "not closed")
    report = repair(tmp_path / "two")  # every rank closed, only the merge is missing
    assert report.frames == 2
    edit(tmp_path / "two", lambda m: m.update(complete=True, segments=m["segments"][:1]))
    refused(tmp_path / "two", "no segment of rank 1")


def test_a_segment_dropped_from_the_manifest_is_missed(folder: Path) -> None:
    edit(folder, lambda m: m.update(segments=m["segments"][:1]))
    refused(folder, "as counted in the manifest")


@pytest.mark.parametrize("keep", [0, 1, 100, 4096, 0.5, -1])
def test_truncated_segment(folder: Path, keep: float) -> None:
    path = folder / SEGMENT
    size = path.stat().st_size
    os.truncate(path, int(size * keep) if 0 < keep < 1 else int(keep) % size)
    refused(folder, "manifest says")
    fix_size(folder)
    refused(folder, "empty|cannot be read")


def test_garbage_segment(folder: Path) -> None:
    path = folder / SEGMENT
    for seed in range(5):
        path.write_bytes(random.Random(seed).randbytes(path.stat().st_size))
        refused(folder, "cannot be read")


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.h5"
    (folder / SEGMENT).rename(moved)
    (folder / SEGMENT).symlink_to(moved)
    refused(folder, "symbolic link")


@pytest.mark.parametrize("kind", ["external", "soft", "external storage", "filter", "virtual"])
def test_links_and_storage_inside_hdf5(folder: Path, tmp_path: Path, kind: str) -> None:
    data = np.zeros((200, 1024), np.uint16)
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["payload"] = data
    (tmp_path / "raw").write_bytes(data.tobytes())
    with h5py.File(folder / SEGMENT, "r+") as file:
        group = file["sites/00000"]
        shape = group["payload"].shape
        del group["payload"]
        if kind == "external":
            group["payload"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "payload")
        elif kind == "soft":
            group["payload"] = h5py.SoftLink("/sites/00001/payload")
        elif kind == "external storage":
            group.create_dataset("payload", shape, np.uint16, external=[(str(tmp_path / "raw"), 0, data.nbytes)])
        elif kind == "filter":
            group.create_dataset("payload", data=data[: shape[0]], compression="gzip")
        else:
            layout = h5py.VirtualLayout(shape, np.uint16)
            layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "payload", data.shape)[: shape[0]]
            group.create_virtual_dataset("payload", layout)
    fix_size(folder)
    with open_capture(folder) as capture, pytest.raises(CaptureInvalid, match="cannot be read"):
        capture.sites["layers.0.mlp:out"].payload(slice(None))


def find(root: Path, needle: bytes) -> tuple[Path, int]:
    for path in sorted(root.glob("*.h5")):
        at = path.read_bytes().find(needle)
        if at >= 0:
            return path, at
    raise AssertionError("not found")


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("row", [0, 99, 250, 399])
def test_flipped_payload_byte_is_named(folder: Path, row: int) -> None:
    made = frames(4, 100, 1024)
    block = made[row // 100][2][1]
    assert block.payload is not None
    path, at = find(folder, block.payload[row % 100].tobytes())
    flip(path, at + 777)
    with open_capture(folder) as capture:
        assert verify_payload(capture) == [BadRow("layers.1.mlp:out", row, row)]
        assert verify_payload(capture, ["layers.0.mlp:out"]) == []


def test_flipped_digest_row_number_or_row(folder: Path) -> None:
    made = frames(4, 100, 1024)
    digest = made[0][2][0].digest
    path, at = find(folder, digest[50].tobytes())
    flip(path, at)
    with open_capture(folder) as capture:
        with pytest.raises(CaptureInvalid, match=r"digests of site layers\.0\.mlp:out"):
            _ = capture.sites["layers.0.mlp:out"].digest
        assert len(capture.sites["layers.1.mlp:out"].digest) == 400
    flip(path, at)
    path, at = find(folder, np.arange(20, 60, dtype="<u4").tobytes())
    flip(path, at)
    with open_capture(folder) as capture, pytest.raises(CaptureInvalid, match="row numbers"):
        _ = [site.rows for site in capture.sites.values()]
    flip(path, at)
    path, at = find(folder, made[0][1]["prefix"][3].tobytes())
    flip(path, at)
    refused(folder, "not what was written")


def test_any_flipped_byte_is_an_error_or_harmless(folder: Path, tmp_path: Path) -> None:
    """Flip bytes all over a segment: the answer is a refusal, a named row, or data that is not affected."""
    size = (folder / SEGMENT).stat().st_size
    rng = random.Random(7)
    made = frames(4, 100, 1024)
    for at in [*range(0, 96, 12), *(rng.randrange(size) for _ in range(16)), *(size - 1 - k * 97 for k in range(32))]:
        root = tmp_path / "flip"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(folder, root)
        flip(root / SEGMENT, at)
        try:
            with open_capture(root) as capture:
                if not verify_payload(capture):
                    same(capture, made)
        except ZklError:
            continue
