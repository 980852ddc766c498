"""The search core on synthetic spaces: AND, OR, HARM, REQUIRES, untestable members, noise, parallel cuts."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from zkl_debug.bisect.outcome import Observation, Outcome, Request
from zkl_debug.bisect.replay import Policy
from zkl_debug.bisect.result import Role, SearchResult, Status
from zkl_debug.bisect.search import Search
from zkl_debug.bisect.space import Config, Space, Switch

Judge = Callable[[Request], Observation]


@dataclass(frozen=True)
class World:
    """A space with its truth: every clause needs one of its members; ``harm`` (h, g): h re-breaks unless g."""

    space: Space
    clauses: tuple[frozenset[str], ...]
    harm: tuple[tuple[str, str], ...] = ()
    broken: frozenset[str] = frozenset()  # undeclared untestable members
    holes: int = 0  # percent of configurations that cannot be judged, by hash

    def truth(self, config: Config) -> bool:
        """Whether the configuration is really zero."""
        return all(c & config for c in self.clauses) and all(h not in config or g in config for h, g in self.harm)

    def outcome(self, config: Config) -> Outcome:
        """What an ideal oracle says."""
        if config & self.broken:
            return Outcome.ERROR
        ends = (self.space.bottom, self.space.top)
        if self.holes and config not in ends and _hash("hole", config) % 100 < self.holes:
            return Outcome.UNTESTABLE
        return Outcome.ZERO if self.truth(config) else Outcome.MISMATCH

    def judge(self, request: Request) -> Observation:
        """The oracle."""
        outcome = self.outcome(request.config)
        return Observation(outcome, reason="" if outcome in (Outcome.ZERO, Outcome.MISMATCH) else "made up")


def _hash(*parts: object) -> int:
    text = "|".join(",".join(sorted(p)) if isinstance(p, frozenset) else str(p) for p in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def plain(n: int) -> Space:
    return Space(tuple(Switch(f"s{i:02d}") for i in range(n)))


def drive(space: Space, judge: Judge, policy: Policy | None = None, width: int = 1) -> SearchResult:
    """Run a search to its end and check that nothing is asked twice and only valid configurations are."""
    search = Search(space, policy)
    asked = set()
    while search.result is None:
        batch = search.proposals(width)
        assert batch
        assert len(batch) <= width
        for request in batch:
            assert request.key not in asked
            assert space.is_valid(request.config)
            asked.add(request.key)
            search.tell(request, judge(request))
        assert len(asked) < 5000
    assert search.proposals(width) == ()
    return search.result


def random_world(rnd: random.Random, n: int, k: int, *, ors: bool, harm: bool, requires: bool, broken: bool) -> World:
    names = [f"s{i:02d}" for i in range(n)]
    need: dict[str, tuple[str, ...]] = {}
    if requires:
        for i, name in enumerate(names[1:], start=1):
            if rnd.random() < 0.3:
                need[name] = tuple(rnd.sample(names[:i], min(i, rnd.choice((1, 1, 2)))))
    order = names[:]
    rnd.shuffle(order)  # file order need not respect requirements
    space = Space(tuple(Switch(x, requires=need.get(x, ())) for x in order))
    bad = frozenset(rnd.sample(names, min(n - 1, rnd.randint(1, 2)))) if broken and n > 2 else frozenset()
    gone = space.dependents(bad)
    usable = [x for x in names if x not in gone]
    clauses = []
    for cause in rnd.sample(usable, min(k, len(usable))):
        others = rnd.sample(usable, min(len(usable), rnd.randint(0, 2))) if ors else []
        clauses.append(frozenset([cause, *others]))
    pairs = []
    if harm and len(usable) > 1:
        for _ in range(rnd.randint(1, 2)):
            h, g = rnd.sample(usable, 2)
            pairs.append((h, g))
    return World(space, tuple(clauses), tuple(pairs), bad)


def check_sound(world: World, result: SearchResult) -> None:
    """Sufficient, 1-minimal (but for what is reported unproven), and every claim true of the world."""
    space, kept = world.space, frozenset(result.minimal) | world.space.bottom
    assert result.status is Status.FOUND
    assert result.confirmed
    assert world.truth(kept)
    for name in result.minimal:
        outcome = world.outcome(kept - space.dependents([name]))
        if name in result.unproven:
            assert outcome not in (Outcome.ZERO, Outcome.MISMATCH)
        else:
            assert outcome is Outcome.MISMATCH
    assert {f.name for f in result.findings} == set(space.order)
    dropped = set(result.with_role(Role.UNTESTED)) - set(result.minimal)
    top = space.top - dropped
    for finding in result.findings:
        assert finding.in_minimal == (finding.name in result.minimal)
        if finding.role is Role.CORE:
            assert world.outcome(top - space.dependents([finding.name])) is Outcome.MISMATCH
        if finding.role is Role.UNTESTED:
            assert finding.reason
        if finding.in_minimal:
            base = kept - space.dependents([finding.name])
            for others in finding.replaced_by:
                assert finding.name not in others
                assert world.truth(base | set(others))
    for witness in result.witnesses:
        for seen in witness.evidence:
            assert world.outcome(frozenset(seen.config) | space.bottom) is seen.outcome
        before, after = witness.evidence[:2]
        if witness.kind == "harm":
            assert (before.outcome, after.outcome) == (Outcome.ZERO, Outcome.MISMATCH)
            assert set(after.config) - set(before.config) == set(witness.switches)
        else:
            assert [e.outcome for e in witness.evidence] == [Outcome.MISMATCH, Outcome.ZERO, Outcome.ZERO]


def brute_force(world: World) -> list[Config]:
    """All sufficient configurations among the valid ones."""
    names = world.space.order
    subsets = itertools.chain.from_iterable(itertools.combinations(names, i) for i in range(len(names) + 1))
    configs = (frozenset(c) for c in subsets)
    return [c for c in configs if world.space.is_valid(c) and world.outcome(c) is Outcome.ZERO]


FLAVOURS = {
    "and": {"ors": False, "harm": False, "requires": False, "broken": False},
    "or": {"ors": True, "harm": False, "requires": False, "broken": False},
    "harm": {"ors": False, "harm": True, "requires": False, "broken": False},
    "requires": {"ors": False, "harm": False, "requires": True, "broken": False},
    "untestable": {"ors": False, "harm": False, "requires": False, "broken": True},
    "all": {"ors": True, "harm": True, "requires": True, "broken": True},
}


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("n", [1, 2, 14, 20, 30])
def test_always_sufficient_and_one_minimal(n: int, flavour: str) -> None:
    rnd = random.Random(f"{n}{flavour}")
    for round_number in range({1: 9, 2: 18, 30: 27}.get(n, 45)):
        k = round_number % 9
        world = random_world(rnd, n, min(k, n), **FLAVOURS[flavour])
        result = drive(world.space, world.judge)
        if world.truth(world.space.bottom):
            assert result.status is Status.NOTHING
        else:
            check_sound(world, result)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_small_spaces_against_brute_force(flavour: str) -> None:
    rnd = random.Random(flavour)
    for round_number in range(60):
        n = rnd.randint(1, 10 if round_number % 6 == 0 else 7)
        world = random_world(rnd, n, rnd.randint(1, min(n, 4)), **FLAVOURS[flavour])
        result = drive(world.space, world.judge)
        if not world.clauses:  # everything usable required what is broken
            assert result.status is Status.NOTHING
            continue
        check_sound(world, result)
        sufficient = brute_force(world)
        assert frozenset(result.minimal) in sufficient
        if FLAVOURS[flavour]["harm"]:
            continue
        # Without harm the truth is monotone: core is exactly what no sufficient configuration can do without, and a
        # 1-minimal set is minimal among all its subsets.
        core = frozenset.intersection(*sufficient)
        assert set(result.with_role(Role.CORE)) == core
        assert not any(s < frozenset(result.minimal) for s in sufficient)
        for finding in result.findings:
            if finding.in_minimal and finding.role is Role.REPLACEABLE:
                assert finding.replaced_by


def test_every_single_world_of_four_switches() -> None:
    """Every monotone-or-not truth table given by two clauses and one harm pair over four switches."""
    space = plain(4)
    sets = [frozenset(c) for i in (1, 2) for c in itertools.combinations(space.order, i)]
    for first, second in itertools.combinations_with_replacement(sets, 2):
        for pair in [(), *((p,) for p in itertools.permutations(space.order, 2))]:
            world = World(space, (first, second), pair)
            check_sound(world, drive(space, world.judge))


@pytest.mark.parametrize(("k", "bound"), [(1, 7), (2, 12), (3, 17)])
def test_mean_runs_at_twenty_switches(k: int, bound: float) -> None:
    rnd = random.Random(k)
    space = plain(20)
    total = 0
    for _ in range(150):
        world = World(space, tuple(frozenset([c]) for c in rnd.sample(space.order, k)))
        result = drive(space, world.judge)
        assert set(result.minimal) == set().union(*world.clauses)
        total += result.runs["search"] + result.runs.get("minimality", 0)
        assert result.runs["endpoints"] == 2
        assert result.runs["confirmation"] == 1
    assert total / 150 <= bound


def test_nothing_to_explain_and_stack_insufficient() -> None:
    space = plain(5)
    nothing = drive(space, lambda _: Observation(Outcome.ZERO))
    assert nothing.status is Status.NOTHING
    assert nothing.exit_code == 3
    assert nothing.runs == {"endpoints": 1}
    insufficient = drive(space, lambda _: Observation(Outcome.MISMATCH))
    assert insufficient.status is Status.INSUFFICIENT
    assert insufficient.exit_code == 3
    assert insufficient.runs == {"endpoints": 2}


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.UNTESTABLE])
def test_endpoint_that_cannot_be_judged_is_refused_as_such(outcome: Outcome) -> None:
    space = plain(3)
    off = drive(space, lambda _: Observation(outcome, reason="signal 11"))
    assert off.status.value == outcome.value
    assert "signal 11" in off.reason
    # only all-off runs: every switch makes it unjudgeable, and each is reported with the reason
    on = drive(space, lambda q: Observation(outcome if q.config else Outcome.MISMATCH, reason="no GPU"))
    assert on.status is Status.UNTESTABLE
    assert on.with_role(Role.UNTESTED) == space.order
    assert "no GPU" in on.finding("s01").reason


def test_declared_untestable_switches_are_never_varied() -> None:
    space = Space(
        (
            Switch("a", untestable="needs SM100"),
            Switch("b", requires=("a",)),
            Switch("c"),
            Switch("d", held=True),
            Switch("e", requires=("d",)),
            Switch("f", held=False),
        )
    )
    world = World(space, (frozenset("c"),))

    def judge(request: Request) -> Observation:
        assert "d" in request.config
        assert not request.config & {"a", "b", "f"}
        return world.judge(request)

    result = drive(space, judge)
    assert result.minimal == ("c",)
    assert result.finding("a").reason == "needs SM100"
    assert "requires a" in result.finding("b").reason
    assert result.finding("d").reason == "held on"
    assert result.finding("f").reason == "held off"
    assert result.with_role(Role.REMOVABLE) == ("e",)


@pytest.mark.parametrize("percent", [10, 30, 60])
def test_holes_are_never_taken_for_a_mismatch(percent: int) -> None:
    """Configurations that cannot be judged at random: the answer stays sufficient, doubts are named."""
    rnd = random.Random(percent)
    doubts = 0
    for _ in range(60):
        space = plain(rnd.choice((5, 9, 14)))
        world = World(space, tuple(frozenset([c]) for c in rnd.sample(space.order, rnd.randint(1, 4))), holes=percent)
        search_result = drive(space, world.judge, Policy(confirm=False))
        kept = frozenset(search_result.minimal)
        assert world.truth(kept)
        for name in search_result.minimal:
            outcome = world.outcome(kept - {name})
            assert outcome is (Outcome.UNTESTABLE if name in search_result.unproven else Outcome.MISMATCH)
            if search_result.finding(name).role is Role.UNTESTED:
                assert world.outcome(space.top - {name}) is Outcome.UNTESTABLE
        doubts += len(search_result.unproven)
    assert doubts > 0


def test_or_pair_comes_out_as_alternatives() -> None:
    space = plain(8)
    world = World(space, (frozenset({"s01", "s05"}), frozenset({"s03"})))
    result = drive(space, world.judge)
    assert set(result.minimal) in ({"s01", "s03"}, {"s05", "s03"})
    assert result.with_role(Role.CORE) == ("s03",)
    assert result.with_role(Role.REPLACEABLE) == ("s01", "s05")
    assert result.finding("s01").replaced_by == (("s05",),)
    assert result.finding("s05").replaced_by == (("s01",),)
    assert [w.kind for w in result.witnesses] == ["or"]


def test_or_of_three_and_a_replacement_made_of_two() -> None:
    space = plain(9)
    world = World(space, (frozenset({"s01", "s04", "s07"}),))
    result = drive(space, world.judge)
    (member,) = result.minimal
    assert {x for s in result.finding(member).replaced_by for x in s} == {"s01", "s04", "s07"} - {member}

    def either(request: Request) -> Observation:
        zero = "s08" in request.config or {"s02", "s05"} <= request.config
        return Observation(Outcome.ZERO if zero else Outcome.MISMATCH)

    result = drive(space, either)
    if result.minimal == ("s08",):
        assert result.finding("s08").replaced_by == (("s02", "s05"),)
    else:
        assert result.minimal == ("s02", "s05")
        assert result.finding("s02").replaced_by == (("s08",),)


def test_harm_is_witnessed_with_what_heals_it() -> None:
    space = plain(10)
    world = World(space, (frozenset({"s00"}),), (("s03", "s08"),))
    result = drive(space, world.judge)
    check_sound(world, result)
    assert result.minimal == ("s00",)
    scanned = drive(space, world.judge, Policy(scan_harm=True))
    (witness,) = scanned.witnesses
    assert (witness.kind, witness.switches, witness.others) == ("harm", ("s03",), ("s08",))
    assert witness.text == "s03 re-breaks it unless s08 is on"


def test_conflicting_alternative_is_swapped_in() -> None:
    space = Space(
        (
            Switch("base"),
            Switch("fa4", requires=("base",), conflicts=("math",)),
            Switch("noise"),
            Switch("math", requires=("base",)),
        )
    )
    assert "math" not in space.top
    world = World(space, (frozenset({"fa4", "math"}), frozenset({"base"})))
    result = drive(space, world.judge)
    assert result.minimal == ("base", "fa4")
    assert result.finding("fa4").replaced_by == (("math",),)
    assert result.finding("math").role is Role.REPLACEABLE
    assert result.with_role(Role.REMOVABLE) == ("noise",)
    only_math = World(space, (frozenset({"math"}),))
    result = drive(space, only_math.judge)
    assert result.status is Status.FOUND
    assert result.minimal == ("base", "math")
    assert "conflicts with math" in result.finding("fa4").reason


def test_slippage_is_shown_and_can_be_refused() -> None:
    space = plain(6)

    def judge(request: Request) -> Observation:
        if {"s01", "s04"} <= request.config:
            return Observation(Outcome.ZERO)
        return Observation(Outcome.MISMATCH, "attention" if "s04" not in request.config else "router")

    result = drive(space, judge)
    assert result.minimal == ("s01", "s04")
    assert result.signature == "attention"
    assert [e.signature for e in result.slippage] == ["router"]
    assert result.finding("s01").fixes == "router"
    assert result.finding("s04").fixes == "attention"
    strict = drive(space, judge, Policy(same_signature=True))
    assert strict.status is Status.FOUND
    assert "s01" in strict.unproven
    assert "another mismatch came first: router" in strict.finding("s01").reason
