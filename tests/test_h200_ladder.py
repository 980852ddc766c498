"""The ladder of an H200, as far as it came: what its committed runs prove."""

from __future__ import annotations

from pathlib import Path

import pytest

from zkl_debug.bisect.evidence import proofs, read_runs, smallest_zero
from zkl_debug.errors import UsageError

FOLDER = Path(__file__).parent.parent / "captures" / "h200-ladder"
SUFFICIENT = frozenset(
    {
        "attention-flash",
        "bi-te-gemm",
        "chunk-edge-labels",
        "cublas-workspace",
        "cublaslt-workspace",
        "flash-attention-4",
        "fused-log-softmax",
    }
)


def test_every_run_of_the_full_ladder_ended_in_zero_or_mismatch() -> None:
    runs = read_runs(FOLDER / "journal-all.jsonl")
    assert len(runs) == 64
    assert {run.outcome for run in runs} == {"zero", "mismatch"}
    assert len(frozenset().union(*(run.on for run in runs))) == 20


def test_seven_of_twenty_switches_were_seen_to_be_enough() -> None:
    assert smallest_zero(read_runs(FOLDER / "journal-all.jsonl")) == SUFFICIENT


def test_what_is_needed_and_what_can_go() -> None:
    found = proofs(read_runs(FOLDER / "journal-all.jsonl"))
    assert {name for name, proof in found.items() if proof.needed} == {"fused-log-softmax"}
    assert {name for name, proof in found.items() if not proof.zero_without} == SUFFICIENT - {"chunk-edge-labels"}
    rest = proofs(read_runs(FOLDER / "journal-rest.jsonl"))
    assert rest["cublas-workspace"].zero_without  # the second search drops it too
    assert rest["chunk-edge-labels"].zero_without  # no-chunked-prefill does the same
    assert rest["fused-log-softmax"].needed


def test_with_a_batch_invariant_gemm_alone_the_first_difference_moves_to_attention() -> None:
    found = proofs(read_runs(FOLDER / "journal-rest.jsonl"))
    for name in ("bi-te-gemm", "te-gemm-workspace"):
        assert found[name].site_alone == "decoder.layers.1.self_attention.core_attention:out"
    assert found["cublas-workspace"].site_alone == "decoder.layers.0.mlp.linear_fc2:out"


def test_the_figure_draws_each_configuration_once_and_refuses_to_draw_nothing() -> None:
    from zkl_debug.viz import ladder_map

    runs = [({"a"}, "mismatch"), ({"a", "b"}, "zero"), ({"a"}, "mismatch"), ({"b"}, "error")]
    figure = ladder_map(runs, ["a", "b"])
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
