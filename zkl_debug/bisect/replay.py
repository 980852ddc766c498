"""The search's memory: answers what is known and names the run that is missing. No I/O.

The search is written as plain code over :meth:`Replay.ask`. It is replayed from the start whenever something new is
known; the first question without an answer raises :class:`Need`. So the path depends only on the answers, never on the
order in which they came: resuming and running in parallel give the serial result by construction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from zkl_debug.bisect.noise import conclusions_bound, repeats_for, visibility_bound
from zkl_debug.bisect.outcome import Observation, Outcome, Purpose, Request, RunKey
from zkl_debug.bisect.result import Evidence
from zkl_debug.bisect.space import Config, Space

#: How likely a question of a phase is to come out zero; only ranks speculative runs.
_PRIOR = {
    Purpose.CALIBRATION: 0.1,
    Purpose.ENDPOINTS: 0.5,
    Purpose.SEARCH: 0.5,
    Purpose.MINIMALITY: 0.1,
    Purpose.CONFIRMATION: 0.95,
    Purpose.NECESSITY: 0.3,
    Purpose.WITNESS: 0.5,
}


@dataclass(frozen=True)
class Policy:
    """How careful the search is.

    Attributes:
        visibility: probability that one run of a mismatching configuration shows the mismatch.
        error_bound: bound on the probability of any false "zero" in the whole search.
        calibrate: runs of all-off from which the visibility is measured first (0: take ``visibility``).
        confirm: run the minimal set with the wider probe before the final word.
        same_signature: a mismatch with another signature than all-off's is untestable instead of a mismatch.
        scan_harm: also turn on every removable switch alone on top of the minimal set (one run each).
        max_alternatives: replacement sets to look for per replaceable switch.
        max_witnesses: HARM witnesses to refine.
    """

    visibility: float = 1.0
    error_bound: float = 0.01
    calibrate: int = 0
    confirm: bool = True
    same_signature: bool = False
    scan_harm: bool = False
    max_alternatives: int = 3
    max_witnesses: int = 3


class Need(Exception):  # noqa: N818 - control flow, not an error
    """The replay stopped at a run nobody made yet.

    Attributes:
        request: the run.
        prior: probability that it comes out zero, for ranking speculation only.
        left: further repeats a zero of this one would call for.
    """

    def __init__(self, request: Request, prior: float, left: int = 0) -> None:
        super().__init__(request)
        self.request = request
        self.prior = prior
        self.left = left


class Replay:
    """One pass over the search with the runs known so far.

    Args:
        space: the switches.
        policy: how careful to be.
        known: the judged runs.
    """

    def __init__(self, space: Space, policy: Policy, known: Mapping[RunKey, Observation]) -> None:
        self.space = space
        self.policy = policy
        self.known = known
        self.visibility = policy.visibility
        self.repeats = 1
        self.wide = False  # once the wider probe contradicted a zero, every zero must pass it
        self.target = ""  # signature of the mismatch under bisection
        self.answers: dict[tuple[Config, bool], Observation] = {}
        self.runs: Counter[str] = Counter()
        self._counted: set[RunKey] = set()

    def size_repeats(self) -> None:
        """Fix the number of repeats, measuring the visibility on all-off when the policy asks for it."""
        runs = [self._fetch((self.space.bottom, False, i), Purpose.CALIBRATION) for i in range(self.policy.calibrate)]
        judged = [r for r in runs if r.outcome in (Outcome.ZERO, Outcome.MISMATCH)]
        seen = sum(r.outcome is Outcome.MISMATCH for r in judged)
        if judged:
            # Nothing seen: the all-off endpoint itself will say so, with the policy's own visibility.
            self.visibility = visibility_bound(seen, len(judged)) or self.policy.visibility
        conclusions = conclusions_bound(len(self.space.switches))
        self.repeats = repeats_for(self.visibility, self.policy.error_bound, conclusions)

    def ask(self, config: Iterable[str], purpose: Purpose, *, wide: bool | None = None) -> Observation:
        """The outcome of a configuration: the first repeat that is not zero, or zero when all repeats are.

        Raises:
            Need: a run is missing.
        """
        on = frozenset(config)
        use_wide = self.wide if wide is None else wide
        key = (on, use_wide)
        if key in self.answers:
            return self.answers[key]
        narrow = self.answers.get((on, False))
        if use_wide and narrow is not None and narrow.outcome is Outcome.MISMATCH:
            return narrow  # a mismatch is final
        answer = Observation(Outcome.ZERO)
        for repeat in range(self.repeats):
            answer = self._fetch((on, use_wide, repeat), purpose)
            if answer.outcome is not Outcome.ZERO:
                break
        answer = self._follow(answer)
        self.answers[key] = answer
        return answer

    def outcome(self, config: Iterable[str], purpose: Purpose) -> Outcome:
        """Shorthand for ``ask(...).outcome``."""
        return self.ask(config, purpose).outcome

    def evidence(self, config: Iterable[str]) -> Evidence:
        """What is on record for a configuration that was asked in the current mode."""
        on = frozenset(config)
        wide = self.wide and (on, True) in self.answers
        answer = self.answers[(on, wide)]
        return Evidence(self.space.sort(on - self.space.bottom), answer.outcome, answer.signature, answer.reason, wide)

    def slipped(self) -> tuple[Evidence, ...]:
        """Mismatches whose signature is not the target's, the first of each signature."""
        found: dict[str, Evidence] = {}
        for (on, wide), answer in self.answers.items():
            if self.target and answer.signature and answer.signature != self.target:
                shown = self.space.sort(on - self.space.bottom)
                found.setdefault(
                    answer.signature, Evidence(shown, answer.outcome, answer.signature, answer.reason, wide)
                )
        return tuple(found.values())

    def _follow(self, answer: Observation) -> Observation:
        other = answer.signature and self.target and answer.signature != self.target
        if self.policy.same_signature and answer.outcome is Outcome.MISMATCH and other:
            reason = f"another mismatch came first: {answer.signature}"
            return replace(answer, outcome=Outcome.UNTESTABLE, reason=reason)
        return answer

    def _fetch(self, key: RunKey, purpose: Purpose) -> Observation:
        found = self.known.get(key)
        if found is None:
            config, wide, repeat = key
            assert self.space.is_valid(config), f"proposed an invalid configuration: {sorted(config)}"
            prior = _PRIOR[purpose] if repeat == 0 or purpose is Purpose.CALIBRATION else max(0.9, _PRIOR[purpose])
            left = 0 if purpose is Purpose.CALIBRATION else self.repeats - 1 - repeat
            raise Need(Request(config, repeat, wide, purpose), prior, left)
        if key not in self._counted:
            self._counted.add(key)
            self.runs[purpose.value] += 1
        return found
