"""Block formats: what differs between two quantised operands, and by which rule each was made. numpy only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bits import F64, round_to, ulp_distance
from zkl_debug.diff.explain.model import Evidence, Finding, Operand, Quantised, Strength
from zkl_debug.diff.explain.numeric import same_values, shown
from zkl_debug.schema import Json

_F32 = NDArray[np.float32]
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_REPLACES = (
    *("dtype-change", "shape-change", "constant-ratio", "constant-offset", "column-permutation", "reduction-order"),
    *("extra-rounding", "other-weights", "uninitialised"),
)


def quantisation(e: Evidence) -> Finding | None:
    """One side quantises and the other does not, or they do it differently: by scale, by data, or in form alone."""
    q = e.quantised
    if q is None:
        return None
    if not q.is_operand:
        return _weight(e, q)
    if q.left.is_quantised != q.right.is_quantised:
        return _one_sided(e, q)
    if q.left.dtypes != q.right.dtypes:
        forms = [form(side) for side in (q.left, q.right)]
        text = f"{e.side(False)} quantises to {forms[0]}, {e.side(True)} to {forms[1]}"
        return _finding(text, "format", {"left": forms[0], "right": forms[1]}, Strength.CLASS)
    return _both(e, q)


def form(operand: Operand) -> str:
    """A block format in words."""
    known = {
        ("float8_e4m3fn", "float8_e8m0fnu"): "mxfp8 (e4m3 data, e8m0 scales)",
        ("float4_e2m1fn_x2", "float8_e4m3fn"): "nvfp4 (e2m1 data, e4m3 scales)",
    }
    parts = operand.dtypes
    if not operand.is_quantised:
        return parts.get("data", "nothing captured")
    key = (parts.get("data", ""), parts["scale"])
    return known.get(key, f"{key[0]} data with {key[1]} scales")


def _finding(text: str, what: str, evidence: Mapping[str, Json], strength: Strength) -> Finding:
    return Finding("quantisation-differs", text, {"what": what, **evidence}, strength, _REPLACES)


def _weight(e: Evidence, q: Quantised) -> Finding | None:
    if not q.weight:
        return None
    name = f"{e.site.owner}.weight"
    if q.weight == ("one-side",):
        text = f"one side alone quantises {name}, whose parameter is the same on both"
        return _finding(text, "weight, one-side", {"parts": ["one-side"]}, Strength.FITTED)
    same = [part for part in ("scale", "data") if part not in q.weight]
    text = f"{' and '.join(q.weight)} of {name} in its block format: not the same on both sides"
    text += f"; its {' and '.join(same)} and its parameter are equal" if same else "; its parameter is equal"
    return _finding(text, f"weight {' and '.join(q.weight)}", {"parts": list(q.weight)}, Strength.FITTED)


# ---- one side alone ---------------------------------------------------------------------------------------------
def _one_sided(e: Evidence, q: Quantised) -> Finding:
    right = q.right.is_quantised
    made, plain = (q.right, q.left) if right else (q.left, q.right)
    words = form(made)
    text = f"{e.side(right)} quantises to {words}, {e.side(not right)} does not"
    evidence: dict[str, Json] = {"side": e.side(right), "format": words}
    if plain.data is None or made.data is None or made.scale is None:
        return _finding(text, "one-side", evidence, Strength.CLASS)
    source = plain.data.real
    rules = _rules_of(made, source)
    evidence |= {"scale_rule": rules[0] if rules else None, "data_rounded_once": _is_rounding(made, source)}
    values = dequantised(made)
    if values is not None:
        equal = same_values(values, source)
        evidence |= {"elements": int(equal.size), "equal_elements": int(equal.sum())}
        with np.errstate(all="ignore"):
            largest = float(np.nanmax(np.abs(values - source) / np.abs(source).max(axis=1, keepdims=True), initial=0))
        evidence["largest_error_in_rows_maximum"] = shown(largest)
        text += f"; {int(equal.sum())} of {equal.size} elements keep their value"
    proved = bool(rules) and bool(evidence["data_rounded_once"])
    if proved:
        text += f"; scales ({rules[0]}) and data are those of {e.side(not right)}'s values, bit for bit"
    return _finding(text, "one-side", evidence, Strength.EXACT if proved else Strength.CLASS)


# ---- both sides -------------------------------------------------------------------------------------------------
def _both(e: Evidence, q: Quantised) -> Finding:
    left, right = q.left, q.right
    if left.data is None or right.data is None or left.scale is None or right.scale is None:
        text = f"both quantise to {form(left)}, and {_port_words(e.site.port)} differs"
        return _finding(text, _port_words(e.site.port), {}, Strength.CLASS)
    scale = left.scale.bits != right.scale.bits
    data = to_codes(left) != to_codes(right)
    row = _overall_differs(left, right)
    parts = [name for name, any_ in (("row scale", row.any()), ("scale", scale.any()), ("data", data.any())) if any_]
    evidence: dict[str, Json] = {"blocks": int(scale.size), "blocks_with_other_scale": int(scale.sum())}
    evidence |= {"elements": int(data.size), "elements_with_other_data": int(data.sum())}
    evidence["scale_max_steps"] = _steps(left, right)
    text = f"both quantise to {form(left)}; "
    if row.any():
        text += f"the row's scale differs in {int(row.sum())} of {len(row)} rows; "
    text += _scale_words(scale, evidence["scale_max_steps"], left.dtypes["scale"])
    follows = _data_words(scale, data, row)
    text += f"; {follows[0]}"
    evidence["data_differs_only_with_scale"] = follows[1]
    strength = Strength.CLASS
    values = [dequantised(side) for side in (left, right)]
    if values[0] is not None and values[1] is not None and bool(same_values(values[0], values[1]).all()):
        evidence["same_values"] = True
        text += "; both stand for the same values in every element"
        parts = [*parts, "same values"]
    if q.source is not None:
        rules = [_rules_of(side, q.source.real) for side in (left, right)]
        rounds = [_is_rounding(side, q.source.real) for side in (left, right)]
        evidence |= {"scale_rules": [r[0] if r else None for r in rules], "data_rounded_once": rounds}
        text += _rule_words(e, rules, rounds if data.any() else [True, True], bool(scale.any()))
        fits = [_fits_row_rule(side, q.source.real) for side in (left, right)]
        if row.any() and fits[0] != fits[1]:
            text += f"; the row's scale of {e.side(fits[0])} is not its largest value / 2688, that of the other is"
            evidence["row_scale_by_rule"] = fits
        told = scale.any() or data.any()
        exact = (any(rules) and scale.any() and all(rounds)) or (any(rounds) and not all(rounds) and told)
        if exact or (row.any() and fits[0] != fits[1]):
            strength = Strength.EXACT
    return _finding(text, " and ".join(parts) or "nothing", evidence, strength)


def _port_words(port: str) -> str:
    return {"out.1": "scale", "out.2": "row scale"}.get(port, "data")


def _scale_words(scale: NDArray[np.bool_], steps: Json, dtype: str) -> str:
    if not scale.any():
        return f"the scales are equal in all {scale.size} blocks"
    text = f"the scale differs in {int(scale.sum())} of {scale.size} blocks"
    if steps is not None:
        factor = ", a factor of 2" if dtype == "float8_e8m0fnu" and steps == 1 else ""
        text += f" (at most {steps} step{'s' if steps != 1 else ''} of {dtype}{factor})"
    return text


def _data_words(scale: NDArray[np.bool_], data: NDArray[np.bool_], row: NDArray[np.bool_]) -> tuple[str, bool]:
    if not data.any():
        return f"the data are equal in all {data.size} elements", True
    blocks = data.reshape(*scale.shape, -1).any(axis=2)
    alone = blocks & ~scale & ~row[:, None]
    text = f"the data differ in {int(data.sum())} of {data.size} elements"
    if not alone.any():
        return f"{text}, all in blocks of another scale", True
    return f"{text}, in {int(alone.sum())} blocks under an equal scale", False


def _rule_words(e: Evidence, rules: list[list[str]], rounds: list[bool], scale: bool) -> str:
    text = ""
    if scale and rules[0] != rules[1]:
        words = [r[0] if r else "no known rule" for r in rules]
        text = f"; scales: {e.side(False)} by {words[0]}, {e.side(True)} by {words[1]}"
    if rounds[0] != rounds[1]:
        odd = e.side(rounds[0])
        text += f"; the data of {odd} are not its input rounded to nearest, ties to even, those of the other are"
    return text


def _overall_differs(left: Operand, right: Operand) -> NDArray[np.bool_]:
    if left.overall is None or right.overall is None:
        assert left.data is not None
        return np.zeros(len(left.data), np.bool_)
    return np.asarray((left.overall.bits != right.overall.bits).any(axis=1))


def _steps(left: Operand, right: Operand) -> int | None:
    assert left.scale is not None
    assert right.scale is not None
    steps = ulp_distance(left.scale.bits, right.scale.bits, left.scale.dtype)
    known = steps[steps != np.uint64(2**64 - 1)]
    return int(known.max()) if known.size else None


# ---- formats ----------------------------------------------------------------------------------------------------
def to_codes(operand: Operand) -> NDArray[np.uint8]:
    """One code a value, [m, k]."""
    assert operand.data is not None
    bits = operand.data.bits
    if operand.data.dtype != "float4_e2m1fn_x2":
        return np.asarray(bits, np.uint8)
    return np.stack([bits & np.uint8(15), bits >> np.uint8(4)], axis=-1).reshape(len(bits), -1)


def _unit(operand: Operand) -> F64 | None:
    """What a code of one stands for in each block, float64 [m, blocks]."""
    if operand.scale is None:
        return None
    unit = operand.scale.real
    if "overall" in operand.dtypes:
        if operand.overall is None:
            return None
        unit = (unit.astype(np.float32) * operand.overall.real.astype(np.float32)).astype(np.float64)
    return unit


def _spread(per_block: F64, width: int) -> F64:
    return np.repeat(per_block, width // per_block.shape[1], axis=1)


def dequantised(operand: Operand) -> F64 | None:
    """The values an operand stands for, float64 [m, k]."""
    unit = _unit(operand)
    if unit is None or operand.data is None:
        return None
    values = operand.data.real
    return values * _spread(unit, values.shape[1])


def _is_rounding(operand: Operand, source: F64) -> bool:
    """Whether the data are the source divided by the scales, saturated and rounded to nearest, ties to even."""
    unit = _unit(operand)
    if unit is None or operand.data is None or not np.isfinite(source).all():
        return False
    wide = _spread(unit, source.shape[1])
    scaled = np.where(wide > 0, source.astype(np.float32) / np.where(wide > 0, wide, 1).astype(np.float32), 0)
    top = _E2M1_MAX if operand.data.dtype == "float4_e2m1fn_x2" else _E4M3_MAX
    wanted = round_to(np.clip(scaled.astype(np.float64), -top, top), operand.data.dtype)
    return bool((wanted == operand.data.bits).all())


def _rules_of(operand: Operand, source: F64) -> list[str]:
    """Rules that give every scale of an operand, from the values that were quantised."""
    if operand.scale is None or not np.isfinite(source).all():
        return []
    blocks = operand.scale.bits.shape[1]
    largest = np.abs(source).reshape(len(source), blocks, -1).max(axis=2)
    if operand.scale.dtype == "float8_e8m0fnu":
        return [name for name, bits in _mx_rules(largest).items() if bool((bits == operand.scale.bits).all())]
    if operand.overall is None:
        return []
    overall = operand.overall.real.astype(np.float32)
    wanted = largest.astype(np.float32) / np.float32(_E2M1_MAX) / overall
    bits = round_to(np.minimum(wanted, np.float32(_E4M3_MAX)).astype(np.float64), "float8_e4m3fn")
    rule = "largest / 6, to nearest e4m3"
    return [rule] if bool((bits == operand.scale.bits).all()) else []


def _fits_row_rule(operand: Operand, source: F64) -> bool:
    """Whether the scales of rows bring the largest value of each to what e4m3 scales of e2m1 data can hold."""
    if operand.overall is None or not np.isfinite(source).all():
        return False
    largest = np.abs(source).max(axis=1).astype(np.float32)
    wanted = largest / np.float32(_E4M3_MAX * _E2M1_MAX)
    return bool((np.where(wanted > 0, wanted, np.float32(1)) == operand.overall.real[:, 0].astype(np.float32)).all())


def _mx_rules(largest: F64) -> dict[str, NDArray[np.uint8]]:
    """e8m0 codes of blocks by the rules in use."""
    mantissa, exponent = np.frexp(largest)
    floor = exponent - 1 - 8
    ceil = np.frexp(largest.astype(np.float32) / np.float32(_E4M3_MAX))
    up = ceil[1] - (ceil[0] == 0.5)
    near = exponent - 1 - 8 + (mantissa >= 0.96875)  # where the largest value would round to 512
    rules = {
        "floor(log2(largest)) - 8": floor,
        "ceil(log2(largest / 448))": up,
        "the largest value rounded first": near,
    }
    return {
        name: np.where(largest > 0, np.clip(value, -127, 127) + 127, 0).astype(np.uint8)
        for name, value in rules.items()
    }
