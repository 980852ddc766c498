"""Which rows differ: the step where it begins, the sequences, and a short rule that says which rows they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zkl_debug.logprobs.table import I64, Bools
from zkl_debug.logprobs.view import View, take
from zkl_debug.schema import Json

#: A rule that is not exact is still shown when it covers every affected row and at least this share of its rows is.
MIN_PRECISION = 0.5
#: ... and it must be this many times better than "every valid row".
MIN_GAIN = 2.0
_LISTED = 8  # samples, positions and steps listed by name


@dataclass(frozen=True)
class Onset:
    """Where in the run the mismatch begins.

    Attributes:
        step: first step with a mismatch.
        clean_before: steps compared before it, all bit-exact.
        last_clean: the last of those, or None.
        diverged: steps with a mismatch.
        clean_after: bit-exact steps after the onset.
    """

    step: int
    clean_before: int
    last_clean: int | None
    diverged: tuple[int, ...]
    clean_after: tuple[int, ...]

    def to_json(self) -> Json:
        """The ``onset`` object."""
        return {
            "step": self.step,
            "clean_before": self.clean_before,
            "last_clean": self.last_clean,
            "diverged_steps": list(self.diverged),
            "clean_after": list(self.clean_after),
        }


@dataclass(frozen=True)
class Rule:
    """A condition on rows, with how well it matches the rows that differ."""

    text: str
    precision: float
    recall: float
    cost: float
    also: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True for the affected rows and for no other."""
        return self.precision == 1.0 and self.recall == 1.0

    def to_json(self) -> Json:
        """The ``rule`` object; ``also`` lists other rules that fit just as exactly."""
        return {
            "text": self.text,
            "precision": self.precision,
            "recall": self.recall,
            "exact": self.is_exact,
            "also": list(self.also),
        }


@dataclass(frozen=True)
class Affected:
    """The rows that differ."""

    rows: int
    of: int
    sequences: int
    of_sequences: int
    samples: tuple[int, ...]
    per_sequence: tuple[int, int]
    rule: Rule | None

    def to_json(self) -> Json:
        """The ``affected`` object."""
        return {
            "rows": self.rows,
            "of": self.of,
            "sequences": self.sequences,
            "of_sequences": self.of_sequences,
            "samples": list(self.samples),
            "rows_per_sequence": {"min": self.per_sequence[0], "max": self.per_sequence[1]},
            "rule": None if self.rule is None else self.rule.to_json(),
        }


def find_onset(step: I64, differs: Bools) -> Onset | None:
    """Onset over the rows' steps, None when nothing differs; both of shape [N]."""
    if not differs.any():
        return None
    steps = np.unique(step)
    bad = np.unique(step[differs])
    clean = np.setdiff1d(steps, bad)
    first = int(bad[0])
    before = clean[clean < first]
    return Onset(
        step=first,
        clean_before=int(before.shape[0]),
        last_clean=int(before[-1]) if before.shape[0] else None,
        diverged=tuple(bad.tolist()),
        clean_after=tuple(clean[clean > first].tolist()),
    )


def find_affected(view: View) -> Affected:
    """Counts, samples and rule of the rows that differ."""
    rows = np.flatnonzero(view.differs)
    _, counts = np.unique(view.sequence[rows], return_counts=True)
    return Affected(
        rows=int(rows.shape[0]),
        of=len(view),
        sequences=int(counts.shape[0]),
        of_sequences=int(view.sequence[-1]) + 1 if len(view) else 0,
        samples=tuple(np.unique(view.sample[rows]).tolist()),
        per_sequence=(int(counts.min()), int(counts.max())) if counts.shape[0] else (0, 0),
        rule=_rule(view),
    )


def _rule(view: View) -> Rule | None:
    """The rule among the steps from the onset on; the clean steps before it are named in its text."""
    onset = find_onset(view.step, view.differs)
    if onset is None:
        return None
    if not onset.clean_before:
        return learn(view, view.differs)
    rule = learn(take(view, view.step >= onset.step), view.differs[view.step >= onset.step])
    return None if rule is None else replace(rule, text=f"{rule.text}, from step {onset.step} on")


@dataclass(frozen=True)
class _Condition:
    text: str
    cost: float
    rows: Bools


def learn(view: View, affected: Bools) -> Rule | None:
    """The simplest condition that holds on all affected rows and, if there is one, on no other.

    Conditions are built from the affected rows themselves: a threshold, a remainder, a set of samples, the ends of
    sequences, and one of those about the sequence combined with one about the row.
    """
    if not affected.any():
        return None
    base = float(affected.mean())
    if base == 1.0:
        return Rule("every valid row", 1.0, 1.0, 0.0)
    scored = sorted(
        (
            (_precision(condition.rows, affected), condition)
            for condition in _conditions(view, affected)
            if bool(condition.rows[affected].all())
        ),
        key=lambda pair: (-pair[0], pair[1].cost),
    )
    if not scored:
        return None
    precision, best = scored[0]
    if precision == 1.0:
        also = [c.text for p, c in scored[1:] if p == 1.0 and c.cost <= best.cost + 1.0 and " and " not in c.text]
        return Rule(best.text, 1.0, 1.0, best.cost, tuple(dict.fromkeys(also))[:3])
    if precision < MIN_PRECISION or precision < MIN_GAIN * base:
        return None
    # Among the near-best the simplest reads best.
    near = min((c for p, c in scored if p >= precision - 0.02), key=lambda c: c.cost)
    return Rule(near.text, _precision(near.rows, affected), 1.0, near.cost)


def _precision(rows: Bools, affected: Bools) -> float:
    return float((rows & affected).sum() / max(int(rows.sum()), 1))


def _conditions(view: View, affected: Bools) -> Iterator[_Condition]:
    yield _Condition("every valid row", 0.0, np.ones(len(view), np.bool_))
    by_sequence = list(_of_sequences(view, affected))
    by_row = list(_of_rows(view, affected))
    yield from by_sequence
    yield from by_row
    for outer in by_sequence:
        for inner in by_row:
            yield _Condition(f"{inner.text} and {outer.text}", outer.cost + inner.cost + 0.5, outer.rows & inner.rows)


def _of_sequences(view: View, affected: Bools) -> Iterator[_Condition]:
    """Conditions on a row's step, sample and sequence."""
    steps = np.unique(view.step[affected])
    if np.unique(view.step).shape[0] > 1 and steps.shape[0] <= 2:
        yield _Condition(f"step in {_listing(steps)}", 1.25 + 0.75 * steps.shape[0], np.isin(view.step, steps))
    samples = np.unique(view.sample[affected])
    if samples.shape[0] <= _LISTED and samples.shape[0] < np.unique(view.sample).shape[0]:
        text = f"sample {_listing(samples)}" if samples.shape[0] == 1 else f"samples {_listing(samples)}"
        yield _Condition(text, 1.0 + 0.75 * samples.shape[0], np.isin(view.sample, samples))
    sequences, at = np.unique(view.sequence[affected], return_index=True)
    if steps.shape[0] > 1 and sequences.shape[0] <= _LISTED:
        rows = np.flatnonzero(affected)[at]
        text = ", ".join(f"step {view.step[r]} sample {view.sample[r]}" for r in rows.tolist())
        yield _Condition(f"sequences {{{text}}}", 1.25 + sequences.shape[0], np.isin(view.sequence, sequences))
    length = view.rank + view.from_end + 1
    end = _last_position(view)
    start = view.position - view.rank  # position of the first valid row where rows are contiguous
    for values, name in ((length, "valid tokens"), (end + 1, "tokens"), (start, "tokens before the first valid one")):
        low, high = int(values[affected].min()), int(values[affected].max())
        if low > int(values.min()):
            yield _Condition(f"sequences with >= {low} {name}", 2.25, values >= low)
        if high < int(values.max()):
            yield _Condition(f"sequences with <= {high} {name}", 2.25, values <= high)


def _of_rows(view: View, affected: Bools) -> Iterator[_Condition]:
    """Conditions on a row's place in its sequence and on its token."""
    yield _Condition("last position of each sequence", 1.0, view.from_end == 0)
    yield _Condition("first valid position of each sequence", 1.0, view.rank == 0)
    if view.generated.any() and not view.generated.all():
        yield _Condition("generated tokens", 1.0, view.generated)
        yield _Condition("prompt tokens", 1.0, ~view.generated)
    token = np.unique(view.token[affected])
    if token.shape[0] == 1 and int(token[0]) >= 0:
        yield _Condition(f"token id {int(token[0])}", 1.75, view.token == token[0])
    yield from _thresholds(view.position, "position", affected, 1.5)
    yield from _thresholds(view.rank, "valid position (counted from 0)", affected, 1.75)
    yield from _remainders(view.position, affected)


def _thresholds(values: I64, name: str, affected: Bools, cost: float) -> Iterator[_Condition]:
    low, high = int(values[affected].min()), int(values[affected].max())
    if low == high:
        yield _Condition(f"{name} == {low}", cost, values == low)
        return
    yield _Condition(f"{name} >= {low}", cost + 0.25, values >= low)
    yield _Condition(f"{name} < {high + 1}", cost + 0.25, values <= high)
    yield _Condition(f"{low} <= {name} <= {high}", cost + 1.0, (values >= low) & (values <= high))


def _remainders(position: I64, affected: Bools) -> Iterator[_Condition]:
    found = np.unique(position[affected])
    if found.shape[0] < 2:
        return
    period = int(np.gcd.reduce(np.diff(found)))
    if period < 2:
        return
    rest = int(found[0]) % period
    rows = (position % period == rest) & (position >= found[0])
    text = f"position % {period} == {rest}" if int(found[0]) < 2 * period else f"position {found[0]} + k * {period}"
    yield _Condition(text, 2.5, rows)


def _last_position(view: View) -> I64:
    last = view.position[view.from_end == 0]
    return np.asarray(last[view.sequence], np.int64)


def _listing(values: I64) -> str:
    shown: Sequence[str] = [str(v) for v in values.tolist()]
    return shown[0] if len(shown) == 1 else "{" + ", ".join(shown) + "}"
