"""The bisection of a bed against brute force over its switches: real runs, hence slow.

Every subset of the switches that matter is run with all others off and with all others on; every other switch is put
on each end and on the minimal set alone; then random configurations of all switches must come out as predicted.

``ZKL_BRUTE_JOURNAL=FILE`` keeps the runs (a killed test goes on where it was); ``ZKL_BRUTE_RECORD=FILE`` writes the
table that ``test_bed_oracle.py`` replays.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from zkl_debug.beds.bed import BedOptions
from zkl_debug.beds.oracle import BedOracle, bed_space, bed_switches
from zkl_debug.bisect.criterion import judge
from zkl_debug.bisect.driver import bisect_switches
from zkl_debug.bisect.journal import Identity, Journal
from zkl_debug.bisect.outcome import Observation, Outcome, Request, Trial
from zkl_debug.bisect.result import Role, SearchResult, Status
from zkl_debug.bisect.space import Config, Space

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

_RANDOM = 16


def run_all(oracle: BedOracle, configs: Iterable[Config], path: Path) -> dict[Config, Observation]:
    """Outcome of every configuration, from the journal where it is known."""
    identity = Identity(oracle.space.digest(), oracle.probe_hash, oracle.environment_hash)
    found = {}
    with Journal(path, identity) as journal:
        for config in dict.fromkeys(configs):
            trial = Trial(Request(config))
            raw = journal.get(trial)
            if raw is None:
                raw = oracle.run(trial)
                journal.put(trial, raw)
            found[config] = judge(raw)
    return found


def relevant(result: SearchResult) -> Config:
    """The switches that matter: the minimal set and whatever replaces a member of it."""
    return frozenset(result.with_role(Role.CORE) + result.with_role(Role.REPLACEABLE))


def predicted(result: SearchResult, config: Config) -> Outcome:
    """What the answer says of a configuration: zero when every member, or something that replaces it, is on."""
    for name in result.minimal:
        replaced = any(set(names) <= config for names in result.finding(name).replaced_by)
        if name not in config and not replaced:
            return Outcome.MISMATCH
    return Outcome.ZERO


def brute_force(space: Space, result: SearchResult) -> list[Config]:
    """The configurations that decide whether the answer is right."""
    matter = space.sort(relevant(result))
    rest = space.top - relevant(result)
    subsets = [frozenset(s) for n in range(len(matter) + 1) for s in itertools.combinations(matter, n)]
    configs = [*subsets, *(subset | rest for subset in subsets)]
    minimal = frozenset(result.minimal)
    for name in space.sort(rest):
        configs += [frozenset([name]), minimal | {name}, space.top - {name}]
    rng = random.Random(5)
    names = space.order
    configs += [frozenset(n for n in names if rng.random() < 0.7) for _ in range(_RANDOM)]
    return configs


@pytest.mark.parametrize(("bed", "dtype"), [("tiny-gpt", "bf16")])
def test_the_answer_is_what_brute_force_finds(bed: str, dtype: str, tmp_path: Path) -> None:
    path = Path(os.environ.get("ZKL_BRUTE_JOURNAL", tmp_path / "runs.jsonl"))
    space = bed_space(bed_switches(bed))
    options = BedOptions(bed=bed, dtype=dtype)
    result = bisect_switches(space, BedOracle(space, options, tmp_path / "search"), journal=path)
    assert result.status is Status.FOUND
    assert result.confirmed
    oracle = BedOracle(space, options, tmp_path / "brute")
    try:
        truth = run_all(oracle, brute_force(space, result), path)
    finally:
        oracle.close()
    if record := os.environ.get("ZKL_BRUTE_RECORD"):
        write_table(Path(record), bed, dtype, space, truth)

    wrong = {space.sort(c): seen.outcome for c, seen in truth.items() if seen.outcome is not predicted(result, c)}
    assert wrong == {}
    zeros = [c for c, seen in truth.items() if seen.outcome is Outcome.ZERO]
    assert min(map(len, zeros)) == len(result.minimal), "a smaller set is enough"
    core = frozenset.intersection(*zeros)
    assert core == frozenset(result.with_role(Role.CORE)), "the core is what every zero configuration has"
    # What is true on any CPU: two implementations of attention, two of log-softmax, one wrong label.
    assert {"attention-reference", "log-softmax"} <= core
    assert result.finding("chunk-edge-labels").replaced_by == (("no-chunked-prefill",),)
    assert {"mamba-version-pinned", "reseed-sides", "fresh-rope-cache", "moe-ordered-combine"} <= set(
        result.with_role(Role.REMOVABLE)
    )


def write_table(path: Path, bed: str, dtype: str, space: Space, truth: dict[Config, Observation]) -> None:
    """Record what was run."""
    runs = [
        {"on": list(space.sort(config)), "outcome": seen.outcome.value, "signature": seen.signature}
        for config, seen in truth.items()
    ]
    body = {"made_by": "tests/test_bed_oracle_brute.py, ZKL_BRUTE_RECORD", "bed": bed, "dtype": dtype, "runs": runs}
    path.write_text(json.dumps(body, indent=1) + "\n")


def test_a_fresh_interpreter_and_a_fork_give_the_same_verdict(tmp_path: Path) -> None:
    space = bed_space(bed_switches("tiny-gpt"))
    options = BedOptions(dtype="bf16")
    trial = Trial(Request(frozenset({"attention-reference", "log-softmax"})))
    documents = []
    for fresh in (False, True):
        oracle = BedOracle(space, options, tmp_path / str(fresh), fresh=fresh)
        try:
            raw = oracle.run(trial)
        finally:
            oracle.close()
        assert raw.failure == ""
        documents.append(raw.document)
    assert documents[0] == documents[1]
    seen = judge(raw)
    assert (seen.outcome, seen.signature.split(" @ ")[0]) == (Outcome.MISMATCH, "logprobs/label:out.0")
