"""``diff A``: one capture, its own rows of one prefix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import zkl_debug
from zkl_debug.cli import main as cli
from zkl_debug.diff import diff_captures

REFERENCE = Path(__file__).resolve().parents[1] / "captures/reference"


class Batched(torch.nn.Module):
    """A model one operator of which looks at how many lines the batch has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(16, 8)
        self.first = torch.nn.Linear(8, 8)
        self.second = Second()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(self.embed(ids)).round(decimals=2))
        return result


class Second(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (1e-3 if len(x) > 2 else 0.0)


def captured(folder: Path, batches: list[list[list[int]]]) -> Path:
    with zkl_debug.capture(Batched(), folder, side="train", level="payload") as cap, torch.no_grad():  # type: ignore[operator]
        for batch in batches:
            cap.model(torch.tensor(batch))
    return folder


def test_batch_variance_of_one_capture_is_found(tmp_path: Path) -> None:
    a, b, c = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
    verdict = diff_captures(captured(tmp_path / "c", [[a, b], [a, b, c]]))
    assert (verdict.verdict, verdict.edge) == ("diverged", "within-a")
    assert verdict.first is not None
    assert (verdict.first.site, verdict.first.kind.label) == ("second:out", "own")
    assert verdict.affected.rows == 8
    equal = diff_captures(captured(tmp_path / "d", [[a, b], [b, a]]))
    assert (equal.verdict, equal.edges["within-a"].compared) == ("identical", 8)
    assert equal.coverage.rows_b == 0
    assert not [skip for skip in equal.coverage.skipped if "B" in skip.what]


def test_nothing_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = captured(tmp_path / "c", [[[1, 2, 3]]])
    with pytest.raises(SystemExit) as stop:
        cli.main(["diff", str(folder)])
    assert stop.value.code == 3
    assert "no row twice" in capsys.readouterr().out
    assert diff_captures(tmp_path / "none").exit_code == 3


def test_generation_alone_shows_prefill_against_decode() -> None:
    off = diff_captures(REFERENCE / "h200-gpt-te-stack-off/gen")
    assert (off.verdict, off.edge) == ("diverged", "prefill-decode")
    assert off.first is not None
    assert off.first.site == "decoder.layers.0.mlp.linear_fc2:out"
    assert set(off.certification) == {"a"}
    assert all("diff" not in command or "--drill" not in command for command in off.next)
    assert diff_captures(REFERENCE / "h200-gpt-te-stack-on/gen").verdict == "identical"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(REFERENCE / "h200-gpt-te-stack-on/gen")
    page = tmp_path / "r.html"
    with pytest.raises(SystemExit) as stop:
        cli.main(["diff", folder, "--json", "--html", str(page)])
    document = json.loads(capsys.readouterr().out)
    assert (stop.value.code, document["verdict"]) == (0, "identical")
    assert "against itself" in page.read_text()
    with pytest.raises(SystemExit) as stop:
        cli.main(["diff", folder, "--drill"])
    assert stop.value.code == 2


def test_a_copy_beside_itself_is_still_refused(tmp_path: Path) -> None:
    folder = captured(tmp_path / "c", [[[1, 2, 3], [1, 2, 3]]])
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert diff_captures(folder, copy).exit_code == 3
    assert diff_captures(folder).verdict == "identical"
