"""What the diverged sequences of a step have in common that the others have not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from zkl_debug.beds.grpo.record import Rollout, StepRecord
from zkl_debug.schema import Json


@dataclass(frozen=True)
class SequenceRule:
    """A condition on sequences, and how well it separates diverged ones from the others.

    Attributes:
        text: the condition in words.
        precision: share of those it covers that diverged; ``recall``: share of those that diverged that it covers.
        same: other conditions that cover exactly the same sequences: the data cannot tell them apart.
    """

    text: str
    precision: float
    recall: float
    same: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether it covers the diverged sequences and no other."""
        return self.precision == 1.0 and self.recall == 1.0

    def to_json(self) -> Json:
        """All fields."""
        return {"text": self.text, "precision": self.precision, "recall": self.recall, "same": list(self.same)}


def sequence_rule(
    record: StepRecord, earlier: Sequence[StepRecord], old_blocks: Collection[int] = (), shared: Collection[int] = ()
) -> SequenceRule:
    """The rule of a step's diverged sequences.

    Args:
        record: the step.
        earlier: steps before it: what prompts were seen.
        old_blocks: KV blocks that hold values of old weights.
        shared: sequences one of whose KV blocks another sequence wrote into while they held it.
    """
    diverged = set(record.diverged)
    everyone = {s.sample for s in record.sequences}
    best: tuple[float, str, set[int]] | None = None
    ties: list[str] = []
    for text, covered in _conditions(record, earlier, set(old_blocks), set(shared)):
        if not covered:
            continue
        hit = len(covered & diverged)
        score = 2 * hit / (len(covered) + len(diverged))
        if best is None or score > best[0]:
            best, ties = (score, text, covered), []
        elif covered == best[2]:
            ties.append(text)
    if best is None or best[0] == 0:
        return SequenceRule("no condition covers them", 0.0, 0.0)
    _, text, covered = best
    hit = len(covered & diverged)
    if covered == everyone:
        ties = []
    return SequenceRule(text, hit / len(covered), hit / len(diverged), tuple(ties))


def _conditions(
    record: StepRecord, earlier: Sequence[StepRecord], old: set[int], shared: set[int]
) -> Iterator[tuple[str, set[int]]]:
    """Conditions and the samples they cover; where two cover the same, the first one is told."""
    rollouts = record.sequences
    seen = {s.tokens[: s.prompt_length] for r in earlier for s in r.sequences}

    def having(text: str, test: object) -> tuple[str, set[int]]:
        return text, {s.sample for s in rollouts if test(s)}  # type: ignore[operator]

    yield "every sequence", {s.sample for s in rollouts}
    yield having("took KV blocks of old weights from the prefix cache", lambda s: bool(old & set(s.cached_blocks)))
    yield (
        "another sequence wrote into a KV block of it",
        shared & {s.sample for s in rollouts},
    )
    yield having("took KV blocks from the prefix cache", lambda s: bool(s.cached_blocks))
    yield having("its prompt was split over prefill chunks", lambda s: _chunks(s) > 1)
    yield having("its prompt was used in an earlier step", lambda s: s.tokens[: s.prompt_length] in seen)
    for name, value in (("prompt length", _prompt), ("total length", _total)):
        for limit in sorted({value(s) for s in rollouts})[1:]:
            yield having(f"{name} >= {limit}", lambda s, v=value, n=limit: v(s) >= n)
        for exact in sorted({value(s) for s in rollouts}):
            yield having(f"{name} = {exact}", lambda s, v=value, n=exact: v(s) == n)
    for group in sorted({record.batch.group(s.sample) for s in rollouts}):
        yield having(f"prompt group {group}", lambda s, g=group: record.batch.group(s.sample) == g)


def _chunks(s: Rollout) -> int:
    return len({use.start for use in s.uses if use.length})


def _prompt(s: Rollout) -> int:
    return s.prompt_length


def _total(s: Rollout) -> int:
    return len(s.tokens)
