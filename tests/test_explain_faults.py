"""Rule and explanation of real captures: megatron-core with a fault put in, a few by default, the others when slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from zkl_debug.beds.bed import BedOptions
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.diff import diff_captures

# fault, bed, dtype, what the rule says, name of the first explanation
FAST = [
    ("K2", "tiny-gpt", "bf16", "rows in call of score <= 33", "reduction-order"),
    ("M12", "tiny-gpt", "fp32", "packed (score) and not first sequence in call", "mask-fit"),
    ("K7", "tiny-moe", "bf16", "every row", "reduction-order"),
]
SLOW = [
    ("K1", "tiny-gpt", "fp32", "rows in call of score >= ", "reduction-order"),
    ("K4", "tiny-gpt", "bf16", "", "reduction-order"),
    ("K5", "tiny-gpt", "bf16", "longest query in call", "reduction-order"),
    ("K8", "tiny-gpt", "fp32", "sequences in call of score >= ", "reduction-order"),
    ("K12", "tiny-gpt", "fp32", "every row", "log-softmax-formula"),
    ("P1", "tiny-gpt", "fp32", "every row", "extra-rounding"),
    ("P2", "tiny-moe", "fp32", "every row", "extra-rounding"),
    ("P4", "tiny-gpt", "bf16", "every row", "norm-rounding-order"),
    ("P5", "tiny-gpt", "fp32", "every row", "eps"),
    ("P5", "tiny-gpt", "bf16", "", "eps"),
    ("P7", "tiny-gpt", "bf16", "position >= 1", "rope-frequency"),
    ("M1", "tiny-gpt", "bf16", "last position of its sequence in call", "label-fault"),
    ("M4", "tiny-gpt", "bf16", "chunk edge", "label-fault"),
    ("X1", "tiny-gpt", "bf16", "padding of its sequence", "position-shift"),
    ("X2", "tiny-gpt", "bf16", "position >= 1", "rope-pairing"),
    ("L1", "tiny-gpt", "bf16", "every row", "temperature"),
    ("L4", "tiny-gpt", "bf16", "every row", "row-shift"),
    ("R1", "tiny-moe", "bf16", "every row", "routing-weights"),
    ("R2", "tiny-moe", "bf16", "in call of score", "row-permutation"),
    ("W2", "tiny-gpt", "bf16", "every row", "other-weights"),
]


@pytest.mark.parametrize(
    ("fault", "bed", "dtype", "rule", "name"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_rule_and_explanation(fault: str, bed: str, dtype: str, rule: str, name: str, tmp_path: Path) -> None:
    options = BedOptions(bed=bed, dtype=dtype, fault=fault)
    record_bed(options, tmp_path, RecordOptions(level="payload", certify=False))
    document = diff_captures(tmp_path / "train", tmp_path / "gen").to_json()
    assert rule in document["affected"]["rule"]["text"]
    assert document["explanations"][0]["name"] == name
    assert "explanation-failed" not in [entry["name"] for entry in document["explanations"]]
