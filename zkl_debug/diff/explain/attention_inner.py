"""Roundings inside an attention: the scores, the probabilities, or the weights before they are divided by their sum.

Such a rounding is far below the tolerance of a recomputation in the output's own narrow dtype. There the bits decide:
one form gives all elements of a side, the form without that rounding does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.attention_math import Row, attend, groups_of
from zkl_debug.diff.explain.model import Evidence, Finding, Keys, Strength
from zkl_debug.diff.explain.numeric import epsilon, rounded, shown
from zkl_debug.schema import Json

_FORMATS = ("bfloat16", "float16")
_MOST = 0.97  # elements of a side that a form must give
_FEWER = 0.05  # by how much the exact form must give fewer
_LEAST_ELEMENTS = 64


@dataclass(frozen=True)
class Form:
    """Where an attention rounds on its way.

    Attributes:
        scores: format of the scaled scores, or empty.
        weights: format of what multiplies V, or empty.
        normalised: the weights are divided by their sum before they are rounded; otherwise after the product with V.
    """

    scores: str = ""
    weights: str = ""
    normalised: bool = True

    @property
    def words(self) -> str:
        """In words."""
        parts = [f"the scaled scores to {self.scores}"] if self.scores else []
        what = "the softmax probabilities" if self.normalised else "the exponentials, before they are divided,"
        parts += [f"{what} to {self.weights}"] if self.weights else []
        return " and ".join(parts)

    @property
    def roundings(self) -> int:
        """How many extra roundings it has."""
        return bool(self.scores) + bool(self.weights)


FORMS = tuple(
    Form(scores, weights, normalised)
    for scores, weights, normalised in product(("", *_FORMATS), ("", *_FORMATS), (True, False))
    if (scores or weights) and (weights or normalised)
)


def replay(keys: Keys, scale: float, form: Form) -> F64:
    """The attention of a row over its own keys with the roundings of a form, float64 [heads, d]."""
    group = groups_of(keys)
    k, v = keys.key[keys.own][:, group], keys.value[keys.own][:, group]
    score = np.einsum("hd,nhd->hn", keys.query, k) * scale
    score = rounded(score, form.scores) if form.scores else score
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    total = weight.sum(axis=1, keepdims=True)
    weight = weight / total if form.normalised else weight
    weight = rounded(weight, form.weights) if form.weights else weight
    out = np.einsum("hn,nhd->hd", weight, v)
    return np.asarray(out if form.normalised else out / total)


def inner_rounding(e: Evidence, rows: list[Row], scale: float, dtype: str, limit: float) -> Finding | None:
    """One side rounds on its way in every row, the other one does not, or does so elsewhere."""
    if sum(row.out[0].size for row in rows) < _LEAST_ELEMENTS:
        return None
    exact = [_share(rows, side, scale, Form(), dtype, limit) for side in (0, 1)]
    found = [_best(rows, side, scale, dtype, limit, exact[side]) for side in (0, 1)]
    if all(form is None for form, _ in found) or found[0][0] == found[1][0]:
        return None
    if any(form is None and exact[side] < _MOST for side, (form, _) in enumerate(found)):
        return None
    words = [
        f"{e.side(bool(side))} rounds {form.words} on its way ({share:.1%} of the elements {_how(dtype)}, "
        f"{exact[side]:.1%} without)"
        for side, (form, share) in enumerate(found)
        if form is not None
    ]
    evidence: dict[str, Json] = {"rows_recomputed": len(rows), "scale": shown(scale), "exact": False}
    for side, name in enumerate(("left", "right")):
        form, share = found[side]
        evidence[name] = {"rounds": "" if form is None else form.words, "share": shown(share)}
    odd = next(form for form, _ in found if form is not None)
    evidence["dtype"] = odd.weights or odd.scores
    text = f"recomputed in float64 from the captured q, K and V, {'; '.join(words)}"
    if len(words) == 1:
        plain = next(side for side, (form, _) in enumerate(found) if form is None)
        text += f"; {e.side(bool(plain))} does not ({exact[plain]:.1%} {_how(dtype)})"
    return Finding("extra-rounding", text, evidence, Strength.FITTED, ("reduction-order", "constant-ratio"))


def _how(dtype: str) -> str:
    return "within rounding" if dtype == "float32" else "bit for bit"


def _best(
    rows: list[Row], side: int, scale: float, dtype: str, limit: float, exact: float
) -> tuple[Form | None, float]:
    """The form with the fewest roundings that gives a side where the exact attention does not."""
    if exact >= _MOST:
        return None, exact
    best: tuple[Form | None, float] = (None, exact)
    for form in sorted(FORMS, key=lambda f: f.roundings):
        share = _share(rows, side, scale, form, dtype, limit)
        if share >= _MOST and share >= exact + _FEWER and (best[0] is None or share > best[1] + _FEWER / 2):
            best = form, share
    return best


def _share(rows: list[Row], side: int, scale: float, form: Form, dtype: str, limit: float) -> float:
    """Share of a side's elements that a form gives: bit for bit in a narrow dtype, else within rounding."""
    hits = []
    for row in rows:
        out = replay(row.keys[side], scale, form)
        if dtype != "float32":
            hits.append((rounded(out, dtype) == row.out[side]).mean())
            continue
        _, size = attend(row.keys[side], row.keys[side].own, scale)
        hits.append((np.abs(out - row.out[side]) <= limit * epsilon(dtype) * size).mean())
    return float(np.mean(hits))
