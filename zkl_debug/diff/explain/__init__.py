"""Why a site differs: closed forms and mechanisms tested on the bits, each able to say no."""

from __future__ import annotations

from zkl_debug.diff.explain.model import Evidence, Finding, Strength
from zkl_debug.diff.explain.run import explain, explain_evidence

__all__ = ["Evidence", "Finding", "Strength", "explain", "explain_evidence"]
