"""Evidence of operands in a block format: data, scales, and what became of the weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.explain.model import Operand, Quantised, Values
from zkl_debug.diff.model import CaptureLike, Ints
from zkl_debug.schema import StateRecord

if TYPE_CHECKING:
    from zkl_debug.diff.explain.gather import Chosen

#: Part -> port of the operator.
_PORTS = {"data": "out.0", "scale": "out.1", "overall": "out.2"}
#: Behind the name of a product: the sites of its operand.
OPERATOR = "/quantize"


def quantised(chosen: Chosen) -> Quantised | None:
    """Parts of the operand at a site of it, or what is known of the weight at the site of a product."""
    comparison = chosen.comparison
    owner = comparison.sites[chosen.site].parsed.owner
    if owner.endswith(OPERATOR):
        rows = chosen.rows(chosen.read)
        left, right = (operand(comparison, owner, side, rows[side]) for side in (0, 1))
        return Quantised(left, right, _source(comparison, owner, rows))
    weight = weight_parts(comparison, f"{owner}.weight")
    left, right = (operand(comparison, f"{owner}{OPERATOR}", side, chosen.read[:0]) for side in (0, 1))
    known = bool(weight) or left.is_quantised or right.is_quantised
    return Quantised(left, right, weight=weight, is_operand=False) if known else None


def operand(comparison: Comparison, owner: str, side: int, rows: Ints) -> Operand:
    """What one side makes of the rows at the sites of an operand; raw bits where they were captured.

    Args:
        comparison: of both captures.
        owner: e.g. ``decoder.layers.1.mlp.linear_fc1/quantize``.
        side: 0 or 1.
        rows: in the common row space, [m].
    """
    from zkl_debug.diff.explain.gather import values_of

    dtypes: dict[str, str] = {}
    parts: dict[str, Values | None] = {}
    for part, port in _PORTS.items():
        for i, pair in enumerate(comparison.sites):
            site = (pair.a, pair.b)[side]
            if pair.name == f"{owner}:{port}" and site is not None:
                dtypes[part] = site.meta.torch_dtype
                parts[part] = values_of(comparison, pair, comparison.where(i), rows)
    return Operand(dtypes, **parts)


def _source(comparison: Comparison, owner: str, rows: tuple[Ints, Ints]) -> Values | None:
    """What was quantised, where it is the same on both sides."""
    from zkl_debug.diff.explain.gather import values_of

    for i, pair in enumerate(comparison.sites):
        if pair.name == f"{owner}:in.0" and not pair.differ:
            left, right = (values_of(comparison, pair, comparison.where(i), side) for side in rows)
            if left is not None and right is not None and bool((left.bits == right.bits).all()):
                return left
    return None


def weights_in_other_form(comparison: Comparison) -> list[str] | None:
    """Weights whose block format differs between the captures; None where neither holds any."""
    sides = [_weights(capture) for capture in (comparison.a, comparison.b)]
    names = sorted({key.rpartition(":")[0] for side in sides for key in side})
    return [name for name in names if weight_parts(comparison, name)] if names else None


def _weights(capture: CaptureLike) -> Mapping[str, StateRecord]:
    return {r.name: r for _, records in sorted(capture.states.items()) for r in records if r.kind == "quantised"}


def weight_parts(comparison: Comparison, name: str) -> tuple[str, ...]:
    """Parts of a quantised weight that differ between the captures."""
    sides = [
        {key.rpartition(":")[2]: r for key, r in _weights(capture).items() if key.rpartition(":")[0] == name}
        for capture in (comparison.a, comparison.b)
    ]
    if not any(sides):
        return ()
    if not all(sides):
        return ("one-side",)
    parts = sorted(set(sides[0]) | set(sides[1]))
    return tuple(part for part in parts if _form(sides[0].get(part)) != _form(sides[1].get(part)))


def _form(record: StateRecord | None) -> object:
    return None if record is None else (record.torch_dtype, record.shape, record.digest)
