"""The search core with an oracle that may be lucky, with runs side by side, and beside another algorithm."""

from __future__ import annotations

import random
import sys
import types

import pytest
from test_bisect_search import FLAVOURS, Judge, World, _hash, drive, plain, random_world

from zkl_debug.bisect.noise import conclusions_bound, repeats_for, visibility_bound
from zkl_debug.bisect.outcome import Observation, Outcome, Request
from zkl_debug.bisect.replay import Policy
from zkl_debug.bisect.result import Role, Status
from zkl_debug.bisect.search import Search
from zkl_debug.errors import UsageError


def noisy(world: World, visibility: float, seed: int, wide_visibility: float | None = None) -> Judge:
    """An oracle that shows a mismatch with probability ``visibility`` (the wider probe with its own)."""

    def judge(request: Request) -> Observation:
        if world.truth(request.config):
            return Observation(Outcome.ZERO)
        chance = wide_visibility if request.wide and wide_visibility is not None else visibility
        lucky = _hash(seed, request.config, request.repeat, request.wide) % 10**6 >= chance * 10**6
        return Observation(Outcome.ZERO if lucky else Outcome.MISMATCH)

    return judge


def test_half_visible_mismatches_are_found_right_97_percent() -> None:
    rnd = random.Random(5)
    right = total = 0
    for seed in range(150):
        n = rnd.choice((8, 14, 20))
        space = plain(n)
        world = World(space, tuple(frozenset([c]) for c in rnd.sample(space.order, rnd.randint(1, 3))))
        result = drive(space, noisy(world, 0.5, seed), Policy(visibility=0.5))
        right += set(result.minimal) == set().union(*world.clauses)
        total += 1
        assert result.repeats > 1
    assert right / total >= 0.97


def test_visibility_is_measured_on_all_off() -> None:
    space = plain(14)
    right = 0
    for seed in range(30):
        world = World(space, (frozenset({"s03"}), frozenset({"s10"})))
        result = drive(space, noisy(world, 0.5, seed), Policy(calibrate=20))
        assert 0.1 < result.visibility < 0.8
        assert result.runs["calibration"] == 20
        right += result.minimal == ("s03", "s10")
    assert right >= 29


def test_a_wider_probe_that_disagrees_resumes_the_search() -> None:
    """The narrow probe never sees the second cause; the wide one does."""
    space = plain(12)
    world = World(space, (frozenset({"s02"}), frozenset({"s09"})))

    def judge(request: Request) -> Observation:
        zero = world.truth(request.config) if request.wide else "s02" in request.config
        return Observation(Outcome.ZERO if zero else Outcome.MISMATCH)

    result = drive(space, judge)
    assert result.minimal == ("s02", "s09")
    assert result.confirmed
    assert "failed the wider probe" in result.reason
    assert result.with_role(Role.CORE) == ("s02", "s09")
    blind = drive(space, lambda q: Observation(Outcome.ZERO if q.config and not q.wide else Outcome.MISMATCH))
    assert blind.status is Status.INSUFFICIENT
    broken = drive(space, lambda q: Observation(Outcome.ERROR, reason="OOM") if q.wide else world.judge(q))
    assert not broken.confirmed
    assert broken.exit_code == 4
    assert "OOM" in broken.reason


def test_repeats_and_visibility_bounds() -> None:
    assert repeats_for(1.0, 0.01, 100) == 1
    repeats = repeats_for(0.5, 0.01, 100)
    assert 100 * 0.5**repeats <= 0.01 < 100 * 0.5 ** (repeats - 1)
    assert conclusions_bound(20) > 60
    assert visibility_bound(0, 10) == 0.0
    assert visibility_bound(10, 10) == pytest.approx(0.05 ** (1 / 10), abs=1e-9)
    assert 0.27 < visibility_bound(10, 20) < 0.5
    for bad in (0.0, 1.5):
        with pytest.raises(UsageError):
            repeats_for(bad, 0.01, 10)
    with pytest.raises(UsageError):
        repeats_for(0.5, 0.0, 10)


# ------------------------------------------------------------------------------------------------ parallel, picire


@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_parallel_gives_the_serial_result(width: int) -> None:
    rnd = random.Random(width)
    for seed in range(25):
        world = random_world(rnd, rnd.choice((2, 7, 14)), 2, **FLAVOURS["all" if seed % 2 else "or"])
        serial, parallel = drive(world.space, world.judge), drive(world.space, world.judge, width=width)
        assert serial == parallel
    space = plain(12)
    world = World(space, (frozenset({"s02"}), frozenset({"s09"})))
    for seed in range(3):
        judge, policy = noisy(world, 0.5, seed), Policy(visibility=0.5)
        assert drive(space, judge, policy) == drive(space, judge, policy, width)


def test_parallel_needs_fewer_rounds() -> None:
    space = plain(30)
    world = World(space, (frozenset({"s11"}), frozenset({"s23"})))

    def rounds(width: int) -> int:
        search, count = Search(space), 0
        while search.result is None:
            for request in search.proposals(width):
                search.tell(request, world.judge(request))
            count += 1
        return count

    assert rounds(3) <= 0.7 * rounds(1)
    assert rounds(7) < rounds(3)
    search = Search(space)
    (first,) = search.proposals(1)
    assert first not in search.proposals(4, running=[first])


def test_incomplete_names_the_next_run() -> None:
    space = plain(6)
    world = World(space, (frozenset({"s02"}),))
    search = Search(space)
    for _ in range(4):
        (request,) = search.proposals(1)
        search.tell(request, world.judge(request))
    partial = search.incomplete("budget of 4 runs reached")
    assert partial.status is Status.INCOMPLETE
    assert partial.exit_code == 5
    assert world.truth(frozenset(partial.minimal))
    assert "needs a run" in partial.next_steps[0]


def test_cross_check_with_picire_ddmin(monkeypatch: pytest.MonkeyPatch) -> None:
    """ddmin and this search agree on AND spaces, and both are sufficient and 1-minimal on OR spaces."""
    if "pkg_resources" not in sys.modules:  # picire asks setuptools for its own version only
        stub = types.ModuleType("pkg_resources")
        stub.get_distribution = lambda _: types.SimpleNamespace(version="0")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "pkg_resources", stub)
    picire = pytest.importorskip("picire")
    rnd = random.Random(77)
    ours = theirs = 0
    for number in range(40):
        ors = number % 2 == 0
        world = random_world(rnd, 14, 1 + number % 4, ors=ors, harm=False, requires=False, broken=False)
        runs = 0

        def test(config: list[str], _: object, world: World = world) -> object:
            nonlocal runs
            runs += 1
            return picire.Outcome.FAIL if world.truth(frozenset(config)) else picire.Outcome.PASS

        reduced = frozenset(picire.DD(test, cache=picire.ConfigCache())(list(world.space.order)))
        result = drive(world.space, world.judge)
        assert world.truth(reduced)
        assert not any(world.truth(reduced - {x}) for x in reduced)
        if not ors:
            assert frozenset(result.minimal) == reduced
        theirs += runs
        ours += result.runs["search"] + result.runs.get("minimality", 0)
    assert ours < theirs
