"""The record every test of :mod:`zkl_debug.logprobs.shapes`, ``placement`` and ``noise`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from zkl_debug.logprobs.table import F32, F64, Bools
from zkl_debug.schema import Json

#: fp32 machine epsilon: ulp(x) <= EPS32 * |x|.
EPS32 = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Finding:
    """One explanation that the numbers bear out.

    Attributes:
        name: machine-readable, e.g. ``label-fault``.
        text: one sentence for a reader.
        evidence: what was counted and measured.
        rows: the rows of the view it speaks of.
        is_benign: a formula or rounding difference that no training run is hurt by; the verdict is still "diverged".
        proof: what would confirm or refute it.
        capture: site patterns that such a proof needs.
    """

    name: str
    text: str
    evidence: Mapping[str, Json]
    rows: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    is_benign: bool = False
    proof: str = ""
    capture: tuple[str, ...] = ()

    def to_json(self, differing: Bools) -> Json:
        """An entry of ``explanations``; ``explains`` counts the differing rows it covers."""
        covered = int((self.rows & differing).sum()) if self.rows.shape == differing.shape else 0
        return {
            "name": self.name,
            "text": self.text,
            "evidence": {**self.evidence, "explains": covered, "of": int(differing.sum())},
            "benign": self.is_benign,
            "proof": self.proof,
        }


def ulp32(*values: F32 | F64) -> F64:
    """Spacing of float32 at the largest magnitude of the given arrays, in float64."""
    largest = np.max([np.abs(np.asarray(v, np.float64)) for v in values], axis=0)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.spacing(np.asarray(largest, np.float32)), np.float64)


def listing(values: list[int], most: int = 8) -> str:
    """``1, 2, 3 and 5 more``."""
    shown = ", ".join(str(v) for v in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"
