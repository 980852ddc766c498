"""What an engine hands over beside log-probs: the routing of every finished request, for training to replay.

Rows may agree at every site and the hand-over be wrong all the same. Its evidence is not a row of a site but an event
per finished request (``routing_returned``): what was handed back, what the steps had recorded, and which of the
request's KV blocks were given to somebody else in the step in which it finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zkl_debug.diff.answer import Affected, EdgeSummary, First
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.explain.model import Finding, Strength
from zkl_debug.diff.model import NO_STATS, WITHIN_EDGES, CaptureLike, Kind
from zkl_debug.diff.rules_learn import Rule
from zkl_debug.schema import Json, Phase, parse_site, row_phase

EVENT = "routing_returned"
SITE = "routing/indices:out.0"
_LISTED = 8
_CAUSE = "a KV block of the request was given to another request in the step in which it finished"

Event = Mapping[str, Json]


@dataclass(frozen=True)
class Handed:
    """Routing that one side handed back.

    Attributes:
        side: 0 for A, 1 for B.
        events: details of the events, one per finished request.
        bad: those of them whose routing is missing or not what was recorded.
    """

    side: int
    events: tuple[Event, ...]
    bad: tuple[Event, ...]

    @property
    def name(self) -> str:
        """``A`` or ``B``."""
        return "AB"[self.side]

    @property
    def text(self) -> str:
        """In one line, for the checks."""
        if not self.bad:
            return f"complete for {len(self.events)} requests of {self.name}"
        return f"missing or wrong for {len(self.bad)} of {len(self.events)} requests of {self.name}"


def handed_over(side: int, capture: CaptureLike) -> Handed | None:
    """The routing a capture says was handed back; None where none was asked for."""
    events = tuple(event.detail for event in getattr(capture, "events", ()) if event.name == EVENT)
    if not events:
        return None
    bad = [e for e in events if e["recorded"] and (e["returned"] is None or e["returned"] != e["rows"] or e["wrong"])]
    return Handed(side, events, tuple(bad))


def finding(handed: Handed) -> Finding:
    """What happened to the routing: the reuse of a block where that is what all affected requests have in common."""
    affected = [_words(event) for event in handed.bad[:_LISTED]]
    more = f"; and {len(handed.bad) - _LISTED} more" if len(handed.bad) > _LISTED else ""
    evidence: dict[str, Json] = {"requests": [dict(event) for event in handed.bad[:_LISTED]], "of": len(handed.events)}
    text = f"{'; '.join(affected)}{more}"
    if rule(handed).found:
        text += "; the routing is kept by block and put together only afterwards; no other request lost a block so"
        return Finding("routing-lost", text, evidence, Strength.EXACT)
    evidence["ruled_out"] = ["block given away in the last step"]
    return Finding("not-localised", f"{text}; the blocks given away do not account for it", evidence, Strength.NOTHING)


def _words(event: Event) -> str:
    request, rows, step = event["request"], event["rows"], event["engine_step"]
    if event["returned"] is None:
        text = f"request {request}: nothing was handed back of the routing of its {rows} rows"
    elif event["wrong"]:
        wrong, first = event["wrong"], event["first_wrong"]
        text = f"request {request}: {wrong} of {rows} rows were handed back with other experts, from position {first}"
    else:
        text = f"request {request}: the routing of {event['returned']} rows was handed back for {rows} rows"
    for given in event["given"]:
        owner = f"request {given['owner']}" if given["owner"] >= 0 else "another request"
        place = f"number {given['place'] + 1} of its {len(event['blocks'])} KV blocks"
        text += f"; block {given['block']}, {place}, was given to {owner} in engine step {step}, in which it finished"
    return text


def rule(handed: Handed) -> Rule:
    """What the affected requests have in common: told as a rule only where it is true of them and of no other."""
    requests = sorted({int(event["request"]) for event in handed.bad})
    only = f"only request{'s' if len(requests) > 1 else ''} {', '.join(map(str, requests[:_LISTED]))}"
    only += " ..." if len(requests) > _LISTED else ""
    lost = [bool(event["given"]) for event in handed.events]
    bad = [event in handed.bad for event in handed.events]
    both = sum(a and b for a, b in zip(lost, bad, strict=True))
    if both == sum(lost) == sum(bad) and both < len(bad):
        return Rule(True, f"{only}: {_CAUSE}", (), "", 1.0, 1.0)
    return Rule(False, f"no rule: {only}", (), "")


def first_of(handed: Handed, comparison: Comparison) -> First:
    """The first wrong hand-over, in the form of a first divergence."""
    event = min(handed.bad, key=lambda e: int(e["engine_step"]))
    capture = (comparison.a, comparison.b)[handed.side]
    position = max(0, int(event["first_wrong"]), int(event["returned"] or 0) if not event["wrong"] else 0)
    rows = capture.rows
    at = np.flatnonzero((rows["sample"] == event["request"]) & (rows["position"] == position))
    token, row, frame, phase = -1, -1, -1, Phase.DECODE
    if len(at):
        row, token, frame = int(at[0]), int(rows["token"][at[0]]), int(rows["frame"][at[0]])
        phase = Phase(int(row_phase(rows["flags"][at[:1]])[0]))
    last = [pair.name for pair, kinds in zip(comparison.sites, comparison.done, strict=True) if kinds.present.any()]
    what = "nothing" if event["returned"] is None else "something else"
    own: Json = {
        "side": "ab"[handed.side],
        "row": row,
        "frame": frame,
        "sample": event["request"],
        "phase": phase.name.lower(),
    }
    return First(
        site=SITE,
        name=parse_site(SITE),
        phase=phase.name.lower(),
        step=int(capture.frames["step"][frame]) if frame >= 0 else -1,
        sample=int(event["request"]),
        position=position,
        token=token,
        kind=Kind.OWN,
        inputs="equal",
        stats=NO_STATS,
        rows={"left": own, "right": own},
        last_equal=last[-1] if last else None,
        between=(),
        differ=f"{what} was handed back of what the steps recorded for each of its rows; every layer is equal",
    )


def summary(handed: Handed) -> Affected:
    """Rows of the affected requests."""
    return Affected(
        rows=sum(int(event["rows"]) for event in handed.bad),
        of=sum(int(event["rows"]) for event in handed.events),
        samples=tuple(sorted({int(event["request"]) for event in handed.bad})),
        rule=rule(handed).to_json(),
    )


def edge_of(handed: Handed) -> str:
    """The edge inside the side: what it ran against what it handed back."""
    return WITHIN_EDGES[handed.side]


def with_first(edges: Mapping[str, EdgeSummary], handed: Handed, first: First) -> dict[str, EdgeSummary]:
    """The edges, with a hand-over as the first divergence inside its side."""
    edge = edge_of(handed)
    rows = sum(int(event["rows"]) for event in handed.bad)
    before = edges[edge]
    return {**edges, edge: replace(before, compared=max(before.compared, rows), mismatched=rows, first=first)}


def worst(found: Sequence[Handed | None]) -> Handed | None:
    """The first side that handed something wrong back."""
    return next((handed for handed in found if handed is not None and handed.bad), None)
