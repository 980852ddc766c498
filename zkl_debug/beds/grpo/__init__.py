"""A small synchronous GRPO loop on real megatron-core, and the search for what makes its two sides part."""

from zkl_debug.beds.grpo.answer import document, lines
from zkl_debug.beds.grpo.drift import Drift, find_drift
from zkl_debug.beds.grpo.gate import certificate, certify
from zkl_debug.beds.grpo.options import LAYOUTS, GrpoOptions
from zkl_debug.beds.grpo.record import StepRecord, table_of

__all__ = [
    "LAYOUTS",
    "Drift",
    "GrpoOptions",
    "StepRecord",
    "certificate",
    "certify",
    "document",
    "find_drift",
    "lines",
    "table_of",
]
