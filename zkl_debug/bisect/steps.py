"""When did it start: the onset step, and whether the state or the data of that step brought it. Pure functions.

The caller keeps what it knows as ``{step: outcome}`` and asks :func:`next_steps` what to run until it gets an
:class:`Onset`. A mismatch is final; a pass must already stand for as many repeats as the visibility calls for
(:func:`zkl_debug.bisect.noise.repeats_for`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from zkl_debug.bisect.noise import repeats_for
from zkl_debug.bisect.outcome import Outcome


class OnsetStatus(StrEnum):
    """How the search for the onset ended."""

    FOUND = "found"  # one step
    RANGE = "range"  # the steps between could not be tested
    NEVER = "never"  # the last step is still zero
    ALWAYS = "always"  # the first step already mismatches
    UNTESTABLE = "untestable"  # the first or last step could not be judged
    CONTRADICTION = "contradiction"  # a later step is zero again


@dataclass(frozen=True)
class Onset:
    """The answer.

    Attributes:
        status: how it ended.
        last_zero: the latest step known zero before the onset, or None.
        first_mismatch: the earliest step known to mismatch, or None.
        candidates: steps at which it may have started; one when found.
        reason: in words.
    """

    status: OnsetStatus
    last_zero: int | None = None
    first_mismatch: int | None = None
    candidates: tuple[int, ...] = ()
    reason: str = ""


def next_steps(steps: Sequence[int], outcomes: Mapping[int, Outcome], width: int = 1) -> tuple[int, ...] | Onset:
    """Steps to test next, or the onset.

    Args:
        steps: all steps that can be tested, ascending; the fault is taken to stay once it is there.
        outcomes: what is known.
        width: how many steps may be tested at once.

    Returns:
        Up to ``width`` steps without an outcome, evenly spread over what is open; or the answer.
    """
    assert steps
    assert all(a < b for a, b in itertools.pairwise(steps))
    ends = tuple(dict.fromkeys((steps[0], steps[-1])))
    missing = tuple(s for s in ends if s not in outcomes)
    if missing:
        return missing[: max(1, width)]
    refusal = _refusal(steps, outcomes)
    if refusal is not None:
        return refusal
    high = next(i for i, s in enumerate(steps) if outcomes.get(s) is Outcome.MISMATCH)
    low = max(i for i in range(high) if outcomes.get(steps[i]) is Outcome.ZERO)
    open_steps = [s for s in steps[low + 1 : high] if s not in outcomes]
    if open_steps:
        return _spread(open_steps, width)
    candidates = tuple(steps[low + 1 : high + 1])
    if len(candidates) == 1:
        return Onset(OnsetStatus.FOUND, steps[low], steps[high], candidates, f"it starts at step {steps[high]}")
    reason = f"it starts between step {steps[low]} and step {steps[high]}; the steps between cannot be tested"
    return Onset(OnsetStatus.RANGE, steps[low], steps[high], candidates, reason)


def _refusal(steps: Sequence[int], outcomes: Mapping[int, Outcome]) -> Onset | None:
    first, last = outcomes[steps[0]], outcomes[steps[-1]]
    for step, outcome in ((steps[0], first), (steps[-1], last)):
        if outcome in (Outcome.UNTESTABLE, Outcome.ERROR):
            return Onset(OnsetStatus.UNTESTABLE, reason=f"step {step} gives {outcome.value}")
    broken = [s for s in steps if outcomes.get(s) is Outcome.MISMATCH]
    zeros = [s for s in steps if outcomes.get(s) is Outcome.ZERO]
    if broken and zeros and zeros[-1] > broken[0]:
        reason = (
            f"step {broken[0]} mismatches but the later step {zeros[-1]} is zero: it does not stay once it is there"
        )
        return Onset(OnsetStatus.CONTRADICTION, None, broken[0], reason=reason)
    if first is Outcome.MISMATCH:
        reason = f"the first step, {steps[0]}, already mismatches"
        return Onset(OnsetStatus.ALWAYS, None, steps[0], (steps[0],), reason)
    if last is Outcome.ZERO:
        return Onset(OnsetStatus.NEVER, steps[-1], None, reason=f"the last step, {steps[-1]}, is still zero")
    return None


def _spread(open_steps: Sequence[int], width: int) -> tuple[int, ...]:
    """``width`` cuts that split ``open_steps`` into equal parts."""
    count = min(max(1, width), len(open_steps))
    picked = [open_steps[(i + 1) * len(open_steps) // (count + 1)] for i in range(count)]
    return tuple(dict.fromkeys(picked))


def repeats_for_steps(n_steps: int, visibility: float, error_bound: float = 0.01) -> int:
    """Repeats every passing step needs so that no false "zero" enters the search with ``error_bound``."""
    return repeats_for(visibility, error_bound, max(1, n_steps.bit_length()) + 2)


# ------------------------------------------------------------------------------------------- the 2x2 swap


@dataclass(frozen=True)
class Swap:
    """Outcomes of the four combinations at the onset step t; weights and data each of step t-1 or t."""

    old_weights_old_data: Outcome
    new_weights_old_data: Outcome
    old_weights_new_data: Outcome
    new_weights_new_data: Outcome


class Fault(StrEnum):
    """What the swap says."""

    STATE = "state"  # follows the weights (or other state) of step t
    DATA = "data"  # follows the batch of step t
    EITHER = "either"  # the weights of t and the batch of t each bring it alone
    INTERACTION = "interaction"  # only the weights of t on the batch of t
    NOT_REPRODUCED = "not-reproduced"  # the controls did not come out as the onset says
    UNDECIDED = "undecided"  # a combination that decides could not be judged


@dataclass(frozen=True)
class SwapVerdict:
    """The classification, with the reason in words."""

    fault: Fault
    reason: str


def swap_cells(swap: Mapping[tuple[bool, bool], Outcome]) -> Swap:
    """A :class:`Swap` from outcomes keyed by ``(weights of t?, data of t?)``."""
    return Swap(swap[False, False], swap[True, False], swap[False, True], swap[True, True])


def classify_swap(swap: Swap) -> SwapVerdict:
    """Tell a state fault from a data fault.

    The two controls must come out as the onset says: zero with everything of step t-1, a mismatch with everything of
    step t. Nothing that could not be judged counts as either.
    """
    controls = (
        ("weights and data of t-1", swap.old_weights_old_data, Outcome.ZERO),
        ("weights and data of t", swap.new_weights_new_data, Outcome.MISMATCH),
    )
    for what, found, expected in controls:
        if found not in (Outcome.ZERO, Outcome.MISMATCH):
            return SwapVerdict(Fault.UNDECIDED, f"{what} gives {found.value}")
        if found is not expected:
            return SwapVerdict(Fault.NOT_REPRODUCED, f"{what} gives {found.value} instead of {expected.value}")
    crossed = {
        "weights of t on data of t-1": swap.new_weights_old_data,
        "weights of t-1 on data of t": swap.old_weights_new_data,
    }
    for what, found in crossed.items():
        if found not in (Outcome.ZERO, Outcome.MISMATCH):
            return SwapVerdict(Fault.UNDECIDED, f"{what} gives {found.value}")
    state, data = (found is Outcome.MISMATCH for found in crossed.values())
    return {
        (True, False): SwapVerdict(Fault.STATE, "it follows the weights of t: they mismatch on the old data too"),
        (False, True): SwapVerdict(Fault.DATA, "it follows the data of t: the old weights mismatch on it too"),
        (True, True): SwapVerdict(Fault.EITHER, "the weights of t and the data of t each bring it alone"),
        (False, False): SwapVerdict(Fault.INTERACTION, "only the weights of t on the data of t bring it"),
    }[state, data]


def untestable_steps(steps: Iterable[int], outcomes: Mapping[int, Outcome]) -> tuple[int, ...]:
    """Steps that were tried and could not be judged."""
    return tuple(s for s in steps if outcomes.get(s) in (Outcome.UNTESTABLE, Outcome.ERROR))
