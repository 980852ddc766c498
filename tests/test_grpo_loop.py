"""The GRPO loop: zero in every layout, repeatable from a checkpoint, and nothing of it left in the process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from zkl_debug.beds.grpo import checkpoint, data
from zkl_debug.beds.grpo.loop import open_loop
from zkl_debug.beds.grpo.options import LAYOUTS, GrpoOptions
from zkl_debug.beds.grpo.record import StepRecord, table_of, write_table
from zkl_debug.beds.grpo.watch import LoopWatch
from zkl_debug.errors import CaptureInvalid, Refused, UsageError
from zkl_debug.logprobs.files import read_npz
from zkl_debug.logprobs.report import analyse

SMALL = {"groups": 4, "returning": (1,), "returns_at": 2}


def bits(record: StepRecord) -> list[tuple[tuple[int, ...], bytes, bytes]]:
    return [(s.tokens, s.gen.tobytes(), s.train.tobytes()) for s in record.sequences]


# ---- zero ------------------------------------------------------------------------------------


def test_every_layout_is_zero_with_the_same_bits() -> None:
    """``dedicated`` runs behind loops of this process: its engine must not depend on what happened here before."""
    seen = {}
    for layout in LAYOUTS:
        with open_loop(GrpoOptions(layout=layout, **SMALL)) as loop:  # type: ignore[arg-type]
            start = {n: p.detach().clone() for n, p in loop.layout.trainer.named_parameters()}
            records = loop.run(3)
            trained = [n for n, p in loop.layout.trainer.named_parameters() if not torch.equal(p, start[n])]
        assert [r.diverged for r in records] == [(), (), ()]
        assert [r.version for r in records] == [0, 1, 2]
        assert all(r.metrics.tokens == r.metrics.exact > 40 for r in records)
        assert all(r.metrics.gen_kl_error == 0 and r.metrics.token_mult_prob_error == 1 for r in records)
        assert len(trained) == len(start)
        seen[layout] = [bits(r) for r in records]
    assert seen["colocated-shared"] == seen["colocated-inference-model"] == seen["dedicated"]


def test_without_the_stack_it_is_not_zero() -> None:
    with open_loop(GrpoOptions(stack=False, **SMALL)) as loop:  # type: ignore[arg-type]
        assert loop.run(1)[0].diverged


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv", ["persist", "offload", "recompute"])
@pytest.mark.parametrize("changes", [{}, {"nap": 4, "late": 4}, {"experts": 4}, {"tied": True}, {"max_tokens": 128}])
def test_eight_steps_are_zero(layout: str, kv: str, changes: dict[str, object]) -> None:
    with open_loop(GrpoOptions(layout=layout, kv=kv, **changes)) as loop:  # type: ignore[arg-type]
        assert not any(r.diverged for r in loop.run(8))


# ---- any step again ------------------------------------------------------------------------------------


def test_a_step_from_a_checkpoint_gives_the_same_bits(tmp_path: Path) -> None:
    options = GrpoOptions(layout="colocated-inference-model", **SMALL)  # type: ignore[arg-type]
    with open_loop(options) as loop:
        loop.run(2)
        path = checkpoint.save(loop, tmp_path / "step2.npz")
        third = loop.run_step()
        after = {n: p.detach().clone() for n, p in loop.layout.trainer.named_parameters()}
    with open_loop(options) as loop:
        checkpoint.load(loop, path)
        again = loop.run_step()
        assert (again.step, again.version) == (3, 2)
        assert bits(again) == bits(third)
        assert all(torch.equal(p, after[n]) for n, p in loop.layout.trainer.named_parameters())


def test_checkpoints_of_other_loops_and_other_files_are_refused(tmp_path: Path) -> None:
    with open_loop(GrpoOptions(**SMALL)) as loop:  # type: ignore[arg-type]
        path = checkpoint.save(loop, tmp_path / "a.npz")
        torn = tmp_path / "torn.npz"
        torn.write_bytes(path.read_bytes()[:200])
        with pytest.raises(CaptureInvalid, match="cannot be read"):
            checkpoint.load(loop, torn)
        loop.options = GrpoOptions(seed=7, **SMALL)  # type: ignore[arg-type]
        with pytest.raises(Refused, match="seed=0"):
            checkpoint.load(loop, path)


def test_a_watched_step_is_put_back_and_repeats_itself() -> None:
    with open_loop(GrpoOptions(**SMALL)) as loop:  # type: ignore[arg-type]
        with LoopWatch(loop, keep=2) as watch:
            live = [bits(r) for r in loop.run(3)]
        assert list(watch.kept) == [2, 3]
        for step in (3, 2):
            watch.kept[step].image.restore()
            results = loop.generate(watch.kept[step].batch)
            assert [r.tokens for r in results] == [tokens for tokens, _, _ in live[step - 1]]
        names = [m.name for m in watch.log.moments if m.step == 2 and m.phase == "end"]
        assert names == ["refit", "cache_reset", "wake", "sleep", "generate", "optimizer_step"]


# ---- data, tables, options ------------------------------------------------------------------------------------


def test_prompts_come_back_when_they_should() -> None:
    options = GrpoOptions(returns_at=4, returning=(3,))
    batches = {step: data.batch(options, step, 128) for step in range(1, 8)}
    assert batches[4].origin[3] == 1
    assert batches[5].origin[3] == 2
    assert batches[4].prompts[3] == batches[1].prompts[3]
    assert all(batches[s].origin == (s,) * 16 for s in (1, 2, 3))
    assert batches[4].prompts[2] not in {p for s in (1, 2, 3) for p in batches[s].prompts}


def test_advantages_are_centred_in_each_group() -> None:
    got = data.advantages(np.asarray([1, 0, 0.5, 0.5], np.float32), 2)
    assert got[:2].sum() == 0
    assert got[0] > 0.7
    assert not got[2:].any()


def test_the_table_of_a_loop_is_what_logprobs_reads(tmp_path: Path) -> None:
    with open_loop(GrpoOptions(prompt_log_probs=True, **SMALL)) as loop:  # type: ignore[arg-type]
        records = loop.run(2)
    write_table(records, tmp_path / "t.npz")
    report = analyse(read_npz(tmp_path / "t.npz"))
    assert report.verdict == "identical"
    assert report.compared == sum(r.metrics.tokens for r in records)
    assert report.masked > 0
    assert len(table_of(records, mask_prompts=False)) == report.compared + report.masked


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layout": "three"}, "layout 'three'"),
        ({"max_tokens": 100}, "multiple of 64"),
        ({"steps": 0}, "1 or more"),
        ({"hybrid": True}, "hybrid model in bf16"),
        ({"hybrid": True, "dtype": "fp32"}, "prefix caching"),
    ],
)
def test_options_that_cannot_run_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        GrpoOptions(**changes)  # type: ignore[arg-type]
