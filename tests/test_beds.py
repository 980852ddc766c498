"""The beds: zero with the stack on, the right first difference with it off, and nothing but the prompt matters."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from test_engines_probe import observe

from zkl_debug.beds import BEDS, BedOptions, BedRun, bed, open_bed, run_bed
from zkl_debug.beds.workload import ALONE_LENGTH
from zkl_debug.errors import UsageError

CORE = "decoder.layers.0.self_attention.core_attention"


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-moe"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stack_on_is_zero_at_every_site(name: str, dtype: str) -> None:
    seen = observe(BedOptions(bed=name, dtype=dtype))
    assert seen.first() is None
    assert not any(seen.within_gen(site) for site in seen.order)
    assert f"{CORE}:out" in seen.order
    assert "logprobs/selected:out.0" in seen.order
    assert ("decoder.layers.3.mlp/unpermute:out.0" in seen.order) == (name == "tiny-moe")
    count = seen.run.mismatches()
    assert seen.run.zero
    assert count["compared"] > 500
    assert seen.run.gen is not None
    assert any(r.cached == 32 for r in seen.run.gen.results)


@pytest.mark.parametrize("name", ["tiny-gpt", pytest.param("tiny-moe", marks=pytest.mark.slow)])
def test_stack_off_differs_first_at_core_attention(name: str) -> None:
    seen = observe(BedOptions(bed=name, dtype="bf16", stack=False))
    assert seen.first(("prefill",)) == f"{CORE}:out"
    for port in ("in", "in.1", "in.2"):
        assert not seen.differing(f"{CORE}:{port}", ("prefill",))
    assert not seen.run.zero


def _flat(run: BedRun) -> dict[Any, bytes]:
    """Everything a run returned for the bed's own samples, comparable across options."""
    assert run.gen is not None
    assert run.train is not None
    flat: dict[Any, bytes] = {}
    for result in run.gen.results:
        if result.sample < 100:
            flat["tokens", result.sample] = np.array(result.tokens).tobytes()
            flat["generated", result.sample] = result.generated_log_probs.tobytes()
    for result in run.gen.reprefill:
        if result.sample < 100:
            flat["reprefill", result.sample] = result.log_probs.tobytes()
    for sample, scored in run.train.log_probs.items():
        if sample < 100:
            flat["scored", sample] = scored.tobytes()
    return flat


VARIANTS: dict[str, dict[str, Any]] = {
    "order and neighbours": {"permute": 3, "neighbours": 3},
    "chunks and padding": {"chunk": 128, "pad_multiple": 1, "pack_multiple": 1},
    "no chunks, no cache, no packs": {
        "chunked_prefill": False,
        "prefix_caching": False,
        "packing": False,
        "micro_batch": 4,
    },
}
SLOW_VARIANTS: dict[str, dict[str, Any]] = {
    "again": {},
    "permuted": {"permute": 4},
    "neighbours": {"neighbours": 5},
    "chunk": {"chunk": 192},
    "no chunks": {"chunked_prefill": False},
    "no prefix cache": {"prefix_caching": False},
    "padding": {"pad_multiple": 32},
    "no padding in packs": {"pack_multiple": 1},
    "not packed": {"packing": False},
    "one by one": {"micro_batch": 1, "packing": False},
    "two threads": {"threads": 2},
    "three threads": {"threads": 3},
}


@pytest.fixture(scope="module")
def baseline() -> dict[Any, bytes]:
    return _flat(run_bed(BedOptions(bed="tiny-moe", dtype="bf16")))


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_prompt_matters(variant: str, baseline: dict[Any, bytes]) -> None:
    run = run_bed(BedOptions(bed="tiny-moe", dtype="bf16", **VARIANTS[variant]))
    assert run.zero
    assert _flat(run) == baseline


@pytest.mark.slow
@pytest.mark.parametrize("variant", SLOW_VARIANTS)
@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-moe"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_only_the_prompt_matters_one_change_at_a_time(name: str, dtype: str, variant: str) -> None:
    run = run_bed(BedOptions(bed=name, dtype=dtype, **SLOW_VARIANTS[variant]))
    assert run.zero
    assert _flat(run) == _flat(run_bed(BedOptions(bed=name, dtype=dtype)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-moe"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_zero_over_seeds(name: str, dtype: str, seed: int) -> None:
    assert run_bed(BedOptions(bed=name, dtype=dtype, seed=seed, permute=seed, neighbours=seed % 3)).zero


def test_sampling_is_seeded_and_zero() -> None:
    runs = [run_bed(BedOptions(dtype="fp32", greedy=False, reprefill=False)) for _ in range(2)]
    assert runs[0].zero
    assert _flat(runs[0]) == _flat(runs[1])
    assert _flat(runs[0]) != _flat(run_bed(BedOptions(dtype="fp32", reprefill=False)))


def test_exactly_one_scoring_call_has_the_odd_number_of_rows() -> None:
    with open_bed(BedOptions(dtype="fp32", reprefill=False)) as context:
        first = context.run_gen()
        train = context.run_train()
        assert context.run_gen().sequences == first.sequences
        again = context.run_train()
    slots = [b.n_slots for b in train.batches]
    assert slots.count(ALONE_LENGTH) == 1
    assert 1 not in slots
    assert sorted(s for b in train.batches for s in b.samples) == sorted(first.sequences)
    assert {b.layout for b in train.batches} == {"padded", "packed"}
    assert all(np.array_equal(train.log_probs[s], again.log_probs[s]) for s in train.log_probs)


def test_hooks_get_each_side_with_its_surroundings_in_place() -> None:
    from contextlib import contextmanager

    calls = []

    @contextmanager
    def on_side(context: Any, side: str) -> Any:
        calls.append((side, len(context.switches), context.generator.engine is not None))
        yield

    run = run_bed(BedOptions(dtype="fp32", sides=("train",)), on_side, sequences={0: [1, 2, 3], 2: [4, 5]})
    assert run.gen is None
    assert run.train is not None
    assert {s: x.shape for s, x in run.train.log_probs.items()} == {0: (2,), 2: (1,)}
    assert [c[0] for c in calls] == ["train"]
    with open_bed(BedOptions(dtype="fp32")) as context, pytest.raises(UsageError, match="nothing to score"):
        context.run_train()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bed": "tiny-llama"}, "no bed named"),
        ({"dtype": "fp8"}, "no dtype 'fp8'"),
        ({"sides": ("left",)}, "sides left"),
        ({"chunk": 48}, "chunk 48"),
    ],
)
def test_options_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BedOptions(**wrong)


def test_listing() -> None:
    for b in BEDS.values():
        assert b.description
        assert len(set(b.switches)) == len(b.switches) > 1
    for name in ("tiny-gpt", "tiny-moe"):
        assert "attention-reference" in bed(name).switches
        assert "Z0" in bed(name).faults
    assert {"flash-attention-4", "batch-invariant-mode"} <= set(bed("gpt-te").switches), "a GPU has a ladder of its own"
    assert "K7" in bed("tiny-moe").faults
    assert "K7" not in bed("tiny-gpt").faults
    assert dataclasses.is_dataclass(bed("tiny-gpt"))
