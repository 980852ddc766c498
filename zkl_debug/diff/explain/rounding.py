"""One more rounding; another dtype; another shape."""

from __future__ import annotations

import numpy as np

from zkl_debug.diff.explain.model import Evidence, Finding, Port, Strength, Values
from zkl_debug.diff.explain.numeric import mantissa, narrower, rounded, same_values, spacing
from zkl_debug.schema import Json

_LEAST = 16  # elements that must say the same
_CHANCE_BITS = 96  # bits by which elements must agree with a rounding to be no chance


def extra_rounding(e: Evidence) -> Finding | None:
    """One side equals the other after one more rounding to a narrower format, in every element of every row."""
    pair = e.pair()
    if pair is None or pair.left.bits.size < _LEAST:
        return None
    for right in (True, False):
        rounded_side, plain = (pair.right, pair.left) if right else (pair.left, pair.right)
        fits = [n for n in narrower(plain.dtype) if bool(same_values(rounded(plain.real, n), rounded_side.real).all())]
        if fits:
            return _exact(e, fits, right, plain)
    return _in_part(e, pair) or _on_grid(e, pair)


def _exact(e: Evidence, fits: list[str], right: bool, plain: Values) -> Finding:
    name, sides = fits[0], (e.side(right), e.side(not right))
    evidence: dict[str, Json] = {
        "dtype": name,
        "or": fits[1:],
        "side": sides[0],
        "rows": len(plain),
        "elements": int(plain.bits.size),
        "exact": True,
    }
    text = f"{sides[0]} equals {sides[1]} after one more rounding to {name}, in all {plain.bits.size} elements"
    if e.clean is not None and e.clean.like:
        kept = same_values(rounded(e.clean.left.real, name), e.clean.left.real).all(axis=1)
        evidence["clean_rows_unchanged_by_it"] = f"{int(kept.sum())} of {len(kept)}"
        if not kept.all():
            text += f"; {int((~kept).sum())} of {len(kept)} equal rows would have changed too, so they were not rounded"
    replaces = ("reduction-order", "constant-ratio", "constant-offset", "eps", "norm-rounding-order")
    return Finding("extra-rounding", text, evidence, Strength.EXACT, replaces)


def _in_part(e: Evidence, pair: Port) -> Finding | None:
    """Only some elements of the rows were rounded, such as those of one expert: each that differs, and exactly."""
    differ = pair.left.bits != pair.right.bits
    count = int(differ.sum())
    for right in (True, False):
        side, plain = (pair.right, pair.left) if right else (pair.left, pair.right)
        for name in narrower(plain.dtype):
            # An element on the grid by chance costs one bit for every bit of the mantissa that is dropped.
            if count * (mantissa(plain.dtype) - mantissa(name)) < _CHANCE_BITS:
                continue
            target = rounded(plain.real, name)
            changes = ~same_values(target, plain.real)
            if not bool((changes & same_values(target, side.real))[differ].all()):
                continue
            spared = int((changes & ~differ).sum())
            evidence: dict[str, Json] = {"dtype": name, "side": e.side(right), "exact": True, "elements": count}
            evidence |= {"of": int(differ.size), "left_alone": spared}
            text = (
                f"{e.side(right)} equals {e.side(not right)} after one more rounding to {name}, in all {count} "
                f"elements that differ; {spared} others in these rows would have changed too and were left alone"
            )
            replaces = ("reduction-order", "constant-ratio", "constant-offset")
            return Finding("extra-rounding", text, evidence, Strength.EXACT, replaces)
    return None


def _on_grid(e: Evidence, pair: Port) -> Finding | None:
    """One side holds only values of a narrower format, close to the other's, which does not."""
    for right in (True, False):
        side, plain = (pair.right, pair.left) if right else (pair.left, pair.right)
        if not np.isfinite(side.real).all() or not np.isfinite(plain.real).all():
            continue
        for name in narrower(plain.dtype)[::-1]:
            if name not in ("float16", "bfloat16") or not same_values(rounded(side.real, name), side.real).all():
                continue
            if same_values(rounded(plain.real, name), plain.real).mean() > 0.5:
                continue
            step = spacing(side.real, name)
            largest = float((np.abs(side.real - plain.real) / step).max())
            if largest > 2:
                continue
            exact = float(same_values(rounded(plain.real, name), side.real).mean())
            text = (
                f"{e.side(right)} holds only values of {name}, within {largest:.2f} of its spacing from "
                f"{e.side(not right)}; {exact:.1%} of the elements equal it rounded: computed and rounded in {name}"
            )
            evidence = {"dtype": name, "side": e.side(right), "exact": False, "equal_after_rounding": exact}
            evidence["largest_in_ulp_of_dtype"] = largest
            return Finding("extra-rounding", text, evidence, Strength.FITTED, ("reduction-order",))
    return None


def dtype_change(e: Evidence) -> Finding | None:
    """The sides hold the site in different dtypes."""
    if e.metas is None or e.metas[0][0] == e.metas[1][0]:
        return None
    (one, _), (two, _) = e.metas
    text = f"{e.side(False)} holds {one}, {e.side(True)} holds {two}"
    evidence: dict[str, Json] = {"left": one, "right": two}
    strength = Strength.CLASS
    out = e.out
    if out is not None and out.left.is_float and out.right.is_float and out.left.bits.shape == out.right.bits.shape:
        for right in (True, False):
            narrow, wide = (out.right, out.left) if right else (out.left, out.right)
            if narrow.dtype not in narrower(wide.dtype):
                continue
            equal = same_values(rounded(wide.real, narrow.dtype), narrow.real)
            evidence["equal_after_rounding"] = float(equal.mean())
            if bool(equal.all()):
                text += f"; equal after rounding {e.side(not right)} to {narrow.dtype}, in all {equal.size} elements"
                strength = Strength.EXACT
            else:
                text += f"; {float(equal.mean()):.1%} of the elements are equal after rounding to {narrow.dtype}"
    return Finding("dtype-change", text, evidence, strength)


def shape_change(e: Evidence) -> Finding | None:
    """The sides hold rows of different width."""
    if e.metas is None or int(np.prod(e.metas[0][1])) == int(np.prod(e.metas[1][1])):
        return None
    one, two = (list(shape) for _, shape in e.metas)
    text = f"a row is {one} on {e.side(False)}, {two} on {e.side(True)}"
    evidence: dict[str, Json] = {"left": one, "right": two}
    strength = Strength.CLASS
    out = e.out
    if out is not None and out.left.dtype == out.right.dtype and len(out.left):
        width = min(out.left.bits.shape[1], out.right.bits.shape[1])
        if bool((out.left.bits[:, :width] == out.right.bits[:, :width]).all()):
            text += f"; the first {width} elements are equal in every row, the wider side has more behind them"
            evidence["equal_head"] = width
            strength = Strength.EXACT
    return Finding("shape-change", text, evidence, strength)
