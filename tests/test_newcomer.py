"""What first users ran into: interrupted captures, full disks, closed pipes, one folder twice, damaged payload."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import zkl_debug
from zkl_debug.diff import diff_captures
from zkl_debug.errors import CaptureInvalid
from zkl_debug.store.reader import open_capture
from zkl_debug.store.repair import repair

ROOT = Path(__file__).resolve().parents[1]
OFF = ROOT / "captures/reference/h200-gpt-te-stack-off"
ON = ROOT / "captures/reference/h200-gpt-te-stack-on"
CLI = [sys.executable, "-m", "zkl_debug.cli.main"]


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.out = torch.nn.Linear(4, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.embed(ids))
        return result


def captured(folder: Path, level: str = "payload") -> Path:
    with zkl_debug.capture(Tiny(), folder, side="train", level=level) as cap:  # type: ignore[operator]
        cap.model(torch.tensor([[1, 2, 3]]))
    return folder


def run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *command], capture_output=True, text=True, timeout=300, cwd=ROOT, env=os.environ | (env or {})
    )


def test_a_capture_that_an_exception_ended_is_incomplete(tmp_path: Path) -> None:
    model = Tiny()

    def interrupted() -> None:
        with zkl_debug.capture(model, tmp_path / "c", side="gen"):  # type: ignore[operator]
            model(torch.tensor([[1, 2, 3]]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(CaptureInvalid, match="KeyboardInterrupt"):
        open_capture(tmp_path / "c")
    verdict = diff_captures(captured(tmp_path / "whole"), tmp_path / "c")
    assert (verdict.verdict, verdict.exit_code) == ("refused", 3)
    with open_capture(tmp_path / "c", partial=True) as capture:
        assert len(capture.frames) == 1
        assert not capture.manifest["repaired"]


def test_a_capture_without_frames_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(4, 4)
    with zkl_debug.capture(model, tmp_path / "c", side="train"):  # type: ignore[operator]
        model(torch.ones(3, 4))
    assert "holds no frame" in capsys.readouterr().err


def test_a_capture_against_itself_is_no_comparison(tmp_path: Path) -> None:
    folder = captured(tmp_path / "c")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for other in (folder, tmp_path / "x" / ".." / "c", copy):
        (tmp_path / "x").mkdir(exist_ok=True)
        verdict = diff_captures(folder, other)
        assert verdict.refusal is not None
        assert verdict.refusal.code == "same-capture"


def test_damaged_payload_is_not_explained_and_repair_says_it(tmp_path: Path) -> None:
    train, gen = captured(tmp_path / "a"), captured(tmp_path / "b")
    with open_capture(gen) as capture:
        site = capture.sites["out:out"]
        raw = np.ascontiguousarray(site.payload(slice(0, 1))).tobytes()
    file = next(gen.glob("*.h5"))
    data = bytearray(file.read_bytes())
    data[data.index(raw)] ^= 1
    file.write_bytes(bytes(data))
    verdict = diff_captures(train, gen)  # weights differ between the two, so elements would be looked at
    assert verdict.exit_code == 3
    with pytest.raises(CaptureInvalid, match="payload rows of out:out"):
        repair(gen)
    assert repair(train).already_complete


def test_a_reader_that_goes_away_is_not_a_divergence() -> None:
    pair = f"{ON}/train {ON}/gen"
    shell = f"set -o pipefail; {' '.join(CLI)} diff {pair} | true"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode in (0, 141), "0 when everything fitted into the pipe"
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_cannot_be_written_is_a_usage_error(options: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [*CLI, "diff", str(ON / "train"), str(ON / "gen"), *options]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr


def test_other_encodings_and_errors_in_json(tmp_path: Path) -> None:
    ascii_only = run("diff", str(OFF / "train"), str(OFF / "gen"), env={"PYTHONIOENCODING": "ascii"})
    assert ascii_only.returncode == 1
    assert "Traceback" not in ascii_only.stderr
    (tmp_path / "empty").mkdir()
    for command in (["repair", str(tmp_path / "empty"), "--json"], ["check", str(tmp_path / "no.yaml"), "--json"]):
        done = run(*command)
        document = json.loads(done.stdout)
        assert document["format"] == "zkl-error"
        assert document["exit_code"] == done.returncode > 0
        assert document["found"]


@pytest.mark.parametrize("arguments", [["--out", "{file}"], ["--out", "{file}/x"], ["--out", "{dir}", "--seed", "-1"]])
def test_bad_places_and_seeds_are_usage_errors(arguments: list[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    done = run("capture", "--bed", "tiny-gpt", *(a.format(file=file, dir=tmp_path / "new") for a in arguments))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert file.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="needs to mount a small file system")
@pytest.mark.slow
def test_a_full_disk_does_not_crash_the_process(tmp_path: Path) -> None:
    tmp_path.joinpath("disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path / "disk")]).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        out = str(tmp_path / "disk/a")
        done = run("capture", "--bed", "tiny-gpt", "--level", "payload", "--no-certify", "--side", "gen", "--out", out)
        assert done.returncode in (2, 3), done.stderr
        assert "No space left" in done.stderr
        assert "repair" in done.stderr
        saved = Path(shutil.copytree(Path(out) / "gen", tmp_path / "saved"))
        assert repair(saved).frames >= 1
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "disk")], check=True)


def test_a_damaged_run_file_is_refused(tmp_path: Path) -> None:
    for side in ("train", "gen"):
        captured(tmp_path / side)
    for text in ("", '{"bed": 3}', "[]"):
        (tmp_path / "run.json").write_text(text)
        done = run("zoom", str(tmp_path / "train"), str(tmp_path / "gen"))
        assert done.returncode in (2, 3)
        assert "Traceback" not in done.stderr
