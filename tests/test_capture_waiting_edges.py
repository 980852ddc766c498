"""Sites that wait in programs that are not as even as most: other paths, lengths and ends of frames than before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from graph_fakes import WIDTH, FakeKernels, Model, copy_to, digests, recorded_model, rows_of, steps_of
from test_capture_waiting import Blocks, Scale, batches, issued, moved, same, score, watching
from torch import nn

from zkl_debug.capture import postponed
from zkl_debug.capture.api import Capture
from zkl_debug.capture.device import Pending
from zkl_debug.capture.frame import OpenFrame
from zkl_debug.capture.rows import FrameRows, Sketch
from zkl_debug.capture.twins import AUDITS, END, UNPROVEN, Pair, Twins
from zkl_debug.digest import digest_array
from zkl_debug.engines.megatron.frames import StepRequests
from zkl_debug.engines.megatron.labels_dynamic import record_decode
from zkl_debug.schema import Phase
from zkl_debug.store.manifest import read_json
from zkl_debug.store.reader import open_capture
from zkl_debug.store.rest import rest_path

BEHIND = "logprobs/log_softmax:out.0"


def step(model: Model, capture: Capture, tokens: list[int], sample: int = 0) -> torch.Tensor:
    """A decode step of a graph, keyed by a sketch; returns what follows the model."""

    def rows() -> FrameRows:
        made = rows_of(tokens, 4)
        made.rows["sample"] = sample
        return made

    capture.next_rows(Sketch(Phase.DECODE, 4, len(tokens), rows))
    model(torch.tensor([tokens]))
    return model.table[torch.tensor(tokens)] * 7


def test_a_frame_that_was_put_aside_keeps_sites_that_cannot_be_read_together(tmp_path: Path) -> None:
    """Where a device has no launch for many, each is read by itself: into its own frame, not into the one that runs."""
    model, steps = Model(), steps_of(12)
    capture = recorded_model(model, tmp_path / "c")
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
    capture = recorded_model(model, tmp_path / "c")
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
    capture = recorded_model(model, tmp_path / "c")
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


def test_a_frame_before_one_that_is_left_out_is_finished_first(tmp_path: Path) -> None:
    """Nobody sees the end of a forward that runs none of the wanted requests, nor what it writes over."""
    model, steps = Model(), steps_of(14)
    capture = recorded_model(model, tmp_path / "c", requests=1)
    sampled = torch.zeros(4, WIDTH)
    for number, tokens in enumerate(steps):
        logits = step(model, capture, tokens, sample=int(number % 4 == 0 and number > 7))
        copy_to(sampled.data, logits)
        if capture.session.frame is not None:
            capture.record(BEHIND, sampled)
        if number == 4:
            capture.session.flush()
    capture.__exit__(None, None, None)
    kept = [tokens for number, tokens in enumerate(steps) if number % 4 or number <= 7]
    want = np.concatenate([digest_array(model.table[tokens].numpy() * 7) for tokens in kept])
    assert np.array_equal(digests(tmp_path / "c")[BEHIND], want)


@pytest.mark.parametrize("how", ["never", "counted", "moved"])
def test_labels_that_wait_tell_what_is_written_before_they_are_read(how: str, tmp_path: Path) -> None:
    model, steps = Model(), steps_of(12)
    capture = recorded_model(model, tmp_path / "c")
    capture.session.kernels.takes = lambda tensor: tensor is not None  # type: ignore[method-assign]
    every = np.arange(4)
    writes: dict[str, Callable[[torch.Tensor], object]] = {"never": torch.clone, "counted": torch.neg_, "moved": moved}
    for number, tokens in enumerate(steps):
        log_probs = step(model, capture, tokens)
        new = torch.tensor([number % WIDTH, 1, 2, 3])
        requests = StepRequests(every, every, every, np.zeros(4, np.int64))
        assert record_decode(capture, requests, new, log_probs.gather(1, new[:, None])[:, 0], log_probs)
        if number == 4:
            capture.session.flush()
        if number == 8:
            writes[how](new)
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as found:
        probe = found.manifest["probe"]
        rows = found.sites["logprobs/selected:out.0"].digest.shape[0]
    assert probe["ok"] == (how == "never")
    if how == "never":
        assert rows == 4 * len(steps)
    else:
        assert "logprobs/selected:out.0" in probe["errors"][0]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_batch_first_tensor_beside_rows_that_come_first(at_once: bool, tmp_path: Path) -> None:
    """The rows of a frame are its first token slots, but not the first rows of a tensor that has the batch outside."""
    model = Blocks(1)
    capture = watching(tmp_path / "c", model, at_once=at_once)
    want = []
    for tokens in batches(5):
        with torch.inference_mode():
            score(model, capture, tokens, (1, 1))
            value = model.table[torch.from_numpy(tokens)] + 1
            capture.record(BEHIND, value)
        want.append(digest_array(value[:, 0].numpy()))
        capture.session.flush()
    capture.__exit__(None, None, None)
    assert np.array_equal(digests(tmp_path / "c")[BEHIND], np.concatenate(want))


class Beside(Model):
    """Runs its last layer once more, behind the graph."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        y = super().forward(input_ids).clone()
        self.layers[1](y)
        return y


def test_a_module_beside_a_graph_of_it_has_its_name_in_every_frame(tmp_path: Path) -> None:
    """Whether it waits or not, what ran by itself is the first occurrence, and the graph the second."""
    model, steps = Beside(), steps_of(12)
    capture = recorded_model(model, tmp_path / "c")
    for tokens in steps:
        step(model, capture, tokens)
        capture.session.flush()
    capture.__exit__(None, None, None)
    got = digests(tmp_path / "c")
    for name, factor in (("layers.1:out", 18), ("layers.1#1:out", 6)):
        want = np.concatenate([digest_array(model.table[tokens].numpy() * factor) for tokens in steps])
        assert np.array_equal(got[name], want)


def test_a_capture_at_rest_tells_what_was_written_before_it_was_read(tmp_path: Path) -> None:
    """Its process may be ended there, and what was told then is all that will be."""
    model = Blocks()
    capture = watching(tmp_path / "c", model)
    for number, tokens in enumerate(batches(9)):
        model.blocks[1].mlp.write = (lambda x: x.add_(1)) if number == 7 else None
        score(model, capture, tokens)
        capture.rest()
        told = read_json(rest_path(tmp_path / "c", 0))["facts"]["probe"]
        assert told["ok"] == (number < 7)
        capture.wake()
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as found:
        assert found.manifest["probe"] == told
    assert len(told["errors"]) == 1


def test_frames_of_a_long_generation_are_read_out_while_it_runs(tmp_path: Path) -> None:
    """Also where each has something on the device when the one before it is finished."""
    model = Beside()
    capture = recorded_model(model, tmp_path / "c")
    most = 0
    for tokens in steps_of(120):
        step(model, capture, tokens)
        batch = capture.session.read_out._batch
        most = max(most, 0 if batch is None else len(batch))
    capture.__exit__(None, None, None)
    assert most < 20


def written(_module: nn.Module, args: tuple[torch.Tensor, ...], _output: torch.Tensor) -> None:
    args[0].data.add_(1)


def test_what_was_read_early_for_its_size_is_no_proof_for_shorter_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an operator read was as it had been when a long frame was read behind it; then it is written over."""
    monkeypatch.setattr(postponed, "MOST_BYTES_OF_PARTS", 3 * 2 * 5 * WIDTH * 4 - 1)
    for folder, options in (("a", {"at_once": True}), ("b", {})):
        model = Blocks()
        capture = watching(tmp_path / folder, model, **options)
        handle = model.blocks[1].mlp.down.register_forward_hook(written)
        for number, tokens in enumerate(batches(12)):
            score(model, capture, *((tokens, (5, 3)) if number < 6 else (tokens[:, :1], (1, 1))))
            capture.session.flush()
        handle.remove()
        capture.__exit__(None, None, None)
    assert same(tmp_path / "a", tmp_path / "b")


def test_a_forward_that_is_not_observed_writes_over_nothing_that_waits(tmp_path: Path) -> None:
    model, steps = Model(), steps_of(16)
    capture = recorded_model(model, tmp_path / "c")
    session, sampled = capture.session, torch.zeros(4, WIDTH)
    for number, tokens in enumerate(steps):
        session.enabled = number != 10
        logits = step(model, capture, tokens)
        copy_to(sampled.data, logits)  # as a replay writes: torch does not count it
        capture.record(BEHIND, sampled)
        if number == 5:
            session.flush()
    capture.__exit__(None, None, None)
    seen = [tokens for number, tokens in enumerate(steps) if number != 10]
    want = np.concatenate([digest_array(model.table[tokens].numpy() * 7) for tokens in seen])
    assert np.array_equal(digests(tmp_path / "c")[BEHIND], want)


def test_a_site_read_behind_another_part_than_it_was_compared_at_is_an_error(tmp_path: Path) -> None:
    """The part it waits for does not run: by the end of the next one it may have been written over."""
    model = Blocks()
    capture = watching(tmp_path / "c", model)
    attn = model.blocks[1].attn
    for number, tokens in enumerate(batches(20)):
        model.blocks[1].attn = cast("Scale", nn.Identity()) if number == 12 else attn
        score(model, capture, tokens)
        capture.session.flush()
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as found:
        probe = found.manifest["probe"]
    assert not probe["ok"]
    assert "never been compared: layers.0:out" in probe["errors"][0]


def test_a_program_that_leaves_parts_out_from_the_beginning_is_none(tmp_path: Path) -> None:
    steps = batches(24)
    for folder, options in (("a", {"at_once": True}), ("b", {})):
        model = Blocks()
        capture = watching(tmp_path / folder, model, **options)
        attn = model.blocks[1].attn
        for number, tokens in enumerate(steps):
            # Both ways are seen before anything waits: frames of either length are looked at.
            model.blocks[1].attn = cast("Scale", nn.Identity()) if number % 2 else attn
            score(model, capture, tokens, (5, 2 + number % 2))
            if number % 2 or number > 3:
                capture.session.flush()
        capture.__exit__(None, None, None)
    assert same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(("bucket", "audits"), [(4, AUDITS), (-1, 1)])
def test_behind_a_model_of_graphs_one_equal_reading_is_not_enough(bucket: int, audits: int) -> None:
    """What waits there may lie in memory of a graph that only some of the next steps replay."""
    twins, zeros = Twins(), [np.zeros((4, 2), np.uint64)]
    for _ in range(audits):
        frame = OpenFrame(1, rows_of([1, 2], bucket), parts=bucket < 0, fresh=True)
        frame.pairs.append(Pair("a:out", END, Pending(0, 0, 2), Pending(0, 2, 2)))
        assert "a:out" not in twins.until_end(frame.kind, 1)
        frame.judge(twins, zeros)
    assert "a:out" in twins.until_end(frame.kind, 1)
    assert not twins.is_fresh(frame.kind, frame.shape)


def test_readings_that_prove_nothing_are_not_made_for_ever(tmp_path: Path) -> None:
    """Where every step is written before the next one runs, none shows what the next one writes over."""
    model = Model()
    capture = recorded_model(model, tmp_path / "c")
    waiting = []
    for tokens in steps_of(40):
        capture.record(BEHIND, step(model, capture, tokens))
        assert capture.session.frame is not None
        waiting.append(len(capture.session.frame.waiting))
        capture.session.flush()
    capture.__exit__(None, None, None)
    assert waiting == [1] * UNPROVEN + [0] * (40 - UNPROVEN)


def test_a_site_that_has_to_be_read_by_itself_leaves_the_others_together(tmp_path: Path) -> None:
    """A tensor that cannot be seen as rows without a copy is read so; what waits with it is one launch."""
    steps = batches(10)
    found = {}
    for folder, options in (("a", {"at_once": True}), ("b", {})):
        model = Blocks()
        capture = watching(tmp_path / folder, model, **options)
        alone = torch.arange(5 * 2 * WIDTH, dtype=torch.float32).view(WIDTH, 2, 5).permute(2, 1, 0)
        model.blocks[1].attn.register_forward_hook(
            lambda *_, c=capture, t=alone: c.record("layers.1.attn/turned:out.0", t)
        )
        launches = issued(capture)
        for tokens in steps:
            score(model, capture, tokens)
            capture.session.flush()
        capture.__exit__(None, None, None)
        found[folder] = launches[-8:]
    assert same(tmp_path / "a", tmp_path / "b")
    assert sorted(found["b"]) == [1, 2, 2, 2, 2, 2, 2, 2]


def test_what_sites_take_is_worked_out_before_they_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the frame that compares their readings; the first in which they wait only issues."""
    made: list[int] = []
    several = FakeKernels.several

    def counted(self: FakeKernels, views: Any, dests: Any, counts: Any) -> Any:
        made.append(len(views))
        return several(self, views, dests, counts)

    monkeypatch.setattr(FakeKernels, "several", counted)
    model = Blocks()
    capture = watching(tmp_path / "c", model)
    sizes = []
    for tokens in batches(4):
        score(model, capture, tokens)
        capture.session.flush()
        sizes.append(len(made))
    capture.__exit__(None, None, None)
    assert sizes == [7] * 4
    assert made == [2] * 7
