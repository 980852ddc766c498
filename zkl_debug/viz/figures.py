"""Figures of a verdict: sites, rows of a site, ULP distances. Each returns a matplotlib Figure; a notebook draws it."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from zkl_debug.diff import Verdict
from zkl_debug.errors import UsageError
from zkl_debug.viz.palette import BLUE, DOT, KINDS, MARKERS
from zkl_debug.viz.picture import Picture

_MAX_BARS = 40
_FILLED = ("own", "uncaptured_state", "propagated", "masked")


def _edge(verdict: Verdict, edge: str | None) -> str:
    """The edge asked for, else that of the verdict, else the first with anything compared."""
    if edge is not None:
        if edge not in verdict.edges:
            raise UsageError(f"no edge {edge!r}", ", ".join(verdict.edges))
        return edge
    if verdict.edge is not None:
        return verdict.edge
    return next((name for name, summary in verdict.edges.items() if summary.compared), "score-prefill")


def site_bars(verdict: Verdict, edge: str | None = None) -> Figure:
    """Share of differing rows per site, in execution order, stacked by kind.

    At most 40 sites are drawn, from the last equal one on: the first divergence is where the bars begin.

    Args:
        verdict: a verdict with a comparison.
        edge: default the edge of the verdict.

    Raises:
        UsageError: for a refused verdict or an unknown edge.
    """
    table = verdict.site_counts
    name = _edge(verdict, edge)
    rows = table[table["edge"] == name]
    touched = np.flatnonzero((rows["mismatched"] > 0) | (rows["masked"] > 0))
    start = max(0, int(touched[0]) - 3) if len(touched) else 0
    shown = rows[start : start + _MAX_BARS]
    figure = Picture(figsize=(9, 1.2 + 0.22 * max(4, len(shown))), layout="constrained")
    axes = figure.add_subplot()
    _stack(axes, shown)
    axes.set_yticks(range(len(shown)), list(shown["site"]), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.margins(y=0.01)
    axes.set_xlabel("share of compared rows")
    hidden = len(rows) - start - len(shown)
    axes.set_title(f"{name}: {len(rows)} sites, {len(touched)} differ" + (f", {hidden} later not drawn" * (hidden > 0)))
    _legend(axes)
    return figure


def _stack(axes: Any, rows: NDArray[Any]) -> None:
    left = np.zeros(len(rows))
    compared = np.maximum(rows["compared"], 1)
    axes.barh(range(len(rows)), np.ones(len(rows)), color=KINDS["equal"][0], height=0.8)
    for column in _FILLED:
        colour, hatch = KINDS[column.replace("_", "-")]
        share = rows[column] / compared
        axes.barh(range(len(rows)), share, left=left, color=colour, hatch=hatch, edgecolor="white", height=0.8)
        left = left + share


def _legend(axes: Any) -> None:
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white", label=kind) for kind, (c, h) in KINDS.items()]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(handles), fontsize=7)


def row_map(verdict: Verdict, site: str, edge: str | None = None) -> Figure:
    """Samples by position: which rows of a site differ, and how.

    Args:
        verdict: a verdict with a comparison.
        site: canonical site name.
        edge: default the edge of the verdict.

    Raises:
        UsageError: for a refused verdict, an unknown site or edge.
    """
    name = _edge(verdict, edge)
    rows = verdict.row_table(site, name)
    samples = np.unique(rows["sample"])
    figure = Picture(figsize=(9, 1.6 + 0.3 * max(3, len(samples))), layout="constrained")
    axes = figure.add_subplot()
    lines = np.searchsorted(samples, rows["sample"])
    for kind, (colour, _) in KINDS.items():
        chosen = rows["kind"] == kind
        if chosen.any():
            seen = DOT if kind == "equal" else colour  # a small dot needs more contrast than a bar
            axes.scatter(rows["position"][chosen], lines[chosen], c=seen, marker=MARKERS[kind], s=28, label=kind)
    axes.set_yticks(range(len(samples)), [str(sample) for sample in samples])
    axes.invert_yaxis()
    axes.set_xlabel("position")
    axes.set_ylabel("sample")
    axes.set_title(f"{name}: {site}\n{int(rows['mismatch'].sum())} of {len(rows)} pairs differ", fontsize=9)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7)
    return figure


def ulp_histogram(verdict: Verdict, site: str, edge: str | None = None) -> Figure:
    """Largest ULP distance of each differing row of a site, in powers of two.

    Args:
        verdict: a verdict with a comparison.
        site: canonical site name.
        edge: default the edge of the verdict.

    Raises:
        UsageError: for a refused verdict, an unknown site or edge.
    """
    name = _edge(verdict, edge)
    rows = verdict.row_table(site, name)
    differing = rows[rows["mismatch"]]
    known = differing["ulp"][differing["ulp"] >= 0]
    figure = Picture(figsize=(7, 3.2), layout="constrained")
    axes = figure.add_subplot()
    bins = np.floor(np.log2(np.maximum(known, 1))).astype(np.int64)
    values, counts = np.unique(bins, return_counts=True)
    axes.bar(values, counts, color=BLUE, width=0.9)
    axes.set_xticks(values, [_power(int(value)) for value in values], rotation=30, fontsize=8)
    axes.set_xlabel("largest ULP distance in the row")
    axes.set_ylabel("pairs of rows")
    missing = len(differing) - len(known)
    note = f", {missing} without a known distance" if missing else ""
    axes.set_title(f"{name}: {site}\n{len(differing)} differing pairs{note}", fontsize=9)
    return figure


def _power(exponent: int) -> str:
    return "≤ 1" if exponent == 0 else f"{2**exponent}-{2 ** (exponent + 1) - 1}"
