"""Mixture of experts: order of the combine, flipped choices with their margins, how the weights were computed."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.model import Evidence, Finding, Grid, Routing, Strength, Values
from zkl_debug.diff.explain.numeric import epsilon, rounded, shown, spacing
from zkl_debug.diff.model import Bools
from zkl_debug.schema import Json

_MOST_ADDENDS = 6
_LISTED = 16
_CHANCE = 0.9  # of the rows must hold the other row's choice


def _is_combine(e: Evidence) -> bool:
    return "unpermute" in (e.semantic, e.site.operator.split("#")[0]) or e.site.operator.split("#")[0] == "combine"


def combine_order(e: Evidence) -> Finding | None:
    """The same expert outputs, added in another order: which order gives each side, bit for bit."""
    pair, addends = e.pair(), e.equal_input()
    if pair is None or addends is None or not _is_combine(e) or not addends.is_float:
        return None
    parts = addends.heads()
    if parts.ndim != 3 or parts.shape[2] != pair.left.bits.shape[1] or not np.isfinite(parts).all():
        return None
    exact = parts.sum(axis=1)
    scale = np.abs(parts).sum(axis=1)
    bound = parts.shape[1] * epsilon(pair.left.dtype) * scale + spacing(exact, pair.left.dtype)
    wrong = [bool((np.abs(side.real - exact) > bound).any()) for side in (pair.left, pair.right)]
    if any(wrong):
        return None
    orders = [_orders(parts, side) for side in (pair.left, pair.right)]
    evidence: dict[str, Json] = {"addends": parts.shape[1], "rows": len(parts), "equal_in_exact_arithmetic": True}
    replaces = ("constant-ratio", "constant-offset")
    if orders[0] and orders[1]:
        left, right = orders[0][0], orders[1][0]
        evidence |= {"left": left, "right": right, "bit_for_bit": True}
        text = (
            f"the {parts.shape[1]} expert outputs of a row are equal on both sides; {e.side(False)} adds them {left}, "
            f"{e.side(True)} {right}, bit for bit in all {len(parts)} rows"
        )
        return Finding("reduction-order", text, evidence, Strength.EXACT, replaces)
    worst = max(float((np.abs(side.real - exact) / bound).max()) for side in (pair.left, pair.right))
    evidence |= {"bit_for_bit": False, "largest_error_of_bound": shown(worst)}
    text = (
        f"the {parts.shape[1]} expert outputs of a row are equal on both sides, and both sums equal the exact sum "
        f"within rounding ({worst:.2f} of the bound): they are added in another order"
    )
    return Finding("reduction-order", text, evidence, Strength.FITTED, replaces)


def _orders(parts: F64, out: Values) -> list[str]:
    """Orders of addition that give every element of every row, the plainest first."""
    k = parts.shape[1]
    if k > _MOST_ADDENDS:
        orders = [tuple(range(k)), tuple(reversed(range(k)))]
    else:
        orders = sorted(permutations(range(k)), key=lambda order: _plainness(order, k))
    found = []
    few = parts[:8], out.real[:8]
    for inside in dict.fromkeys((out.dtype, "float32")):
        for order in orders:
            if bool((_sum(few[0], order, inside, out.dtype) == few[1]).all()) and bool(
                (_sum(parts, order, inside, out.dtype) == out.real).all()
            ):
                found.append(_words(order, k, inside, out.dtype))
                break
        if k == 4 and bool((_tree(parts, inside, out.dtype) == out.real).all()):
            found.append(f"as (1 + 2) + (3 + 4) in expert order, in {inside}")
    return found


def _plainness(order: tuple[int, ...], k: int) -> int:
    plain = (tuple(range(k)), tuple(reversed(range(k))))
    return plain.index(order) if order in plain else 2


def _words(order: tuple[int, ...], k: int, inside: str, dtype: str) -> str:
    how = "" if inside == dtype else f" in {inside}"
    if order == tuple(range(k)):
        return f"in ascending expert order{how}"
    if order == tuple(reversed(range(k))):
        return f"in descending expert order{how}"
    return f"in the order {[i + 1 for i in order]} of ascending expert ids{how}"


def _sum(parts: F64, order: tuple[int, ...], inside: str, dtype: str) -> F64:
    total = parts[:, order[0]]
    for at in order[1:]:
        total = rounded(total + parts[:, at], inside)
    return rounded(total, dtype)


def _tree(parts: F64, inside: str, dtype: str) -> F64:
    one = rounded(parts[:, 0] + parts[:, 1], inside)
    two = rounded(parts[:, 2] + parts[:, 3], inside)
    return rounded(rounded(one + two, inside), dtype)


def routing_flip(e: Evidence) -> Finding | None:
    """Rows whose experts differ, with how close the choice was."""
    routing = e.routing
    if routing is None:
        return None
    flipped = (routing.chosen[0] != routing.chosen[1]).any(axis=1)
    if not flipped.any():
        return None
    rows = np.flatnonzero(flipped)
    flips = [_flip(routing, int(i)) for i in rows[:_LISTED]]
    evidence: dict[str, Json] = {"site": routing.site, "rows": len(rows), "of": len(flipped), "flips": flips}
    text = f"{len(rows)} of {len(flipped)} rows go to other experts at {routing.site}"
    if routing.logits is not None:
        margins = _margins(routing, rows)
        evidence["largest_margin"], evidence["median_margin"] = shown(margins.max()), shown(float(np.median(margins)))
        middle = float(np.median(margins))
        text += f"; the logits of the swapped experts were {middle:.3g} apart (largest {margins.max():.3g})"
        if bool((routing.logits[0] == routing.logits[1]).all()):
            evidence["logits_equal"] = True
            text += ", though the logits are equal on both sides"
    first = flips[0]
    text += (
        f"; first: sample {first['sample']} position {first['position']}, {first['left']} instead of {first['right']}"
    )
    at_router = "router" in e.site.owner
    return Finding("routing-flip", text, evidence, Strength.CLASS if at_router else Strength.FOLLOWS)


def _flip(routing: Routing, i: int) -> dict[str, Json]:
    left, right = (np.flatnonzero(side[i]).tolist() for side in routing.chosen)
    flip: dict[str, Json] = {"sample": int(routing.sample[i]), "position": int(routing.position[i])}
    flip |= {"left": sorted(set(left) - set(right)), "right": sorted(set(right) - set(left))}
    if routing.logits is not None:
        flip["margin"] = shown(float(_margins(routing, np.array([i]))[0]))
    return flip


def _margins(routing: Routing, rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> F64:
    """How far apart the swapped experts' logits are on the left side: 0 is a tie."""
    assert routing.logits is not None
    logits = routing.logits[0][rows]
    only_left = routing.chosen[0][rows] & ~routing.chosen[1][rows]
    only_right = routing.chosen[1][rows] & ~routing.chosen[0][rows]
    lost = np.where(only_left, logits, np.inf).min(axis=1)
    gained = np.where(only_right, logits, -np.inf).max(axis=1)
    both = np.isfinite(lost) & np.isfinite(gained)
    return np.where(both, np.abs(lost - gained), 0.0)


def routing_permutation(e: Evidence) -> Finding | None:
    """One side's choices are those of other rows of the call: the call's rows read in another order."""
    routing = e.routing
    if routing is None or not (routing.chosen[0] != routing.chosen[1]).any():
        return None
    for right in (False, True):
        grid = routing.grid[int(right)]
        if grid is None:
            continue
        own, other = routing.chosen[int(right)], routing.chosen[1 - int(right)]
        found = _read_otherwise(grid, own, other)
        if found is None:
            continue
        words, hits, of, chance = found
        evidence: dict[str, Json] = {
            "side": e.side(right),
            "pattern": words,
            "rows": hits,
            "of": of,
            "chance": shown(chance),
        }
        text = (
            f"the experts of {e.side(right)} are those {e.side(not right)} chose for other rows of the call, {words}: "
            f"{hits} of {of} rows ({chance:.0%} would agree by chance)"
        )
        replaces = ("reduction-order", "constant-ratio", "routing-weights", "routing-flip")
        return Finding("row-permutation", text, evidence, Strength.EXACT if hits == of else Strength.FITTED, replaces)
    return None


def _read_otherwise(grid: Grid, own: Bools, other: Bools) -> tuple[str, int, int, float] | None:
    """Whether own choices are other's choices at a permuted slot of the call."""
    flat = grid.position * grid.sequences + grid.place
    size, width = grid.sequences * grid.width, np.maximum(grid.width, 1)
    at = np.flatnonzero((grid.width > 0) & (grid.sequences > 1))
    if not len(at):
        return None
    where = {(int(grid.call[i]), int(flat[i])): i for i in at}
    maps = {
        "[b, s] read as [s, b]": (flat % width) * grid.sequences + flat // width,
        "[s, b] read as [b, s]": (flat % grid.sequences) * width + flat // grid.sequences,
        "in reverse": size - 1 - flat,
        "shifted by one row": flat - 1,
        "shifted back by one row": flat + 1,
    }
    for words, source in maps.items():
        pairs = [(i, where.get((int(grid.call[i]), int(source[i])))) for i in at]
        known = [(i, j) for i, j in pairs if j is not None and j != i]
        if len(known) < 8:
            continue
        one, two = (np.array(side) for side in zip(*known, strict=True))
        hits = int((own[one] == other[two]).all(axis=1).sum())
        chance = float((own[one] == other[np.roll(two, len(two) // 2)]).all(axis=1).mean())
        if hits >= _CHANCE * len(known) and chance < 0.6:
            return words, hits, len(known), chance
    return None


def routing_weights(e: Evidence) -> Finding | None:
    """The same experts and logits, other weights: by which formula each side computes them."""
    pair, logits = e.pair(), e.equal_input()
    routing = e.routing
    if pair is None or logits is None or routing is None or e.site.operator.split("#")[0] != "router.topk":
        return None
    if e.site.port != "out.0" or logits.bits.shape != pair.left.bits.shape:
        return None
    left, right = (side.real != 0 for side in (pair.left, pair.right))
    if not bool((left == right).all()):
        return None
    names = [_weight_formula(logits.real, side, left) for side in (pair.left, pair.right)]
    evidence: dict[str, Json] = {"ids_equal": True, "left": names[0], "right": names[1], "rows": len(logits)}
    if names[0] is None or names[1] is None or names[0] == names[1]:
        return None
    text = (
        f"the experts are the same in all {len(logits)} rows and so are the logits; {e.side(False)} weighs them by "
        f"{names[0]}, {e.side(True)} by {names[1]}"
    )
    replaces = ("constant-ratio", "reduction-order", "constant-offset")
    return Finding("routing-weights", text, evidence, Strength.FITTED, replaces)


def _weight_formula(logits: F64, out: Values, chosen: Bools) -> str | None:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    gate = 1 / (1 + np.exp(-logits))
    forms = {
        "a softmax over the chosen experts": _normalised(shifted * chosen),
        "a softmax over all experts": _normalised(shifted) * chosen,
        "a sigmoid, normalised over the chosen experts": _normalised(gate * chosen),
        "a sigmoid": gate * chosen,
    }
    tolerance = 16 * epsilon(out.dtype) * np.abs(out.real).max(axis=1, keepdims=True)
    for name, value in forms.items():
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.where(value > 0, out.real / value, np.nan)
        scale = float(np.nanmedian(factor))
        if bool((np.abs(out.real - scale * value) <= tolerance * max(1.0, scale)).all()):
            return name if abs(scale - 1) < 1e-3 else f"{name}, times {scale:.5g}"
    return _formula_by_rank(forms, out.real, tolerance)


def _formula_by_rank(forms: dict[str, F64], out: F64, tolerance: F64) -> str | None:
    """Experts of some ranks (by weight) weighed by one form, those of others by another."""
    rank = np.argsort(np.argsort(-forms["a softmax over the chosen experts"], axis=1, kind="stable"), axis=1)
    count = int((forms["a softmax over the chosen experts"] > 0).sum(axis=1).max())
    fits = {
        name: [bool((np.abs(out - value) <= tolerance)[rank == r].all()) for r in range(count)]
        for name, value in forms.items()
    }
    for usual, each in fits.items():
        odd = [r for r in range(count) if not each[r]]
        others = [name for name, ok in fits.items() if all(ok[r] for r in odd)]
        if odd and len(odd) < count and others:
            ranks = ", ".join(str(r + 1) for r in odd)
            return f"{usual}, those ranked {ranks} by {others[0]}"
    return None


def _normalised(values: F64) -> F64:
    return np.asarray(values / values.sum(axis=1, keepdims=True))
