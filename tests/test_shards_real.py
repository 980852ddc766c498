"""Real models of megatron-core on several ranks (torch.distributed with gloo), against one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from zkl_debug.beds import ranks
from zkl_debug.beds.bed import BedOptions
from zkl_debug.beds.faults import FAULTS
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.beds.spread import fit_options, layout_of
from zkl_debug.diff import Outcome, diff_captures
from zkl_debug.errors import UsageError

QUICK = RecordOptions(level="digest", certify=False)


def captured(out: Path, record: RecordOptions = QUICK, **options: Any) -> Any:
    """Both sides of a bed, compared."""
    record_bed(BedOptions(**options), out, record)
    return diff_captures(out / "train", out / "gen")


def test_train_tp2_ep2_against_one_rank_is_identical(tmp_path: Path) -> None:
    """Tensor, sequence and expert parallel at once: every row of every site that both have, no gather anywhere."""
    verdict = captured(tmp_path, bed="tiny-moe", dtype="bf16", layout={"tp": 2, "sp": True, "ep": 2}, reprefill=False)
    assert verdict.outcome is Outcome.IDENTICAL
    assert verdict.checks["weights"] == "equal"
    assert verdict.checks["ranks_a"]["alike"]
    compared = {str(r["site"]): int(r["compared"]) for r in verdict.site_counts if r["edge"] == "score-prefill"}
    for site in (
        "decoder.layers.0.self_attention.linear_qkv:out",  # column-parallel, groups of heads
        "decoder.layers.0.mlp.linear_fc1:out",  # gate and up: two pieces a rank
        "decoder.layers.0.self_attention.linear_proj/tp.reduce:out.0",
        "decoder.layers.1.mlp/router.topk:out.0",  # rows shared out by sequence parallel
        "decoder.layers.3.mlp.experts.local_experts.7:out",  # tokens that came from the other rank
        "decoder.layers.2.mlp/unpermute:out.0",
        "output_layer:out",
    ):
        assert compared.get(site, 0) > 10, site
    assert compared["output_layer:out"] == compared["embedding.word_embeddings:out"] > 200
    assert not any("tp.reduce:in" in name for name in compared)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bed", "layout", "gen_layout"),
    [
        ("tiny-gpt", {"tp": 2}, {}),
        ("tiny-gpt", {"pp": 2}, {}),
        ("tiny-gpt", {"dp": 2}, {}),
        ("tiny-gpt", {"cp": 2}, {}),
        ("tiny-gpt", {"cp": 2, "cp_comm": "p2p"}, {}),
        ("tiny-gpt", {"tp": 2, "pp": 2, "sp": True}, {"tp": 2}),
        ("tiny-moe", {"ep": 2, "dp": 2}, {}),
        ("tiny-moe", {"tp": 2, "sp": True, "ep": 2}, {"ep": 2, "dp": 2}),
    ],
)
def test_layouts_are_identical_to_one_rank(tmp_path: Path, bed: str, layout: Any, gen_layout: Any) -> None:
    verdict = captured(
        tmp_path,
        RecordOptions(),
        bed=bed,
        dtype="fp32",
        layout=layout,
        gen_layout=gen_layout,
        packing="cp" not in layout,
    )
    assert verdict.outcome is Outcome.IDENTICAL
    assert verdict.certification["a"] == {"a0_a1": True, "a0_a2": True}
    rows = {r["edge"]: int(r["compared"]) for r in verdict.site_counts if r["site"] == "output_layer:out"}
    assert rows["score-prefill"] > 400
    assert verdict.coverage.prompt.compared == verdict.coverage.prompt.of > 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["C1", "C4"])
def test_order_between_ranks_is_named_at_the_collective(tmp_path: Path, name: str) -> None:
    from zkl_debug.bench.faults_bench import Case, run_case

    fault = FAULTS[name]
    score = run_case(Case(fault, fault.beds[0], "fp32", 0), tmp_path)
    assert score.failure == ""
    assert False not in score.right.values(), (score.right, score.told)
    assert all(score.right[goal] for goal in ("detected", "site", "kind", "explanation"))


def test_a_killed_rank_leaves_the_others_readable(tmp_path: Path) -> None:
    """Rank 1 dies in the middle: what both had is repaired, refused by the rank's name, and compared when asked to."""
    options = BedOptions(bed="tiny-gpt", dtype="fp32", layout={"pp": 2}, sides=("train",))
    sequences = {str(s): list(range(3 + s, 20 + s)) for s in range(6)}
    job = {
        "side": "train",
        "options": asdict(options),
        "record": asdict(QUICK),
        "folder": str(tmp_path / "killed"),
        "sequences": sequences,
        "prompt_lens": dict.fromkeys(sequences, 8),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    program = Path(__file__).parent / "programs" / "killed_rank.py"
    with pytest.raises(ranks.RankFailed, match=r"rank 1 of 2 was ended by signal 9"):
        ranks.wait_for(ranks.start(tmp_path, 2, [str(program)]), tmp_path, tmp_path / "killed")
    command = [sys.executable, "-m", "zkl_debug.cli.main"]
    repaired = subprocess.run([*command, "repair", str(tmp_path / "killed")], capture_output=True, text=True)
    assert repaired.returncode == 0, repaired.stderr
    refused = diff_captures(tmp_path / "killed", tmp_path / "killed")
    assert refused.outcome is Outcome.REFUSED
    assert refused.refusal is not None
    assert "rank 1" in refused.refusal.text
    # The first pipeline stage lives on for a forward that rank 1 never made.
    verdict = diff_captures(tmp_path / "killed", None, partial=True)
    lost = [skip.what for skip in verdict.coverage.skipped if skip.what.startswith("lost in A")]
    assert lost


def test_layouts_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="over 2 ranks"):
        BedOptionsOf(layout={"tp": 2, "cp": 1, "ep": 4})
    with pytest.raises(UsageError, match="sequence parallel"):
        layout_of(BedOptions(layout={"tp": 1, "sp": True, "dp": 2}), "train")
    with pytest.raises(UsageError, match="generation"):
        fit_options(BedOptions(gen_layout={"pp": 2}))


def BedOptionsOf(**fields: Any) -> Any:  # noqa: N802
    """The training layout of such options."""
    return layout_of(BedOptions(**fields), "train")
