"""Figures of a loop: which sequences differ in which step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from zkl_debug.errors import UsageError
from zkl_debug.viz.palette import BLUE
from zkl_debug.viz.picture import Picture


def step_map(diverged: Mapping[int, Sequence[int]], sequences: int) -> Figure:
    """One column a step, one row a sequence; a mark where the two sides differ.

    Args:
        diverged: numbers of the sequences that differ, by step; a step without any must be there too.
        sequences: sequences of a step.

    Raises:
        UsageError: no steps.
    """
    if not diverged:
        raise UsageError("no steps to draw", "the steps of a loop")
    steps = sorted(diverged)
    figure = Picture(figsize=(max(4.0, 0.5 * len(steps)), 3.2), layout="constrained")
    axes = figure.subplots()
    points = np.array([(step, sample) for step in steps for sample in diverged[step]]).reshape(-1, 2)
    axes.scatter(points[:, 0], points[:, 1], marker="s", s=18, color=BLUE, label="differs")
    axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    axes.set_ylim(-0.5, sequences - 0.5)
    axes.set_xticks(steps)
    axes.set_xlabel("step")
    axes.set_ylabel("sequence")
    count = sum(map(len, diverged.values()))
    axes.set_title(f"{count} of {sequences * len(steps)} sequences differ", loc="left", fontsize=10)
    return figure
