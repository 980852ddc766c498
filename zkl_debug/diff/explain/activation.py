"""The activation between two linear layers, recomputed in float64: which function each side applied, to which half."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import erf, sqrt

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.model import Evidence, Finding, Strength, Values
from zkl_debug.diff.explain.numeric import epsilon, finite_rows, rounded, shown
from zkl_debug.schema import Json

#: Spacings of the output's dtype that a chain of three roundings may reach: activation, product, probability.
_FIT = 3.0
_LEAST = 32  # elements that must say the same
_REPLACES = ("reduction-order", "constant-ratio", "constant-offset", "extra-rounding", "other-weights")

_ERF = np.vectorize(erf, otypes=[np.float64])


def _sigmoid(x: F64) -> F64:
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-x)))


FUNCTIONS: dict[str, Callable[[F64], F64]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + _ERF(x / sqrt(2.0))),
    "gelu-tanh": lambda x: 0.5 * x * (1.0 + np.tanh(sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))),
    "quick-gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0.0),
    "squared-relu": lambda x: np.maximum(x, 0.0) ** 2,
    "sigmoid": _sigmoid,
    "identity": lambda x: x,
}
_GATES = {"": "", "first": " of the first half, times the second", "second": " of the second half, times the first"}


@dataclass(frozen=True)
class Form:
    """A function and the half it is applied to.

    Attributes:
        name, gate, beta: the function, the half, and the factor of its argument.
        act, other, factor: the function's value, what it is multiplied with, and what the row is scaled by.
        size: what rounding is measured by, [m, width].
    """

    name: str
    gate: str
    beta: float
    act: F64
    other: F64
    factor: F64
    size: F64

    @property
    def value(self) -> F64:
        """The whole, unrounded, [m, width]."""
        return np.asarray(self.act * self.other * self.factor)

    @property
    def words(self) -> str:
        """``silu of the first half, times the second``."""
        scaled = f" at {self.beta:.6g} times its argument" if self.beta != 1.0 else ""
        return f"{self.name}{scaled}{_GATES[self.gate]}"


def applies(e: Evidence) -> bool:
    """An input port that is made of the outputs of linear layers."""
    return e.site.is_input and any(name.endswith(":out") for name in e.inputs)


def missing(e: Evidence) -> str:
    """What is not there: raw bits of what it is made of, equal on both sides."""
    if e.pair() is None or _made_of(e) is None:
        return f"raw bits of {e.site.owner}:{e.site.port} and of the linear layer before it"
    return ""


def activation(e: Evidence) -> Finding | None:
    """Each side is one activation of the equal values before it, and not the same one."""
    pair, made = e.pair(), _made_of(e)
    if pair is None or made is None:
        return None
    parts, factor = made
    good = finite_rows(pair.left.real, pair.right.real, *parts, factor)
    if good.sum() * pair.left.real.shape[1] < _LEAST:
        return None
    parts, factor = [part[good] for part in parts], factor[good]
    outs = [Values(side.bits[good], side.dtype, side.shape) for side in (pair.left, pair.right)]
    fits = [_fit(out, parts, factor) for out in outs]
    if all(form is None for form, _ in fits):
        return None
    words = [
        f"{e.side(bool(side))} {'applies ' + form.words if form else 'applies none of the known functions'}"
        for side, (form, _) in enumerate(fits)
    ]
    evidence: dict[str, Json] = {"rows": int(good.sum())}
    for name, (form, error) in zip(("left", "right"), fits, strict=True):
        evidence[name] = form.name if form else None
        evidence[f"{name}_gate"] = form.gate if form else None
        evidence[f"{name}_beta"] = shown(form.beta) if form else None
        evidence[f"{name}_error"] = shown(error) if np.isfinite(error) else None
    one, two = (form for form, _ in fits)
    if one is not None and two is not None and (one.name, one.gate, one.beta) == (two.name, two.gate, two.beta):
        text = (
            f"recomputed in float64, both sides apply {one.words} to equal values, within {fits[0][1]:.2g} and "
            f"{fits[1][1]:.2g} spacings: they round at other places, or evaluate the function otherwise"
        )
        weak = ("reduction-order", "constant-ratio", "constant-offset")
        return Finding("activation-rounding", text, evidence, Strength.CLASS, weak)
    text = f"recomputed in float64 from equal values: {'; '.join(words)} (in all {int(good.sum())} rows)"
    return Finding("activation", text, evidence, Strength.FITTED, _REPLACES)


def _made_of(e: Evidence) -> tuple[list[F64], F64] | None:
    """Outputs of the linear layers before it, in order, and the factor a row is scaled by, [m, 1]."""
    outs, factor = [], None
    for name, port in e.inputs.items():
        if not port.equal or not port.left.is_float:
            return None
        if name.endswith(":out"):
            outs.append(port.left.real)
        else:
            factor = port.left.real
    if not outs or (factor is not None and factor.shape[1] != 1):
        return None
    return outs, np.ones((len(outs[0]), 1)) if factor is None else factor


def _fit(out: Values, parts: list[F64], factor: F64) -> tuple[Form | None, float]:
    """The form a side has, and its error in spacings; None where none is within rounding.

    Of several that are, as two kinds of gelu are in bf16, the one that gives most elements bit for bit.
    """
    fits = [(form, error) for form in _forms(out, parts, factor) if (error := _error(out, form)) <= _FIT]
    if fits:
        return max(fits, key=lambda entry: (_share(out, entry[0]), -entry[1]))
    fitted = _fit_beta(out, parts, factor)
    return fitted if fitted[1] <= _FIT else (None, float("inf"))


def _share(out: Values, form: Form) -> float:
    """Elements that are the form bit for bit, rounded once at the end or after each operation."""
    once = rounded(form.value, out.dtype)
    steps = rounded(rounded(rounded(form.act, out.dtype) * form.other, out.dtype) * form.factor, out.dtype)
    return max(float((each == out.real).mean()) for each in (once, steps))


def _forms(out: Values, parts: list[F64], factor: F64, beta: float = 1.0, only: str = "") -> Iterator[Form]:
    for gate, x, other in _halves(parts, out.real.shape[1]):
        # Near its ends an activation is a sum or difference of numbers that float32, at the least, has rounded.
        tail = 2.0 * np.abs(x) * min(1.0, epsilon("float32") / epsilon(out.dtype))
        for name, function in FUNCTIONS.items():
            if not only or name == only:
                act = function(beta * x) / beta
                yield Form(name, gate, beta, act, other, factor, (np.abs(act) + tail) * np.abs(other * factor))


def _halves(parts: list[F64], width: int) -> Iterator[tuple[str, F64, F64]]:
    if len(parts) == 2:
        yield "first", parts[0], parts[1]
        yield "second", parts[1], parts[0]
    elif parts[0].shape[1] == 2 * width:
        first, second = parts[0][:, :width], parts[0][:, width:]
        yield "first", first, second
        yield "second", second, first
    elif parts[0].shape[1] == width:
        yield "", parts[0], np.ones_like(parts[0])


def _error(out: Values, form: Form) -> float:
    if form.value.shape != out.real.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        error = np.abs(out.real - form.value) / (epsilon(out.dtype) * np.maximum(form.size, 1e-30))
    return float(error.max()) if np.isfinite(error).all() else float("inf")


def _fit_beta(out: Values, parts: list[F64], factor: F64) -> tuple[Form | None, float]:
    """silu with its argument scaled: x * sigmoid(beta * x), beta by golden-section search."""

    def at(beta: float) -> tuple[Form | None, float]:
        forms = [(form, _error(out, form)) for form in _forms(out, parts, factor, beta, "silu")]
        return min(forms, key=lambda entry: entry[1], default=(None, float("inf")))

    grid = np.geomspace(0.25, 8.0, 61)
    errors = [at(float(beta))[1] for beta in grid]
    place = int(np.argmin(errors))
    low, high = float(grid[max(0, place - 1)]), float(grid[min(len(grid) - 1, place + 1)])
    ratio = (sqrt(5.0) - 1) / 2
    for _ in range(40):
        one, two = high - ratio * (high - low), low + ratio * (high - low)
        if at(one)[1] < at(two)[1]:
            high = two
        else:
            low = one
    return at((low + high) / 2)
