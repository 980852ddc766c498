"""What the HTML report shows of a verdict, as plain data: the model map, row maps and ULP counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff import Verdict
from zkl_debug.diff.model import Kind
from zkl_debug.diff.stats import ROW_LIMIT
from zkl_debug.schema import Json

#: Labels of the kind codes used throughout: the values of :class:`zkl_debug.diff.model.Kind`.
LABELS = tuple(kind.label for kind in Kind)
_MAPS = 12  # row maps a report: the first site, then operators that diverge on their own, then the log-probs
_CELLS = 1 << 21  # compared pairs all row maps may hold together
_COLUMNS = ("compared", "mismatched", "own", "propagated", "masked", "uncaptured_state")


def edge_names(verdict: Verdict) -> list[str]:
    """Edges with anything compared, that of the verdict first."""
    names = [name for name, summary in verdict.edges.items() if summary.compared]
    return sorted(names, key=lambda name: name != verdict.edge)


def model_map(verdict: Verdict) -> Json:
    """Sites as a grid: a line for each layer and a column for each operator; sites outside layers by themselves.

    Returns:
        ``tails`` (columns), ``layers`` (lines), ``sites`` (name, layer, column), and for each edge one list of numbers
        a site: kind code, then compared, mismatched, own, propagated, masked and uncaptured rows.
    """
    table = verdict.site_counts
    order, where = np.unique(table["order"], return_index=True)
    named = [(str(row["site"]), int(row["layer"])) for row in table[where]]
    tails = _columns_in_order(named)
    column = {tail: place for place, tail in enumerate(tails)}
    sites = [[site, layer, column[_tail(site, layer)] if layer >= 0 else -1] for site, layer in named]
    layers = [int(n) for n in np.unique(table["layer"]) if n >= 0]
    index = {int(number): place for place, number in enumerate(order)}
    edges: dict[str, Json] = {}
    for edge in edge_names(verdict):
        cells: list[list[int]] = [[int(Kind.ABSENT), *[0] * len(_COLUMNS)] for _ in sites]
        for row in table[table["edge"] == edge]:
            numbers = [int(row[name]) for name in _COLUMNS]
            cells[index[int(row["order"])]] = [_code(row), *numbers]
        edges[edge] = cells
    return {"sites": sites, "tails": tails, "layers": layers, "edges": edges}


def _columns_in_order(named: list[tuple[str, int]]) -> list[str]:
    """Operators of all layers, each right after the one it follows in the first layer that has it."""
    tails: list[str] = []
    before: dict[int, str] = {}
    for site, layer in named:
        if layer < 0:
            continue
        tail = _tail(site, layer)
        if tail not in tails:
            tails.insert(tails.index(before[layer]) + 1 if layer in before else len(tails), tail)
        before[layer] = tail
    return tails


def _tail(site: str, layer: int) -> str:
    """The site name inside its layer."""
    mark = f"layers.{layer}"
    place = site.find(mark)
    return site[place + len(mark) :].removeprefix(".") if layer >= 0 and place >= 0 else site


def _code(row: Any) -> int:
    """The strongest kind of any row of the site: what a cell is coloured by."""
    if row["uncaptured_state"]:
        return int(Kind.UNCAPTURED_STATE)
    if row["own"]:
        return int(Kind.OWN)
    if row["propagated"]:
        return int(Kind.PROPAGATED)
    return int(Kind.MASKED if row["masked"] else Kind.EQUAL)


def row_maps(verdict: Verdict) -> list[Json]:
    """Sample by position maps of the sites worth a look: kind code and place of every compared pair.

    Where a row has several pairs the strongest kind is kept. Positions are run-length coded: ``[start, length, code]``.
    """
    budget = _CELLS
    maps: list[Json] = []
    for edge, site in _worth(verdict):
        if len(maps) == _MAPS or budget <= 0:
            break
        rows = verdict.row_table(site, edge, ROW_LIMIT)  # what the verdict read: the page must not find damage anew
        budget -= len(rows)
        if len(rows):
            maps.append({"site": site, "edge": edge, **_map(rows), "ulp": _ulp_counts(rows)})
    return maps


def _worth(verdict: Verdict) -> list[tuple[str, str]]:
    """(edge, site), the first site of the verdict first."""
    firsts = [(edge, verdict.edges[edge].first) for edge in edge_names(verdict)]
    found = [(edge, first.site) for edge, first in firsts if first is not None]
    table = verdict.site_counts
    own = table[(table["own"] > 0) & (table["edge"] == (verdict.edge or ""))]
    found += [(str(row["edge"]), str(row["site"])) for row in own]
    last = table[(table["edge"] == (verdict.edge or "")) & (table["mismatched"] > 0)]
    if len(last):
        found.append((str(last[-1]["edge"]), str(last[-1]["site"])))
    return list(dict.fromkeys(found))


def _map(rows: NDArray[Any]) -> dict[str, Json]:
    """Lines of a row map: one for each step and sample."""
    kinds, place = np.unique(rows["kind"], return_inverse=True)
    code = np.array([LABELS.index(str(kind)) for kind in kinds], np.int64)[place]
    keys, line = np.unique(rows[["step", "sample"]], return_inverse=True)
    order = np.argsort(line, kind="stable")
    cuts = np.searchsorted(line[order], np.arange(len(keys) + 1))
    lines: list[Json] = []
    for i in range(len(keys)):
        mine = order[cuts[i] : cuts[i + 1]]
        position = rows["position"][mine]
        strongest = np.full(int(position.max()) + 1, -1, np.int64)
        np.maximum.at(strongest, position, code[mine])
        lines.append(_runs(strongest))
    steps = len(np.unique(rows["step"])) > 1
    names = [f"step {key['step']} sample {key['sample']}" if steps else f"sample {key['sample']}" for key in keys]
    return {"names": names, "width": int(rows["position"].max()) + 1, "lines": lines}


def _runs(codes: NDArray[Any]) -> list[list[int]]:
    """Runs of equal codes, those of -1 (no such row) left out."""
    edges = np.flatnonzero(np.diff(codes, prepend=codes[0] - 1))
    lengths = np.diff(np.append(edges, len(codes)))
    pairs = zip(edges, lengths, strict=True)
    return [[int(start), int(n), int(codes[start])] for start, n in pairs if codes[start] >= 0]


def _ulp_counts(rows: NDArray[Any]) -> Json:
    """Differing pairs by the power of two of their largest ULP distance, and how many have none known."""
    ulp = rows["ulp"][rows["mismatch"]]
    known = ulp[ulp >= 0]
    powers = np.floor(np.log2(np.maximum(known, 1))).astype(np.int64)
    values, counts = np.unique(powers, return_counts=True)
    bins = [[int(value), int(count)] for value, count in zip(values, counts, strict=True)]
    return {"bins": bins, "unknown": int(len(ulp) - len(known))}
