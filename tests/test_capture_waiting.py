"""Sites that wait for the end of a part of the model, or for the next forward; and rows that are worked out late."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from graph_fakes import (
    WIDTH,
    FakeKernels,
    Model,
    call,
    copy_to,
    digests,
    recorded_model,
    rows_of,
    steps_of,
    watched,
)
from torch import nn

from zkl_debug.capture import postponed
from zkl_debug.capture.api import Capture
from zkl_debug.capture.rows import FrameRows, Sketch, padded_rows
from zkl_debug.capture.twins import END, RECHECK
from zkl_debug.digest import digest_array
from zkl_debug.schema import Phase
from zkl_debug.store.reader import open_capture

Write = Callable[[torch.Tensor], Any]


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Mlp(nn.Module):
    """Two operators; may write over its argument between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Scale(3.0), Scale(0.5)
        self.write: Write | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if self.write is not None:
            self.write(x)
        return self.down(y)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Two parts; may write over what the first gave the second, behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Scale(2.0), Mlp()
        self.write: Write | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attn(x)
        z = self.mlp(y)
        if self.write is not None:
            self.write(y)
        return y + z  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """Blocks over a table of token vectors."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks = [Block() for _ in range(count)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = Scale(1.5)
        self.table = torch.arange(100 * WIDTH, dtype=torch.float32).view(100, WIDTH)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table[input_ids.T].contiguous()  # as it comes, its rows would be those of input_ids
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)  # type: ignore[no-any-return]


def batches(count: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 100, (2, 5)) for _ in range(count)]


def score(model: nn.Module, capture: Capture, tokens: np.ndarray[Any, Any], lengths: tuple[int, int] = (5, 3)) -> None:
    capture.next_rows(padded_rows(tokens, samples=[0, 1], lengths=list(lengths)))
    model(torch.from_numpy(tokens))


def issued(capture: Capture) -> list[int]:
    """Digests of each launch, as they are issued."""
    kernels, launches = capture.session.kernels, []
    issue = kernels.issue

    def counted(jobs: list[Any]) -> int:
        launches.append(len(jobs))
        return issue(jobs)

    kernels.issue = counted  # type: ignore[method-assign]
    return launches


def watching(folder: Path, model: nn.Module, **options: Any) -> Capture:
    return watched(cast("Model", model), folder, **options)


def scored(folder: Path, model: nn.Module, steps: list[np.ndarray[Any, Any]], **options: Any) -> list[int]:
    capture = watching(folder, model, **options)
    launches = issued(capture)
    for tokens in steps:
        score(model, capture, tokens)
        capture.session.flush()
    capture.__exit__(None, None, None)
    return launches


def same(first: Path, second: Path) -> bool:
    a, b = digests(first), digests(second)
    return set(a) == set(b) and all(np.array_equal(a[name], b[name]) for name in a)


def test_sites_of_a_part_are_read_in_one_launch_where_the_part_ends(tmp_path: Path) -> None:
    steps = batches(20)
    at_once = scored(tmp_path / "at_once", Blocks(), steps, at_once=True)
    waiting = scored(tmp_path / "waiting", Blocks(), steps)
    assert same(tmp_path / "at_once", tmp_path / "waiting")
    # Six parts and what follows them; each memory is read once, as its sites share it.
    assert len(waiting) < len(at_once) / 2
    assert waiting[-7:] == [2] * 7


def moved(x: torch.Tensor) -> None:
    """Other memory for a tensor, as what offloads activations or frees them early does."""
    x.data = torch.zeros_like(x)


ADD: dict[str, Write] = {"counted": lambda x: x.add_(1), "unseen": lambda x: x.data.add_(1), "moved": moved}


@pytest.mark.parametrize("how", ADD)
def test_what_is_written_over_behind_a_part_was_read_where_it_ended(how: str, tmp_path: Path) -> None:
    steps = batches(20)
    models = [Blocks(), Blocks()]
    for model in models:
        model.blocks[1].write = ADD[how]
    scored(tmp_path / "a", models[0], steps, at_once=True)
    scored(tmp_path / "b", models[1], steps)
    assert same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("how", ADD)
def test_a_write_that_comes_after_sites_were_trusted_is_an_error(how: str, tmp_path: Path) -> None:
    """One that torch counts is seen in its frame, as memory that is gone; another when both readings are made again."""
    model = Blocks()
    capture = watching(tmp_path / "c", model)
    for number, tokens in enumerate(batches(40)):
        model.blocks[1].mlp.write = ADD[how] if number == (RECHECK if how == "unseen" else 7) else None
        score(model, capture, tokens)
        capture.session.flush()
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as found:
        probe = found.manifest["probe"]
    assert not probe["ok"]
    assert any("layers.1.mlp:in" in text for text in probe["errors"]), probe
    assert any("--at-once" in text and ("were written" in text) == (how != "unseen") for text in probe["errors"])


def test_a_write_that_comes_with_another_shape_is_seen_before_anything_waits_in_it(tmp_path: Path) -> None:
    """Frames are judged by a thread of its own: until those of a shape are, none of their sites waits."""
    steps = batches(30)
    for folder, options in (("a", {"at_once": True}), ("b", {})):
        model = Blocks()
        capture = watching(tmp_path / folder, model, **options)
        for number, tokens in enumerate(steps):
            short = number in (9, 10, 11, 20)
            model.blocks[1].mlp.write = ADD["unseen"] if short else None
            score(model, capture, tokens, (5, 2 if short else 3))
            if number < 9:
                capture.session.flush()
        if not options:
            assert {pair[1] for pair in capture.session.twins.known if pair[2] == END} >= {"layers.1.mlp:out"}
        capture.__exit__(None, None, None)
    assert same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("how", ADD)
def test_a_write_that_always_comes_is_no_error(how: str, tmp_path: Path) -> None:
    steps = batches(40)
    models = [Blocks(), Blocks()]
    for model in models:
        model.blocks[1].mlp.write = ADD[how]
    scored(tmp_path / "a", models[0], steps, at_once=True)
    scored(tmp_path / "b", models[1], steps)
    assert same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(("most", "most_bytes"), [(1, 1 << 30), (2, 1 << 30), (32, 1), (32, 3 * 10 * WIDTH * 4)])
def test_parts_of_many_or_large_sites_are_read_in_between(
    most: int, most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postponed, "MOST", most)
    monkeypatch.setattr(postponed, "MOST_BYTES_OF_PARTS", most_bytes)
    steps = batches(12)
    scored(tmp_path / "a", Blocks(), steps, at_once=True)
    model = Blocks()
    capture = watching(tmp_path / "b", model)
    for tokens in steps:
        score(model, capture, tokens)
        frame = capture.session.frame
        assert frame is not None
        assert not frame.waiting
        capture.session.flush()
    capture.__exit__(None, None, None)
    assert same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("part", ["layers.1.attn", "layers.1.mlp.up"])
def test_what_runs_on_another_stream_is_read_there(part: str, tmp_path: Path) -> None:
    """A whole part of a block, or an operator of one."""
    steps = batches(12)
    scored(tmp_path / "a", Blocks(), steps, at_once=True)
    model = Blocks()
    capture = watching(tmp_path / "b", model)
    session, kernels = capture.session, cast("FakeKernels", capture.session.kernels)
    followed: list[tuple[int, int]] = []
    kernels.stream = lambda: (0, int(part in session.path))  # type: ignore[method-assign]
    kernels.follow = followed.append  # type: ignore[method-assign, assignment]
    for tokens in steps:
        score(model, capture, tokens)
        session.flush()
    capture.__exit__(None, None, None)
    assert same(tmp_path / "a", tmp_path / "b")
    waited = {pair[1] for pair in session.twins.known if pair[2] == END}
    assert f"{part}:in" not in waited  # passed when the part is on the path
    assert {"layers.0.attn:in", "layers.1.mlp.down:out", "norm:out"} <= waited
    assert not followed


def test_what_waits_is_read_behind_what_it_waits_for_whatever_the_stream(tmp_path: Path) -> None:
    model = Blocks()
    capture = watching(tmp_path / "c", model)
    kernels = cast("FakeKernels", capture.session.kernels)
    followed: list[tuple[int, int]] = []
    kernels.follow = followed.append  # type: ignore[method-assign, assignment]
    lead, led = kernels.lead, []

    def leading(stream: tuple[int, int]) -> None:
        lead(stream)
        led.append(stream)

    kernels.lead = leading  # type: ignore[method-assign]
    handle = model.norm.register_forward_hook(lambda *_: setattr(kernels, "current", (0, 5)))
    for tokens in batches(3):
        kernels.current = (0, 3)
        score(model, capture, tokens)
        capture.session.flush()
    handle.remove()
    capture.__exit__(None, None, None)
    assert followed == led == [(0, 3)] * 3


def test_no_tensor_is_kept_longer_than_its_frame(tmp_path: Path) -> None:
    """What is worked out for a set of sites is addresses and shapes."""
    model = Blocks()
    capture = watching(tmp_path / "c", model)
    alive: list[weakref.ref[torch.Tensor]] = []
    for block in model.blocks:
        block.mlp.up.register_forward_hook(lambda _m, _a, out: alive.append(weakref.ref(out)))
    for tokens in batches(6):
        score(model, capture, tokens)
        capture.session.flush()
        assert not [ref for ref in alive if ref() is not None]
    assert len(alive) == 18
    capture.__exit__(None, None, None)


def test_frames_of_other_lengths_are_worked_out_anew(tmp_path: Path) -> None:
    model, other = Blocks(), Blocks()
    for folder, seen, options in (("a", model, {"at_once": True}), ("b", other, {})):
        capture = watching(tmp_path / folder, seen, **options)
        for number, tokens in enumerate(batches(30)):
            score(seen, capture, tokens, (5, 1 + number % 5))
            if number % 4 == 0:
                capture.session.flush()
        capture.__exit__(None, None, None)
    assert same(tmp_path / "a", tmp_path / "b")


def test_what_follows_the_model_and_is_what_it_gave_is_read_once(tmp_path: Path) -> None:
    """Logits that need no other type: they are kept, of all that was read in the model."""
    model = Blocks()
    capture = watching(tmp_path / "c", model)
    launches = issued(capture)
    behind = []
    for tokens in batches(RECHECK - 1):
        capture.next_rows(padded_rows(tokens, samples=[0, 1], lengths=[5, 5]))
        logits = model(torch.from_numpy(tokens))
        before = len(launches)
        capture.record("logprobs/log_softmax:in.0", logits)
        behind.append(len(launches) - before)
        capture.session.flush()
    capture.__exit__(None, None, None)
    assert behind == [1, *[0] * (RECHECK - 2)], "once it was seen to be the same"
    assert all(len(rows) == 10 * (RECHECK - 1) for rows in digests(tmp_path / "c").values())


# ---- behind the model, in steps that replay graphs ----------------------------------------------------------------
def sketch(tokens: list[int], made: list[int]) -> Sketch:
    def make() -> FrameRows:
        made.append(len(tokens))
        return rows_of(tokens, 4)

    return Sketch(Phase.DECODE, 4, len(tokens), make)


@pytest.mark.parametrize("overwritten", [False, True])
def test_what_follows_the_model_waits_for_the_next_forward(overwritten: bool, tmp_path: Path) -> None:
    """A site whose buffer the program writes over before that is read at once."""
    steps = steps_of(50)
    model = Model()
    capture = recorded_model(model, tmp_path / "c")
    made: list[int] = []
    sampled = torch.zeros(4, WIDTH)
    waited = 0
    for tokens in steps:
        capture.next_rows(sketch(tokens, made))
        model(torch.tensor([tokens]))
        logits = model.table[torch.tensor(tokens)] * 7
        copy_to(sampled, logits)
        capture.record("logprobs/log_softmax:in.0", logits)
        capture.record("logprobs/log_softmax:out.0", sampled)
        assert capture.session.frame is not None
        waited += len(capture.session.frame.waiting)
        if overwritten:
            sampled.add_(1)
    capture.__exit__(None, None, None)
    twins = capture.session.twins
    assert {pair[1] for pair in twins.refuted} == ({"logprobs/log_softmax:out.0"} if overwritten else set())
    # Read twice until the first frames were read out, and now and then; then left to wait.
    assert waited > (len(steps) if overwritten else 2 * len(steps) - 10)
    assert made == [4] * len(steps)
    got = digests(tmp_path / "c")
    want = np.concatenate([digest_array(model.table[tokens].numpy() * 7) for tokens in steps])
    assert np.array_equal(got["logprobs/log_softmax:in.0"], want)
    assert np.array_equal(got["logprobs/log_softmax:out.0"], want)


def test_what_is_read_one_by_one_goes_to_the_frame_it_was_passed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a set of sites cannot be one launch, and another frame is open by then."""
    monkeypatch.setattr(FakeKernels, "several", lambda *_: None)
    model, steps = Model(), steps_of(40)
    capture = recorded_model(model, tmp_path / "c")
    for tokens in steps:
        capture.next_rows(sketch(tokens, []))
        model(torch.tensor([tokens]))
        capture.record("logprobs/log_softmax:in.0", model.table[torch.tensor(tokens)] * 7)
    capture.__exit__(None, None, None)
    assert any(pair[1] == "logprobs/log_softmax:in.0" for pair in capture.session.twins.known)
    want = np.concatenate([digest_array(model.table[tokens].numpy() * 7) for tokens in steps])
    assert np.array_equal(digests(tmp_path / "c")["logprobs/log_softmax:in.0"], want)


def test_a_frame_that_is_finished_late_keeps_its_place_and_its_event(tmp_path: Path) -> None:
    model = Model()
    capture = recorded_model(model, tmp_path / "c")
    made: list[int] = []
    for number, tokens in enumerate(steps_of(12)):
        if number == 5:
            capture.event("between", {})
        if number == 8:
            capture.set_step(3)
        if number in (2, 9):
            call(model, capture, tokens, graph=False)  # its rows are told at once
            continue
        capture.next_rows(sketch(tokens, made))
        model.use_graph = True
        model(torch.tensor([tokens]))
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as found:
        frames = found.frames
        assert frames["frame"].tolist() == list(range(12))
        assert [int(g) for g in frames["graph"]] == [-1 if i in (2, 9) else 4 for i in range(12)]
        later = np.diff(frames["event_seq"].astype(int)) > 0  # the second with the step
        assert later.nonzero()[0].tolist() == [4, 7]
        assert frames["step"].tolist() == [-1] * 8 + [3] * 4
    got = digests(tmp_path / "c")["layers.1:out"].reshape(12, 4, 2)
    assert np.array_equal(got, np.stack([digest_array(model.table[tokens].numpy() * 6) for tokens in steps_of(12)]))


def test_frames_are_read_out_in_time_whatever_is_read_at_once(tmp_path: Path) -> None:
    """A step that reads a site before the one before it is finished has its digests beside that one's."""
    model = Model()
    capture = recorded_model(model, tmp_path / "c")
    batches_of = []
    submit = capture.session.read_out.submit

    def submitted() -> None:
        batch = capture.session.read_out._batch
        batches_of.append(0 if batch is None else len(batch))
        submit()

    capture.session.read_out.submit = submitted  # type: ignore[method-assign]

    def probe(*_: Any) -> None:
        x = torch.ones(4, 1, WIDTH)
        capture.record("probe:in.0", x)
        x.data.add_(1)

    model.register_forward_pre_hook(probe)
    for tokens in steps_of(120):
        capture.next_rows(sketch(tokens, []))
        model(torch.tensor([tokens]))
    assert ("probe:in.0", END) in {pair[1:] for pair in capture.session.twins.refuted}
    assert 5 <= len(batches_of) <= 9
    assert max(batches_of) <= 18
    capture.__exit__(None, None, None)


def test_rows_of_a_request_filter_are_looked_at_before_the_forward(tmp_path: Path) -> None:
    model = Model()
    capture = recorded_model(model, tmp_path / "c", requests=1)
    made: list[int] = []
    capture.next_rows(sketch([1, 2, 3], made))
    handle = model.layers[0].register_forward_pre_hook(lambda *_: made.append(-1))
    model(torch.tensor([[1, 2, 3, 0]]))
    handle.remove()
    assert made[0] == 3
    capture.__exit__(None, None, None)


def test_a_stand_in_device_is_one(tmp_path: Path) -> None:
    capture = watched(Model(), tmp_path / "c")
    assert isinstance(capture.session.kernels, FakeKernels)
    capture.__exit__(None, None, None)
