"""Forwards that do not come to their end: interrupted, failed, or ended by the program from within."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_fakes import digests
from test_capture_waiting import Blocks, batches, score, watching
from torch import nn

from zkl_debug.capture.api import Capture
from zkl_debug.capture.rows import Sketch, padded_rows
from zkl_debug.schema import Phase
from zkl_debug.store.reader import open_capture

THEN: dict[str, Callable[[Capture], object]] = {
    "the next": lambda _capture: None,
    "an event": lambda capture: capture.event("reward"),
    "a step": lambda capture: capture.set_step(1),
    "a flush": lambda capture: capture.session.flush(),
    "rest": lambda capture: rest(capture),
    "one that is not seen": lambda capture: unseen(capture),
}


def rest(capture: Capture) -> None:
    capture.rest()
    capture.wake()


def unseen(capture: Capture) -> None:
    capture.session.enabled = False
    capture.model(torch.zeros((2, 5), dtype=torch.int64))
    capture.session.enabled = True


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("then", THEN)
def test_a_forward_that_was_interrupted_is_left_out(told: bool, then: str, tmp_path: Path) -> None:
    """The program goes on and refills its batch: it is not taken for that, and what waited in it is no error."""
    model = Blocks()
    capture = watching(tmp_path / "c", model)
    tokens = np.zeros((2, 5), np.int64)

    def stop(*_args: Any) -> None:
        if tokens[0, 0] == 3:
            raise KeyboardInterrupt

    model.blocks[1].mlp.up.register_forward_hook(stop)
    for number in range(6):
        tokens[:] = number
        make = functools.partial(padded_rows, tokens, samples=[0, 1], lengths=[5, 5])
        capture.next_rows(make() if told else Sketch(Phase.SCORE, -1, 10, make, places="the same"))
        try:
            model(torch.from_numpy(tokens.copy()))
        except KeyboardInterrupt:
            tokens[:] = 4
            THEN[then](capture)
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as found:
        assert found.manifest["probe"] == {"ok": True, "errors": []}
        assert found.manifest["notes"] == ["1 forward left out: interrupted before the end"]
        assert found.rows["token"].tolist() == [n for n in (0, 1, 2, 4, 5) for _ in range(10)]
        assert np.unique(found.rows["frame"]).tolist() == [0, 1, 2, 3, 4]
        for site in found.sites.values():
            assert len(np.unique(np.array(site.digest), axis=0)) == 5, "and no site of one that another ran"


class Direct(Blocks):
    """Is called without the way round that torch takes to compiled modules."""

    __call__: Callable[..., Any] = nn.Module._call_impl


class Silent(Blocks):
    """Gives nothing back."""

    def forward(self, input_ids: torch.Tensor) -> None:  # type: ignore[override]
        super().forward(input_ids)


def test_a_model_that_gives_nothing_back_has_not_failed(tmp_path: Path) -> None:
    capture = watching(tmp_path / "c", model := Silent())
    for tokens in batches(4):
        score(model, capture, tokens)
        assert capture.session.frame is not None
        assert not capture.session.frame.failed
    capture.__exit__(None, None, None)


@pytest.mark.parametrize("kind", [Blocks, Direct])
@pytest.mark.parametrize("thread", [False, True])
def test_an_event_in_the_middle_of_a_forward_ends_its_frame(thread: bool, kind: type[Blocks], tmp_path: Path) -> None:
    """Which is no interrupt, whoever tells it: the model runs."""
    model = kind()
    capture = watching(tmp_path / "c", model)

    def tell(*_args: Any) -> None:
        if thread:
            teller = threading.Thread(target=capture.event, args=("now",))
            teller.start()
            teller.join()
        else:
            capture.event("now")

    model.blocks[1].mlp.register_forward_hook(tell)
    for tokens in batches(3):
        score(model, capture, tokens)
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as found:
        assert found.manifest["notes"] == []
        assert len(found.sites["layers.0.mlp:out"].digest) == 3 * 8
    assert capture.session.broken_off == 0


@pytest.mark.parametrize("failed", [False, True])
def test_a_forward_that_raises_is_not_what_its_shape_is_judged_by(failed: bool, tmp_path: Path) -> None:
    """It did not come to where this shape, unlike the others, is written over."""
    fails = [False]

    def stop(*_args: Any) -> None:
        if fails[0]:
            raise ValueError("not this time")

    def write(_module: nn.Module, args: tuple[torch.Tensor, ...], _output: Any) -> None:
        if args[0].shape[0] == 5:
            args[0].numpy()[:] = 0

    for folder, at_once in (("c", False), ("d", True)):
        model = Blocks()
        seen = watching(tmp_path / folder, model, at_once=at_once)
        blocks = model.blocks
        blocks[0].attn.register_forward_hook(stop)
        blocks[2].mlp.down.register_forward_hook(write)
        for number, tokens in enumerate(batches(14)):
            short = number < 8
            some = tokens[:, :4].copy() if short else tokens
            fails[0] = failed and number == 8
            seen.next_rows(padded_rows(some, samples=[0, 1], lengths=[some.shape[1]] * 2))
            try:
                model(torch.from_numpy(some))
            except ValueError:
                assert fails[0]
            seen.session.flush()
        seen.__exit__(None, None, None)
    got, wanted = digests(tmp_path / "c"), digests(tmp_path / "d")
    assert all(np.array_equal(got[name], rows) for name, rows in wanted.items())
