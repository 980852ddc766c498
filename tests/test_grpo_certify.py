"""The gate: zero only over edges that were crossed, a named cause otherwise, and never a pass over nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zkl_debug.beds.grpo import gate
from zkl_debug.beds.grpo.drift import Drift
from zkl_debug.beds.grpo.edges import Edge, edges_of, merged
from zkl_debug.beds.grpo.faults_loop import LOOP_FAULTS
from zkl_debug.beds.grpo.gate import Certificate, Run, certificate, certify
from zkl_debug.beds.grpo.loop import open_loop
from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.cli.main import main
from zkl_debug.errors import ExitCode

FEW = next(mix for mix in gate.MIXES if mix.name == "few")


def crossed(options: GrpoOptions, steps: int) -> dict[str, Edge]:
    with open_loop(options) as loop:
        return {edge.name: edge for edge in edges_of(options, loop.run(steps))}


def cli(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    with pytest.raises(SystemExit) as stop:
        main([*words, "--json"])
    return int(stop.value.code or 0), json.loads(capfd.readouterr().out)


# ---- edges --------------------------------------------------------------------------------


def test_edges_are_counted_from_what_the_engine_did() -> None:
    small = GrpoOptions(groups=4, returning=(1,), returns_at=2, max_tokens=64, prefix_caching=False, nap=4, late=2)
    found = crossed(small, 2)
    assert found["prefill chunk edge"].crossed == 2  # eight prompts of about 15 tokens, 64 a step: one is split
    assert found["sleep with requests in flight"].crossed == 2
    assert found["request that arrives while others decode"].crossed == 4
    assert found["prompt of an earlier step"].crossed == 1
    assert found["weight update and refit"].crossed == 1
    assert found["warm prefix cache"].absent == "prefix caching is off"
    assert not any(edge.is_missing for edge in found.values() if edge.name != "bucket filled to its edge")


def test_prompts_that_are_too_short_cross_nothing_and_it_is_said() -> None:
    """H3: everything equal, nothing shown."""
    found = crossed(GrpoOptions(groups=2, prompt_tokens=1, returns_at=0, block=16), 1)
    missing = {edge.name for edge in found.values() if edge.is_missing}
    assert {"prefill chunk edge", "KV block edge in a prompt", "KV block edge while decoding"} <= missing
    assert {"warm prefix cache", "weight update and refit", "sleep with requests in flight"} <= missing


def test_edges_of_several_runs_add_up() -> None:
    one = [Edge("a", 2), Edge("b", 0, "off"), Edge("c", 0, "off"), Edge("d", 0)]
    two = [Edge("a", 1), Edge("b", 4), Edge("c", 0, "off"), Edge("d", 0)]
    found = {edge.name: edge for edge in merged([one, two])}
    assert (found["a"].crossed, found["b"].crossed) == (3, 4)
    assert found["c"].absent == "off"
    assert [name for name, edge in found.items() if edge.is_missing] == ["d"]


# ---- the verdict --------------------------------------------------------------------------------


def test_no_runs_and_no_tokens_are_no_pass() -> None:
    assert Certificate().exit_code is ExitCode.REFUSED
    empty = Certificate([Run("colocated-shared", "few", Drift(GrpoOptions()), (Edge("a", 1),))])
    assert (empty.verdict, empty.exit_code) == ("incomplete", ExitCode.REFUSED)


def test_one_mix_is_zero_and_sequences_alone_are_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MIXES", (FEW,))
    found = certify(GrpoOptions(steps=3), ["colocated-shared"])
    document: Any = certificate(found, GrpoOptions())
    assert [run.zero for run in found.runs] == [True]
    names = {edge["name"]: edge["crossed"] for edge in document["edges"]["crossed"]}
    assert names["chunk edge inside a KV block"] > 0
    assert names["decoded rows prefilled alone, cold"] > names["decoded rows prefilled alone, warm"] > 0
    # This mix alone has no late requests and no sleep in flight: not a pass, and exactly that is said.
    assert document["verdict"] == "incomplete"
    assert "sleep with requests in flight" in {edge["name"] for edge in document["edges"]["not_crossed"]}


def test_a_sequence_that_differs_only_in_company_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop itself is zero; a sequence that is scored alone is not."""
    from zkl_debug.beds.grpo.loop import GrpoLoop

    plain = GrpoLoop.score

    def score(self: GrpoLoop, results: Any) -> Any:
        found = plain(self, results)
        if len(results) == 1:
            found = {sample: values + values.dtype.type(0.5) for sample, values in found.items()}
        return found

    monkeypatch.setattr(gate, "MIXES", (FEW,))
    monkeypatch.setattr(GrpoLoop, "score", score)
    found = certify(GrpoOptions(steps=1), ["colocated-shared"])
    assert found.exit_code is ExitCode.DIVERGED
    document: Any = certificate(found, GrpoOptions())
    assert document["causes"][0]["name"] == "neighbours"
    assert "scored alone" in document["causes"][0]["text"]


def test_a_fault_fails_with_its_cause_and_the_gate_stops_there(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MIXES", gate.MIXES[::-1][1:])
    code, document = cli(capfd, "certify", "--fault", "W3")
    assert (code, document["verdict"]) == (1, "mismatch")
    assert len(document["runs"]) == 1
    cause = document["causes"][0]
    assert (cause["name"], cause["step"], cause["event"]) == ("weights-not-updated", 2, "refit")
    assert "linear_proj.weight" in cause["text"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_whole_gate_passes(capfd: pytest.CaptureFixture[str], dtype: str) -> None:
    code, document = cli(capfd, "certify", "--dtype", dtype)
    assert (code, document["verdict"], document["causes"]) == (0, "zero", [])
    assert len(document["runs"]) == 9
    assert document["edges"]["not_crossed"] == []
    assert document["seconds"] < 480


@pytest.mark.slow
def test_the_gate_does_not_pass_without_the_stack(capfd: pytest.CaptureFixture[str]) -> None:
    code, document = cli(capfd, "certify", "--stack", "off", "--layout", "colocated-shared")
    assert code == 1
    assert document["causes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOOP_FAULTS if name != "Z0"])
def test_every_fault_fails_with_a_named_cause(capfd: pytest.CaptureFixture[str], name: str) -> None:
    code, document = cli(capfd, "certify", "--fault", name)
    assert code == 1
    assert document["causes"][0]["name"] not in ("", "undecided")
    assert document["causes"][0]["text"]
