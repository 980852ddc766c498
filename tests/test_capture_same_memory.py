"""Views that begin at the same place, modes that rely on nothing, tensors that went to another device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from graph_fakes import WIDTH, FakeGraph, FakeKernels, copy_to, digests, rows_of, run, steps_of, warmup, watched
from test_capture_waiting import Blocks, batches, score, watching
from torch import nn

from zkl_debug.store.reader import open_capture


class Seen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.tall = Seen(), Seen()
        self.table = torch.arange(100 * WIDTH * WIDTH, dtype=torch.float32).view(100, WIDTH, WIDTH)
        self.static = torch.zeros(4, 1, WIDTH, WIDTH)
        self.graph: FakeGraph | None = None
        self.use_graph = False

    def body(self) -> None:
        run(lambda: None)
        self.wide(self.static[:, :, :2, :3])
        self.tall(self.static[:, :, :3, :2])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.static.copy_(self.table[input_ids.T])
        if not self.use_graph:
            self.body()
        elif self.graph is None:
            self.graph = FakeGraph()
            self.graph.capture_begin()
            self.body()
            self.graph.capture_end()
        else:
            self.graph.replay()
        return self.static


@pytest.mark.parametrize("at_once", [False, True])
def test_views_of_other_shapes_but_the_same_strides_are_not_one_reading(at_once: bool, tmp_path: Path) -> None:
    """Only their shapes tell them apart: address, strides and the number of elements are the same."""
    for folder, graph in (("eager", False), ("graph", True)):
        model = Views()
        capture = watched(cast("Any", model), tmp_path / folder, at_once=at_once or not graph)
        model.use_graph = graph
        if graph:
            capture.next_rows(warmup())
            model(torch.zeros(1, 4, dtype=torch.int64))
        for tokens in steps_of(6):
            capture.next_rows(rows_of(tokens, 4 if graph else -1))
            model(torch.tensor([tokens]))
        capture.__exit__(None, None, None)
    want, found = digests(tmp_path / "eager"), digests(tmp_path / "graph")
    assert not np.array_equal(want["wide:in"], want["tall:in"])
    names = ("wide:in", "wide:out", "tall:in", "tall:out")
    assert [n for n in names if not np.array_equal(want[n], found[n])] == []


class Twice(nn.Module):
    """One tensor seen twice; ``write`` comes between, by something torch does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Seen(), Seen()
        self.table = torch.arange(100 * WIDTH, dtype=torch.float32).view(100, WIDTH)
        self.write = False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.table[input_ids.T].contiguous())
        if self.write:
            x.data.add_(1)
        return cast("torch.Tensor", self.second(x))


def test_what_reads_everything_at_once_is_not_at_fault_when_tensors_come_to_differ(tmp_path: Path) -> None:
    """Nothing rested on their being equal; it is what a capture that did rest on it is told to do."""
    model = Twice()
    capture = watching(tmp_path / "c", model, at_once=True)
    steps = batches(40)
    for number, tokens in enumerate(steps):
        model.write = number >= 20
        score(model, capture, tokens)
        capture.session.flush()
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as found:
        assert found.manifest["probe"] == {"ok": True, "errors": []}
        first, second = (np.array(found.sites[name].digest) for name in ("first:out", "second:in"))
    same = (first == second).all(1).reshape(len(steps), -1)
    assert same[:20].all()
    assert not same[20:].any()


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device."""

    def get_device(self) -> int:
        return 1


class Moving(Blocks):
    """Blocks whose last operator gets a tensor from another device now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table[input_ids.T].contiguous()
        for layer in self.layers:
            x = layer(x.as_subclass(Elsewhere) if self.away else x)
        return cast("torch.Tensor", self.norm(x))


def test_a_tensor_on_another_device_is_not_read_as_its_like_was(tmp_path: Path) -> None:
    """What reads it was made for the device of the one before, to which its address means nothing."""
    model = Moving()
    capture = watching(tmp_path / "c", model)
    kernels = cast("FakeKernels", capture.session.kernels)
    takes, several = kernels.takes, kernels.several
    kernels.takes = lambda tensor: takes(tensor) and tensor.get_device() < 1  # type: ignore[method-assign]
    read: list[int] = []

    def counted(views: Any, dests: Any, counts: Any) -> Callable[..., bool]:
        launch = several(views, dests, counts)

        def issue(addresses: Any, out: int) -> bool:
            read.append(len(addresses))
            return launch(addresses, out)

        return issue

    kernels.several = counted  # type: ignore[method-assign]
    for number, tokens in enumerate(batches(20)):
        model.away = number == 15
        read.clear()
        with torch.inference_mode():
            score(model, capture, tokens)
        if number >= 14:
            assert (not read) == model.away, (number, read)
        capture.session.flush()
    capture.__exit__(None, None, None)
    assert capture.session.enabled


class Discarding(nn.Module):
    """A part that gives up the memory of its first output once that was read, as recomputation does."""

    def __init__(self, discard: bool = True) -> None:
        super().__init__()
        self.first, self.second = Seen(), Seen()
        self.discard = discard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        run(lambda: copy_to(y, x * 2) if y.untyped_storage().nbytes() else None)
        y = self.first(y)
        out = torch.empty_like(x)
        run(lambda: copy_to(out, y * 3) if y.untyped_storage().nbytes() else None)
        if self.discard:
            y.untyped_storage().resize_(0)
        return cast("torch.Tensor", self.second(out))


class OneLayer(nn.Module):
    def __init__(self, discard: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"mlp": Discarding(discard)})])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = torch.ones(*input_ids.T.shape, WIDTH)
        graph = FakeGraph()
        graph.capture_begin()
        out: torch.Tensor = cast("Any", self.layers[0])["mlp"](x)
        graph.capture_end()
        return out


@pytest.mark.parametrize("discard", [False, True])
def test_memory_that_was_given_up_while_a_graph_is_recorded_is_not_read_again(discard: bool, tmp_path: Path) -> None:
    """The address of such a tensor is none, and a replay that reads there ends the program."""
    model = OneLayer(discard)
    capture = watched(cast("Any", model), tmp_path / "c")
    kernels = cast("FakeKernels", capture.session.kernels)
    job, bytes_read = kernels.job, []

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        bytes_read.append(tensor.untyped_storage().nbytes())
        return job(tensor, *args, **kwargs)

    kernels.job = counted  # type: ignore[method-assign]
    capture.next_rows(warmup())
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert capture.session.enabled
    capture.__exit__(None, None, None)
    assert 0 not in bytes_read
    # Argument of the part, what it made in between and its output: each read when it is there, and again at the end.
    assert len(bytes_read) == (5 if discard else 6)


class Thrice(Twice):
    """Something that was not seen before sees the tensor in between, when it is written; in the end it is no more."""

    def __init__(self) -> None:
        super().__init__()
        self.between = Seen()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.table[input_ids.T].contiguous())
        if self.write:
            x.data.add_(1)
            x = self.between(x)
        self.second(x)
        x.data.zero_()  # no site of it may wait
        return cast("torch.Tensor", x)


def test_what_another_site_read_meanwhile_is_a_reason_to_read_again(tmp_path: Path) -> None:
    """Two sites are known to be one; a new one reads the memory between them, and may tell that they are not."""
    model, steps = Thrice(), batches(8)
    capture = watching(tmp_path / "c", model)
    for number, tokens in enumerate(steps):
        model.write = number == 6
        score(model, capture, tokens)
        capture.session.flush()
    assert "second:in" in {second for _, _, second in capture.session.twins.betrayed}
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as found:
        first, second = (np.array(found.sites[name].digest) for name in ("first:out", "second:in"))
        between = np.array(found.sites["between:out"].digest)
    each = len(between)
    assert np.array_equal(second[6 * each : 7 * each], between)
    assert not (first[6 * each : 7 * each] == between).all(1).any()
