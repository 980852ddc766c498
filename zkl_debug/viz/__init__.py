"""Matplotlib figures of verdicts, for notebooks and reports. Importing this imports matplotlib."""

from __future__ import annotations

from zkl_debug.viz.figures import row_map, site_bars, ulp_histogram
from zkl_debug.viz.ladder import ladder_map
from zkl_debug.viz.steps import step_map

__all__ = ["ladder_map", "row_map", "site_bars", "step_map", "ulp_histogram"]
