"""Recurrent operators: a state that is not the sequence's own, and a value kept from other weights."""

from __future__ import annotations

from zkl_debug.diff.explain.gather_state import belongs_to
from zkl_debug.diff.explain.model import Evidence, Finding, Handover, Strength
from zkl_debug.schema import Json

_REPLACES = (
    "reduction-order",
    "extra-rounding",
    "equals-other-sample",
    "row-shift",
    "row-permutation",
    "uninitialised",
)
_SHOWN = 4


def handed_over(e: Evidence) -> Finding | None:
    """The calls of the affected rows started from a state that is not what was written for their sequence."""
    if e.states is None:
        return None
    found = e.states()
    wrong = [one for one in found if one.wrong]
    affected = 1 + max((p for one in found for p in one.pairs), default=-1)
    if not wrong or not belongs_to(wrong, affected).all() or affected < min(e.rows, len(e.position)):
        return None
    kinds = {_kind(one) for one in wrong}
    name = kinds.pop() if len(kinds) == 1 else "state-replaced"
    evidence: dict[str, Json] = {
        "state": wrong[0].site,
        "calls": len(wrong),
        "of": len(found),
        "handovers": [_told(one) for one in wrong[:_SHOWN]],
    }
    return Finding(name, _text(name, wrong), evidence, Strength.EXACT, _REPLACES)


def _kind(one: Handover) -> str:
    if one.position == 0:
        return "state-not-reset"
    if one.lacking and one.written is not False and not one.zero:
        return "state-incomplete"
    return "state-dropped" if one.zero else "state-replaced"


def _told(one: Handover) -> Json:
    source = None if one.source is None else {"sample": one.source[0], "position": one.source[1]}
    return {
        "sample": one.sample,
        "position": one.position,
        "zero": one.zero,
        "equals_what_was_written_by": source,
        "lacking": list(one.lacking),
        "slot": one.slot,
        "previous_owner": one.previous,
    }


def _text(name: str, wrong: list[Handover]) -> str:
    one = next((o for o in wrong if o.source is not None), wrong[0])
    state = one.site.rpartition("/")[2].partition(".")[0]
    where = f"sample {one.sample} at position {one.position}"
    if name == "state-dropped":
        return (
            f"the {state} that the call of {where} started from is zero, not what was written behind position "
            f"{one.position - 1}: it was not carried over ({len(wrong)} calls)"
        )
    if name == "state-incomplete":
        return (
            f"the {state} that the call of {where} started from has zeros in the place of the inputs of "
            f"{_positions(one.lacking)}, though nothing replaced it since it was written ({len(wrong)} calls): the "
            "last call before it kept only inputs of its own"
        )
    reason = "it is not zero" if one.position == 0 else f"not what was written behind position {one.position - 1}"
    text = f"the {state} that the call of {where} started from is not its own ({reason}; {len(wrong)} calls)"
    if one.source is not None:
        text += f": it is what sample {one.source[0]} left behind at position {one.source[1]}"
    elif one.previous >= 0:
        text += ": something that was left behind"
    if one.slot >= 0:
        text += f"; slot {one.slot}" + (f" was sample {one.previous}'s before" if one.previous >= 0 else "")
    return text


def _positions(found: tuple[int, ...]) -> str:
    return f"position {found[0]}" if len(found) == 1 else f"positions {', '.join(map(str, found))}"


def derived_value(e: Evidence) -> Finding | None:
    """What the scan was given of its weights is one other value in all affected rows, though parameters are equal."""
    pair = e.pair()
    if pair is None:
        return None
    one_each = [len({row.tobytes() for row in side.bits}) for side in (pair.left, pair.right)]
    if one_each != [1, 1]:
        return None
    parameter = {"out.0": "-exp(A_log)", "out.1": "D", "out.2": "dt_bias"}.get(e.site.port, e.site.port)
    with_two = (pair.left.real[0], pair.right.real[0])
    evidence: dict[str, Json] = {
        "value": parameter,
        "left": [float(v) for v in with_two[0][:_SHOWN]],
        "right": [float(v) for v in with_two[1][:_SHOWN]],
        "rows": len(pair.left),
    }
    text = (
        f"the model's parameters are equal on both sides, yet {e.side(False)} and {e.side(True)} scan with different "
        f"{parameter}, the same in every row: one of them is a value kept from other weights"
    )
    return Finding("stale-derived-value", text, evidence, Strength.EXACT, _REPLACES)
