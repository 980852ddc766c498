"""Damaged capture folders: no crash, and never "identical" of content that is not that of the sound one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zkl_debug
from zkl_debug.diff import diff_captures

SCRIPT = Path(__file__).with_name("mutate_captures.py")
OFF = Path(__file__).resolve().parents[1] / "captures/reference/h200-gpt-te-stack-off"


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.out = torch.nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        result: torch.Tensor = self.out(x)
        return result


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    for side in ("train", "gen"):
        torch.manual_seed(0)
        model = Small()
        with zkl_debug.capture(model, root / side, side=side, level="payload"), torch.no_grad():  # type: ignore[operator]
            model(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
            model(torch.tensor([[9, 10, 11]]))
    assert diff_captures(root / "train", root / "gen").verdict == "identical"
    return root


def run(sound: Path, source: Path, scratch: Path, first: int, count: int) -> list[dict[str, Any]]:
    """One answer for every damaged copy; the process must come to its end."""
    command = [sys.executable, str(SCRIPT), str(sound), str(source), str(scratch), str(first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{lines[-1:]}\n{done.stderr[-2000:]}"
    return [line for line in lines if "code" in line]


def check(answers: Sequence[dict[str, Any]], count: int, codes: set[int]) -> None:
    assert len(answers) == count
    for answer in answers:
        if answer["code"] == 3:
            assert answer["why"], answer
        else:
            assert answer["code"] in codes, answer
            assert not answer["differ"], answer


@pytest.mark.parametrize("first", [0])
def test_damaged_folders_are_refused_or_harmless(pair: Path, tmp_path: Path, first: int) -> None:
    answers = run(pair / "train", pair / "gen", tmp_path, first, 48)
    check(answers, 48, {0})
    assert sum(answer["code"] == 3 for answer in answers) > 24, "damage must be seen where it is"


@pytest.mark.parametrize("what", [b'"name":"layers.0.bias"', b'"class":"Small"'])
def test_a_changed_name_of_a_weight_is_seen(what: bytes, pair: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair / "gen", tmp_path / "gen"))
    file = next(folder.glob("*.h5"))
    data = bytearray(file.read_bytes())
    at = data.find(what)
    assert at >= 0
    data[at + len(what) - 2] ^= 1
    file.write_bytes(bytes(data))
    verdict = diff_captures(pair / "train", folder)
    assert verdict.exit_code == 3
    assert verdict.refusal is not None
    assert "not what was written" in verdict.refusal.text


@pytest.mark.slow
def test_two_hundred_damaged_folders(pair: Path, tmp_path: Path) -> None:
    check(run(pair / "train", pair / "gen", tmp_path, 1000, 200), 200, {0})


@pytest.mark.slow
def test_damaged_folders_of_a_real_engine(tmp_path: Path) -> None:
    check(run(OFF / "train", OFF / "gen", tmp_path, 5000, 60), 60, {1})
