"""The steps of the search, each a function over :class:`Replay`. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from zkl_debug.bisect.outcome import Observation, Outcome, Purpose
from zkl_debug.bisect.replay import Replay
from zkl_debug.bisect.result import Status
from zkl_debug.bisect.space import Config

_JUDGED = (Outcome.ZERO, Outcome.MISMATCH)


@dataclass(frozen=True)
class Endpoints:
    """Where the search starts.

    Attributes:
        status: ``found`` when all-off mismatches and ``top`` is zero, else why there is nothing to search.
        top: the all-on configuration that is used.
        dropped: switches taken out because no configuration with them could be judged, with the reason.
        reason: what was seen, for a refusal.
    """

    status: Status
    top: Config
    dropped: dict[str, str] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Replacement:
    """Switches that do the job of a member, and the zero configuration that shows it."""

    added: Config
    config: Config


def endpoints(r: Replay) -> Endpoints:
    """Run all-off and all-on; take out switches that make all-on unjudgeable."""
    space = r.space
    off = r.ask(space.bottom, Purpose.ENDPOINTS)
    if off.outcome is Outcome.ZERO:
        return Endpoints(Status.NOTHING, space.top, reason="all-off is already zero: there is nothing to explain")
    if off.outcome is not Outcome.MISMATCH:
        return Endpoints(_refusal(off), space.top, reason=f"all-off gives {off.outcome.value}: {off.reason}")
    r.target = off.signature
    top, dropped = _judgeable_top(r)
    if top == space.bottom:
        return Endpoints(Status.UNTESTABLE, top, dropped, "no switch of the space can be tested here")
    if r.outcome(top, Purpose.ENDPOINTS) is Outcome.ZERO:
        return Endpoints(Status.FOUND, top, dropped)
    for name in space.swappable:
        other = space.swap_in(top, name)
        gone = space.dependents(dropped)
        if other is not None and not other & gone and r.outcome(other, Purpose.ENDPOINTS) is Outcome.ZERO:
            return Endpoints(Status.FOUND, other, dropped)
    untested = space.sort({*dropped, *space.excluded} - top)
    reason = "all-on still mismatches: the switches of this space do not explain it"
    if untested:
        reason = f"everything that can be tested is on and it still mismatches; not tested: {', '.join(untested)}"
    return Endpoints(Status.INSUFFICIENT, top, dropped, reason)


def _refusal(answer: Observation) -> Status:
    return Status.ERROR if answer.outcome is Outcome.ERROR else Status.UNTESTABLE


def _judgeable_top(r: Replay) -> tuple[Config, dict[str, str]]:
    """The largest ladder that can be judged: each switch that makes a prefix unjudgeable is dropped."""
    space = r.space
    ladder = space.sort(space.top - space.bottom)
    dropped: dict[str, str] = {}
    low = 0  # bottom + ladder[:low] was judged
    while True:
        answer = r.ask(space.bottom.union(ladder), Purpose.ENDPOINTS)
        if answer.outcome in _JUDGED:
            return space.bottom.union(ladder), dropped
        high = len(ladder)
        while high - low > 1:
            mid = (low + high) // 2
            step = r.ask(space.bottom.union(ladder[:mid]), Purpose.ENDPOINTS)
            low, high = (mid, high) if step.outcome in _JUDGED else (low, mid)
            answer = answer if step.outcome in _JUDGED else step
        culprit = ladder[high - 1]
        for name in space.sort(space.dependents([culprit]).intersection(ladder)):
            because = "" if name == culprit else f"requires {culprit}, which gave "
            dropped[name] = f"{because}{answer.outcome.value}: {answer.reason or 'no reason given'}"
        ladder = tuple(n for n in ladder if n not in dropped)


def smallest_prefixes(r: Replay, base: Config, rest: Sequence[str], purpose: Purpose) -> Config:
    """Iterated prefix bisection: a zero configuration between ``base`` and ``base + rest``.

    ``base + rest`` must be known zero and every prefix of ``rest`` closed under ``requires`` together with ``base``.
    Where cuts cannot be judged the whole unresolved block is taken; minimality then tries its members one by one.
    """
    kept = base
    left = [n for n in rest if n not in kept]
    while True:
        answer = r.outcome(kept, purpose)
        if answer is Outcome.ZERO:
            return kept
        start, end = _first_zero(r, kept, left, answer is Outcome.MISMATCH, purpose)
        kept |= r.space.closure(left[start:end])
        left = [n for n in left[:start] if n not in kept]


def _first_zero(r: Replay, kept: Config, left: Sequence[str], judged: bool, purpose: Purpose) -> tuple[int, int]:
    """``(a, b)``: the prefix of length b is zero, that of length a is not, and none between can be judged."""
    low, high = (0 if judged else -1), len(left)
    unknown = set() if judged else {0}
    while True:
        cut = (low + high) // 2
        if cut in unknown or not low < cut < high:
            cuts = [c for c in range(low + 1, high) if c not in unknown]
            if not cuts:
                return max(low, 0), high
            middle = (low + high) / 2
            cut = min(cuts, key=lambda c: (abs(c - middle), c))
        outcome = r.outcome(kept.union(left[:cut]), purpose)
        if outcome is Outcome.ZERO:
            high = cut
        elif outcome is Outcome.MISMATCH:
            low = cut
        else:
            unknown.add(cut)


def minimise(r: Replay, config: Config, removable: Iterable[str], purpose: Purpose) -> tuple[Config, tuple[str, ...]]:
    """Drop members one at a time (with what requires them) until no single removal stays zero.

    Returns:
        The 1-minimal configuration, and the members whose removal could not be judged.
    """
    candidates = r.space.sort(removable)
    while True:
        unproven: list[str] = []
        for name in candidates:
            if name not in config:
                continue
            outcome = r.outcome(config - r.space.dependents([name]), purpose)
            if outcome is Outcome.ZERO:
                config -= r.space.dependents([name])
                break
            if outcome is not Outcome.MISMATCH:
                unproven.append(name)
        else:
            return config, tuple(unproven)


def replacements(r: Replay, top: Config, minimal: Config, name: str) -> tuple[Replacement, ...]:
    """Sets of switches that each do the job of ``name``, a member of ``minimal``.

    Named alternatives are tried first, one run each; then, when all-on stays zero without ``name``, what replaces it
    is isolated by the same prefix bisection, until nothing is left that replaces it.
    """
    space, purpose = r.space, Purpose.NECESSITY
    gone = space.dependents([name])
    base = minimal - gone
    named = _named(r, name)
    found: list[Replacement] = []
    for other in (n for n in named if n not in top):
        found += _swapped(r, top - gone, base, other)
    pool = top - base - gone
    for other in (n for n in named if n in pool):
        config = base | space.closure([other])
        if not config & gone and r.outcome(config, purpose) is Outcome.ZERO:
            config, _ = minimise(r, config, config - base, purpose)
            found.append(Replacement(config - base, config))
            pool -= space.dependents(config - base)
    while len(found) < r.policy.max_alternatives and r.outcome(base | pool, purpose) is Outcome.ZERO:
        config = smallest_prefixes(r, base, space.sort(pool), purpose)
        config, _ = minimise(r, config, config - base, purpose)
        if config == base:
            break
        found.append(Replacement(config - base, config))
        pool -= space.dependents(config - base)
    return tuple({f.added: f for f in found}.values())


def _named(r: Replay, name: str) -> tuple[str, ...]:
    """Alternatives the space names for a switch, and those that conflict with it."""
    space = r.space
    back = {s.name for s in space.switches if name in s.alternatives}
    return space.sort({*space.by_name[name].alternatives, *back, *space.rivals([name])})


def _swapped(r: Replay, top: Config, base: Config, other: str) -> list[Replacement]:
    """What replaces the member missing from ``base`` when ``other``, left out by a conflict, is swapped in."""
    small, large = r.space.swap_in(base, other), r.space.swap_in(top, other)
    if small is None or large is None or not small <= large:
        return []
    if r.outcome(small, Purpose.NECESSITY) is not Outcome.ZERO:
        if r.outcome(large, Purpose.NECESSITY) is not Outcome.ZERO:
            return []
        small = smallest_prefixes(r, small, r.space.sort(large - small), Purpose.NECESSITY)
    small, _ = minimise(r, small, small - base, Purpose.NECESSITY)
    return [Replacement(small - base, small)] if small - base else []
