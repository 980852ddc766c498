"""Where the rows of a forward lie is told before they are worked out."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from test_capture_waiting import Blocks, batches, watching

from zkl_debug.capture.rows import FrameRows, Sketch, padded_rows
from zkl_debug.schema import Phase


def test_rows_are_worked_out_when_the_model_is_through(tmp_path: Path) -> None:
    """Where they lie is known from forwards like it: nothing before the end of the model asks for more."""
    model = Blocks()
    capture = watching(tmp_path / "c", model)
    through: list[bool] = []
    inside: list[bool] = []
    model.norm.register_forward_hook(lambda *_: through.append(True))
    for number, tokens in enumerate(batches(40)):
        rows = padded_rows(tokens, samples=[0, 1], lengths=[5, 5])

        def make(rows: FrameRows = rows, number: int = number) -> FrameRows:
            inside.append(len(through) == number)
            return rows

        capture.next_rows(Sketch(Phase.SCORE, -1, 10, make, places="5 and 5"))
        model(torch.from_numpy(tokens))
        frame = capture.session.frame
        assert frame is not None
        assert len(frame.twins) <= 2, "of the tensors that were read, two are kept"
    capture.__exit__(None, None, None)
    assert inside == [True] + [False] * 39, "where they lie was told by the first"
    assert capture.session.errors == []


def _given(rows: FrameRows) -> FrameRows:
    return rows


@pytest.mark.parametrize("asked", [False, True])
def test_rows_that_lie_elsewhere_than_they_were_told_to_are_refused(asked: bool, tmp_path: Path) -> None:
    """Also where somebody asked for them in the middle of the forward, as those do who take experts apart."""
    model = Blocks()
    capture = watching(tmp_path / "c", model, strict=False)

    def ask(*_args: Any) -> None:
        frame = capture.session.frame
        assert not asked or frame is None or frame.rows.n_rows > 0

    model.blocks[1].register_forward_hook(ask)
    for lengths in ([5, 5], [5, 3]):
        tokens = batches(1)[0]
        rows = padded_rows(tokens, samples=[0, 1], lengths=lengths)
        capture.next_rows(Sketch(Phase.SCORE, -1, sum(lengths), functools.partial(_given, rows), places="the same"))
        model(torch.from_numpy(tokens))
    capture.__exit__(None, None, None)
    assert "rows of a forward are not where they were told to be" in capture.session.errors[0]
