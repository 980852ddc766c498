"""Files made to do harm: nothing in them is run, nothing crashes, each is answered with a reason and exit 2 or 3."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ingest_dumps import Dumper, training_dump

from zkl_debug.cli import main as cli
from zkl_debug.errors import Refused
from zkl_debug.ingest import pickled

Make = Callable[[Path], object]


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says on stderr; it must end with 2 or 3, without a traceback."""
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    said = capsys.readouterr()
    assert stop.value.code in (2, 3), said
    assert "Traceback" not in said.err + said.out
    assert "identical" not in said.out
    assert said.err.startswith("zkl-debug: ") or "refused" in said.out.lower(), said
    return said.err + said.out


def in_archive(path: Path, data: bytes, **options: Any) -> None:
    """Put pickle bytes where torch.save puts its own."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in (("data.pkl", data), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"archive/{name}", content)


def cut(path: Path, write: Callable[[], None]) -> None:
    """Keep the first 200 bytes of what is written."""
    write()
    path.write_bytes(path.read_bytes()[:200])


PICKLES: dict[str, Make] = {
    "torch.save": lambda path: torch.save({"value": Bomb(path.parent / "ran"), "meta": {}}, path),
    "plain pickle": lambda path: path.write_bytes(pickle.dumps(Bomb(path.parent / "ran"))),
    "old torch.save": lambda path: torch.save(
        {"samples": [Bomb(path.parent / "ran")]}, path, _use_new_zipfile_serialization=False
    ),
    "archive": lambda path: in_archive(path, pickle.dumps({"samples": [Bomb(path.parent / "ran")]}, protocol=2)),
    "eval": lambda path: in_archive(path, b"cbuiltins\neval\n(V__import__('os').abort()\ntR."),
    "memo loop": lambda path: in_archive(path, b"\x80\x02]q\x00h\x00a."),
    "cut": lambda path: in_archive(path, b"\x80\x02}q\x00X\xff\xff\xff\x7f"),
    "compressed": lambda path: in_archive(path, bytes(1 << 20), compression=zipfile.ZIP_DEFLATED),
    "expanded": lambda path: torch.save({"samples": [torch.zeros(1).expand(2_500_000_000)]}, path),
    "half": lambda path: cut(path, lambda: torch.save({"samples": []}, path)),
    "nothing": lambda path: path.write_bytes(b""),
    "huge ints": lambda path: torch.save({"samples": [{"tokens": [10**400], "response_length": 1}]}, path),
    "deep lists": lambda path: torch.save({"samples": nested(60)}, path),
    "billion lists": lambda path: torch.save({"samples": nested(28)}, path),
}


def nested(depth: int) -> list[Any]:
    """Lists of one list twice: 2**depth leaves when it is walked without looking."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize("kind", list(PICKLES))
def test_pickles_are_not_run(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PICKLES[kind](tmp_path / "rollout_1.pt")
    refused(capsys, "ingest", str(tmp_path / "rollout_1.pt"), "--out", str(tmp_path / "t.npz"))
    refused(capsys, "logprobs", str(tmp_path / "rollout_1.pt"))
    (tmp_path / "dump").mkdir()
    PICKLES[kind](tmp_path / "dump/step=0___rank=0___dump_index=1___name=input_ids.pt")
    refused(capsys, "ingest", str(tmp_path / "dump"), "--side", "gen", "--out", str(tmp_path / "gen"))
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "dump/ran").exists()
    assert not (tmp_path / "t.npz").exists()


def test_a_bomb_among_good_files_of_a_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumper = training_dump(tmp_path / "dump")
    dumper.step = 0
    dumper.dump("hidden", Bomb(tmp_path / "ran"))
    text = refused(capsys, "ingest", str(tmp_path / "dump"), "--side", "gen", "--out", str(tmp_path / "gen"))
    assert "not plain data" in text
    assert "nothing in it was run" in text
    assert not (tmp_path / "ran").exists()


def test_a_reader_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hang.py"
    script.write_text("import time; time.sleep(60)")
    torch.save({"samples": []}, tmp_path / "a.pt")
    monkeypatch.setattr(pickled, "_SCRIPT", script)
    monkeypatch.setattr(pickled._Child, "idle", [])
    with pytest.raises(Refused, match="limits of memory or time"):
        list(pickled.load([tmp_path / "a.pt"], seconds=1))


# arrays ---------------------------------------------------------------------------------------------------------------


def npy_header(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    """A .npy header without its data."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def zipped(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def lying_zip(path: Path) -> None:
    """A member whose entry in the directory claims 10 GB."""
    zipped(path, {"x.npy": npy_header((2_500_000_000,)) + bytes(64)})
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 4_000_000_000)
    path.write_bytes(bytes(data))


F4 = {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}
ARRAYS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "10 GB claimed": ("npy", lambda p: p.write_bytes(npy_header((2_500_000_000,)))),
    "negative shape": ("npy", lambda p: p.write_bytes(npy_header((-4, 8)) + bytes(128))),
    "objects": ("npy", lambda p: np.save(p, np.array([{"a": 1}], object), allow_pickle=True)),
    "code as header": ("npy", lambda p: p.write_bytes(b"\x93NUMPY\x01\x00\x20\x00__import__('os').abort()        \n")),
    "strings": ("npy", lambda p: np.save(p, np.array(["a"]))),
    "complex": ("npy", lambda p: np.save(p, np.zeros((4, 8), complex))),
    "cut array": ("npy", lambda p: p.write_bytes(npy_header((4, 8)) + bytes(60))),
    "no array": ("npy", lambda p: p.write_bytes(b"x")),
    "lying zip": ("npz", lying_zip),
    "zip bomb": ("npz", lambda p: zipped(p, {"x.npy": npy_header((50_000_000,)) + bytes(200_000_000)})),
    "cut zip": ("npz", lambda p: cut(p, lambda: np.savez(p, x=np.zeros((4, 8))))),
    "member climbing out": ("npz", lambda p: zipped(p, {"../../x.npy": b"no"})),
    "header beyond the file": ("safetensors", lambda p: p.write_bytes(safetensors(b"{}", length=2**62))),
    "10 GB tensor": (
        "safetensors",
        lambda p: p.write_bytes(safetensors({"x": {**F4, "shape": [2_500_000_000], "data_offsets": [0, 10**10]}})),
    ),
    "end before start": ("safetensors", lambda p: p.write_bytes(safetensors({"x": {**F4, "data_offsets": [64, 0]}}))),
    "no description": ("safetensors", lambda p: p.write_bytes(safetensors({"x": 3}, bytes(128)))),
    "unknown dtype": ("safetensors", lambda p: p.write_bytes(safetensors({"x": {**F4, "dtype": "Q4"}}, bytes(128)))),
    "huge numbers": ("safetensors", lambda p: p.write_bytes(safetensors({"x": {**F4, "shape": [10**30]}}, bytes(128)))),
    "deep header": ("safetensors", lambda p: p.write_bytes(safetensors(b"[" * 90_000))),
    "no header": ("safetensors", lambda p: p.write_bytes(b"123")),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(ARRAYS))
def test_arrays_are_not_believed(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ending, make = ARRAYS[kind]
    (tmp_path / "f").mkdir()
    np.save(tmp_path / "ids.npy", np.arange(4))
    make(tmp_path / f"f/x_0.{ending}")
    pattern = "{name}_{step}.npy" if ending == "npy" else f"x_{{step}}.{ending}"
    command = ("ingest", str(tmp_path / "f"), "--pattern", pattern, "--ids", str(tmp_path / "ids.npy"), "--order", "*")
    refused(capsys, *command, "--side", "gen", "--out", str(tmp_path / "o"))


@pytest.mark.parametrize(
    "ids",
    [np.array([1.0, np.nan, 3.0, 4.0]), np.array([1, -2, 3, 4]), np.array([2**40, 1, 2, 3]), np.zeros((2, 2, 1), int)],
    ids=["nan", "negative", "huge", "three dimensions"],
)
def test_token_ids_that_are_none(ids: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f").mkdir()
    np.save(tmp_path / "f/x_0.npy", np.zeros((4, 8)))
    np.save(tmp_path / "ids.npy", ids)
    command = ("ingest", str(tmp_path / "f"), "--pattern", "{name}_{step}.npy", "--ids", str(tmp_path / "ids.npy"))
    refused(capsys, *command, "--order", "x", "--side", "gen", "--out", str(tmp_path / "o"))


@pytest.mark.parametrize(
    "bad", [{"positions": [5, 4, 3]}, {"seq_lens": [2**40]}, {"seq_lens": [-1]}, {"rids": ["a"] * 3}]
)
def test_a_dump_that_contradicts_itself(
    bad: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fed: dict[str, Any] = {"input_ids": [1, 2, 3], "positions": [0, 1, 2], "seq_lens": [3], "rids": ["a"]}
    dumper = Dumper(tmp_path / "dump")
    for name, value in (fed | bad).items():
        dumper.dump(name, value if name == "rids" else torch.tensor(value))
    dumper.dump("hidden", torch.zeros(3, 8))
    refused(capsys, "ingest", str(tmp_path / "dump"), "--side", "gen", "--out", str(tmp_path / "gen"))


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training_dump(tmp_path / "real")
    (tmp_path / "dump").mkdir()
    for path in (tmp_path / "real").iterdir():
        (tmp_path / "dump" / path.name).symlink_to(path)
    refused(capsys, "ingest", str(tmp_path / "dump"), "--side", "gen", "--out", str(tmp_path / "gen"))
    (tmp_path / "files").mkdir()
    np.save(tmp_path / "outside.npy", np.zeros((4, 8)))
    np.save(tmp_path / "ids.npy", np.arange(4))
    (tmp_path / "files/x_0.npy").symlink_to(tmp_path / "outside.npy")
    (tmp_path / "files/sub").symlink_to(tmp_path / "real")
    command = ("ingest", str(tmp_path / "files"), "--pattern", "{name}_{step}.npy", "--ids", str(tmp_path / "ids.npy"))
    refused(capsys, *command, "--order", "x", "--side", "gen", "--out", str(tmp_path / "o"))


JSON_LINES = {
    "cut": '{"token_ids": [[1,2',
    "huge ints": '{"token_ids": [[1, 1e999]], "generation_logprobs": [[0, 1]], "prev_logprobs": [[0, 1]]}',
    "5000 digits": f'{{"token_ids": [[1, {"9" * 5000}]], "generation_logprobs": [[0, 1]], "prev_logprobs": [[0, 1]]}}',
    "nan ids": '{"token_ids": [[NaN, 1]], "generation_logprobs": [[0, 1]], "prev_logprobs": [[0, 1]]}',
    "deep": "[" * 100_000,
    "nul": "\0\0\0",
}


@pytest.mark.parametrize("kind", list(JSON_LINES))
@pytest.mark.parametrize("name", ["train_data_step1.jsonl", "golden.json", "table.csv"])
def test_json_and_tables(kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text(JSON_LINES[kind])
    refused(capsys, "logprobs", str(tmp_path / name))
    refused(capsys, "ingest", str(tmp_path / name), "--out", str(tmp_path / "t.npz"))
