"""``zkl-debug capture -- PROGRAM`` on a program with its own loops over megatron-core, and a fault planted in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_attach import attached

from zkl_debug.diff import Verdict, diff_captures
from zkl_debug.schema import Phase
from zkl_debug.store.reader import open_capture

PROGRAM = str(Path(__file__).parent / "programs/mcore_tiny.py")


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mcore")
    done = attached(root / "gen", "gen", sys.executable, PROGRAM, "gen", str(root / "sequences.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    return root


def scored(root: Path, name: str, *options: str) -> Verdict:
    words = (sys.executable, PROGRAM, "train", str(root / "sequences.json"), *options)
    done = attached(root / name, "train", *words)
    assert done.returncode == 0, done.stderr
    return diff_captures(root / name, root / "gen")


def test_engine_and_training_loop_are_found(generated: Path) -> None:
    verdict = scored(generated, "train", "--steps", "2")
    assert verdict.first is not None
    assert verdict.first.site == "decoder.layers.0.self_attention.core_attention:out"
    assert verdict.first.inputs == "equal"
    with open_capture(generated / "gen") as gen, open_capture(generated / "train") as train:
        assert {int(phase) for phase in gen.frames["phase"]} >= {int(Phase.PREFILL), int(Phase.DECODE)}
        assert gen.manifest["counts"]["frames"] == len(gen.frames) == 6
        assert list(train.frames["step"]) == [0, 0, 0, 0, 0, 0, 1, 1, 1], "three scored, then two steps of three"
        assert train.manifest["probe"]["ok"]
        assert gen.manifest["probe"]["ok"]


def test_a_planted_fault_is_named(generated: Path) -> None:
    verdict = scored(generated, "eps", "--eps", "1e-6")
    assert verdict.first is not None
    assert verdict.first.site == "decoder.layers.0.input_layernorm:out"
    assert verdict.first.kind.label == "own"
    assert verdict.edge == "score-prefill"
