"""Replay of the first divergent operator: is the difference the operator's own, or does something uncaptured feed it?

The run that made the captures is rebuilt. When the call that computed a row of the first pair comes by, the operator
is called again, there and then, on the inputs its capture holds: it must give its captured output, else nothing can
be concluded. Then the second operator of the pair is given the first one's inputs; and where the data round the two
calls differ (globals, closed-over variables, environment, random generator), the first one's surroundings as well.
Output that follows the surroundings and not the inputs comes from uncaptured state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.edges import named_row
from zkl_debug.diff.model import Ints, Kind
from zkl_debug.errors import ZklError
from zkl_debug.schema import Json, parse_site

if TYPE_CHECKING:
    from zkl_debug.beds.replay_pages import Table
    from zkl_debug.beds.replay_probe import Outcome
    from zkl_debug.diff.verdict import Verdict

REPRODUCES, FAILS, IMPOSSIBLE = "reproduces", "replay does not reproduce", "not possible"
_NAMED = 4


@dataclass(frozen=True)
class ReplayAnswer:
    """What the replay of one operator says.

    Attributes:
        site: the output that was replayed.
        status: ``reproduces``, ``replay does not reproduce`` or ``not possible``.
        kind: ``own`` or ``uncaptured-state``; empty when the replay cannot tell.
        text: one sentence.
        state: data that the operator reads and the capture does not hold, where they could be named.
        rows: pairs that were settled.
        inputs: input ports that were overwritten with captured rows in both calls.
        settled: 1, 0 or -1 by pair of (capture row of the left, of the right), with their sides.
    """

    site: str
    status: str
    kind: str = ""
    text: str = ""
    state: tuple[str, ...] = ()
    rows: int = 0
    inputs: tuple[str, ...] = ()
    settled: dict[tuple[int, int, int, int], int] | None = None

    def to_json(self) -> Json:
        """The ``replay`` object of the verdict document."""
        return {
            "site": self.site,
            "status": self.status,
            "kind": self.kind,
            "text": self.text,
            "state": list(self.state),
            "rows": self.rows,
            "inputs": list(self.inputs),
        }


def replay_first(
    verdict: Verdict, dir_a: Path, dir_b: Path, progress: Callable[[str], None] | None = None
) -> ReplayAnswer:
    """Replay the operator at the first divergence of a verdict.

    Args:
        verdict: of comparing the two folders; diverged.
        dir_a, dir_b: the captures, payload level, both of one run of a bed.
        progress: told what happens.

    Returns:
        The answer; ``not possible`` with the reason where the operator cannot be replayed.
    """
    comparison = verdict.comparison
    if verdict.first is None or comparison is None:
        return ReplayAnswer("", IMPOSSIBLE, text="nothing diverges: there is no operator to replay")
    site = verdict.first.site
    try:
        return _replay(comparison, site, (Path(dir_a), Path(dir_b)), progress or (lambda _text: None))
    except ZklError as error:
        return ReplayAnswer(site, IMPOSSIBLE, text=str(error).replace("\n", "; "))


def settle(verdict: Verdict, answer: ReplayAnswer) -> Verdict:
    """The verdict with the kinds that a replay settled, and the replay itself."""
    comparison = verdict.comparison
    if comparison is None or verdict.first is None:
        return replace(verdict, replay=answer.to_json())
    if not answer.settled:
        return replace(verdict, replay=answer.to_json())
    from zkl_debug.diff.run import diff_captures

    again = diff_captures(
        comparison.a,
        comparison.b,
        partial=verdict.partial,
        oracle=_Settled(comparison, answer),
        first_only=comparison.stopped is not None,
    )
    return replace(
        again,
        replay=answer.to_json(),
        claim=verdict.claim,
        checks=verdict.checks,
        certification=verdict.certification,
    )


class _Settled:
    """A :class:`~zkl_debug.diff.kinds.ReplayOracle` that knows the pairs a replay went through."""

    def __init__(self, comparison: Comparison, answer: ReplayAnswer) -> None:
        self.space, self.answer = comparison.space, answer

    def replay(self, site: str, left: Ints, right: Ints) -> NDArray[np.int8]:
        """See :meth:`zkl_debug.diff.kinds.ReplayOracle.replay`."""
        result = np.full(len(left), -1, np.int8)
        if site != self.answer.site or self.answer.settled is None:
            return result
        side, row = self.space.side, self.space.row
        for i, (x, y) in enumerate(zip(left.tolist(), right.tolist(), strict=True)):
            result[i] = self.answer.settled.get((int(side[x]), int(row[x]), int(side[y]), int(row[y])), -1)
        return result


# ---- the replay -----------------------------------------------------------------------------------------------------
def _replay(comparison: Comparison, site: str, folders: tuple[Path, Path], say: Callable[[str], None]) -> ReplayAnswer:
    from zkl_debug.beds.rebuild import recipe_of, run_again
    from zkl_debug.beds.replay_probe import ReplayProbe
    from zkl_debug.beds.replay_rows import keys_of, operand_of

    recipe = recipe_of(*folders)
    edge = comparison.edge
    first = comparison.firsts[edge] if edge is not None else None
    assert first is not None
    at = (int(comparison.pairs.left[first.pair]), int(comparison.pairs.right[first.pair]))
    operands = [operand_of(comparison, first.site, row, name) for row, name in zip(at, ("left", "right"), strict=True)]
    keys = keys_of(comparison, at[0])
    probe = ReplayProbe(site, operands, keys)
    run_again(recipe, probe.sides(), say)
    if not probe.bound:
        return ReplayAnswer(site, IMPOSSIBLE, text=f"no callable is known that computes {site} by itself")
    if len(probe.outcomes) < 2:
        missing = ", ".join(o.name for o in operands if o.name not in probe.outcomes)
        return ReplayAnswer(site, IMPOSSIBLE, text=f"the rebuilt run did not come by the call again ({missing} row)")
    outcomes = dict(probe.outcomes)
    early, late = outcomes
    differ = outcomes[early].surroundings.differing(outcomes[late].surroundings)
    if differ and verdict_of_row(outcomes[early], outcomes[late], keys[0]) == 0:
        # The earlier call could not be given the later one's surroundings yet.
        turned = ReplayProbe(site, operands, keys, {late: outcomes[late]})
        run_again(recipe, turned.sides(), say)
        if early in turned.outcomes and turned.outcomes[early].names:
            outcomes = turned.outcomes
    return _judged(comparison, first.site, outcomes, at)


# ---- the answer -----------------------------------------------------------------------------------------------------
def verdict_of_row(first: Outcome, second: Outcome, key: bytes) -> int:
    """What a replay says of one row: 1 uncaptured state, 0 the operator's own, -1 it cannot tell.

    Args:
        first, second: of the two calls, in the order in which they ran; the second has ``cross`` and ``swapped``.
        key: the row.
    """
    from zkl_debug.beds.replay_probe import agrees

    ours, theirs = second.operand.output, first.operand.output
    if key not in ours or key not in theirs or np.array_equal(ours[key], theirs[key]):
        return -1

    def gives(got: Table, want: Table) -> bool:
        return agrees(got, want, [key])

    if first.error or second.error or not (first.own and second.own):
        return -1
    first_own = all(gives(got, theirs) for got in first.own)
    second_own = all(gives(got, ours) for got in second.own)
    if first_own and gives(second.cross, theirs):
        return 1  # the second operator, on its own again, gives what the first gave
    if second_own and all(gives(got, ours) for got in first.own):
        return 1  # the other way round
    if not (first_own and second_own):
        return -1
    return 1 if gives(second.swapped, theirs) else 0


def _judged(
    comparison: Comparison,
    site: int,
    outcomes: dict[str, Outcome],
    at: tuple[int, int],
) -> ReplayAnswer:
    from zkl_debug.beds.replay_rows import keys_of

    pair = comparison.sites[site]
    first, second = outcomes.values()  # in the order in which the calls ran
    settled: dict[tuple[int, int, int, int], int] = {}
    for i in _pairs_of(comparison, site, at).tolist():
        left, right = int(comparison.pairs.left[i]), int(comparison.pairs.right[i])
        answer = verdict_of_row(first, second, keys_of(comparison, left)[0])
        if Kind(int(comparison.done[site].kind[i])) is Kind.PROPAGATED and not _all_in_place(comparison, site, second):
            answer = -1
        settled[_name(comparison, left, right)] = answer
    said = settled.get(_name(comparison, *at), -1)
    inputs = tuple(sorted(parse_site(name).port for name in first.substituted & second.substituted))
    rows = sum(value >= 0 for value in settled.values())
    where = f"{pair.name} at sample {int(comparison.space.sample[_named(comparison, at)])}"
    if said < 0:
        status = IMPOSSIBLE if first.error or second.error else FAILS
        return ReplayAnswer(pair.name, status, text=_why_not(comparison, outcomes, at), settled=settled)
    if said == 0:
        also = "on the other's inputs as well" if inputs else "none of its inputs could be put in place"
        text = f"called again, each side's operator gives its own output of {where}; {also}"
        return ReplayAnswer(pair.name, REPRODUCES, "own", text, (), rows, inputs, settled)
    state = tuple(second.names[:_NAMED])
    feeds = f"{', '.join(state)} feeds it" if state else "something that changes from call to call feeds it"
    text = f"called again on the same inputs, one side's operator gives the other's output of {where}: {feeds}"
    return ReplayAnswer(pair.name, REPRODUCES, Kind.UNCAPTURED_STATE.label, text, state, rows, inputs, settled)


def _why_not(comparison: Comparison, outcomes: dict[str, Outcome], at: tuple[int, int]) -> str:
    from zkl_debug.beds.replay_probe import agrees
    from zkl_debug.beds.replay_rows import keys_of

    key = keys_of(comparison, at[0])
    for outcome in outcomes.values():
        operand = outcome.operand
        who = f"{operand.side} (frame {operand.frame})"
        if outcome.error:
            return f"the operator of {who} cannot be called by itself: {outcome.error}"
        if not agrees(outcome.live, operand.output, key):
            return f"the rebuilt run of {who} does not give what was captured; the kind stays as it was"
        if not all(agrees(got, operand.output, key) for got in outcome.own):
            return f"replay does not reproduce {who} from its own captured inputs; the kind stays as it was"
    return "not every input could be put in place; the kind stays as it was"


def _pairs_of(comparison: Comparison, site: int, at: tuple[int, int]) -> Ints:
    """Differing pairs of the site whose rows are of the same two calls as the first."""
    space, pairs = comparison.space, comparison.pairs
    same = comparison.done[site].differs.copy()
    for rows, row in ((pairs.left, at[0]), (pairs.right, at[1])):
        same &= (space.side[rows] == space.side[row]) & (space.frame[rows] == space.frame[row])
    return np.flatnonzero(same)


def _all_in_place(comparison: Comparison, site: int, outcome: Outcome) -> bool:
    owner = comparison.sites[site].parsed.owner
    ports = {p.name for p in comparison.sites if p.parsed.owner == owner and parse_site(p.name).is_input}
    return bool(ports) and ports <= outcome.substituted


def _named(comparison: Comparison, at: tuple[int, int]) -> int:
    return int(named_row(comparison.space, np.array([at[0]]), np.array([at[1]]))[0])


def _name(comparison: Comparison, left: int, right: int) -> tuple[int, int, int, int]:
    side, row = comparison.space.side, comparison.space.row
    return int(side[left]), int(row[left]), int(side[right]), int(row[right])
