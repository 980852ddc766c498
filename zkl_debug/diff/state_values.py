"""How one tensor came out of another: equal, rounded, permuted, shifted, scaled, zero ... numpy only, bit by bit.

A match must hold for every element. Forms are tried from the most specific to the least, and over all candidates, the
current version first, so that "equal to version v-2" wins over "a scaled version of v".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bits import dtype_info, round_to, to_float64
from zkl_debug.diff.state_mixed import blended, mixed
from zkl_debug.schema import Json

_NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_MOST_ROWS = 1 << 16  # rows a permutation is looked for in
_CLEAR = 4.0  # units in the last place that a ratio must be away from 1, an offset away from 0


@dataclass(frozen=True, eq=False)
class Values:
    """A tensor as raw bits.

    Attributes:
        bits: unsigned integers in the tensor's shape.
        dtype: torch dtype name.
    """

    bits: NDArray[Any]
    dtype: str

    @property
    def floats(self) -> NDArray[np.float64]:
        """float64 values."""
        return to_float64(self.bits, self.dtype)

    def same_bits(self, other: Values) -> bool:
        """Same dtype, shape and bits."""
        return self.dtype == other.dtype and bool(np.array_equal(self.bits, other.bits))


@dataclass(frozen=True)
class Source:
    """A candidate: parameter ``name`` as it was under weight version ``version``."""

    name: str
    version: int


@dataclass(frozen=True)
class Match:
    """What a tensor turned out to be.

    Attributes:
        form: ``equal``, ``cast``, ``dtype-rounded``, ``permutation``, ``shift``, ``scale``, ``offset``, ``zero``,
            ``constant``, ``negative exponential``, ``transposed``, ``partly updated``, ``blend`` ... or ``none``.
        source: the tensor it comes from; None for ``zero``, ``constant`` and ``none``.
        detail: the form's parameters.
    """

    form: str
    source: Source | None = None
    detail: Mapping[str, Json] = field(default_factory=dict)

    def text(self, current: int, name: str = "") -> str:
        """In words, e.g. ``version v-2`` or ``permutation of its rows (version v)``."""
        if self.source is None:
            return "matches no version" if self.form == "none" else self.form
        lag = current - self.source.version
        version = "version v" if lag == 0 else f"version v-{lag}"
        other = f" of {self.source.name}" if name and self.source.name != name else ""
        if self.form == "equal":
            return version + other
        if self.form == "partly updated":
            return f"partly updated: {self.detail['part']} are of {version}{other}"
        if self.form == "blend":
            return f"{self.detail['share']} of the current version and the rest of {version}{other}"
        extra = "".join(
            f", {k} {v}" for k, v in self.detail.items() if k in ("dtype", "rows", "ratio", "offset", "axis")
        )
        return f"{self.form} ({version}{other}{extra})"

    def to_json(self, current: int) -> Json:
        """All fields; ``lag`` counts versions behind ``current``."""
        source = self.source
        return {
            "form": self.form,
            "of": source.name if source else None,
            "version": source.version if source else None,
            "lag": current - source.version if source else None,
            "detail": dict(self.detail),
        }


def explain_values(found: Values, candidates: Iterable[tuple[Source, Values]]) -> Match:
    """The first form that maps a candidate to ``found`` in every element.

    Args:
        found: the tensor in question.
        candidates: where it may come from, the likeliest first.
    """
    known = list(candidates)
    for source, values in known:
        if found.same_bits(values):
            return Match("equal", source)
    alone = _alone(found)
    if alone is not None:
        return alone
    for form in _FORMS:
        for source, values in known:
            detail = form(found, values)
            if detail is not None:
                name = str(detail.pop("form"))
                return Match(name, source, detail)
    return _of_two(found, known) or Match("none", None, _nearest(found, known))


def _of_two(found: Values, known: Sequence[tuple[Source, Values]]) -> Match | None:
    """The first candidate and an older one at once."""
    for source, values in known[1:]:
        first, new = known[0]
        if not found.dtype == new.dtype == values.dtype:
            continue
        detail = mixed(found.bits, new.bits, values.bits)
        if detail is not None and ("scattered" not in str(detail["part"]) or _far_apart(new, values)):
            return Match("partly updated", source, {**detail, "rest": f"version {first.version}"})
        detail = blended(found.floats, new.floats, values.floats, found.dtype)
        if detail is not None:
            return Match("blend", source, {**detail, "rest": f"version {first.version}"})
    return None


def _far_apart(one: Values, other: Values) -> bool:
    """Whether what lies between two versions could not be rounded to either: most differ by more than a few units."""
    if not dtype_info(one.dtype).is_float:
        return True
    a, b = one.floats, other.floats
    apart = (
        np.abs(a - b)[a != b] / (2.0 ** -dtype_info(one.dtype).mantissa_bits * np.maximum(np.abs(a), np.abs(b)))[a != b]
    )
    return bool(np.median(apart) > _CLEAR)


def _alone(found: Values) -> Match | None:
    if found.bits.size == 0:
        return Match("empty")
    if not found.floats.any():
        return Match("zero")
    if found.bits.size > 1 and (found.bits == found.bits.flat[0]).all():
        return Match("constant", None, {"value": float(found.floats.flat[0])})
    return None


# ---- forms: each returns its parameters with "form", or None -----------------------------------------------------


def _cast(found: Values, other: Values) -> dict[str, Json] | None:
    """The same numbers in a wider dtype, or rounded once to a narrower one."""
    if found.dtype == other.dtype or found.bits.shape != other.bits.shape:
        return None
    if not dtype_info(found.dtype).is_float or not dtype_info(other.dtype).is_float:
        return None
    if np.array_equal(round_to(other.bits, found.dtype, other.dtype), found.bits):
        return {"form": "cast", "dtype": found.dtype}
    return None


def _rounded(found: Values, other: Values) -> dict[str, Json] | None:
    """The same dtype, but every value went through a narrower one."""
    if found.dtype != other.dtype or found.bits.shape != other.bits.shape or not dtype_info(found.dtype).is_float:
        return None
    for narrow in _NARROW:
        if dtype_info(narrow).itemsize >= dtype_info(found.dtype).itemsize:
            continue
        through = round_to(round_to(other.bits, narrow, other.dtype), found.dtype, narrow)
        if np.array_equal(through, found.bits):
            return {"form": "dtype-rounded", "dtype": narrow}
    return None


def _transposed(found: Values, other: Values) -> dict[str, Json] | None:
    if found.dtype == other.dtype and found.bits.ndim == 2 and np.array_equal(found.bits, other.bits.T):
        return {"form": "transposed"}
    return None


def _shift(found: Values, other: Values) -> dict[str, Json] | None:
    """Rolled by k along an axis."""
    if found.dtype != other.dtype or found.bits.shape != other.bits.shape:
        return None
    for axis in range(found.bits.ndim):
        a, b = (np.moveaxis(v.bits, axis, 0) for v in (found, other))
        starts = np.flatnonzero((a == b[0]).reshape(len(a), -1).all(1))
        for start in starts[:8].tolist():
            if start and np.array_equal(a, np.roll(b, start, 0)):
                return {"form": "shift", "rows": start, "axis": axis}
    return None


def _permutation(found: Values, other: Values) -> dict[str, Json] | None:
    """Rows of one axis in another order. Rows must be distinct for the order to be known."""
    if found.dtype != other.dtype or found.bits.shape != other.bits.shape:
        return None
    for axis in range(found.bits.ndim):
        order = _row_order(np.moveaxis(found.bits, axis, 0), np.moveaxis(other.bits, axis, 0))
        if order is not None:
            return {"form": "permutation", "axis": axis, **_describe(order)}
    flat = _row_order(found.bits.reshape(-1, 1), other.bits.reshape(-1, 1)) if found.bits.ndim > 1 else None
    return {"form": "permutation", "axis": "all", **_describe(flat)} if flat is not None else None


def _row_order(a: NDArray[Any], b: NDArray[Any]) -> list[int] | None:
    """``order`` with ``a[i] == b[order[i]]``, or None."""
    if len(a) > _MOST_ROWS or len(a) < 2:
        return None
    rows: dict[bytes, list[int]] = {}
    for i, row in enumerate(np.ascontiguousarray(b).reshape(len(b), -1)):
        rows.setdefault(row.tobytes(), []).append(i)
    order = []
    for row in np.ascontiguousarray(a).reshape(len(a), -1):
        left = rows.get(row.tobytes())
        if not left:
            return None
        order.append(left.pop(0))
    return order


def _describe(order: Sequence[int]) -> dict[str, Json]:
    cycles = cycle_lengths(order)
    even = [n for n in set(cycles) if n % 2 == 0]
    square = all(cycles.count(n) % 2 == 0 for n in even)
    moved = sum(i != o for i, o in enumerate(order))
    return {"order": list(order[:64]), "moved": moved, "is_a_square": square}


def cycle_lengths(order: Sequence[int]) -> list[int]:
    """Lengths of the cycles of a permutation, longest first."""
    seen, found = set(), []
    for start in range(len(order)):
        length, at = 0, start
        while at not in seen:
            seen.add(at)
            at = order[at]
            length += 1
        if length:
            found.append(length)
    return sorted(found, reverse=True)


def _elementwise(found: Values, other: Values) -> dict[str, Json] | None:
    """Constant ratio or offset, or a known function of each element."""
    if found.bits.shape != other.bits.shape or found.bits.size < 2:
        return None
    if not dtype_info(found.dtype).is_float or not dtype_info(other.dtype).is_float:
        return None
    with np.errstate(all="ignore"):
        a, b = found.floats, other.floats
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return None
        unit = 2.0 ** -dtype_info(found.dtype).mantissa_bits
        for form, detail, values in _functions(a, b, unit):
            scale = np.maximum(np.abs(a), np.abs(b)) if form == "offset" else np.abs(a)  # a sum may cancel
            if (np.abs(a - values) <= unit * scale + np.finfo(np.float64).tiny).all():
                return {"form": form, **detail}
    return None


def _functions(
    a: NDArray[np.float64], b: NDArray[np.float64], unit: float
) -> Iterator[tuple[str, dict[str, Json], NDArray[np.float64]]]:
    """Closed forms worth trying. A ratio near 1 or an offset near 0 is no form: rounding alone gives these."""
    square = float((b * b).sum())
    ratio = float((a * b).sum()) / square if square else 0.0
    if ratio and abs(ratio - 1.0) > _CLEAR * unit:
        yield "scale", {"ratio": ratio}, b * ratio
    offset = float(np.mean(a - b))
    if abs(offset) > _CLEAR * unit * float(np.abs(a).max()):
        yield "offset", {"offset": offset}, b + offset
    yield "negative exponential", {}, -np.exp(b)
    yield "exponential", {}, np.exp(b)


_FORMS: tuple[Callable[[Values, Values], dict[str, Json] | None], ...] = (
    _cast,
    _rounded,
    _transposed,
    _shift,
    _permutation,
    _elementwise,
)


def _nearest(found: Values, known: Sequence[tuple[Source, Values]]) -> dict[str, Json]:
    """How far it is from the first candidate of the same shape, for a reader."""
    for source, values in known:
        if values.bits.shape == found.bits.shape and values.dtype == found.dtype:
            differ = found.bits != values.bits
            with np.errstate(all="ignore"):
                largest = float(np.nanmax(np.abs(found.floats - values.floats)))
            return {
                "compared_with": {"name": source.name, "version": source.version},
                "elements": int(found.bits.size),
                "different": int(differ.sum()),
                "max_abs": largest,
            }
    return {}
