"""Readings that wait: in graphs until a part of a block ends, outside them until the forward has been issued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_fakes import (
    WIDTH,
    FakeExecutable,
    FakeGraph,
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

from zkl_debug.capture import postponed
from zkl_debug.capture.late import AUDITED_ROWS, ends_part
from zkl_debug.capture.twins import RECHECK
from zkl_debug.digest import digest_array
from zkl_debug.store.reader import open_capture


def test_launches_that_second_readings_stand_for_are_left_out_and_the_digests_stay(tmp_path: Path) -> None:
    model, steps = Model(), steps_of(70)
    FakeExecutable.launches = 0
    capture = recorded_model(model, tmp_path / "graph")
    assert model.graph is not None
    recorded = len(model.graph.steps)
    for tokens in steps:
        call(model, capture, tokens, graph=True)
        capture.session.flush()
    capture.__exit__(None, None, None)
    assert (model.graph.made, len(model.graph.steps)) == (1, recorded)  # the program's graph is as it was
    settled = AUDITED_ROWS // 4  # after so many frames, and one that notices
    assert FakeExecutable.launches == len([i for i in range(settled + 1, len(steps)) if i % RECHECK])
    eager = Model()
    capture = watched(eager, tmp_path / "eager")
    for tokens in steps:
        call(eager, capture, tokens, graph=False)
    capture.__exit__(None, None, None)
    want, found = digests(tmp_path / "eager"), digests(tmp_path / "graph")
    assert set(want) == set(found)
    assert all(np.array_equal(want[name], found[name]) for name in want)
    with open_capture(tmp_path / "graph") as opened:
        facts = opened.manifest["graphs"]
    # Out of layer 0 is the buffer that layer 1 writes over: it is still read when it is there. The other two wait.
    assert (facts["launches_left_out"], facts["read_at_once"]) == (2, 1)


def test_a_graph_of_the_whole_model_is_replayed_lightly_too(tmp_path: Path) -> None:
    """No hook runs before its replay: the frame is opened by the replay itself."""
    model, steps = Model(), steps_of(60)
    capture = recorded_model(model, tmp_path / "c")
    assert model.graph is not None
    FakeExecutable.launches = 0
    for tokens in steps:
        capture.next_rows(rows_of(tokens, 4))
        model.static.copy_(model.table[torch.tensor(tokens)][:, None])
        model.graph.replay()
        if tokens[0] % 4 == 0:
            capture.session.flush()
    capture.__exit__(None, None, None)
    assert FakeExecutable.launches > 30
    got = digests(tmp_path / "c")["layers.1:out"].reshape(len(steps), 4, 2)
    assert np.array_equal(got, np.stack([digest_array(model.table[tokens].numpy() * 6) for tokens in steps]))


def test_at_once_means_at_once(tmp_path: Path) -> None:
    model = Model()
    capture = recorded_model(model, tmp_path / "c", at_once=True)
    assert model.graph is not None
    assert not model.graph.kept
    for tokens in steps_of(60):
        call(model, capture, tokens, graph=True)
        capture.session.flush()
    capture.__exit__(None, None, None)
    assert model.graph.made == 1
    twins = capture.session.twins
    assert not any(twins.trusted(*pair[:1], 1, *pair[1:]) or twins.until_end(pair[0], 1) for pair in twins.known)
    with open_capture(tmp_path / "c") as opened:
        assert opened.manifest["graphs"]["launches_left_out"] == 0


def test_a_few_replays_are_not_enough_to_take_anything_out(tmp_path: Path) -> None:
    model = Model()
    capture = recorded_model(model, tmp_path / "c")
    for tokens in steps_of(AUDITED_ROWS // 4 - 1):
        call(model, capture, tokens, graph=True)
        capture.session.flush()
    call(model, capture, [1, 2, 3, 4], graph=True)
    watch = capture.session.graphs
    assert watch is not None
    assert not watch._settled
    capture.__exit__(None, None, None)


def test_a_tensor_written_only_now_and_then_is_found_while_both_readings_are_compared(tmp_path: Path) -> None:
    """The buffer is written over when one token comes by, and left alone otherwise."""
    model = Model()
    capture = recorded_model(model, tmp_path / "c")
    graph, late = model.graph, capture.session.graphs
    assert graph is not None
    assert late is not None
    first = next(i for i, step in enumerate(graph.steps) if step.__qualname__.startswith("Layer"))
    graph.steps.insert(first + 1, lambda: None)
    static = model.static
    graph.steps[first + 1] = lambda: copy_to(static, static + 1) if static[0, 0, 0] == model.table[7, 0] else None
    for tokens in steps_of(60):
        call(model, capture, tokens, graph=True)
        capture.session.flush()
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as opened:
        assert opened.manifest["graphs"]["read_at_once"] == 2


def test_readings_that_part_after_one_was_left_out_are_an_error_and_both_are_made_again(tmp_path: Path) -> None:
    """The buffer is written over when one token comes by, for the first time long after the readings were compared."""
    model = Model()
    capture = recorded_model(model, tmp_path / "c")
    graph = model.graph
    assert graph is not None
    static, steps = model.static, steps_of(100)
    steps[2 * RECHECK][0] = 99
    first = next(i for i, step in enumerate(graph.steps) if step.__qualname__.startswith("Layer"))
    layer = graph.steps[first]

    def run_layer() -> None:
        layer()
        if static[0, 0, 0] == model.table[99, 0]:
            static.add_(1)

    graph.steps[first] = run_layer
    for tokens in steps:
        call(model, capture, tokens, graph=True)
        capture.session.flush()
        if tokens is steps[2 * RECHECK]:  # both readings were made, for its number is a multiple of RECHECK
            FakeExecutable.launches = 0
    assert FakeExecutable.launches == 0
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as opened:
        probe = opened.manifest["probe"]
        got = np.array(opened.sites["layers.0:in"].digest).reshape(len(steps), 4, 2)
    assert not probe["ok"]
    assert "layers.0:in" in probe["errors"][0]
    want = [digest_array(model.table[tokens].numpy()) for tokens in steps]
    assert np.array_equal(got, np.stack(want))


def test_a_graph_that_draws_random_numbers_is_replayed_as_it_is(tmp_path: Path) -> None:
    model, drawn = Model(), iter(range(1000))
    capture = recorded_model(model, tmp_path / "c")
    capture.session.kernels.drawn = lambda generators: (len(generators), next(drawn))  # type: ignore[method-assign]
    FakeExecutable.launches = 0
    for tokens in steps_of(40):
        call(model, capture, tokens, graph=True)
        capture.session.flush()
    capture.__exit__(None, None, None)
    assert next(drawn) == 2  # asked once, before and after a replay
    assert FakeExecutable.launches == 0


@pytest.mark.parametrize(("owner", "name"), [(FakeExecutable, "launch"), (FakeKernels, "without")])
def test_a_lighter_graph_that_the_driver_refuses_is_done_without(
    owner: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("refused")

    monkeypatch.setattr(owner, name, refuse)
    model = Model()
    capture = recorded_model(model, tmp_path / "c")
    for tokens in steps_of(40):
        out = call(model, capture, tokens, graph=True)
        assert torch.equal(out[:, 0], model.table[tokens] * 6)
        capture.session.flush()
    capture.__exit__(None, None, None)
    with open_capture(tmp_path / "c") as opened:
        assert opened.manifest["probe"]["ok"]
        assert opened.manifest["graphs"]["light_refused"] == "refused"
        got = np.array(opened.sites["layers.0:in"].digest).reshape(40, 4, 2)
    assert np.array_equal(got, np.stack([digest_array(model.table[tokens].numpy()) for tokens in steps_of(40)]))


def test_a_graph_whose_template_the_program_keeps_is_not_edited(tmp_path: Path) -> None:
    capture = watched(Model(), tmp_path / "c")
    watch = capture.session.graphs
    assert watch is not None
    mine, other = FakeGraph(keep_graph=True), FakeGraph()
    assert (mine.kept, other.kept) == (True, True)
    for graph in (mine, other):
        graph.capture_begin()
        assert watch.recording is not None
        assert (watch.recording.late is None) == (graph is mine)
        graph.capture_end()
    assert (mine.made, other.made) == (0, 1)
    capture.__exit__(None, None, None)


def test_sites_outside_the_graphs_wait_for_the_end_of_the_forward_only_where_nothing_writes_over_them(
    tmp_path: Path,
) -> None:
    steps = steps_of(70)
    counts = {}
    for name, bucket in (("plain", -1), ("waiting", 4)):
        model = Model()
        capture = watched(model, tmp_path / name, at_once=bucket < 0)
        launches: list[int] = []
        kernels = capture.session.kernels
        issue = kernels.issue
        kernels.issue = lambda jobs, launches=launches, issue=issue: (launches.append(len(jobs)), issue(jobs))[1]  # type: ignore[method-assign, misc]
        with torch.inference_mode():
            model.buffer, model.table = model.buffer.clone(), model.table.clone()
            for layer in model.layers:
                layer.buffer = model.buffer
            for tokens in steps:
                capture.next_rows(rows_of(tokens, bucket))
                model(torch.tensor([tokens]))
                capture.session.flush()
        capture.__exit__(None, None, None)
        counts[name] = sum(launches)
        twins = capture.session.twins
        if bucket > 0:
            assert {pair[1] for pair in twins.known} >= {"layers.0:in", "layers.1:out"}
            assert {pair[1] for pair in twins.refuted} == {"layers.0:out", "layers.1:in"}
            # Of the sites that wait, those on the device: one launch a step.
            assert 30 < launches.count(2) < len(steps)
    # Each site once; and while readings are compared, and again now and then, twice.
    assert counts["plain"] < counts["waiting"] < 1.2 * counts["plain"]
    found = {name: digests(tmp_path / name) for name in counts}
    assert set(found["plain"]) == set(found["waiting"])
    assert all(np.array_equal(digest, found["waiting"][site]) for site, digest in found["plain"].items())


@pytest.mark.parametrize(("most", "most_bytes"), [(1, 1 << 30), (32, 4 * WIDTH * 4 + 1)])
def test_steps_with_many_or_large_sites_outside_graphs_do_not_wait(
    most: int, most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postponed, "MOST", most)
    monkeypatch.setattr(postponed, "MOST_BYTES", most_bytes)
    model = Model()
    capture = watched(model, tmp_path / "c")
    for tokens in steps_of(40):
        capture.next_rows(rows_of(tokens, 4))
        model(torch.tensor([tokens]))
        assert capture.session.frame is not None
        assert not capture.session.frame.waiting
        capture.session.flush()
    capture.__exit__(None, None, None)
    assert len(capture.session.postponed._too_many) == 1
    got = digests(tmp_path / "c")
    for name, times in (("layers.0:in", 1), ("layers.0:out", 2), ("layers.1:in", 2), ("layers.1:out", 6)):
        want = [digest_array(model.table[tokens].numpy() * times) for tokens in steps_of(40)]
        assert np.array_equal(got[name], np.concatenate(want)), name


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("decoder.layers.0.mlp", True),
        ("model.layers.11.self_attn", True),
        ("layers.0", False),
        ("layers.0.mlp.linear_fc1", False),
        ("decoder.layers.0.mlp.experts.local_experts.3", False),
        ("output_layer", False),
    ],
)
def test_parts_of_a_block(path: str, expected: bool) -> None:
    assert ends_part(path) == expected
