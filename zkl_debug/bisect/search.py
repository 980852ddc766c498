"""Which switches make the mismatch go away: a pure state machine over outcomes. No I/O.

``Search`` is driven from outside: ask it for :meth:`Search.proposals`, run them in any order, :meth:`Search.tell` it
what came out, until :attr:`Search.result` is there. See DESIGN 8 for the algorithm and ``replay`` for how it runs.
"""

from __future__ import annotations

import heapq
import itertools
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from zkl_debug.bisect.outcome import Observation, Outcome, Purpose, Request, RunKey
from zkl_debug.bisect.phases import Endpoints, Replacement, endpoints, minimise, replacements, smallest_prefixes
from zkl_debug.bisect.replay import Need, Policy, Replay
from zkl_debug.bisect.result import Evidence, Finding, Role, SearchResult, Status
from zkl_debug.bisect.space import Config, Space
from zkl_debug.bisect.witness import harm_witnesses, or_witnesses

#: Possible futures looked at per proposal wanted.
_LOOK_AHEAD = 6


class Search:
    """The state machine.

    Args:
        space: the switches.
        policy: how careful to be.
    """

    def __init__(self, space: Space, policy: Policy | None = None) -> None:
        self.space = space
        self.policy = policy or Policy()
        self._known: dict[RunKey, Observation] = {}
        self._step: SearchResult | Need | None = None

    @property
    def result(self) -> SearchResult | None:
        """The answer, or None while runs are missing."""
        step = self._current()
        return step if isinstance(step, SearchResult) else None

    @property
    def told(self) -> int:
        """Number of runs told so far, speculative ones included."""
        return len(self._known)

    def proposals(self, width: int = 1, running: Iterable[Request] = ()) -> tuple[Request, ...]:
        """Up to ``width`` runs to make now, the one the search waits for first; empty when it is done.

        With more than one, the others are those most likely to be needed next whatever comes out; ``running`` are
        not proposed again.
        """
        found: list[Request] = []
        busy = {r.key for r in running}
        order = itertools.count()
        futures: list[tuple[float, int, dict[RunKey, Observation]]] = [(-1.0, next(order), {})]
        for _ in range(_LOOK_AHEAD * (width + len(busy))):
            if len(found) >= width or not futures:
                break
            weight, _, assumed = heapq.heappop(futures)
            step = self._current() if not assumed else _advance(self.space, self.policy, ChainMap(assumed, self._known))
            if isinstance(step, SearchResult):
                continue
            request = step.request
            if request.key not in busy:
                busy.add(request.key)
                found.append(request)
            for outcome, chance in ((Outcome.ZERO, step.prior), (Outcome.MISMATCH, 1 - step.prior)):
                future = {**assumed, request.key: Observation(outcome)}
                heapq.heappush(futures, (weight * chance, next(order), future))
        return tuple(found)

    def tell(self, request: Request, observation: Observation) -> None:
        """Take in the outcome of a run. A run that is known already must not be told again."""
        assert request.key not in self._known, f"told twice: {sorted(request.config)}"
        self._known[request.key] = observation
        step, self._step = self._step, None
        if isinstance(step, Need) and step.request.key == request.key and observation.outcome is Outcome.ZERO:
            follow = replace(step.request, repeat=request.repeat + 1)
            if step.left and follow.key not in self._known:
                self._step = Need(follow, max(0.9, step.prior), step.left - 1)  # what the replay would come to

    def knows(self, request: Request) -> bool:
        """Whether the run was told already."""
        return request.key in self._known

    def incomplete(self, reason: str) -> SearchResult:
        """The partial answer: the smallest configuration known zero, and the run that is needed next."""
        step = self._current()
        if isinstance(step, SearchResult):
            return step
        zeros = [c for (c, _, _), o in self._known.items() if o.outcome is Outcome.ZERO]
        broken = {c for (c, _, _), o in self._known.items() if o.outcome is Outcome.MISMATCH}
        best = min((c for c in zeros if c not in broken), key=lambda c: (len(c), self.space.sort(c)), default=None)
        names = ", ".join(self.space.sort(step.request.config)) or "nothing"
        return SearchResult(
            Status.INCOMPLETE,
            minimal=self.space.sort(best - self.space.bottom) if best is not None else (),
            runs={"told": self.told},
            reason=reason,
            next_steps=(f"needs a run ({step.request.purpose.value}) with these on: {names}",),
        )

    def _current(self) -> SearchResult | Need:
        if self._step is None:
            self._step = _advance(self.space, self.policy, self._known)
        return self._step


def _advance(space: Space, policy: Policy, known: Mapping[RunKey, Observation]) -> SearchResult | Need:
    try:
        return _solve(Replay(space, policy, known))
    except Need as need:
        return need


def _solve(r: Replay) -> SearchResult:
    """The whole search; raises :class:`Need` at the first run that is missing."""
    r.size_repeats()
    ends = endpoints(r)
    if ends.status is not Status.FOUND:
        return _refused(r, ends, ends.status, ends.reason)
    minimal, unproven = _minimal(r, ends.top)
    confirmed, reason = False, "not confirmed: confirmation was switched off"
    if r.policy.confirm:
        answer = r.ask(minimal, Purpose.CONFIRMATION, wide=True)
        confirmed, reason = answer.outcome is Outcome.ZERO, ""
        if answer.outcome is Outcome.MISMATCH:
            r.wide = True
            best = r.ask(ends.top, Purpose.CONFIRMATION)
            if best.outcome is not Outcome.ZERO:
                status = Status.INSUFFICIENT if best.outcome is Outcome.MISMATCH else Status.UNTESTABLE
                return _refused(r, ends, status, f"with the wider probe all-on gives {best.outcome.value}")
            minimal, unproven = _minimal(r, ends.top)
            confirmed, reason = True, "the first answer failed the wider probe; this one passed it in every run"
        elif not confirmed:
            reason = f"not confirmed: the wider probe gives {answer.outcome.value}: {answer.reason}"
    return _explained(r, ends, minimal, unproven, confirmed, reason)


def _minimal(r: Replay, top: Config) -> tuple[Config, tuple[str, ...]]:
    bottom = r.space.bottom
    kept = smallest_prefixes(r, bottom, r.space.sort(top - bottom), Purpose.SEARCH)
    return minimise(r, kept, kept - bottom, Purpose.MINIMALITY)


def _explained(
    r: Replay, ends: Endpoints, minimal: Config, unproven: tuple[str, ...], confirmed: bool, reason: str
) -> SearchResult:
    space, members = r.space, r.space.sort(minimal - r.space.bottom)
    replaced: dict[str, tuple[Replacement, ...]] = {}
    from_top: dict[str, Observation] = {}
    for name in members:
        from_top[name] = r.ask(ends.top - space.dependents([name]), Purpose.NECESSITY)
        replaced[name] = replacements(r, ends.top, minimal, name)
    witnesses = or_witnesses(r, minimal, replaced) + harm_witnesses(r, ends.top, minimal)
    without = {n: minimal - space.dependents([n]) for n in members}
    findings = tuple(
        _member(r, n, from_top[n], replaced[n], r.ask(without[n], Purpose.MINIMALITY), n in unproven)
        if n in minimal and n not in space.bottom
        else _outsider(space, ends, n, [m for m in members if any(n in s.added for s in replaced[m])])
        for n in space.order
    )
    shown = [r.evidence(minimal)] + [r.evidence(c) for c in without.values()]
    return SearchResult(
        Status.FOUND,
        minimal=members,
        confirmed=confirmed,
        findings=findings,
        witnesses=tuple(witnesses),
        slippage=r.slipped(),
        evidence=tuple(shown),
        unproven=unproven,
        repeats=r.repeats,
        visibility=r.visibility,
        runs=dict(r.runs),
        signature=r.target,
        reason=reason,
    )


def _member(
    r: Replay, name: str, from_top: Observation, sets: tuple[Replacement, ...], without: Observation, unproven: bool
) -> Finding:
    role, reason = Role.CORE, "taking it out of all-on mismatches"
    if sets:
        role, reason = Role.REPLACEABLE, ""
    elif from_top.outcome is Outcome.ZERO:
        role, reason = Role.REPLACEABLE, "all-on is zero without it, but what replaces it could not be isolated"
    elif from_top.outcome is not Outcome.MISMATCH:
        role, reason = Role.UNTESTED, f"all-on without it gives {from_top.outcome.value}: {from_top.reason}"
    needing = [n for n in r.space.sort(r.space.dependents([name]) - {name}) if name in r.space.by_name[n].requires]
    if needing and role is Role.CORE:
        reason += f"; required by {', '.join(needing)}"
    if unproven:
        limit = f"the minimal set without it gives {without.outcome.value}: {without.reason}"
        reason = f"{reason}; {limit}" if reason else limit
    replaced_by = tuple(r.space.sort(s.added) for s in sets)
    return Finding(name, role, True, replaced_by, reason, without.signature)


def _outsider(space: Space, ends: Endpoints, name: str, replaces: Sequence[str]) -> Finding:
    """The verdict on a switch outside the minimal set."""
    if replaces:
        return Finding(name, Role.REPLACEABLE, replaced_by=tuple((m,) for m in replaces))
    if name in space.bottom:
        return Finding(name, Role.UNTESTED, reason="held on")
    if name in ends.dropped:
        return Finding(name, Role.UNTESTED, reason=ends.dropped[name])
    if name in ends.top:
        return Finding(name, Role.REMOVABLE)
    rivals = ", ".join(space.sort(space.rivals([name]) & ends.top))
    return Finding(name, Role.UNTESTED, reason=space.excluded.get(name) or f"conflicts with {rivals}")


def _refused(r: Replay, ends: Endpoints, status: Status, reason: str) -> SearchResult:
    """A result without a minimal set: what was run, and which switches could not be."""
    space = r.space
    untested = {**space.excluded, **ends.dropped, **dict.fromkeys(space.bottom, "held on")}
    shown: list[Evidence] = [
        Evidence(space.sort(c - space.bottom), a.outcome, a.signature, a.reason, wide)
        for (c, wide), a in r.answers.items()
        if c in (space.bottom, ends.top, space.top)
    ]
    return SearchResult(
        status,
        findings=tuple(Finding(n, Role.UNTESTED, reason=untested[n]) for n in space.order if n in untested),
        slippage=r.slipped(),
        evidence=tuple(shown),
        repeats=r.repeats,
        visibility=r.visibility,
        runs=dict(r.runs),
        signature=r.target,
        reason=reason,
    )
