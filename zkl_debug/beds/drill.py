"""Pass 2 of a diff: the bed is run again with raw bits round the first site, its operator is called again on captured
inputs and in float64, and then the operators inside it are traced."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from zkl_debug.beds.rebuild import recipe_of
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.beds.replay import replay_first, settle
from zkl_debug.beds.ruling import rule_first
from zkl_debug.beds.zoom import Zoom, zoom
from zkl_debug.diff.run import diff_captures
from zkl_debug.diff.suggest import on_a_page
from zkl_debug.diff.verdict import Verdict
from zkl_debug.errors import Refused, UsageError
from zkl_debug.schema import Json

Say = Callable[[str], None]


@dataclass(frozen=True)
class Drill:
    """What pass 2 found.

    Attributes:
        verdict: the verdict of pass 1, with what the raw bits say of its first site.
        confirmed: pass 2 found the same first site on the same edge, in the same row.
        zoom: operators inside the site; None where nothing runs inside it.
        note: why something is missing, or empty.
    """

    verdict: Verdict
    confirmed: bool
    zoom: Zoom | None = None
    note: str = ""

    def to_json(self) -> dict[str, Json]:
        """The ``drill`` object beside the verdict document."""
        inside = None if self.zoom is None else self.zoom.to_json()
        return {"confirmed": self.confirmed, "note": self.note, "zoom": inside}


def drill(a: Path, b: Path, verdict: Verdict, say: Say | None = None) -> Drill:
    """Run pass 2 for a verdict that diverged; any other is returned as it is.

    Args:
        a, b: captures of one run of a bed.
        verdict: of these captures.
        say: told what happens.

    Captures that are not from one run of a bed keep their verdict; the note says why there is no pass 2.
    """
    say = say or (lambda _text: None)
    if verdict.first is None:
        return Drill(verdict, False, note="nothing differs, there is nothing to drill into")
    if not verdict.by_rows:
        return Drill(verdict, False, note=f"{verdict.first.site} is no operator of a forward, nothing runs inside it")
    try:
        recipe = recipe_of(a, b)
    except Refused as error:
        return Drill(verdict, False, note=f"not possible: {error.found}")
    layer = max(verdict.first.name.layer, 0)
    record = RecordOptions("payload", layers=(max(0, layer - 1), layer), certify=False)
    with tempfile.TemporaryDirectory(prefix="zkl-drill-") as folder:
        say(f"pass 2: raw bits of layers {max(0, layer - 1)} to {layer}")
        record_bed(recipe.options, Path(folder), record, say)
        one, two = (Path(folder) / path.resolve().name for path in (a, b))
        second = diff_captures(one, two)
        if _key(second) != _key(verdict):
            there = "nothing differs" if second.first is None else f"{second.first.site} is first"
            note = f"run again, {there}: the difference does not repeat, so nothing is said of it"
            return Drill(verdict, False, note=note)
        ruling = rule_first(second, one, two)
        second = settle(second, replay_first(second, one, two, say))
        known = replace(
            verdict,
            first=second.first,
            affected=second.affected,
            explanations=second.explanations,
            edges=second.edges,
            next=_after(verdict),
            replay=second.replay,
            referee=ruling.to_json(),
        )
        say("pass 2: operators")
        try:
            return Drill(known, True, zoom(one, two, None, say))
        except (UsageError, Refused) as error:  # what pass 2 found stays; only the look inside is missing
            return Drill(known, True, note=error.found)


def _after(verdict: Verdict) -> tuple[str, ...]:
    """What is left to do once pass 2 was made."""
    left = tuple(command for command in verdict.next if "--drill" not in command)
    return left or (on_a_page(verdict.comparison) if verdict.comparison is not None else ())


def _key(verdict: Verdict) -> tuple[object, ...]:
    first = verdict.first
    return () if first is None else (verdict.edge, first.site, first.sample, first.position)
