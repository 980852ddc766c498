"""Were the weights equal? Asked of every step and weight version of both captures, before a layer is blamed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zkl_debug.diff.model import CaptureLike, Refusal, refuse
from zkl_debug.schema import Json, StateRecord

_LISTED = 10

#: (step, rank of the weight version within the step), as rows are keyed, or (0, rank) where each side has one step.
When = tuple[int, int]
State = Mapping[str, StateRecord]


def check_weights(a: CaptureLike, b: CaptureLike) -> tuple[Refusal | None, dict[str, Json]]:
    """Parameters that differ. Names on one side only and differing buffers are reported, not refused."""
    states = _aligned(_by_when(a), _by_when(b))
    if not all(states):
        missing = [name for name, found in zip("AB", states, strict=True) if not found]
        return None, {"weights": f"not captured on {' and '.join(missing)}"}
    report: dict[str, Json] = {}
    equal: list[When] = []
    compared: set[tuple[int, int]] = set()
    both: list[When | None] = [*sorted(set(states[0]) & set(states[1]))]
    for when in both or [None]:
        # Without a common step no row is common either; the first weights still tell whether the model is the same.
        left, right = (found[min(found) if when is None else when] for found in states)
        pair = (id(left), id(right))
        if pair in compared:
            continue
        compared.add(pair)
        refusal, found = _compare(left, right, when, equal)
        report = found if not report or refusal is not None else {**report, "snapshots": len(compared)}
        if refusal is not None:
            return refusal, report
        if when is not None:
            equal.append(when)
    return None, report


def _by_when(capture: CaptureLike) -> dict[When, State]:
    """The weights in force at the first frame of each step and weight version."""
    snapshots = {
        seq: {record.name: record for record in records}
        for seq, records in capture.states.items()
        if any(record.kind == "parameter" and ":" not in record.name for record in records)
    }
    if not snapshots:  # an event log alone writes the names of its parts in front
        snapshots = {seq: {r.name: r for r in records} for seq, records in list(capture.states.items())[:1]}
    if not snapshots:
        return {}
    seqs = np.array(sorted(snapshots), np.int64)
    frames = capture.frames
    if len(frames) == 0:
        return {(0, 0): snapshots[int(seqs[0])]}
    steps = np.unique(frames["step"])
    found: dict[When, State] = {}
    for step in steps:
        of_step = frames[frames["step"] == step]
        for rank, version in enumerate(np.unique(of_step["weight_version"])):
            first = of_step[of_step["weight_version"] == version]["event_seq"].min()
            at = max(0, int(np.searchsorted(seqs, int(first), side="right")) - 1)
            found[(int(step), rank)] = snapshots[int(seqs[at])]
    return found


def _aligned(a: dict[When, State], b: dict[When, State]) -> tuple[dict[When, State], dict[When, State]]:
    """Each side with a single step: its number does not matter, as for rows."""
    if any(len({step for step, _ in side}) > 1 for side in (a, b)):
        return a, b
    left, right = ({(0, rank): state for (_, rank), state in side.items()} for side in (a, b))
    return left, right


def _compare(left: State, right: State, when: When | None, equal: list[When]) -> tuple[Refusal | None, dict[str, Json]]:
    common, differ = _differing(left, right, "parameter")
    _, buffers = _differing(left, right, "buffer")
    one_sided = sorted(
        name
        for state, other in ((left, right), (right, left))
        for name, record in state.items()
        if record.kind == "parameter" and name not in other
    )
    report: dict[str, Json] = {
        "weights": "equal",
        "parameters": len(common),
        "on_one_side": one_sided[:_LISTED],
        "buffers_differ": buffers[:_LISTED],
    }
    next_step = "load the same checkpoint on both sides, or check the weight sync, then capture again"
    if not common:
        text = "no parameter has the same name on both sides"
        found = f"A: {next(iter(left), '-')} ..., B: {next(iter(right), '-')} ..."
        return refuse("no-common-weights", text, found, "the same model on both sides", next_step), report
    if not differ:
        return None, report
    report["weights"] = "differ"
    first = left[differ[0]], right[differ[0]]
    other = [f"A has it as {x}, B as {y}" for x, y in zip(*map(_form, first), strict=True) if x != y]
    at = "" if when is None or not equal else f" at step {when[0]}" + _earlier(when, equal)
    text = f"{len(differ)} of {len(common)} parameters differ{at}, first {differ[0]}" + "".join(f"; {t}" for t in other)
    found = ", ".join(differ[:_LISTED]) + (" ..." if len(differ) > _LISTED else "")
    expected = "the same weights on both sides: layers cannot be blamed while they differ"
    detail: dict[str, Json] = {"parameters": differ[:100], "count": len(differ), "of": len(common)}
    if at and when is not None:
        detail["step"] = when[0]
    return refuse("weights-differ", text, found, expected, next_step, **detail), report


def other_buffers(a: CaptureLike, b: CaptureLike) -> list[tuple[StateRecord, StateRecord]]:
    """Buffers of the same name that differ, of A and of B, at the first step both have."""
    left, right = _aligned(_by_when(a), _by_when(b))
    both = sorted(set(left) & set(right))
    if not both:
        return []
    of_a, of_b = left[both[0]], right[both[0]]
    return [(of_a[name], of_b[name]) for name in _differing(of_a, of_b, "buffer")[1]]


def _earlier(when: When, equal: list[When]) -> str:
    """What was equal before, as a remark on a difference."""
    if when[0] == equal[-1][0]:
        return f", weights {when[1] + 1} of that step (equal before)"
    steps = sorted({step for step, _ in equal})
    return f" (equal at step {steps[0]})" if len(steps) == 1 else f" (equal at steps {steps[0]} to {steps[-1]})"


def _differing(a: Mapping[str, StateRecord], b: Mapping[str, StateRecord], kind: str) -> tuple[list[str], list[str]]:
    """(common names, common names whose tensors differ) of one kind of state."""
    common = [n for n, record in a.items() if n in b and record.kind == kind and b[n].kind == kind]

    def bits(record: StateRecord) -> tuple[object, ...]:
        return (record.torch_dtype, tuple(record.shape), tuple(record.digest))

    return common, [n for n in common if bits(a[n]) != bits(b[n])]


def _form(record: StateRecord) -> tuple[str, str]:
    return record.torch_dtype, str(list(record.shape))
