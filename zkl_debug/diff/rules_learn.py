"""What the affected rows have in common that the clean rows have not: an exact learner of short rules. numpy only.

A rule is one condition, or two joined by *and* or *or*. The labels of N pairs, n of them affected, can be written down
in log2 C(N, n) bits. With a rule they take log2 C(N1, n1) + log2 C(N0, n0) bits (affected inside and outside of it),
the bits that say how n splits, and the bits that name the rule. Whatever the data, labels drawn at random are
shortened by k bits with probability at most 2**-k, over all rules together (Kraft's inequality). A rule is believed
only when it saves :data:`GUARD` bits; so nothing is read into chance, however many facts there are.

Pairs of one row key, or of the same content, are not independent of each other. Before a rule is believed its saving is
counted again with each such unit counted once inside and once outside of the rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lgamma, log

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.facts import FactTable
from zkl_debug.diff.model import Bools, Ints
from zkl_debug.diff.rules_atoms import COMMON, Atom, atoms
from zkl_debug.diff.rules_rank import is_cause, preference
from zkl_debug.schema import Json

#: Bits a rule must save, its own length included: chance gets there at most once in 2**GUARD tables.
GUARD = 5.0
_RECALL = 0.8  # of the affected rows that a rule must cover
_SEARCHED = 4096  # pairs the search looks at; what it finds is judged on all of them
_FOR_PAIRS = 160  # conditions that are tried in twos
_JUDGED = 48  # rules that are counted with every key once
_ALTERNATIVES = 4
_SECOND = 24  # what a second condition weighs against the rank of the facts


@dataclass(frozen=True)
class Rule:
    """What separates affected from clean pairs.

    Attributes:
        found: there is a rule; otherwise ``text`` starts with "no rule".
        text: the rule in words.
        atoms: its conditions; ``joined`` by ``and`` or ``or``. None for "every row".
        precision: affected pairs among those it covers; ``recall``: covered pairs among those affected.
        saved: bits it saves, its own length included.
        same: other conditions that cover exactly the same pairs: the data cannot tell them apart.
        facts: every single fact with which a condition covers exactly these pairs.
    """

    found: bool
    text: str
    atoms: tuple[Atom, ...] = ()
    joined: str = ""
    precision: float | None = None
    recall: float | None = None
    saved: float = 0.0
    same: tuple[str, ...] = ()
    facts: frozenset[str] = frozenset()

    def to_json(self) -> Json:
        """The ``rule`` object of the verdict document."""
        return {
            "found": self.found,
            "text": self.text,
            "precision": self.precision,
            "recall": self.recall,
            "joined": self.joined,
            "conditions": [_condition(atom) for atom in self.atoms],
            "same": list(self.same),
            "saved_bits": round(self.saved, 1),
        }


def _condition(atom: Atom) -> dict[str, Json]:
    low, high = atom.interval if atom.values else (None, None)
    return {
        "fact": atom.fact,
        "of": atom.of,
        "operation": atom.operation,
        "values": list(atom.values),
        "limit": [low, high] if low != high else None,
    }


@dataclass(frozen=True)
class _Candidate:
    atoms: tuple[Atom, ...]
    joined: str
    saved: float

    @property
    def covered(self) -> Bools:
        first, *rest = (atom.covered for atom in self.atoms)
        if not rest:
            return first
        return first & rest[0] if self.joined == "and" else first | rest[0]

    @property
    def cost(self) -> float:
        return _length(self.atoms)


def learn(table: FactTable, affected: Bools, semantic: str = "", likely: Mapping[str, int] | None = None) -> Rule:
    """The shortest rule that separates affected from clean pairs, or none.

    Args:
        table: facts of the pairs.
        affected: which of them differ, bool [N].
        semantic: operator class of the site; decides between facts that the data cannot tell apart.
        likely: facts to prefer there, with a weight.
    """
    affected = np.asarray(affected, np.bool_)
    count, total = int(affected.sum()), len(affected)
    if count == 0:
        return Rule(False, "no rule: no row differs")
    if count == total:
        return Rule(True, "every row", (), "", 1.0, 1.0)
    found = atoms(table, affected)
    candidates = _search(found, affected)
    judged = [_judge(candidate, affected, table.unit) for candidate in candidates[:_JUDGED]]
    # A cause covers what it caused; luck hides some of it, and never adds to it. What covers less is a tendency.
    whole = [candidate for candidate in judged if _recall(candidate, affected) >= _RECALL]
    best = max(whole, key=lambda candidate: candidate.saved, default=None)
    if best is None or best.saved < GUARD:
        return Rule(False, _none(table, affected) + _tendency(judged, affected))
    chosen = _sharpened(best, found, affected, semantic) or best
    return _told(chosen, _search_same(chosen, found, judged), affected, semantic, likely or {})


def _recall(candidate: _Candidate, affected: Bools) -> float:
    return float((candidate.covered & affected).sum() / affected.sum())


def _tendency(judged: list[_Candidate], affected: Bools) -> str:
    """Where more of the rows differ than elsewhere, though others do too."""
    best = max(judged, key=lambda candidate: candidate.saved, default=None)
    if best is None or best.saved < GUARD:
        return ""
    covered = best.covered
    share, rest = (float(affected[at].mean()) for at in (covered, ~covered))
    return f"; more often where {_words(best)} ({share:.0%} there, {rest:.0%} elsewhere)"


def _none(table: FactTable, affected: Bools) -> str:
    """What can be said without a rule."""
    rows, of = (len(np.unique(table.unit[at])) for at in (affected, np.ones_like(affected)))
    shared = _shared(table, affected)
    if rows == 1:
        return f"no rule: a single row of {of} differs{shared}"
    told = f"{rows} of {of} different rows do; no captured fact separates them from the others"
    return f"no rule: every row alike may differ ({told}){shared}"


def _shared(table: FactTable, affected: Bools) -> str:
    """Values that all affected pairs have, which may be chance."""
    told = []
    for fact in table.facts:
        values = np.unique(fact.values[affected])
        if fact.name in ("sample", "position", "token") and len(values) == 1 and len(np.unique(fact.values)) > 1:
            told.append(f"{fact.name} {int(values[0])}")
    return f"; it has {', '.join(told)}" if told else ""


def _sharpened(best: _Candidate, found: list[Atom], affected: Bools, semantic: str) -> _Candidate | None:
    """A believed rule with one more condition on a common fact that leaves exactly the affected pairs, if there is one.

    It needs no bits of its own: the rule stands without it, and it is told only where it is right in every pair.
    """
    covered = best.covered
    if len(best.atoms) > 1 or bool((covered & ~affected).sum() == 0) or bool((affected & ~covered).any()):
        return None
    exact = [atom for atom in found if atom.fact in COMMON and np.array_equal(atom.covered & covered, affected)]
    if not exact:
        return None
    return replace(best, atoms=(*best.atoms, min(exact, key=lambda atom: preference(atom, semantic))), joined="and")


def _log_choose(n: NDArray[np.float64], k: NDArray[np.float64]) -> NDArray[np.float64]:
    return (_log_factorial(n) - _log_factorial(k) - _log_factorial(n - k)) / log(2)


def _log_factorial(n: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of n!; n may be halves."""
    whole = n.astype(np.int64)
    top = int(whole.max(initial=0))
    if top <= 2 * _SEARCHED and bool((whole == n).all()):
        return _factorials()[whole]
    return np.fromiter(map(lgamma, (n + 1).tolist()), np.float64, len(n))


@lru_cache(maxsize=1)
def _factorials() -> NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, 2 * _SEARCHED + 1)))])


def _gains(hits: NDArray[np.float64], rows: NDArray[np.float64], count: float, total: float) -> NDArray[np.float64]:
    """Bits saved by splitting ``total`` labels, ``count`` of them set, into ``rows`` with ``hits`` and the rest."""
    n, t = np.full_like(hits, count), np.full_like(hits, total)
    split = np.log2(np.minimum(count, rows) + 1)
    without = _log_choose(t, n)
    within = _log_choose(rows, hits) + _log_choose(t - rows, n - hits)
    return np.asarray(without - within - split, np.float64)


def saved_bits(hits: float, rows: float, other_hits: float, other_rows: float) -> float:
    one, two = np.array([hits], np.float64), np.array([rows], np.float64)
    return float(_gains(one, two, hits + other_hits, rows + other_rows)[0])


def _length(parts: Sequence[Atom]) -> float:
    """Bits that name a rule: one or two conditions, which, and how they are joined (the order says it)."""
    return 1 + sum(atom.cost for atom in parts)


def _sample(affected: Bools) -> Ints:
    """Pairs the search looks at: all, or evenly spaced affected and clean ones."""
    if len(affected) <= _SEARCHED:
        return np.arange(len(affected))
    parts = []
    for group in (np.flatnonzero(affected), np.flatnonzero(~affected)):
        step = max(1, -(-len(group) // (_SEARCHED // 2)))
        parts.append(group[::step])
    return np.sort(np.concatenate(parts))


def _search(found: list[Atom], affected: Bools) -> list[_Candidate]:
    """Rules by what they save, best first, each pair counted."""
    if not found:
        return []
    at = _sample(affected)
    labels = affected[at].astype(np.float32)
    hits, rows = np.empty(len(found)), np.empty(len(found))
    for start in range(0, len(found), _FOR_PAIRS):
        block = _covers(found[start : start + _FOR_PAIRS], at)
        hits[start : start + len(block)] = block @ labels
        rows[start : start + len(block)] = block.sum(axis=1, dtype=np.float64)
    count, total = float(labels.sum()), float(len(labels))
    cost = np.array([1 + atom.cost for atom in found])
    saved = np.where(_leans(hits, rows, count, total), _gains(hits, rows, count, total) - cost, -np.inf)
    candidates = [_Candidate((found[i],), "", float(saved[i])) for i in np.argsort(-saved)[:_JUDGED] if saved[i] > 0]
    candidates += _twos(found, at, labels, hits, rows)
    return sorted(candidates, key=lambda candidate: -candidate.saved)


def _covers(found: Sequence[Atom], at: Ints) -> NDArray[np.float32]:
    """Which of some pairs each condition covers, 0 or 1, [conditions, pairs]; sums of them are exact."""
    return np.stack([atom.test(at) for atom in found]).astype(np.float32)


def _leans(hits: NDArray[np.float64], rows: NDArray[np.float64], count: float, total: float) -> NDArray[np.bool_]:
    """Whether more of the covered than of the other pairs are affected."""
    return np.asarray(hits * total > rows * count)


def _twos(
    found: list[Atom],
    at: Ints,
    labels: NDArray[np.float32],
    hits: NDArray[np.float64],
    rows: NDArray[np.float64],
) -> list[_Candidate]:
    count, total = float(labels.sum()), float(len(labels))
    # Both conditions of an "and" should cover what is affected; those of an "or" should cover nothing else.
    clean = rows - hits
    best_and = np.lexsort((clean, -np.round(hits / count, 1)))[:_FOR_PAIRS]
    best_or = np.lexsort((-hits, np.round(clean / max(total - count, 1), 2)))[:_FOR_PAIRS]
    result = []
    for joined, chosen in (("and", best_and), ("or", best_or)):
        part = _covers([found[i] for i in chosen], at)
        both, both_hits = part @ part.T, (part * labels) @ part.T
        if joined == "or":
            both = rows[chosen][:, None] + rows[chosen][None, :] - both
            both_hits = hits[chosen][:, None] + hits[chosen][None, :] - both_hits
        one, two = np.triu_indices(len(chosen), 1)
        n_rows, n_hits = both[one, two].astype(np.float64), both_hits[one, two].astype(np.float64)
        cost = np.array([found[i].cost for i in chosen])
        # The order of the two conditions says "and" or "or".
        gain = _gains(n_hits, n_rows, count, total) - 1 - cost[one] - cost[two]
        gain = np.where(_leans(n_hits, n_rows, count, total), gain, -np.inf)
        for k in np.argsort(-gain)[:_JUDGED]:
            if gain[k] > 0:
                parts = (found[chosen[one[k]]], found[chosen[two[k]]])
                result.append(_Candidate(parts, joined, float(gain[k])))
    return result


def _judge(candidate: _Candidate, affected: Bools, key: Ints) -> _Candidate:
    """The candidate with its saving counted over all pairs, each key once inside and once outside."""
    covered = candidate.covered
    counts = []
    for side in (covered, ~covered):
        hit, miss = np.unique(key[side & affected]), np.unique(key[side & ~affected])
        mixed = len(np.intersect1d(hit, miss, assume_unique=True))
        counts.append((len(hit) - mixed / 2, len(hit) + len(miss) - mixed))
    saved = saved_bits(counts[0][0], counts[0][1], counts[1][0], counts[1][1]) - candidate.cost
    return replace(candidate, saved=min(saved, candidate.saved) if len(affected) <= _SEARCHED else saved)


def _search_same(best: _Candidate, found: list[Atom], judged: list[_Candidate]) -> list[_Candidate]:
    """Rules, no longer than the best one in conditions, that cover the same pairs."""
    covered = best.covered
    same = [_Candidate((atom,), "", 0.0) for atom in found if np.array_equal(atom.covered, covered)]
    same += [c for c in (best, *judged) if len(c.atoms) > 1 and np.array_equal(c.covered, covered) and not _idle(c)]
    return same or [best]


def _idle(candidate: _Candidate) -> bool:
    """Whether one of two conditions says it all."""
    covered = candidate.covered
    return any(np.array_equal(atom.covered, covered) for atom in candidate.atoms)


def _told(best: _Candidate, same: list[_Candidate], affected: Bools, semantic: str, likely: Mapping[str, int]) -> Rule:
    """The rule to print: of those that cover the same pairs, the one whose facts are most often a cause."""

    def rank(candidate: _Candidate) -> tuple[float, float, float]:
        second = _SECOND if len(candidate.atoms) > 1 else 0
        fact = candidate.atoms[0].fact
        elsewhere = likely.get(fact, 0) if len(candidate.atoms) == 1 and is_cause(fact) else 0
        return -elsewhere, second + sum(preference(atom, semantic) for atom in candidate.atoms), candidate.cost

    ordered = sorted(same, key=rank)
    chosen, others = ordered[0], _distinct(ordered)
    covered = chosen.covered
    hits = int((covered & affected).sum())
    text = _words(chosen)
    if others:
        text += f"; the same rows: {'; '.join(others)}"
    return Rule(
        True,
        text,
        chosen.atoms,
        chosen.joined,
        hits / int(covered.sum()),
        hits / int(affected.sum()),
        best.saved,
        tuple(others),
        frozenset(candidate.atoms[0].fact for candidate in same if len(candidate.atoms) == 1),
    )


def _distinct(ordered: list[_Candidate]) -> list[str]:
    """Other rules in words, one for each set of facts, the likeliest first."""
    seen = {tuple(sorted(atom.fact for atom in ordered[0].atoms))}
    singles = [candidate for candidate in ordered[1:] if len(candidate.atoms) == 1]
    words: list[str] = []
    pairs = ordered[1:] if len(ordered[0].atoms) > 1 else []
    for candidate in singles or pairs:
        facts = tuple(sorted(atom.fact for atom in candidate.atoms))
        if facts not in seen and len(words) < _ALTERNATIVES:
            seen.add(facts)
            words.append(_words(candidate))
    return words


def _words(candidate: _Candidate) -> str:
    return f" {candidate.joined} ".join(atom.text for atom in candidate.atoms)
