"""A figure of a bisection: which switches were on in each run, and how it ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zkl_debug.errors import UsageError
from zkl_debug.viz.palette import BLUE, GREY, ORANGE
from zkl_debug.viz.picture import Picture

_OFF, _ZERO, _MISMATCH = 0, 1, 2


def ladder_map(runs: Sequence[tuple[Collection[str], str]], order: Sequence[str]) -> Figure:
    """Switches by runs: a filled cell is a switch that was on, its colour the outcome of the run.

    Runs are sorted by outcome, then by the number of switches; each configuration is drawn once.

    Args:
        runs: (switches that were on, ``zero`` or ``mismatch``) of each run; other outcomes are not drawn.
        order: switches, in ladder order.

    Raises:
        UsageError: no run ended in zero or mismatch.
    """
    seen = {(frozenset(on), outcome) for on, outcome in runs if outcome in ("zero", "mismatch")}
    if not seen:
        raise UsageError("nothing to draw: no run ended in zero or mismatch", "runs of a bisection")
    ordered = sorted(seen, key=lambda run: (run[1] != "zero", len(run[0]), sorted(run[0])))
    cells = np.full((len(order), len(ordered)), _OFF)
    for column, (on, outcome) in enumerate(ordered):
        for row, name in enumerate(order):
            if name in on:
                cells[row, column] = _ZERO if outcome == "zero" else _MISMATCH
    figure = Picture(figsize=(9, 1.4 + 0.24 * len(order)), layout="constrained")
    axes = figure.add_subplot()
    colours = ListedColormap([GREY, BLUE, ORANGE])
    axes.pcolormesh(cells, cmap=colours, vmin=_OFF, vmax=_MISMATCH, edgecolors="white", linewidth=0.6)
    axes.set_yticks(np.arange(len(order)) + 0.5, list(order), fontsize=7)
    axes.invert_yaxis()
    zero = sum(outcome == "zero" for _, outcome in ordered)
    axes.axvline(zero, color="black", linewidth=1)
    axes.set_xlabel(f"configurations: {zero} zero, left of the line; {len(ordered) - zero} mismatch")
    axes.set_xticks([])
    handles = [
        Patch(color=BLUE, label="on, zero"),
        Patch(color=ORANGE, label="on, mismatch"),
        Patch(color=GREY, label="off"),
    ]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, fontsize=7)
    return figure
