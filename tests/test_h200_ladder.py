"""The ladder of an H200: the committed journal, searched again, comes to the committed answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zkl_debug.beds.oracle import bed_space, bed_switches
from zkl_debug.bisect.evidence import Run, proofs, read_runs, smallest_zero
from zkl_debug.bisect.outcome import Observation, Outcome
from zkl_debug.bisect.search import Search
from zkl_debug.errors import UsageError

FOLDER = Path(__file__).parent.parent / "captures" / "h200-ladder"
MINIMAL = ("attention-flash", "bi-te-gemm", "fused-log-softmax", "chunk-edge-labels")
OUTCOMES = {"zero": Outcome.ZERO, "mismatch": Outcome.MISMATCH}


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return read_runs(FOLDER / "journal.jsonl")


def test_every_run_ended_in_zero_or_mismatch(runs: list[Run]) -> None:
    assert len(runs) == 114
    assert {run.outcome for run in runs} == {"zero", "mismatch"}
    assert len(frozenset().union(*(run.on for run in runs))) == 20


def test_a_search_that_is_told_the_runs_comes_to_the_same_answer(runs: list[Run]) -> None:
    told = {(run.on, run.wide): OUTCOMES[run.outcome] for run in runs}
    search = Search(bed_space(bed_switches("gpt-te", graphs=True)))
    for _ in range(200):
        if search.result is not None:
            break
        for request in search.proposals(1):
            search.tell(request, Observation(told[request.config, request.wide]))
    result = search.result
    assert result is not None
    committed = json.loads((FOLDER / "result.json").read_text())
    assert tuple(committed["minimal"]) == result.minimal == MINIMAL
    assert committed["confirmed"]
    assert result.confirmed
    assert result.unproven == ()
    assert sum(dict(result.runs).values()) == committed["runs"]["total"] == 34
    roles = {finding.name: finding.role.value for finding in result.findings}
    assert roles == {entry["name"]: entry["role"] for entry in committed["switches"]}
    assert sorted(name for name, role in roles.items() if role == "removable") == [
        "batch-invariant-mode", "bi-addmm", "bi-log-softmax", "bi-mean", "bi-mm", "bi-te-normalization",
        "bi-te-rmsnorm", "cublas-workspace", "cublaslt-workspace", "flash-attention-4", "graph-buckets-64",
        "max-requests-64", "no-cuda-graphs", "no-prefix-caching",
    ]  # fmt: skip


def test_the_minimal_set_was_zero_narrow_and_wide_and_no_member_can_go(runs: list[Run]) -> None:
    assert smallest_zero(runs) == frozenset(MINIMAL)
    of = {(run.on, run.wide): run for run in runs}
    assert of[frozenset(MINIMAL), True].outcome == of[frozenset(MINIMAL), False].outcome == "zero"
    first = {name: of[frozenset(MINIMAL) - {name}, False] for name in MINIMAL}
    assert {run.outcome for run in first.values()} == {"mismatch"}
    assert {name: run.site for name, run in first.items()} == {
        "attention-flash": "decoder.layers.1.self_attention.core_attention:out",
        "bi-te-gemm": "decoder.layers.0.mlp.linear_fc2:out",
        "fused-log-softmax": "logprobs/log_softmax:out.0",
        "chunk-edge-labels": "logprobs/label:out.0",
    }


def test_what_takes_the_place_of_a_member(runs: list[Run]) -> None:
    of = {run.on: run.outcome for run in runs if not run.wide}
    for member, other in (("bi-te-gemm", "te-gemm-workspace"), ("chunk-edge-labels", "no-chunked-prefill")):
        assert of[frozenset(MINIMAL) - {member} | {other}] == "zero"
    found = proofs(runs)
    assert {name for name, proof in found.items() if not proof.zero_without} == {"attention-flash", "fused-log-softmax"}


def test_the_figure_draws_each_configuration_once_and_refuses_to_draw_nothing() -> None:
    from zkl_debug.viz import ladder_map

    drawn = [({"a"}, "mismatch"), ({"a", "b"}, "zero"), ({"a"}, "mismatch"), ({"b"}, "error")]
    figure = ladder_map(drawn, ["a", "b"])
    cells = figure.axes[0].collections[0].get_array()
    assert cells is not None
    assert cells.reshape(2, -1).tolist() == [[1, 2], [1, 0]]
    with pytest.raises(UsageError, match="nothing to draw"):
        ladder_map([({"b"}, "error")], ["b"])


def test_another_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"body": {"format": "something"}}\n')
    with pytest.raises(UsageError, match="cannot be read"):
        read_runs(other)
