"""Sites that wait in programs that are not as even as most: other paths, lengths and ends of frames than before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_fakes import WIDTH, Model, copy_to, digests, rows_of, steps_of, warmup, watched
from test_capture_waiting import Blocks, batches, same, score, watching

from zkl_debug.capture import postponed
from zkl_debug.capture.api import Capture
from zkl_debug.capture.rows import Sketch
from zkl_debug.capture.twins import END
from zkl_debug.digest import digest_array
from zkl_debug.schema import Phase

BEHIND = "logprobs/log_softmax:out.0"


def generating(model: Model, folder: Path) -> Capture:
    """A capture that has seen the model's graph recorded."""
    capture = watched(model, folder)
    capture.next_rows(warmup())
    model.use_graph = True
    model(torch.zeros(1, 4, dtype=torch.int64))
    return capture


def step(model: Model, capture: Capture, tokens: list[int]) -> torch.Tensor:
    """A decode step of a graph, keyed by a sketch; returns what follows the model."""
    capture.next_rows(Sketch(Phase.DECODE, 4, len(tokens), lambda: rows_of(tokens, 4)))
    model(torch.tensor([tokens]))
    return model.table[torch.tensor(tokens)] * 7


def test_a_frame_that_was_put_aside_keeps_sites_that_cannot_be_read_together(tmp_path: Path) -> None:
    """Where a device has no launch for many, each is read by itself: into its own frame, not into the one that runs."""
    model, steps = Model(), steps_of(12)
    capture = generating(model, tmp_path / "c")
    capture.session.kernels.several = lambda *_: None  # type: ignore[method-assign]
    for number, tokens in enumerate(steps):
        capture.record(BEHIND, step(model, capture, tokens))
        if number == 4:
            capture.session.flush()
    capture.__exit__(None, None, None)
    got = digests(tmp_path / "c")
    assert not [name for name in got if "#" in name]
    want = np.concatenate([digest_array(model.table[tokens].numpy() * 7) for tokens in steps])
    assert np.array_equal(got[BEHIND], want)


def test_a_site_that_grows_beyond_what_may_wait_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postponed, "MOST_BYTES_OF_PARTS", 2 * 5 * WIDTH * 4)
    for folder, options in (("a", {"at_once": True}), ("b", {})):
        model = Blocks()
        capture = watching(tmp_path / folder, model, **options)
        for tokens in batches(8):
            score(model, capture, tokens)
            capture.session.flush()
        longer = np.concatenate([batches(1)[0]] * 2, axis=1)
        score(model, capture, longer, (10, 10))
        capture.__exit__(None, None, None)
    assert same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("ended", ["flush", "event", "set_step", "eager"])
def test_a_frame_that_no_forward_followed_is_no_proof(ended: str, tmp_path: Path) -> None:
    """Read before anything could write over them, its sites were the same: not so those of one that is read later."""
    model, steps = Model(), steps_of(20)
    capture = generating(model, tmp_path / "c")
    ends: dict[str, Callable[[], None]] = {
        "flush": capture.session.flush,
        "event": lambda: capture.event("step", {}),
        "set_step": lambda: capture.set_step(1),
        "eager": capture.session.end_frame,  # as before a forward without graphs
    }
    sampled = torch.zeros(4, WIDTH)
    for number, tokens in enumerate(steps):
        sampled.data.zero_()  # as a replay writes: torch does not count it
        logits = step(model, capture, tokens)
        copy_to(sampled, logits)
        capture.record(BEHIND, sampled)
        if number < 6:
            ends[ended]()
        if number == 6:
            capture.session.flush()
    capture.__exit__(None, None, None)
    want = np.concatenate([digest_array(model.table[tokens].numpy() * 7) for tokens in steps])
    assert np.array_equal(digests(tmp_path / "c")[BEHIND], want)


@pytest.mark.parametrize("how", ["refused", "stream"])
def test_occurrences_of_a_site_keep_their_order(how: str, tmp_path: Path) -> None:
    """Also where the first waits and the second may not: refused by the thread that judges, or on another stream."""
    model, steps = Model(), steps_of(8)
    capture = generating(model, tmp_path / "c")
    for tokens in steps[:-1]:
        capture.record(BEHIND, step(model, capture, tokens))
        if tokens is steps[3]:
            capture.session.flush()
    capture.record(BEHIND, first := step(model, capture, steps[-1]))
    frame = capture.session.frame
    assert frame is not None
    assert [site.name for site in frame.waiting] == [BEHIND]
    if how == "refused":
        capture.session.twins.refuse(frame.kind, BEHIND, END)
    else:
        capture.session.kernels.current = (0, 1)  # type: ignore[attr-defined]
    capture.record(BEHIND, first + 1)
    capture.__exit__(None, None, None)
    got = digests(tmp_path / "c")
    assert np.array_equal(got[BEHIND][-4:], digest_array(first.numpy()))
    assert np.array_equal(got["logprobs/log_softmax#1:out.0"], digest_array((first + 1).numpy()))
