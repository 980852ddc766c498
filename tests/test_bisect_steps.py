"""The onset step and the 2x2 swap."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from zkl_debug.bisect.outcome import Outcome
from zkl_debug.bisect.steps import (
    Fault,
    Onset,
    OnsetStatus,
    Swap,
    classify_swap,
    next_steps,
    repeats_for_steps,
    swap_cells,
    untestable_steps,
)

ZERO, MISMATCH, UNTESTABLE, ERROR = Outcome


def find(steps: Sequence[int], judge: Callable[[int], Outcome], width: int = 1) -> tuple[Onset, int]:
    outcomes: dict[int, Outcome] = {}
    while True:
        answer = next_steps(steps, outcomes, width)
        if isinstance(answer, Onset):
            return answer, len(outcomes)
        assert 0 < len(answer) <= max(1, width)
        assert not set(answer) & set(outcomes)
        outcomes.update({s: judge(s) for s in answer})


def test_every_onset_of_every_length() -> None:
    for n in range(2, 40):
        for onset in range(1, n):
            for width in (1, 3):
                answer, runs = find(range(n), lambda s, onset=onset: MISMATCH if s >= onset else ZERO, width)  # type: ignore[misc]
                assert answer.status is OnsetStatus.FOUND
                assert (answer.last_zero, answer.first_mismatch) == (onset - 1, onset)
                assert answer.candidates == (onset,)
                assert width > 1 or runs <= 2 + n.bit_length()


def test_gaps_between_checkpoints_and_refusals() -> None:
    steps = [0, 10, 20, 30, 40]
    answer, _ = find(steps, lambda s: MISMATCH if s >= 25 else ZERO)
    assert (answer.last_zero, answer.first_mismatch) == (20, 30)
    assert find(steps, lambda _: ZERO)[0].status is OnsetStatus.NEVER
    assert find(steps, lambda _: MISMATCH)[0].status is OnsetStatus.ALWAYS
    assert find(steps, lambda s: ERROR if s == 40 else ZERO)[0].status is OnsetStatus.UNTESTABLE
    assert find([7], lambda _: MISMATCH)[0].status is OnsetStatus.ALWAYS
    assert find([7], lambda _: ZERO)[0].status is OnsetStatus.NEVER
    back = next_steps(steps, {0: ZERO, 40: MISMATCH, 20: MISMATCH, 30: ZERO})
    assert isinstance(back, Onset)
    assert back.status is OnsetStatus.CONTRADICTION


def test_untestable_steps_are_never_a_mismatch() -> None:
    rnd = random.Random(0)
    for _ in range(300):
        n = rnd.randint(2, 30)
        onset = rnd.randint(1, n - 1)
        holes = {s for s in range(1, n - 1) if rnd.random() < 0.4}

        def judge(step: int, onset: int = onset, holes: set[int] = holes) -> Outcome:
            return UNTESTABLE if step in holes else MISMATCH if step >= onset else ZERO

        answer, _ = find(range(n), judge)
        assert onset in answer.candidates
        assert answer.last_zero is not None
        assert judge(answer.last_zero) is ZERO
        assert answer.first_mismatch is not None
        assert judge(answer.first_mismatch) is MISMATCH
        assert all(c in holes for c in answer.candidates[:-1])
        assert (answer.status is OnsetStatus.FOUND) == (len(answer.candidates) == 1)
    assert untestable_steps(range(4), {0: ZERO, 1: ERROR, 3: UNTESTABLE}) == (1, 3)


def test_repeats_for_steps() -> None:
    assert repeats_for_steps(1000, 1.0) == 1
    assert 8 <= repeats_for_steps(1000, 0.5) <= 14


def test_swap_table() -> None:
    for cells in itertools.product(Outcome, repeat=4):
        swap = Swap(*cells)
        verdict = classify_swap(swap)
        assert verdict.reason
        if not {UNTESTABLE, ERROR}.isdisjoint(cells):
            assert verdict.fault in (Fault.UNDECIDED, Fault.NOT_REPRODUCED)
        elif (swap.old_weights_old_data, swap.new_weights_new_data) != (ZERO, MISMATCH):
            assert verdict.fault is Fault.NOT_REPRODUCED


@pytest.mark.parametrize(
    ("weights", "data", "fault"),
    [
        (MISMATCH, ZERO, Fault.STATE),
        (ZERO, MISMATCH, Fault.DATA),
        (MISMATCH, MISMATCH, Fault.EITHER),
        (ZERO, ZERO, Fault.INTERACTION),
        (UNTESTABLE, MISMATCH, Fault.UNDECIDED),
        (MISMATCH, ERROR, Fault.UNDECIDED),
    ],
)
def test_swap_faults(weights: Outcome, data: Outcome, fault: Fault) -> None:
    cells = {(False, False): ZERO, (True, False): weights, (False, True): data, (True, True): MISMATCH}
    assert classify_swap(swap_cells(cells)).fault is fault
