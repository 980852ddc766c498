"""What came up when programs of one's own were captured with only the README at hand."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import zkl_debug
from zkl_debug.cli import main as cli
from zkl_debug.diff import Verdict, diff_captures
from zkl_debug.diff.report import print_report


class Scale(torch.nn.Module):
    """An operator that reads a buffer, as a rotary embedding reads its frequencies."""

    factor: torch.Tensor
    unread: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.linspace(1, 1.3, 8))
        self.register_buffer("unread", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(16, 8)
        self.first = torch.nn.Linear(8, 8)
        self.scale = Scale()
        self.last = torch.nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        result: torch.Tensor = self.last(self.scale(self.first(self.embed(input_ids))))
        return result


IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def captured(folder: Path, model: Model, level: str = "payload", positions: torch.Tensor | None = None) -> Path:
    with zkl_debug.capture(model, folder, side=folder.name, level=level), torch.no_grad():  # type: ignore[operator]
        model(IDS) if positions is None else model(IDS, positions)
    return folder


def names(verdict: Verdict) -> list[str]:
    return [str(finding["name"]) for finding in verdict.explanations]


def test_a_buffer_that_was_cast_is_the_reason(tmp_path: Path) -> None:
    cast = Model()
    cast.scale.factor = cast.scale.factor.bfloat16().float()
    train, gen = captured(tmp_path / "train", Model()), captured(tmp_path / "gen", cast)
    verdict = diff_captures(train, gen)
    assert verdict.first is not None
    assert verdict.first.site == "scale:out"
    assert names(verdict)[0] == "other-buffers"
    assert verdict.explanations[0]["evidence"]["buffers"] == ["scale.factor"]
    assert "not-localised" not in names(verdict)


def test_a_buffer_that_the_operator_does_not_read_is_no_reason(tmp_path: Path) -> None:
    other = Model()
    other.scale.unread = other.scale.unread * 2

    def nudged(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        return output * (1 + 2**-20)

    other.first.register_forward_hook(nudged)
    verdict = diff_captures(captured(tmp_path / "train", Model()), captured(tmp_path / "gen", other))
    assert verdict.first is not None
    assert verdict.first.site == "first:out"
    assert "other-buffers" not in names(verdict)
    assert verdict.checks["buffers_differ"] == ["scale.unread"]


def test_padding_counted_as_positions_is_said(tmp_path: Path) -> None:
    right = torch.arange(4).expand(2, 4)
    train = captured(tmp_path / "train", Model(), positions=right + torch.tensor([[3], [5]]))
    verdict = diff_captures(train, captured(tmp_path / "gen", Model(), positions=right))
    assert verdict.refusal is not None
    assert verdict.refusal.code == "positions-differ"
    assert "sample 0 by -3, sample 1 by -5" in verdict.refusal.found
    assert "padding on the left" in verdict.refusal.found
    one = diff_captures(captured(tmp_path / "one", Model(), positions=right + 2), tmp_path / "gen")
    assert one.refusal is not None
    assert "always by -2" in one.refusal.found


def test_next_commands_are_worth_running(tmp_path: Path) -> None:
    train, gen = captured(tmp_path / "train", Model()), captured(tmp_path / "gen", Model())
    assert "--verify-bytes" in diff_captures(train, gen).next[0]
    assert diff_captures(train, gen, verify_bytes=True).next == ()
    bare = captured(tmp_path / "bare", Model(), "digest")
    assert diff_captures(train, bare).next == (), "one side has no bytes to verify"
    assert diff_captures(train, bare, verify_bytes=True).next == ()
    changed = Model()
    changed.scale.factor = changed.scale.factor * 2
    verdict = diff_captures(bare, captured(tmp_path / "digests", changed, "digest"))
    assert verdict.next[0] == (
        "zkl-debug capture --side digests --level payload --sites 'scale:*' --out DIR -- PROGRAM"
    )


def test_a_divergence_is_followed_by_a_command_that_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Raw bits of an operator are bundled also where no bed can be run again; a looked-up value is seen on a page."""
    changed = Model()
    changed.scale.factor = changed.scale.factor * 2
    train, gen = captured(tmp_path / "train", Model()), captured(tmp_path / "gen", changed)
    (command,) = diff_captures(train, gen).next
    assert command == f"zkl-debug bundle {train} {gen} --site scale:out --out DIR"
    with pytest.raises(SystemExit) as stop:
        cli.main([word.replace("DIR", str(tmp_path / "bundle")) for word in command.split()[1:]])
    assert stop.value.code == 0, capsys.readouterr().err
    for value, side in enumerate(("a", "b")):
        with zkl_debug.capture(Model(), tmp_path / side, side, level="payload") as cap, torch.no_grad():  # type: ignore[operator]
            cap.model(IDS)
            cap.selected(torch.full((8,), float(value)), torch.tensor([2, 3, 4, -1, 6, 7, 8, -1]))
    verdict = diff_captures(tmp_path / "a", tmp_path / "b")
    assert verdict.first is not None
    assert verdict.first.site == "logprobs/selected:out.0"
    assert verdict.next == (f"zkl-debug diff {tmp_path / 'a'} {tmp_path / 'b'} --html report.html",)


@pytest.mark.parametrize("width", [40, 60, 120])
def test_the_report_fits_a_narrow_window(width: int, tmp_path: Path) -> None:
    changed = Model()
    changed.scale.factor = changed.scale.factor * 2
    verdict = diff_captures(captured(tmp_path / "train", Model()), captured(tmp_path / "gen", changed))
    stream = io.StringIO()
    print_report(verdict, Console(file=stream, width=width))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert any("scale:out" in line for line in lines), "a site is not broken into columns of a few letters"
    assert "last:out" in stream.getvalue()


def test_every_error_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["repair", str(tmp_path)], ["bisect", "steps", "--bed", "none"], ["logprobs", str(tmp_path)]):
        with pytest.raises(SystemExit) as stop:
            cli.main([*arguments, "--json"])
        said = capsys.readouterr()
        assert stop.value.code in (2, 3)
        assert "\nnext: " in said.err, said.err
        assert json.loads(said.out)["next"]


def test_a_program_that_failed_early_is_not_told_of_models(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zkl_debug.cli.main", "capture", "--side", "x", "--out", str(tmp_path / "c"), "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", "raise SystemExit(7)"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7
    assert "ended with status 7" in done.stderr.replace("\n", " ")
