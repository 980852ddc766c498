"""Marks, taps and the decorator: what a program may say of itself, and that it costs nothing while nobody listens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zkl_debug
from zkl_debug import marks
from zkl_debug.errors import CaptureInvalid, UsageError
from zkl_debug.schema import Phase
from zkl_debug.store.reader import open_capture
from zkl_debug.store.repair import repair


@zkl_debug.tap
def scale(x: torch.Tensor, factor: float, shift: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return x * factor, x if shift is None else x + shift


@zkl_debug.tap("mix.in_order")
def mix(x: torch.Tensor) -> Any:
    return x.flip(-1)


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.inner = Inner()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.inner(self.embed(ids))
        return x


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        double, shifted = scale(x, 2.0, shift=torch.ones_like(x))
        result: torch.Tensor = mix(double) + shifted
        return result


@pytest.fixture(autouse=True)
def no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "_step", None)
    monkeypatch.setattr(marks, "_refused", None)


IDS = torch.tensor([[1, 2, 3]])


def test_tapped_functions_become_sites_of_the_module_that_calls_them(tmp_path: Path) -> None:
    model = Tiny()
    plain = model(IDS)
    with zkl_debug.capture(model, tmp_path / "c", side="train", level="payload"):  # type: ignore[operator]
        assert torch.equal(model(IDS), plain)
    with open_capture(tmp_path / "c") as capture:
        names = set(capture.sites)
        assert {f"inner/scale:{port}" for port in ("in.0", "in.1", "out.0", "out.1")} <= names
        assert {"inner/mix.in_order:in.0", "inner/mix.in_order:out.0"} <= names
        order = {name: site.meta.order for name, site in capture.sites.items()}
        assert order["inner/scale:in.0"] < order["inner/scale:out.0"] < order["inner/mix.in_order:in.0"]
    assert torch.equal(model(IDS), plain), "a tap outlives captures"


def test_marks_say_step_version_and_event(tmp_path: Path) -> None:
    model = Tiny()
    with zkl_debug.capture(model, tmp_path / "c", side="train"):  # type: ignore[operator]
        for step in range(2):
            zkl_debug.mark(step=step, weight_version=step + 10)
            model(IDS)
            zkl_debug.mark(event="refit", tensors=3)
    with open_capture(tmp_path / "c") as capture:
        assert list(capture.frames["step"]) == [0, 1]
        assert list(capture.frames["weight_version"]) == [10, 11]
        refits = [event for event in capture.events if event.name == "refit"]
        assert [event.detail for event in refits] == [{"tensors": 3}] * 2
    with zkl_debug.capture(model, tmp_path / "later", side="train"):  # type: ignore[operator]
        model(IDS)
    with open_capture(tmp_path / "later") as capture:
        assert list(capture.frames["step"]) == [1], "a capture that begins later is told the step"
    with pytest.raises(UsageError):
        marks.tap("a:b")(scale)


def cyclic() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["itself"] = found
    return found


NOT_MARKS: list[tuple[dict[str, Any], str]] = [
    ({}, "without step and event"),
    ({"step": -1}, "step -1"),
    ({"step": 2**31}, "step 2147483648"),
    ({"step": 10**5000}, "step of type int"),
    ({"step": 1.5}, "step 1.5"),
    ({"step": "x"}, "step 'x'"),
    ({"step": torch.ones(2)}, "step of type Tensor"),
    ({"step": 3, "weight_version": 2**70}, "weight_version 1180591620717411303424"),
    ({"event": "refit", "weight_version": 3}, "without a step"),
    ({"event": 5}, "name is int"),
    ({"event": "refit", "facts": cyclic()}, "facts of event 'refit'"),
]


@pytest.mark.parametrize(("mark", "told"), NOT_MARKS, ids=[told for _, told in NOT_MARKS])
def test_a_mark_that_cannot_be_taken_neither_stops_the_program_nor_spoils_a_capture(
    mark: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Tiny()
    plain = model(IDS)
    zkl_debug.mark(step=7)
    with zkl_debug.capture(model, tmp_path / "c", side="train") as cap:  # type: ignore[operator]
        zkl_debug.mark(**mark)
        if mark.keys() <= {"step", "weight_version"} and mark:
            cap.set_step(**mark)
        assert torch.equal(model(IDS), plain)
    assert capsys.readouterr().err.count("a mark was left out, the program goes on: ") == 1
    with zkl_debug.capture(model, tmp_path / "later", side="train"):  # type: ignore[operator]
        model(IDS)
    for name in ("c", "later"):
        with open_capture(tmp_path / name) as capture:
            assert list(capture.frames["step"]) == [7]
            notes = [note for note in capture.manifest["notes"] if "left out, the first: " in note]
            assert bool(notes) is (name == "c" or "step" in mark), "a later capture hears that the step is an old one"
            assert all(told in note for note in notes)
            told_of = name == "c" and "weight_version" in mark and "event" in mark
            assert [event.name for event in capture.events] == ["refit"] * told_of
    with pytest.raises(UsageError), zkl_debug.capture(model, tmp_path / "s", side="train", strict=True):  # type: ignore[operator]
        zkl_debug.mark(**mark)


def test_numbers_of_other_libraries_are_steps(tmp_path: Path) -> None:
    model = Tiny()
    with zkl_debug.capture(model, tmp_path / "c", side="train"):  # type: ignore[operator]
        for step in (np.int64(1), torch.tensor(2), 3.0, True):
            zkl_debug.mark(step=step)  # type: ignore[arg-type]
            model(IDS)
    with open_capture(tmp_path / "c") as capture:
        assert list(capture.frames["step"]) == [1, 2, 3, 1]


def test_a_decorated_function_is_captured_call_by_call(tmp_path: Path) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = Tiny()

        @zkl_debug.captured("self.model", tmp_path / "c", side="train")
        def run(self, ids: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.model(ids)
            return result

    trainer = Trainer()
    assert torch.equal(trainer.run(IDS), trainer.run(IDS))
    for name in ("c", "c.call2"):
        with open_capture(tmp_path / name) as capture:
            assert (capture.side, len(capture.frames)) == ("train", 1)
    wrong = marks.captured("nothing.model", tmp_path / "d")(lambda ids: ids)
    with pytest.raises(UsageError, match="no argument nothing"):
        wrong(IDS)


def test_marks_cost_no_import() -> None:
    code = (
        "import sys, zkl_debug\nzkl_debug.mark(step=1)\nf = zkl_debug.tap(len)\nassert f('abc') == 3\n"
        "assert not {'torch', 'numpy', 'h5py'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# bounds and rest ------------------------------------------------------------------------------------------------------


def generated(capture: Any, samples: list[int], position: int) -> None:
    from zkl_debug.capture.rows import padded_rows

    rows = padded_rows(
        torch.tensor([[1, 2, 3]] * len(samples)).numpy(),
        samples=samples,
        lengths=[3] * len(samples),
        phase=Phase.PREFILL,
    )
    capture.next_rows(rows)
    capture.model(torch.tensor([[1, 2, 3]] * len(samples)) + position)


def test_requests_bound_what_is_recorded(tmp_path: Path) -> None:
    model = Tiny()
    with zkl_debug.capture(model, tmp_path / "c", side="gen", requests=3) as cap:  # type: ignore[operator]
        for samples in ([0, 1], [2, 3], [0, 3], [3], [4], [2]):
            generated(cap, samples, 0)
        model(IDS)
    with open_capture(tmp_path / "c") as capture:
        assert len(capture.frames) == 5, "frames without one of the first three are left out; scoring is not"
        assert any("2 forwards ran none" in note for note in capture.manifest["notes"])


KILLED = """
import os, sys, torch, zkl_debug
sys.path.insert(0, {tests!r})
from test_marks import Tiny, IDS
cap = zkl_debug.capture(Tiny(), {out!r}, side="gen")
cap.__enter__()
cap.model(IDS)
cap.rest()
if {more}:
    cap.wake()
    cap.model(IDS)
    if {flushed}:
        cap.session.flush()
os._exit(9)
"""


@pytest.mark.parametrize(("more", "flushed"), [(False, False), (True, False), (True, True)])
def test_a_process_that_ends_while_it_rests_leaves_a_whole_capture(more: bool, flushed: bool, tmp_path: Path) -> None:
    out = tmp_path / "c"
    code = KILLED.format(tests=str(Path(__file__).parent), out=str(out), more=more, flushed=flushed)
    assert subprocess.run([sys.executable, "-c", code], timeout=120, env=os.environ).returncode == 9
    repair(out)
    with open_capture(out, partial=True) as capture:
        assert capture.manifest["complete"] is not more
        assert len(capture.frames) == 1 + flushed
        if not more:
            assert capture.manifest["probe"]["ok"]
            assert any("rested" in note for note in capture.manifest["notes"])
    assert not list(out.glob("*.rest.json"))
    if more:
        with pytest.raises(CaptureInvalid):
            open_capture(out)
