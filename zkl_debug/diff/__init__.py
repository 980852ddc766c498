"""Compare two captures and name the first site that is not bitwise equal. Needs numpy and h5py only, never torch."""

from __future__ import annotations

from zkl_debug.diff.kinds import ReplayOracle
from zkl_debug.diff.model import Kind, Outcome, Refusal
from zkl_debug.diff.run import diff_captures
from zkl_debug.diff.verdict import Verdict

__all__ = ["Kind", "Outcome", "Refusal", "ReplayOracle", "Verdict", "diff_captures"]
