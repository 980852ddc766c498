"""Collectives: the ranks' partial sums are the same on both sides, and are added in another order."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.model import Evidence, Finding, Strength, Values
from zkl_debug.diff.explain.numeric import epsilon, rounded, shown, spacing
from zkl_debug.schema import Json

_MOST_ORDERS = 5  # ranks of which every order is tried


def applies(e: Evidence) -> bool:
    """Whether the site is what comes out of a reduction over ranks."""
    return e.site.op.split("#")[0] == "tp.reduce" and not e.site.is_input


def partials(e: Evidence) -> F64 | None:
    """Partial sums of the ranks, float64 [m, ranks, W]; None unless all are there and equal on both sides."""
    ports = {name: port for name, port in e.inputs.items() if name.rpartition(".")[2].isdigit()}
    if not ports or sorted(int(name.rpartition(".")[2]) for name in ports) != list(range(len(ports))):
        return None
    if not all(port.equal and port.like for port in ports.values()):
        return None
    ordered = sorted(ports.items(), key=lambda item: int(item[0].rpartition(".")[2]))
    return np.stack([port.left.real for _, port in ordered], axis=1)


def collective_order(e: Evidence) -> Finding | None:
    """Which order of the ranks gives each side, bit for bit."""
    pair, parts = e.pair(), partials(e)
    if pair is None or parts is None or parts.shape[1] < 2 or parts.shape[2] != pair.left.bits.shape[1]:
        return None
    if not np.isfinite(parts).all() or len(parts) != len(pair.left):
        return None
    ranks = parts.shape[1]
    exact, scale = parts.sum(axis=1), np.abs(parts).sum(axis=1)
    bound = ranks * epsilon(pair.left.dtype) * scale + spacing(exact, pair.left.dtype)
    if any(bool((np.abs(side.real - exact) > bound).any()) for side in (pair.left, pair.right)):
        return None
    orders = [_order(parts, side) for side in (pair.left, pair.right)]
    evidence: dict[str, Json] = {"ranks": ranks, "rows": len(parts), "left": orders[0], "right": orders[1]}
    head = f"the partial sums of all {ranks} ranks are equal on both sides"
    replaces = ("constant-ratio", "constant-offset", "reduction-order")
    if orders[0] and orders[1]:
        both = f"{e.side(False)} adds them {orders[0]}, {e.side(True)} {orders[1]}"
        text = f"{head}; {both}, bit for bit in {len(parts)} rows"
        return Finding("collective-order", text, evidence | {"bit_for_bit": True}, Strength.EXACT, replaces)
    worst = max(float((np.abs(side.real - exact) / bound).max()) for side in (pair.left, pair.right))
    known = next((f"; {e.side(i == 1)} adds them {order}" for i, order in enumerate(orders) if order), "")
    text = f"{head}, and both sums are the exact one within rounding ({worst:.2f} of the bound): another order{known}"
    return Finding(
        "collective-order", text, evidence | {"bit_for_bit": False, "of_bound": shown(worst)}, Strength.FITTED, replaces
    )


def _order(parts: F64, out: Values) -> str:
    """In words, the plainest order of the ranks that gives every element of every row; empty when none does."""
    ranks = parts.shape[1]
    ascending = tuple(range(ranks))
    plain = [ascending, ascending[::-1]]
    orders = [*plain, *(o for o in permutations(ascending) if o not in plain)] if ranks <= _MOST_ORDERS else plain
    for inside in dict.fromkeys((out.dtype, "float32")):
        how = "" if inside == out.dtype else f" in {inside}"
        for order in orders:
            if _same(_sum(parts, order, inside), out):
                return f"in the order {', '.join(map(str, order))}{how}"
        if ranks & (ranks - 1) == 0 and _same(_tree(parts, inside), out):
            return f"as a tree of neighbours{how}"
    return ""


def _same(total: F64, out: Values) -> bool:
    return bool((rounded(total, out.dtype) == out.real).all())


def _sum(parts: F64, order: tuple[int, ...], inside: str) -> F64:
    total = parts[:, order[0]]
    for at in order[1:]:
        total = rounded(total + parts[:, at], inside)
    return total


def _tree(parts: F64, inside: str) -> F64:
    while parts.shape[1] > 1:
        parts = rounded(parts[:, ::2] + parts[:, 1::2], inside)
    return np.asarray(parts[:, 0])
