"""Damage in raw bits: every form of the answer looks at the same of them, refuses alike, and blames nobody."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import zkl_debug
from zkl_debug.bench.measure import zkl_command
from zkl_debug.cli.main import main
from zkl_debug.diff import diff_captures
from zkl_debug.diff.explain import explain_evidence
from zkl_debug.diff.explain import run as explaining
from zkl_debug.diff.explain.model import Evidence
from zkl_debug.diff.naming.derived import lanes_of
from zkl_debug.errors import CaptureInvalid
from zkl_debug.store.reader import open_capture

LAYERS = 12
FORMS = {"text": (), "json": ("--json",), "html": ("--html", "page.html")}


class Deep(torch.nn.Module):
    """Linear layers in a row, with ``scale`` before them: where it differs, every later site does."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = scale
        self.embed = torch.nn.Embedding(8, 64)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(LAYERS)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    for side, scale in (("train", 1.0), ("gen", 1.25)):
        with zkl_debug.capture(Deep(scale), root / side, side=side, level="payload") as cap:  # type: ignore[operator]
            cap.model(torch.tensor([[1, 2, 3, 4, 5]]))
    return root


def damaged(pair: Path, side: str, site: str, to: Path, row: int = 0) -> Path:
    """A copy of the pair with one bit of a row of a site turned."""
    root = Path(shutil.copytree(pair, to))
    with open_capture(root / side) as capture:
        raw = np.ascontiguousarray(capture.sites[site].payload(slice(row, row + 1))).tobytes()
    file = next((root / side).glob("*.h5"))
    data = bytearray(file.read_bytes())
    at = data.find(raw)
    while at >= 0:  # one tensor may be the output of one site and the input of the next
        data[at] ^= 1
        at = data.find(raw, at + 1)
    file.write_bytes(bytes(data))
    return root


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def call(root: Path, *options: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["diff", str(root / "train"), str(root / "gen"), *options])
        return int(ended.value.code or 0), capsys.readouterr().out

    return call


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", [0, 3, LAYERS - 1])
@pytest.mark.parametrize("side", ["train", "gen"])
def test_every_form_of_the_answer_refuses(
    pair: Path, tmp_path: Path, form: str, layer: int, side: str, run: Run
) -> None:
    site = f"layers.{layer}:out"
    root = damaged(pair, side, site, tmp_path / "copy", row=2)
    code, out = run(root, *FORMS[form])
    assert code == 3
    assert f"layers.{layer}:out of {'A' if side == 'train' else 'B'} is not what was written" in out.replace("\n", " ")
    assert "DIVERGED" not in out
    if form == "json":
        document = json.loads(out)
        assert (document["verdict"], document["first"], document["edge"]) == ("refused", None, None)


def test_nobody_refuses_a_sound_pair(pair: Path, run: Run) -> None:
    assert {run(pair, *options)[0] for options in FORMS.values()} == {1}


def test_processes_do_not_change_what_is_looked_at(pair: Path, tmp_path: Path) -> None:
    root = damaged(pair, "train", "layers.7:out", tmp_path / "copy")
    command = zkl_command("diff", root / "train", root / "gen", "--jobs", 2)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 3


def test_first_looks_as_far_as_it_goes(pair: Path, tmp_path: Path, run: Run) -> None:
    """What lies behind the first site is neither looked at nor spoken of."""
    behind = damaged(pair, "gen", f"layers.{LAYERS - 1}:out", tmp_path / "behind")
    assert {run(behind, "--first", *options)[0] for options in FORMS.values()} == {1}
    there = damaged(pair, "gen", "layers.0:in", tmp_path / "there")
    assert {run(there, "--first", *options)[0] for options in FORMS.values()} == {3}


def test_damage_that_an_explanation_comes_upon_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def finds(_: Evidence) -> None:
        raise CaptureInvalid("payload is not what was written")

    test = explaining.Test("finds", finds, lambda _e: "")
    monkeypatch.setattr(explaining, "TESTS", (test,))
    with pytest.raises(CaptureInvalid):
        explain_evidence(None)  # type: ignore[arg-type]


def test_lanes_are_not_made_of_damaged_bits(pair: Path, tmp_path: Path) -> None:
    root = damaged(pair, "gen", "layers.4:out", tmp_path / "copy")
    for folder, sound in ((pair, True), (root, False)):
        with open_capture(folder / "gen") as capture:
            lanes = lanes_of(capture.sites["layers.4:out"], "layers.4/gate:out.0", np.arange(8))
            if sound:
                assert len(lanes.digest) == 5
                continue
            with pytest.raises(CaptureInvalid, match=r"layers\.4:out is not what was written, in 1 rows"):
                _ = lanes.digest


def test_a_page_reads_no_rows_that_the_verdict_did_not(pair: Path) -> None:
    verdict = diff_captures(pair / "train", pair / "gen")
    assert verdict.first is not None
    some, every = (verdict.row_table(verdict.first.site, verdict.edge, limit) for limit in (2, None))
    assert (every["ulp"] > 0).all()
    assert np.count_nonzero(some["ulp"] >= 0) == 2
    assert (some["ulp"][:2] == every["ulp"][:2]).all()
