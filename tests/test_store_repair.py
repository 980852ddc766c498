"""Repair: what a killed, damaged or hostile log gives back, and the commands that show it."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from test_store import Frame, frames, same
from test_store_damage import SEGMENT, flip, folder, refused, whole

from zkl_debug.cli.main import main
from zkl_debug.errors import CaptureInvalid, Refused
from zkl_debug.schema import EventRecord, StateRecord
from zkl_debug.store.layout import segment_path
from zkl_debug.store.reader import open_capture, verify_payload
from zkl_debug.store.repair import RepairReport, repair
from zkl_debug.store.wal import _HEAD, Record, WalReader
from zkl_debug.store.writer import CaptureWriter

__all__ = ["folder", "whole"]  # fixtures


def half_written(root: Path, made: list[Frame], **options: Any) -> None:
    """A capture as a killed process leaves it."""
    writer = CaptureWriter(root, side="train", meta={"a": 1}, **options)
    for frame in made:
        writer.write_frame(*frame)
    writer.write_event(EventRecord(1, "refit"))
    writer.write_state(1, [StateRecord("w", "parameter", "int8", (2,), (1, 2), 3, {"x": 1})])
    writer.flush()
    writer.abort("test")


def recovered(root: Path, made: list[Frame]) -> RepairReport:
    report = repair(root)
    with open_capture(root, partial=True) as capture:
        same(capture, made)
        assert capture.meta == {"a": 1}
    return report


@pytest.mark.parametrize("segment_bytes", [1 << 30, 1 << 20])
def test_abort_and_repair(tmp_path: Path, segment_bytes: int) -> None:
    made = frames(5, 300, 1024)
    half_written(tmp_path / "c", made, segment_bytes=segment_bytes)
    refused(tmp_path / "c", "zkl-debug repair")
    recovered(tmp_path / "c", made)
    with open_capture(tmp_path / "c", partial=True) as capture:
        assert "stopped by the program: test" in capture.manifest["reason"]
        assert [event.name for event in capture.events] == ["refit"]
        assert capture.states[1][0].detail == {"x": 1}


def test_repair_does_not_trust_the_open_hdf5_file(tmp_path: Path) -> None:
    made = frames(3, 300, 1024)
    half_written(tmp_path / "c", made)
    partial = segment_path(tmp_path / "c", 0, 0, "h5.partial")
    with partial.open("r+b") as file:
        file.write(b"\0" * 96)  # the superblock
    recovered(tmp_path / "c", made)


def test_repair_leaves_out_what_does_not_verify(tmp_path: Path) -> None:
    made = frames(3, 300, 1024)
    half_written(tmp_path / "c", made)
    partial = segment_path(tmp_path / "c", 0, 0, "h5.partial")
    block = made[1][2][0]
    assert block.payload is not None
    flip(partial, partial.read_bytes().find(block.payload[150].tobytes()))
    report = repair(tmp_path / "c")
    assert [(d.frame, d.rank, d.segment) for d in report.dropped] == [(1, 0, 0)]
    assert "layers.0.mlp:out does not have its digest" in report.dropped[0].reason
    with open_capture(tmp_path / "c", partial=True) as capture:
        assert set(capture.rows["sample"].tolist()) == {0, 2}
        assert len(capture.frames) == 2
        assert verify_payload(capture) == []
        assert len(capture.manifest["dropped_frames"]) == 1


def test_repair_without_the_open_file_keeps_what_the_log_holds(tmp_path: Path) -> None:
    made = frames(3, 4, 8)
    half_written(tmp_path / "c", made)
    segment_path(tmp_path / "c", 0, 0, "h5.partial").unlink()
    recovered(tmp_path / "c", made)
    half_written(tmp_path / "d", frames(3, 600, 1024))
    segment_path(tmp_path / "d", 0, 0, "h5.partial").unlink()
    report = repair(tmp_path / "d")
    assert len(report.dropped) == 3
    assert report.frames == 0


def test_log_cut_anywhere_gives_the_frames_before_the_cut(tmp_path: Path) -> None:
    made = frames(4, 6, 8)
    half_written(tmp_path / "c", made)
    wal = segment_path(tmp_path / "c", 0, 0, "wal").read_bytes()
    first = wal.index(b"ZKLW", 1)  # end of the header record
    seen = set()
    for cut in [first - 1, first, *random.Random(3).sample(range(len(wal)), 18)]:
        root = Path(shutil.copytree(tmp_path / "c", tmp_path / f"cut{cut}"))
        os.truncate(segment_path(root, 0, 0, "wal"), cut)
        if cut < first:
            with pytest.raises(CaptureInvalid, match="nothing in"):
                repair(root)
            continue
        report = repair(root)
        seen.add(report.frames)
        if report.frames:
            recovered(root, made[: report.frames])
    assert len(seen) > 2


def test_log_damaged_anywhere_invents_nothing(tmp_path: Path) -> None:
    made = frames(4, 6, 8)
    half_written(tmp_path / "c", made)
    size = segment_path(tmp_path / "c", 0, 0, "wal").stat().st_size
    for at in random.Random(4).sample(range(size), 15):
        root = Path(shutil.copytree(tmp_path / "c", tmp_path / f"flip{at}"))
        flip(segment_path(root, 0, 0, "wal"), at)
        try:
            report = repair(root)
        except CaptureInvalid:
            continue
        if report.frames:
            recovered(root, made[: report.frames])


def record(kind: int, body: bytes, length: int | None = None, crc: int | None = None) -> bytes:
    size = len(body) if length is None else length
    check = zlib.crc32(body, zlib.crc32(struct.pack("<IQ", kind, size))) if crc is None else crc
    return _HEAD.pack(b"ZKLW", kind, size, check) + body


HEADER = record(1, b'{"side":"train","rank":0,"world":1,"segment":0,"meta":{}}')
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "zeros": bytes(1000),
    "garbage": random.Random(0).randbytes(1000),
    "record length": HEADER + record(3, b"x" * 100, length=1 << 60),
    "no header": record(5, b"{}"),
    "unknown kind": HEADER + record(99, b"{}"),
    "header without fields": record(1, b"{}"),
    "header of another rank": record(1, b'{"side":"t","rank":4,"world":9,"segment":0,"meta":{}}'),
    "header that is a list": record(1, b"[]"),
    "deep JSON": HEADER + record(5, b"[" * 200_000),
    "not JSON": HEADER + record(2, b"\xff\xfe"),
    "row count": HEADER + record(3, struct.pack("<II", 0xFFFFFFFF, 0) + bytes(500)),
    "site count": HEADER + record(3, struct.pack("<II", 0, 0xFFFFFFFF) + bytes(500)),
    "short frame": HEADER + record(3, b""),
    "site without fields": HEADER + record(2, b'{"index":0}'),
    "negative width": HEADER + record(2, b'{"index":0,"site":{},"payload":["<u2",-5]}'),
    "odd event": HEADER + record(5, b'{"surprise":1}'),
    "odd state": HEADER + record(4, b'{"event_seq":"x","records":[{}]}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_logs(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "c"
    root.mkdir()
    segment_path(root, 0, 0, "wal").write_bytes(HOSTILE[name])
    segment_path(root, 0, 0, "h5.partial").write_bytes(b"")
    with pytest.raises(SystemExit) as stop:
        main(["repair", str(root)])
    text = capsys.readouterr()
    assert "Traceback" not in text.err
    if HOSTILE[name].startswith(HEADER):
        assert stop.value.code == 0
        with open_capture(root, partial=True) as capture:
            assert len(capture.frames) == 0
            assert capture.manifest["notes"]
    else:
        assert stop.value.code == 3
        assert "nothing in" in text.err


def test_hostile_offsets_in_a_log(tmp_path: Path) -> None:
    made = frames(1, 600, 1024)
    half_written(tmp_path / "c", made)
    wal = segment_path(tmp_path / "c", 0, 0, "wal")
    raw = wal.read_bytes()
    for reader, offset in ((WalReader(wal), 1 << 62), (WalReader(wal), (1 << 64) - 8)):
        wal.write_bytes(raw)
        (logged,) = [value for kind, value in reader.records() if kind == Record.FRAME]
        old = struct.pack("<QQ", *logged.blocks[0].extents[0])
        at = raw.find(old)
        bad = bytearray(raw)
        bad[at : at + 8] = struct.pack("<Q", offset)
        start = raw.rfind(b"ZKLW\x03", 0, at)
        _, kind, length, _ = _HEAD.unpack(raw[start : start + _HEAD.size])
        body = bytes(bad[start + _HEAD.size : start + _HEAD.size + length])
        bad[start : start + _HEAD.size + length] = record(kind, body)
        root = tmp_path / str(offset)
        shutil.copytree(tmp_path / "c", root)
        segment_path(root, 0, 0, "wal").write_bytes(bad)
        report = repair(root)
        assert len(report.dropped) == 1
        assert "not in the file" in report.dropped[0].reason


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_repair_refuses_a_living_writer(tmp_path: Path) -> None:
    read, write_end = os.pipe()
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        writer = CaptureWriter(tmp_path / "c", side="train", meta={})
        writer.flush()
        os.write(go, b"x")
        os.read(read, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        with pytest.raises(Refused, match="still being written"):
            repair(tmp_path / "c")
        refused(tmp_path / "c", "still being written")
    finally:
        os.write(write_end, b"x")
        os.waitpid(pid, 0)
    assert repair(tmp_path / "c").frames == 0


def test_repair_of_what_is_no_capture(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CaptureInvalid):
            repair(path)
    segment_path(tmp_path, 0, 0, "h5.partial").write_bytes(b"x")
    with pytest.raises(CaptureInvalid, match="has no log"):
        repair(tmp_path)
    (tmp_path / "l").mkdir()
    segment_path(tmp_path / "l", 0, 0, "wal").symlink_to(tmp_path / "x")
    with pytest.raises(CaptureInvalid, match="symbolic link"):
        repair(tmp_path / "l")


def test_repair_changes_nothing_in_a_complete_capture(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert repair(folder).already_complete
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_repair_with_a_lost_manifest_and_a_damaged_segment(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    report = repair(folder)
    assert report.frames == 4
    assert report.recovered_frames == 0
    (folder / "manifest.json").unlink()
    (folder / SEGMENT).write_bytes(b"")
    report = repair(folder)
    assert report.frames < 4
    assert any("is left out" in note for note in report.notes)


def test_repair_is_idempotent_when_it_is_killed_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = frames(3, 300, 1024)
    half_written(tmp_path / "c", made)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("zkl_debug.store.repair.write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            repair(tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            repair(tmp_path / "c")
    recovered(tmp_path / "c", made)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["manifest.json", SEGMENT]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    text = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, text.out, text.err


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", str(folder), "--sites")
    assert code == 0
    for text in ("complete", "400 (score 400)", "layers.1.mlp:out", "bfloat16", "2 segments"):
        assert text in out
    code, out, err = run(capsys, "inspect", str(folder), "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["valid"] is True
    assert document["rows"] == {"total": 400, "score": 400}
    assert [site["name"] for site in document["sites"]] == ["layers.0.mlp:out", "layers.1.mlp:out"]


def test_inspect_and_repair_of_a_killed_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tmp_path / "c")
    half_written(tmp_path / "c", frames(3, 20, 8))
    code, out, err = run(capsys, "inspect", root)
    assert (code, out) == (3, "")
    assert "zkl-debug repair" in err
    code, out, _ = run(capsys, "inspect", root, "--json")
    assert code == 3
    assert json.loads(out)["valid"] is False
    code, out, _ = run(capsys, "repair", root, "--json")
    assert code == 0
    assert json.loads(out)["recovered_frames"] == 3
    code, out, _ = run(capsys, "repair", root)
    assert (code, "nothing to repair" in out) == (0, True)
    code, out, _ = run(capsys, "inspect", root)
    assert code == 0
    assert "INCOMPLETE" in out
    assert "(repaired)" in out


def test_killed_between_renaming_a_segment_and_removing_its_log(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    segment_path(folder, 0, 0, "wal").write_bytes(b"anything")
    report = repair(folder)
    assert (report.frames, report.recovered_frames) == (4, 0)
    assert not segment_path(folder, 0, 0, "wal").exists()
    with open_capture(folder, partial=True) as capture:
        same(capture, frames(4, 100, 1024))
