"""Faults: known defects, each with its known right answer, that can be put into a bed."""

from zkl_debug.beds.faults import (  # noqa: F401 - they register
    collectives,
    harness,
    kernels,
    logprobs,
    precision,
    quantised,
    recurrent,
    routing,
    rows,
)
from zkl_debug.beds.faults.registry import FAULTS, Answer, Fault, fault

__all__ = ["FAULTS", "Answer", "Fault", "fault"]
