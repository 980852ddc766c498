"""The referee: an operator in float64, on each side's own inputs, says who is wrong and who merely rounds differently.

An error is measured in units of the output's epsilon times the magnitudes that were added. Rounding in any order stays
below a few such units; a side far above them does not compute the formula in its own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff import formulas
from zkl_debug.diff.explain.model import Evidence, Values
from zkl_debug.diff.explain.numeric import epsilon, shown
from zkl_debug.schema import Json

#: Units that float32 rounding may reach, by formula: (at least, times the square root of the number of addends).
_ROOM = {
    "linear": (4.0, 1.0),
    "combine": (4.0, 1.0),
    "log_softmax": (4.0, 0.5),
    "attention": (4.0, 1.0),
    "rope": (2.0, 0.0),
}
_PLAIN = (4.0, 0.0)

_WIDE = ("float32", "float64")
#: Root mean square error of a narrow linear output, in units of epsilon times the walk of its addends. One rounding
#: gives 0.29, eight partial sums in the output's dtype 0.67: more than that is another product, such as old weights,
#: even where every single element could still be rounding.
_WALK_ROOM = 0.8

Weights = Mapping[str, F64]


@dataclass(frozen=True)
class Ruling:
    """What the float64 replay says.

    Attributes:
        formula: which formula was used; empty when there is none for the site.
        verdict: ``left-wrong``, ``right-wrong``, ``both-wrong``, ``rounding`` or ``no-ruling``.
        units: error of each side in units of rounding: the largest one, or the overall one scaled to the limit.
        limit: units that rounding may reach.
        names: what the sides are called.
        rows: rows replayed.
        reason: why there is no ruling.
    """

    formula: str
    verdict: str
    units: tuple[float, float] = (0.0, 0.0)
    limit: float = 0.0
    names: tuple[str, str] = ("A", "B")
    rows: int = 0
    reason: str = ""

    @property
    def text(self) -> str:
        """The ruling as a sentence."""
        left, right = self.names
        a, b = (f"{value:.3g}" for value in self.units)
        errors = f"errors {a} and {b}, where rounding reaches {self.limit:.3g}"
        if self.verdict == "no-ruling":
            return f"no ruling: {self.reason}"
        if self.verdict == "rounding":
            return f"{left} and {right} both compute {self.formula} and round differently ({errors})"
        if self.verdict == "both-wrong":
            return f"neither side computes {self.formula} as it is written here ({errors})"
        wrong, sound = (left, right) if self.verdict == "left-wrong" else (right, left)
        return f"{wrong} is wrong: against {self.formula} in float64, {errors}; {sound} is within rounding"

    def to_json(self) -> Json:
        """The ``referee`` object."""
        return {
            "formula": self.formula,
            "verdict": self.verdict,
            "units": [shown(value) if np.isfinite(value) else None for value in self.units],
            "limit": shown(self.limit),
            "rows": self.rows,
            "text": self.text,
        }


def referee(e: Evidence, weights: Weights) -> Ruling:
    """Replay the operator of a site in float64.

    Args:
        e: evidence of the affected rows, with raw bits of the output and of the inputs.
        weights: parameters of the operator as the model was built, float64: ``weight``, ``bias``, ``eps`` (shape ()),
            ``frequencies``, ``scale`` (shape ()), ``interleaved`` (shape ()); what is not needed may be absent.

    Returns:
        A ruling; ``no-ruling`` with the reason where the formula or an input is not known.
    """
    name = formula_of(e)
    if not name:
        return Ruling("", "no-ruling", reason=f"no formula is known for {e.site.owner}")
    if e.out is None or not (e.out.left.is_float and e.out.right.is_float):
        return Ruling(name, "no-ruling", reason="the output was captured without its raw bits")
    blocks = e.quantised
    if blocks is not None and (blocks.weight or blocks.left.is_quantised or blocks.right.is_quantised):
        return Ruling(name, "no-ruling", reason="its operands are in a block format, its input and weight are not them")
    units: list[float] = []
    rows, addends, limit = 0, 1, 0.0
    for side in (0, 1):
        out = e.out.right if side else e.out.left
        try:
            found = _exact(name, e, side, weights)
        except KeyError as error:
            return Ruling(name, "no-ruling", reason=f"{error.args[0]} is not there")
        if found is None:
            return Ruling(name, "no-ruling", reason="an input was captured without its raw bits")
        exact, size, at, addends = found
        units.append(distance(out.real[at].reshape(exact.shape), exact, size, out.dtype))
        limit = limit_of(name, addends, out.dtype)
        if name == "linear" and out.dtype not in _WIDE:
            units[-1] = max(units[-1], limit * _overall(e, side, out, exact, weights["weight"]) / _WALK_ROOM)
        rows = len(exact)
    return Ruling(name, ruled(units[0], units[1], limit), (units[0], units[1]), limit, e.names, rows)


def ruled(left: float, right: float, limit: float) -> str:
    """The verdict from the errors of both sides, in units; both far off says that the formula is not theirs."""
    if left > limit and right > limit:
        return "both-wrong"
    if left > limit:
        return "left-wrong"
    return "right-wrong" if right > limit else "rounding"


def distance(out: F64, exact: F64, size: F64, dtype: str) -> float:
    """Largest error in units of epsilon * size; infinite where a value is not finite and should be."""
    error = np.abs(out - exact)
    if not np.isfinite(error).all():
        return float("inf")
    return float((error / (epsilon(dtype) * np.maximum(size, np.finfo(np.float32).tiny))).max(initial=0.0))


def _overall(e: Evidence, side: int, out: Values, exact: F64, weight: F64) -> float:
    x = _input(e, side)
    assert x is not None
    relative = (out.real - exact) / (epsilon(out.dtype) * np.maximum(formulas.linear_walk(x.real, weight), 1e-30))
    value = float(np.sqrt((relative**2).mean()))
    return value if np.isfinite(value) else float("inf")


def limit_of(formula: str, addends: int, dtype: str) -> float:
    """Units that rounding may reach for a reduction over so many addends.

    Narrow outputs are added up in float32 and rounded a few times at most; only a combine adds in its own dtype.
    """
    if dtype not in _WIDE:
        return 1.0 + addends / 2 if formula == "combine" else 2.0
    least, slope = _ROOM.get(formula, _PLAIN)
    return max(least, slope * float(np.sqrt(addends)))


def formula_of(e: Evidence) -> str:
    """Name of the formula of a site, empty when none is known."""
    operator = e.site.operator.split("#")[0]
    if e.site.is_input:
        return ""
    for name, words in _NAMED:
        if any(word in operator or word == e.semantic for word in words):
            return name
    return ""


_NAMED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("norm", ("norm",)),
    ("attention", ("core_attention",)),
    ("log_softmax", ("log_softmax",)),
    ("combine", ("unpermute", "combine")),
    ("rope", ("rope",)),
    ("linear", ("linear", "output_layer", "router.gating")),
    ("swiglu", ("swiglu", "activation")),
)

_Found = tuple[F64, F64, slice | list[int], int]


def _exact(name: str, e: Evidence, side: int, weights: Weights) -> _Found | None:
    """(exact, size, rows of the evidence, addends) of one side; None where an input is missing."""
    if name == "attention":
        return _attention(e, side, weights)
    x = _input(e, side)
    return None if x is None else _OF_ROWS[name](e, x, weights)


def _input(e: Evidence, side: int) -> Values | None:
    port = e.inputs.get("in", e.inputs.get("in.0"))
    return None if port is None else (port.right if side else port.left)


def _linear(_e: Evidence, x: Values, weights: Weights) -> _Found:
    exact, size = formulas.linear(x.real, weights["weight"], weights.get("bias"))
    return exact, size, slice(None), x.real.shape[1]


def _norm(_e: Evidence, x: Values, weights: Weights) -> _Found:
    eps = float(weights["eps"])
    if "bias" in weights:
        exact, size = formulas.layernorm(x.real, weights["weight"], weights["bias"], eps)
    else:
        exact, size = formulas.rmsnorm(x.real, weights["weight"], eps)
    return exact, size, slice(None), 1


def _log_softmax(_e: Evidence, x: Values, _weights: Weights) -> _Found:
    exact, size = formulas.log_softmax(x.real)
    return exact, size, slice(None), x.real.shape[1]


def _combine(_e: Evidence, x: Values, _weights: Weights) -> _Found:
    parts = x.heads()
    exact, size = formulas.combine(parts)
    return exact, size, slice(None), parts.shape[1]


def _swiglu(_e: Evidence, x: Values, _weights: Weights) -> _Found:
    exact, size = formulas.swiglu(x.real)
    return exact, size, slice(None), 1


def _rope(e: Evidence, x: Values, weights: Weights) -> _Found:
    frequencies = weights["frequencies"]
    heads = x.heads()
    heads = heads.reshape(len(heads), -1, heads.shape[-1])
    interleaved = bool(weights.get("interleaved", np.zeros(())))
    assert e.out is not None
    room = epsilon("float32") / epsilon(e.out.left.dtype)
    exact, size = formulas.rope(heads, e.position, frequencies, interleaved, room)
    return exact, size, slice(None), 1


_OF_ROWS: dict[str, Callable[[Evidence, Values, Weights], _Found]] = {
    "linear": _linear,
    "norm": _norm,
    "log_softmax": _log_softmax,
    "combine": _combine,
    "swiglu": _swiglu,
    "rope": _rope,
}


def _attention(e: Evidence, side: int, weights: Weights) -> _Found | None:
    rows = e.attention() if e.attention is not None else []
    if not rows:
        return None
    parts = []
    for _, *sides in rows:
        keys = sides[side]
        scale = float(weights["scale"]) if "scale" in weights else keys.query.shape[-1] ** -0.5
        parts.append(formulas.attention(keys.query, keys.key[keys.own], keys.value[keys.own], scale))
    exact, size = (np.stack([part[i] for part in parts]) for i in (0, 1))
    return exact, size, [row[0] for row in rows], max(len(row[1].key) for row in rows)
