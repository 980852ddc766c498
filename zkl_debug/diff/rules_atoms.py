"""The conditions a rule may be made of, and what each costs to state. numpy only.

Costs are lengths of a prefix code in bits: over all atoms of a table the sum of 2**-cost is at most 1. That is what
makes the learner's guard against chance a theorem and not a tuned number: see :mod:`zkl_debug.diff.rules`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import comb, log2
from typing import Any

import numpy as np

from zkl_debug.diff.facts import Fact, FactKind, FactTable, varying
from zkl_debug.diff.model import Bools, Ints

#: Facts that faults are most often about. They share three quarters of the code space, so they are cheap to name.
COMMON = frozenset(
    {
        "after cache hit",
        "chunk edge",
        "first decode token",
        "first position of its sequence in call",
        "first sequence in call",
        "last position of its sequence in call",
        "longest query in call",
        "packed",
        "position",
        "rows in call",
        "sample",
        "sequences in call",
    }
)
#: Ordinals that a kernel may look up instead of comparing them with a limit, so that a set of them can be a cause.
_LISTED = frozenset({"rows in call", "longest query in call", "sequences in call", "rank", "step"})
_SET_SIZE = 6  # values of a set
_SET_DOMAIN = 256  # distinct values a fact may have to be used as a set
_OPERATIONS = 4  # ways of using one fact
_LIKELY, _UNLIKELY = -log2(3 / 4), 2.0  # bits that choose between two groups, one of them likelier


At = Ints | slice
_ALL = slice(None)


@dataclass(frozen=True)
class Atom:
    """One condition.

    Attributes:
        fact: name of the fact; ``of``: which row of the pair.
        operation: ``>=``, ``<=``, ``==``, ``!=``, ``in``, ``is``, ``is not``, ``crosses`` or ``one in``.
        values: one value, or those of a set.
        test: gives the pairs that fulfil it, bool [n], of all pairs or of those with the numbers given. The conditions
            of a large table would fill the memory.
        cost: bits it takes to name it.
        other: the value next to a threshold on its other side, so that the true limit lies between; else None.
    """

    fact: str
    of: str
    operation: str
    values: tuple[int, ...]
    test: Callable[[At], Bools]
    cost: float
    other: int | None = None

    @property
    def covered(self) -> Bools:
        """All pairs that fulfil it, bool [N]."""
        return self.test(_ALL)

    @property
    def text(self) -> str:
        """The condition in words."""
        name = f"{self.fact} of {self.of}" if self.of else self.fact
        if self.operation in ("is", "is not"):
            flag = name if not self.of else f"{self.fact} ({self.of})"
            return flag if self.operation == "is" else f"not {flag}"
        listed = ", ".join(str(value) for value in self.values)
        if self.operation == "in":
            return f"{name} in {{{listed}}}"
        if self.operation == "one in":
            return f"{self.fact} in {{{listed}}} on exactly one of the two rows"
        if self.operation == "differs":
            return f"{self.fact} differs between the two rows"
        if self.operation == "crosses":
            return f"{self.fact} >= {listed} on exactly one of the two rows{self._between()}"
        return f"{name} {self.operation} {listed}{self._between()}"

    def _between(self) -> str:
        low, high = self.interval
        return "" if low == high else f" (the limit lies in {low}..{high})"

    @property
    def interval(self) -> tuple[int, int]:
        """Lowest and highest threshold that the data allow."""
        value = self.values[0]
        if self.other is None or self.operation not in (">=", "<=", "crosses"):
            return value, value
        return (value, self.other - 1) if self.operation == "<=" else (self.other + 1, value)


def atoms(table: FactTable, affected: Bools) -> list[Atom]:
    """All atoms of a table. Sets are chosen by what is affected; their cost pays for the choice."""
    facts = varying(table.facts)
    families: dict[str, list[Fact]] = {}
    for fact in facts:
        families.setdefault(fact.family or fact.title, []).append(fact)
    twins = [(a, b) for a, b in table.twins() if not np.array_equal(a.values, b.values)]
    one_row, both = (_LIKELY, _UNLIKELY) if twins else (0.0, 0.0)
    common = {name for name, members in families.items() if members[0].name in COMMON}
    found: list[Atom] = []
    for name, members in families.items():
        choice = _LIKELY + log2(len(common)) if name in common else _UNLIKELY + log2(len(families) - len(common))
        cost = choice + one_row + log2(len(members))
        for fact in members:
            found += _of_fact(fact, affected, cost)
    for one, two in twins:
        found += _of_twins(one, two, affected, both + log2(len(twins)))
    return found


def _of_fact(fact: Fact, affected: Bools, cost: float) -> Iterator[Atom]:
    if fact.kind is FactKind.FLAG:
        yield Atom(fact.name, fact.of, "is", (1,), _compare(fact, operator.eq, 1), cost + 1)
        yield Atom(fact.name, fact.of, "is not", (1,), _compare(fact, operator.eq, 0), cost + 1)
        return
    values = np.unique(fact.values)
    cost += log2(_OPERATIONS)
    if fact.kind is FactKind.ORDINAL:
        yield from _thresholds(fact, values, cost)
    yield from _single_values(fact, values, cost)
    yield from _sets(fact, values, affected, cost)


def _thresholds(fact: Fact, values: Ints, cost: float) -> Iterator[Atom]:
    length = cost + log2(2 * (len(values) - 1))
    for low, high in zip(values[:-1].tolist(), values[1:].tolist(), strict=True):
        yield Atom(fact.name, fact.of, ">=", (high,), _compare(fact, operator.ge, high), length, low)
        yield Atom(fact.name, fact.of, "<=", (low,), _compare(fact, operator.lt, high), length, high)


def _single_values(fact: Fact, values: Ints, cost: float) -> Iterator[Atom]:
    ends = 1 if fact.kind is FactKind.ORDINAL else 0
    inner = values[ends : len(values) - ends]  # the ends of an ordinal are thresholds
    if not len(inner):
        return
    length = cost + log2(2 * len(inner))
    for value in inner.tolist():
        yield Atom(fact.name, fact.of, "==", (value,), _compare(fact, operator.eq, value), length)
        if len(values) > 2:
            yield Atom(fact.name, fact.of, "!=", (value,), _compare(fact, operator.ne, value), length)


def _compare(fact: Fact, how: Callable[[Ints, int], Any], value: int) -> Callable[[At], Bools]:
    return lambda at: np.asarray(how(fact.values[at], value), np.bool_)


def _crossing(one: Fact, two: Fact, value: int) -> Callable[[At], Bools]:
    return lambda at: np.asarray((one.values[at] >= value) != (two.values[at] >= value), np.bool_)


def _sets(fact: Fact, values: Ints, affected: Bools, cost: float) -> Iterator[Atom]:
    """Values whose rows are affected most: the first 2, 3 ... of them."""
    if not 3 < len(values) <= _SET_DOMAIN or (fact.kind is FactKind.ORDINAL and fact.name not in _LISTED):
        return
    where = np.searchsorted(values, fact.values)
    rows = np.bincount(where, minlength=len(values))
    hits = np.bincount(where, weights=affected, minlength=len(values))
    order = np.lexsort((-rows, -hits / rows))
    largest = min(_SET_SIZE, len(values) - 2)
    for size in range(2, largest + 1):
        chosen = np.sort(order[:size])
        if hits[order[size - 1]] == 0:
            return
        length = cost + log2(largest - 1 or 1) + log2(comb(len(values), size))
        covered = np.isin(where, chosen)
        yield Atom(fact.name, fact.of, "in", tuple(values[chosen].tolist()), covered.__getitem__, length)


def _of_twins(one: Fact, two: Fact, affected: Bools, cost: float) -> Iterator[Atom]:
    """Conditions on both rows of a pair: a threshold between them, another value, one of them in a set."""
    values = np.unique(np.concatenate([one.values, two.values]))
    if len(values) < 2:
        return
    cost += log2(3)
    if one.kind is FactKind.ORDINAL:
        length = cost + log2(len(values) - 1)
        for low, high in zip(values[:-1].tolist(), values[1:].tolist(), strict=True):
            yield Atom(one.name, "", "crosses", (high,), _crossing(one, two, high), length, low)
    yield Atom(one.name, "", "differs", (), (one.values != two.values).__getitem__, cost)
    classes = _two_classes(one.values, two.values, values, affected)
    if classes is None:
        return
    chosen = np.flatnonzero(classes)
    if not 0 < len(chosen) <= _SET_SIZE:
        return
    inside = np.isin(one.values, values[chosen]) != np.isin(two.values, values[chosen])
    length = cost + log2(_SET_SIZE) + log2(comb(len(values), len(chosen)))
    yield Atom(one.name, "", "one in", tuple(values[chosen].tolist()), inside.__getitem__, length)


def _two_classes(left: Ints, right: Ints, values: Ints, affected: Bools) -> Bools | None:
    """Two classes of values such that pairs differ where their values are of different classes; None if there are not.

    Affected pairs must cross the classes; combinations never affected should not, the most frequent ones first.
    """
    if len(values) > _SET_DOMAIN:
        return None
    size = len(values)
    code = np.searchsorted(values, left) * size + np.searchsorted(values, right)
    total = np.bincount(code, minlength=size * size)
    hits = np.bincount(code, weights=affected, minlength=size * size)
    parity = _Parity(size)
    for at in np.flatnonzero(hits):
        if not parity.join(int(at) // size, int(at) % size, 1):
            return None
    clean = np.flatnonzero((total > 0) & (hits == 0))
    for at in clean[np.argsort(-total[clean], kind="stable")]:
        parity.join(int(at) // size, int(at) % size, 0)
    return parity.smaller_class(np.flatnonzero(hits), size)


class _Parity:
    """Union-find that also knows whether two members are of the same class."""

    def __init__(self, size: int) -> None:
        self.up, self.odd = list(range(size)), [0] * size

    def find(self, at: int) -> tuple[int, int]:
        odd = 0
        while self.up[at] != at:
            odd ^= self.odd[at]
            at = self.up[at]
        return at, odd

    def join(self, a: int, b: int, different: int) -> bool:
        """State that two members are of different (1) or the same (0) class; False when that is known to be wrong."""
        (root_a, odd_a), (root_b, odd_b) = self.find(a), self.find(b)
        if root_a == root_b:
            return (odd_a ^ odd_b) == different
        self.up[root_a], self.odd[root_a] = root_b, odd_a ^ odd_b ^ different
        return True

    def smaller_class(self, hits: Ints, size: int) -> Bools | None:
        """The class with fewer members among the values that take part in an affected pair's component."""
        roots = {self.find(int(at) // size)[0] for at in hits}
        if len(roots) != 1:
            return None  # unrelated components: which of their classes belong together is not known
        root = roots.pop()
        state = [self.find(at) for at in range(size)]
        one = np.array([r == root and odd == 1 for r, odd in state])
        two = np.array([r == root and odd == 0 for r, odd in state])
        return one if one.sum() <= two.sum() else two
