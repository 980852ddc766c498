"""Interactions, proven by runs: OR pairs and HARM (a switch that re-breaks unless another is on). No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from zkl_debug.bisect.outcome import Outcome, Purpose
from zkl_debug.bisect.phases import Replacement, smallest_prefixes
from zkl_debug.bisect.replay import Replay
from zkl_debug.bisect.result import Witness
from zkl_debug.bisect.space import Config


def or_witnesses(r: Replay, minimal: Config, replaced: Mapping[str, tuple[Replacement, ...]]) -> list[Witness]:
    """For each replaceable member and each replacement: without both it mismatches, with either one it is zero."""
    found = []
    for name, sets in replaced.items():
        base = minimal - r.space.dependents([name])
        for other in sets:
            names = r.space.sort(other.added)
            text = f"{name} or {' with '.join(names)}: either makes it zero, without both it mismatches"
            seen = (r.evidence(base), r.evidence(minimal), r.evidence(other.config))
            found.append(Witness("or", (name,), names, text, seen))
    return found


def harm_witnesses(r: Replay, top: Config, minimal: Config) -> list[Witness]:
    """Find switches whose turning on broke a zero configuration, and what heals it.

    Only contradictions seen on the way are followed up, unless the policy asks for a scan of single switches.
    """
    if r.policy.scan_harm:
        for name in r.space.sort(top - minimal):
            r.ask(minimal | (r.space.closure([name]) & top), Purpose.WITNESS)
    found: dict[str, Witness] = {}
    while len(found) < r.policy.max_witnesses:
        pair = _contradiction(r, set(found))
        if pair is None:
            break
        witness = _refine(r, top, *pair)
        found[witness.switches[0]] = witness
    return list(found.values())


def _contradiction(r: Replay, explained: set[str]) -> tuple[Config, Config] | None:
    """The closest known pair A < B with A zero and B a mismatch that no switch found so far explains."""
    zeros = [c for (c, wide), a in r.answers.items() if wide is r.wide and a.outcome is Outcome.ZERO]
    broken = [c for (c, _), a in r.answers.items() if a.outcome is Outcome.MISMATCH]
    pairs = [(a, b) for a in zeros for b in broken if a < b and not (b - a) & explained]
    return min(pairs, key=lambda p: (len(p[1] - p[0]), r.space.sort(p[0]), r.space.sort(p[1])), default=None)


def _refine(r: Replay, top: Config, clean: Config, broken: Config) -> Witness:
    """Narrow a contradiction to one switch, and find what heals it on the way up to all-on."""
    space = r.space
    chain = space.sort(broken - clean)
    low, high = 0, len(chain)
    while high - low > 1:
        cuts = sorted(range(low + 1, high), key=lambda c: (abs(c - (low + high) / 2), c))
        for cut in cuts:
            outcome = r.outcome(clean.union(chain[:cut]), Purpose.WITNESS)
            if outcome is Outcome.ZERO:
                low = cut
                break
            if outcome is Outcome.MISMATCH:
                high = cut
                break
        else:
            break
    before, after = clean.union(chain[:low]), clean.union(chain[:high])
    blamed = chain[low:high]
    healed = _healing(r, top, after)
    others = space.sort(healed - after) if healed is not None else ()
    with_them = " with ".join(blamed)
    unless = f" unless {' and '.join(others)} is on" if others else ""
    seen = [r.evidence(before), r.evidence(after)] + ([r.evidence(healed)] if healed is not None else [])
    return Witness("harm", blamed, others, f"{with_them} re-breaks it{unless}", tuple(seen))


def _healing(r: Replay, top: Config, broken: Config) -> Config | None:
    whole = broken | top
    if not r.space.is_valid(whole) or r.outcome(whole, Purpose.WITNESS) is not Outcome.ZERO:
        return None
    return smallest_prefixes(r, broken, r.space.sort(whole - broken), Purpose.WITNESS)
