"""Keys of a decode step: the short way gives the rows of the long one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from zkl_debug.digest import prefix_digests, prefix_digests_of
from zkl_debug.engines.megatron.frames import EngineHistory, dynamic_step
from zkl_debug.schema import Phase, RowFlag

PROMPTS = {3: [5, 6, 7], 8: [9, 4], 1: [2, 2, 2, 2]}
GENERATED = {3: [11, 12, 13], 8: [21, 22, 23], 1: [31, 32, 33]}


def _context(rows: list[tuple[int, int, int]], decode: bool) -> Any:
    """A step of (request, position, token) rows, padded by two slots of leftovers."""
    order = list(dict.fromkeys(r for r, _, _ in rows))
    pad = [0, 0]
    return SimpleNamespace(
        active_token_count=len(rows),
        padded_active_token_count=len(rows) + 2,
        token_to_request_idx=torch.tensor([*[order.index(r) for r, _, _ in rows], *pad]),
        request_ids=torch.tensor(order),
        token_to_pos_ids=torch.tensor([*[p for _, p, _ in rows], 99, 99]),
        token_to_input_ids=torch.tensor([*[t for _, _, t in rows], 7, 7]),
        paused_request_count=0,
        num_decode_requests=len(order) if decode else 0,
        using_cuda_graph_this_step=lambda: False,
    )


def _run() -> list[Any]:
    history = EngineHistory()
    for rid, prompt in PROMPTS.items():
        history.add(rid, prompt, first_chunk=True)
    prefill = [(r, i, t) for r, prompt in PROMPTS.items() for i, t in enumerate(prompt)]
    found = [dynamic_step(_context(prefill, decode=False), history)[0].rows]
    for k in range(3):
        step = [(r, len(PROMPTS[r]) + k, GENERATED[r][k]) for r in PROMPTS]
        found.append(dynamic_step(_context(step, decode=True), history)[0].rows)
    return found


def test_decode_steps_are_keyed_by_the_whole_prefix() -> None:
    found = _run()
    for k, rows in enumerate(found[1:]):
        for row, rid in zip(rows, PROMPTS, strict=True):
            tokens = np.array([*PROMPTS[rid], *GENERATED[rid][: k + 1]], np.int32)
            assert tuple(row["prefix"]) == tuple(prefix_digests(tokens)[-1])
            assert row["position"] == len(tokens) - 1
            assert row["token"] == tokens[-1]
            assert bool(row["flags"] & np.uint32(RowFlag.FIRST_DECODE)) == (k == 0)
            assert row["flags"] & np.uint32(RowFlag.GENERATED)
            assert int(row["flags"]) & int(RowFlag.PHASE_MASK) == int(Phase.DECODE)


def test_the_short_way_and_the_long_way_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    short = _run()
    calls: list[int] = []

    def never(*_args: Any) -> bool:
        calls.append(1)
        return False

    monkeypatch.setattr(EngineHistory, "decoding", never)
    long = _run()
    assert len(calls) == 3
    for a, b in zip(short, long, strict=True):
        assert np.array_equal(a, b)


def test_requests_have_their_tokens_whenever_they_are_asked_for() -> None:
    """A run of decode steps, a request that joins, the run again without one that has ended."""
    history = EngineHistory()
    for rid in (3, 8):
        history.add(rid, PROMPTS[rid], first_chunk=True)
    dynamic_step(_context([(r, i, t) for r in (3, 8) for i, t in enumerate(PROMPTS[r])], decode=False), history)
    for k in range(2):
        dynamic_step(_context([(r, len(PROMPTS[r]) + k, GENERATED[r][k]) for r in (3, 8)], decode=True), history)
    assert history.known[3].tokens == PROMPTS[3]  # put off
    assert history.requests[3].tokens == [*PROMPTS[3], 11, 12]
    history.add(1, PROMPTS[1], first_chunk=True)
    mixed = [(3, 5, 13), (8, 4, 23), *((1, i, t) for i, t in enumerate(PROMPTS[1]))]
    dynamic_step(_context(mixed, decode=False), history)
    rows, step = dynamic_step(_context([(8, 5, 24), (1, 4, 31)], decode=True), history)
    want = [prefix_digests(np.array(t, np.int32))[-1] for t in ([9, 4, 21, 22, 23, 24], [2, 2, 2, 2, 31])]
    assert np.array_equal(rows.rows["prefix"], np.array(want))
    assert step.prompt_len is not None
    assert step.prompt_len.tolist() == [2, 4]
    assert [bool(f & np.uint32(RowFlag.FIRST_DECODE)) for f in rows.rows["flags"]] == [False, True]
    assert history.requests[8].tokens == [9, 4, 21, 22, 23, 24]


def test_a_run_does_not_go_on_when_a_request_comes_back_with_another_prompt() -> None:
    history = EngineHistory()
    history.add(3, [5, 6], first_chunk=True)
    dynamic_step(_context([(3, 0, 5), (3, 1, 6)], decode=False), history)
    dynamic_step(_context([(3, 2, 7)], decode=True), history)
    history.add(3, [5, 6, 9], first_chunk=True)
    rows, step = dynamic_step(_context([(3, 3, 8)], decode=True), history)
    assert step.prompt_len is None  # it has not run its prompt
    assert tuple(rows.rows["prefix"][0]) == tuple(prefix_digests(np.array([5, 6, 9, 8], np.int32))[-1])


def test_a_request_that_was_never_admitted_has_no_key() -> None:
    history = EngineHistory()
    rows, step = dynamic_step(_context([(5, 3, 1)], decode=True), history)
    assert len(rows.rows) == 0
    assert len(step.keyed) == 0


def test_rows_are_grouped_by_request_in_the_order_of_their_first_row() -> None:
    from zkl_debug.engines.megatron.labels_dynamic import _by_request

    requests, index = _by_request(np.array([9, 9, 2, 5, 5, 5]))
    assert requests == [9, 2, 5]
    assert index.tolist() == [0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize("rows_each", [1, 3])
def test_the_label_of_a_row_is_the_next_prompt_token_or_the_one_just_sampled(rows_each: int) -> None:
    from zkl_debug.engines.megatron.adapter import MegatronAdapter
    from zkl_debug.engines.megatron.labels_dynamic import _scored

    adapter = MegatronAdapter()
    rows = []
    for rid, prompt in PROMPTS.items():
        adapter.history.add(rid, prompt, first_chunk=True)
        rows += [(rid, len(prompt) - k, prompt[-k]) for k in range(min(rows_each, len(prompt)), 0, -1)]
    _, step = dynamic_step(_context(rows, decode=False), adapter.history)
    adapter.step_requests = step
    capture: Any = SimpleNamespace(session=SimpleNamespace(not_rows={}))
    scored = _scored(capture, adapter, step, len(rows))
    assert scored is not None
    expected, last = [], []
    for sampled, (rid, prompt) in zip((71, 72, 73), PROMPTS.items(), strict=True):
        assert rid in adapter.history.requests
        expected += [*prompt[len(prompt) - min(rows_each, len(prompt)) + 1 :], sampled]
        last.append(len(expected) - 1)
    sampled_now = np.array([71, 72, 73])
    assert scored.labels(sampled_now).tolist() == expected
    assert scored.labels(sampled_now[:2]).tolist() == [*expected[:-1], -1]  # a request that nothing was sampled for
    assert np.flatnonzero(scored.generated).tolist() == last
    # Only the last row of each request was scored; and fewer log-probs than that belong to nobody knows which rows.
    ends = _scored(capture, adapter, step, len(PROMPTS))
    assert ends is not None
    assert ends.parents.tolist() == last
    assert ends.labels(sampled_now).tolist() == [71, 72, 73]
    assert (_scored(capture, adapter, step, 2) is None) == (len(rows) > 2)
    assert capture.session.not_rows


def test_tokens_that_are_run_again_with_others_take_what_was_behind_them_along() -> None:
    history = EngineHistory()
    history.add(3, [5, 6, 7, 8], first_chunk=True)
    rows = dynamic_step(_context([(3, 1, 6), (3, 2, 9)], decode=False), history)[0].rows
    want = prefix_digests(np.array([5, 6, 9], np.int32))
    assert np.array_equal(rows["prefix"], want[1:])
    assert history.requests[3].tokens == [5, 6, 9]
    assert history.requests[3].cached == 1
    assert [int(f) & int(RowFlag.CHUNK_EDGE) for f in rows["flags"]] == [0, int(RowFlag.CHUNK_EDGE)]
    # Positions out of order, and one that nothing leads to.
    rows = dynamic_step(_context([(3, 2, 4), (3, 1, 6)], decode=False), history)[0].rows
    want = prefix_digests(np.array([5, 6, 4], np.int32))
    assert np.array_equal(rows["prefix"], want[[2, 1]])
    assert len(dynamic_step(_context([(3, 3, 1), (3, 5, 1)], decode=False), history)[0].rows) == 0


def test_prefixes_of_many_sequences_are_those_of_each() -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(-1, 2**31 - 1, n).astype(np.int32) for n in (3, 0, 1, 40, 7)]
    found = prefix_digests_of(sequences)
    assert [len(f) for f in found] == [3, 0, 1, 40, 7]
    for tokens, digests in zip(sequences, found, strict=True):
        assert np.array_equal(digests, prefix_digests(tokens))
    assert prefix_digests_of([]) == []
