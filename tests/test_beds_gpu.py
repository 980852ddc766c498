"""GPU beds: what can be known of them on any machine, and on a GPU the beds themselves."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from zkl_debug.beds import gpu
from zkl_debug.beds.bed import BEDS, BedOptions, bed
from zkl_debug.beds.gpu import full_requests, gen_config, gpu_ladder, gpu_switches, lacking
from zkl_debug.beds.oracle import bed_space, bed_switches
from zkl_debug.cli.beds import describe
from zkl_debug.errors import UsageError
from zkl_debug.stack.switches import SwitchError

GPU_BEDS = ("gpt-te", "gpt-infopt", "gpt-local-fa4", "moe-te")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")


@no_gpu
@pytest.mark.parametrize("name", GPU_BEDS)
def test_a_gpu_bed_is_listed_and_untestable_with_the_reason_on_a_cpu(name: str, tmp_path: Path) -> None:
    from zkl_debug.cli.capture import command

    listed = {b["name"]: b for b in describe()["beds"]}[name]
    assert listed["untestable"] == "needs an NVIDIA GPU; there is none"
    assert listed["sizes"] == ["small", "full"]
    result = CliRunner().invoke(command, ["--bed", name, "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, UsageError)
    assert "untestable here: needs an NVIDIA GPU" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", GPU_BEDS)
def test_the_stack_of_a_gpu_bed_fits_together_and_leaves_out_what_avoids_a_path(name: str) -> None:
    graphs = name != "moe-te"
    on = {s.name for s in gpu_switches(BedOptions(bed=name, graphs=graphs), bed(name))}
    assert {"batch-invariant-mode", "bi-mm", "fused-log-softmax"} <= on
    assert ("graph-buckets-64" in on) == graphs
    assert not on & {"no-cuda-graphs", "no-chunked-prefill", "cublas-workspace"}
    assert gpu_switches(BedOptions(bed=name, stack=False), bed(name)) == ()
    assert ("bi-te-gemm" in on) == (name != "gpt-local-fa4")
    assert ("moe-ordered-combine" in on) == (name == "moe-te")


def test_switches_of_graphs_are_varied_only_with_graphs() -> None:
    names = {s.name for s in gpu_ladder(BEDS["gpt-te"], graphs=True)}
    eager = {s.name for s in gpu_ladder(BEDS["gpt-te"], graphs=False)}
    assert names - eager == {"graph-buckets-64", "no-cuda-graphs"}
    space = bed_space(bed_switches("gpt-te", graphs=True))
    assert set(space.order) == names


def test_a_switch_without_what_it_requires_is_refused() -> None:
    options = BedOptions(bed="gpt-te", stack=False, switches={"batch-invariant-mode": True})
    with pytest.raises(SwitchError, match="without attention-flash, flash-attention-4"):
        gpu_switches(options, bed("gpt-te"))
    with pytest.raises(UsageError, match="has no switch 'gemm-row-tiles'"):
        gpu_switches(BedOptions(bed="gpt-te", switches={"gemm-row-tiles": True}), bed("gpt-te"))


def test_the_full_size_generates_more_than_two_thousand_tokens_from_mixed_lengths() -> None:
    options = BedOptions(bed="gpt-te")
    made = full_requests(options, 32768)
    lengths = [len(r.prompt) for r in made]
    assert sum(r.n_generate for r in made) >= 2000
    assert min(lengths) < 20
    assert max(lengths) > 256
    assert max(lengths) + 48 <= 512
    assert made == full_requests(options, 32768)
    config = gen_config(options, 512)
    assert config.max_tokens >= config.max_requests  # mcore pads a decode step to as many tokens as requests


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UsageError, match="no CUDA graphs"):
        BedOptions(bed="tiny-gpt", graphs=True)
    with pytest.raises(UsageError, match="reads expert counts on the host"):
        BedOptions(bed="moe-te", graphs=True)
    with pytest.raises(UsageError, match="cannot be put into"):
        BedOptions(bed="gpt-te", fault="K1")
    with pytest.raises(UsageError, match="no dtype 'fp32'"):
        BedOptions(bed="gpt-te", dtype="fp32")
    with pytest.raises(UsageError, match="size 'huge'"):
        BedOptions(bed="gpt-te", size="huge")


def test_a_bed_takes_back_which_attention_was_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core sets the variables while it builds a model, and refuses the next model if they do not suit it."""
    choice: dict[str, Any] = {"backend_selection_requires_update": False}
    monkeypatch.setitem(sys.modules, gpu._TE_ATTENTION, SimpleNamespace(_attention_backends=choice))
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    with gpu._attention_choice():
        os.environ.update({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"})
    assert os.environ["NVTE_FLASH_ATTN"] == "1"
    assert "NVTE_FUSED_ATTN" not in os.environ
    assert choice["backend_selection_requires_update"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "graphs"), [(n, g) for n in ("gpt-te", "gpt-infopt") for g in (False, True)] + [("moe-te", False)]
)
def test_stack_on_is_identical_and_off_is_not(name: str, graphs: bool, tmp_path: Path) -> None:
    from zkl_debug.beds.record import record_bed
    from zkl_debug.diff import diff_captures

    if reason := lacking(bed(name)):
        pytest.skip(reason)
    for stack, verdict in ((True, "identical"), (False, "diverged")):
        out = tmp_path / str(stack)
        record_bed(BedOptions(bed=name, size="small", graphs=graphs, stack=stack), out)
        assert diff_captures(out / "train", out / "gen").to_json()["verdict"] == verdict


@pytest.mark.gpu
def test_the_local_spec_keeps_a_norm_that_no_override_covers(tmp_path: Path) -> None:
    """torch.nn.RMSNorm is not among the overrides: with everything else on, a norm differs in a few rows."""
    from zkl_debug.beds.record import record_bed
    from zkl_debug.diff import diff_captures

    if reason := lacking(bed("gpt-local-fa4")):
        pytest.skip(reason)
    record_bed(BedOptions(bed="gpt-local-fa4", size="small"), tmp_path)
    document = diff_captures(tmp_path / "train", tmp_path / "gen").to_json()
    assert document["first"]["site"].endswith("layernorm:out")
    assert document["first"]["kind"] == "own"


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_one_launch_for_the_sites_of_a_hook_reads_what_one_for_each_reads(
    graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over whole runs in which mcore adds residuals and turns queries in place."""
    from zkl_debug.beds.record import record_bed
    from zkl_debug.capture.kernels import Kernels
    from zkl_debug.diff import diff_captures

    if reason := lacking(bed("gpt-te")):
        pytest.skip(reason)
    record_bed(BedOptions(bed="gpt-te", size="small", graphs=graphs), tmp_path / "together")
    monkeypatch.setattr(Kernels, "hold", lambda _self: None)
    monkeypatch.setattr(Kernels, "release", lambda _self: False)
    record_bed(BedOptions(bed="gpt-te", size="small", graphs=graphs), tmp_path / "apart")
    for side in ("train", "gen"):
        document = diff_captures(tmp_path / "together" / side, tmp_path / "apart" / side).to_json()
        assert document["verdict"] == "identical"
        assert document["coverage"]["sites"]["matched"] == 77


@pytest.mark.gpu
def test_sites_that_wait_are_read_as_they_were_when_they_were_passed(tmp_path: Path) -> None:
    """Over forwards of scoring with batches of two shapes, with what Transformer Engine and mcore write in place."""
    import numpy as np

    from zkl_debug.capture.api import Capture
    from zkl_debug.capture.twins import END
    from zkl_debug.diff import diff_captures
    from zkl_debug.engines.megatron import gpu as models
    from zkl_debug.engines.megatron import scoring, world

    if reason := lacking(bed("gpt-te")):
        pytest.skip(reason)
    fields = {**bed("gpt-te").model, **bed("gpt-te").sizes["small"]}
    spec = models.GpuSpec(kind="te", attention_backend="flash", flash_attention_version=4, **fields)
    rng = np.random.default_rng(0)
    batches = [
        scoring.padded_batch(i, [(4 * i + k, rng.integers(0, spec.vocab, n).tolist()) for k, n in enumerate(lengths)])
        for i, lengths in enumerate([(96, 64), (96, 64), (96, 64), (128, 128, 30), (96, 64), (128, 128, 30), (96, 64)])
    ]
    waited = set()
    with world.world(inference_rng=True):
        model = models.build_gpu_model(spec, 0)
        for folder, at_once in (("at_once", True), ("waiting", False)):
            with Capture(model, tmp_path / folder, "train", at_once=at_once, strict=True) as capture:
                for batch in batches:
                    scoring.score_microbatch(model, batch)
                    capture.session.flush()
                waited = {pair[1] for pair in capture.session.twins.known if pair[2] == END}
            assert not capture.session.errors
    document = diff_captures(tmp_path / "at_once", tmp_path / "waiting").to_json()
    assert document["verdict"] == "identical"
    assert document["coverage"]["sites"]["matched"] == len(capture.session.metas) > 60
    assert len(waited) > 50
