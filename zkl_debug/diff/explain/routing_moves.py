"""Router choices that are right, for another token: replayed at a shifted position, or for another sequence."""

from __future__ import annotations

import numpy as np

from zkl_debug.diff.explain.model import Evidence, Finding, Routing, Strength
from zkl_debug.diff.model import Bools, Ints
from zkl_debug.schema import Json

_SHIFTS = (-1, 1, -2, 2)
_LEAST = 8
_MOST_BY_CHANCE = 0.6
_ENOUGH = 0.95
_REPLACES = ("routing-flip", "routing-weights", "constant-ratio", "reduction-order")


def routing_shift(e: Evidence) -> Finding | None:
    """One side's experts are those the other side chose for a token some positions away in the same sequence."""
    routing = _flipped(e)
    if routing is None:
        return None
    at = {(s, p): i for i, (s, p) in enumerate(zip(routing.sample.tolist(), routing.position.tolist(), strict=True))}
    own, other = routing.chosen
    for shift in _SHIFTS:
        found = [(i, at.get((s, p + shift))) for (s, p), i in at.items()]
        here = np.array([i for i, j in found if j is not None], np.int64)
        there = np.array([j for _, j in found if j is not None], np.int64)
        hits, chance = _hits(own, other, here, there)
        if len(here) < _LEAST or hits < _ENOUGH * len(here) or chance > _MOST_BY_CHANCE:
            continue
        way = f"{abs(shift)} position{'s' if abs(shift) > 1 else ''} {'earlier' if shift < 0 else 'later'}"
        text = (
            f"the experts of {e.side(False)} are those {e.side(True)} chose {way} in the same sequence, in {hits} of "
            f"{len(here)} rows ({chance:.0%} would agree by chance)"
        )
        evidence: dict[str, Json] = {"shift": shift, "rows": hits, "of": len(here), "chance": round(chance, 4)}
        return Finding("row-shift", text, evidence, _strength(hits, len(here)), _REPLACES)
    return None


def routing_of_another_sample(e: Evidence) -> Finding | None:
    """One side's experts are those the other side chose for another sequence, at the same positions."""
    routing = _flipped(e)
    if routing is None:
        return None
    own, other = routing.chosen
    rows = {int(s): np.flatnonzero(routing.sample == s) for s in np.unique(routing.sample)}
    taken: dict[int, int] = {}
    hits = of = 0
    chances: list[float] = []
    for sample, mine in rows.items():
        best: tuple[int, int, int, float] | None = None
        for candidate, theirs in rows.items():
            here, there = _same_positions(routing.position, mine, theirs)
            count, chance = _hits(own, other, here, there)
            if candidate != sample and len(here) >= _LEAST and (best is None or count / len(here) > best[1] / best[2]):
                best = candidate, count, len(here), chance
        if best is None:
            continue
        taken[sample], hits, of = best[0], hits + best[1], of + best[2]
        chances.append(best[3])
    if of < _LEAST or hits < _ENOUGH * of or max(chances) > _MOST_BY_CHANCE:
        return None
    listed = ", ".join(f"{a} has those of {b}" for a, b in list(taken.items())[:4])
    text = f"the experts of {e.side(False)} are those {e.side(True)} chose for other sequences: {listed}"
    evidence: dict[str, Json] = {"samples": {str(a): b for a, b in taken.items()}, "rows": hits, "of": of}
    return Finding("equals-other-sample", text, evidence, _strength(hits, of), _REPLACES)


def _flipped(e: Evidence) -> Routing | None:
    routing = e.routing
    return routing if routing is not None and bool((routing.chosen[0] != routing.chosen[1]).any()) else None


def _same_positions(position: Ints, mine: Ints, theirs: Ints) -> tuple[Ints, Ints]:
    _, first, second = np.intersect1d(position[mine], position[theirs], return_indices=True)
    return mine[first], theirs[second]


def _hits(own: Bools, other: Bools, here: Ints, there: Ints) -> tuple[int, float]:
    """Rows whose choice is the other's at the other place, and the share that would be so by chance."""
    if not len(here):
        return 0, 1.0
    hits = int((own[here] == other[there]).all(axis=1).sum())
    return hits, float((own[here] == other[np.roll(there, len(there) // 2 or 1)]).all(axis=1).mean())


def _strength(hits: int, of: int) -> Strength:
    return Strength.EXACT if hits == of else Strength.FITTED
