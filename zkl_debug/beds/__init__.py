"""Beds: small deterministic workloads that run real megatron-core, scoring and generation, in seconds.

Importing this package is cheap; torch and megatron are imported when a bed is opened.
"""

from zkl_debug.beds.bed import BEDS, Bed, BedOptions, bed
from zkl_debug.beds.run import BedContext, BedRun, open_bed, run_bed

__all__ = ["BEDS", "Bed", "BedContext", "BedOptions", "BedRun", "bed", "open_bed", "run_bed"]
