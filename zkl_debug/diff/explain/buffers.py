"""Another buffer: what an operator reads beside its inputs and weights is not the same on both sides."""

from __future__ import annotations

from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.explain.model import Evidence, Finding, Strength
from zkl_debug.diff.weights import other_buffers
from zkl_debug.schema import Json, StateRecord


def buffer_differs(comparison: Comparison, e: Evidence) -> Finding | None:
    """A buffer that the first operator reads differs between the sides.

    Buffers come with the checkpoint or are computed when the model is built; a cast of the whole model rounds them, a
    load with a dtype may not. None where both rows of each pair are of one side.
    """
    edge = comparison.edge
    if edge is None or not bool((comparison.pairs.sides[comparison.pairs.slices[edge]] == 2).all()):
        return None
    read = [pair for pair in other_buffers(comparison.a, comparison.b) if _reads(e, pair[0].name)]
    if not read:
        return None
    first = read[0]
    evidence: dict[str, Json] = {
        "buffers": [left.name for left, _ in read[:10]],
        "a": _form(first[0]),
        "b": _form(first[1]),
    }
    forms = "" if _form(first[0]) == _form(first[1]) else f" (A {_form(first[0])}, B {_form(first[1])})"
    cast = "; a cast of the whole model rounds it" if first[0].torch_dtype != first[1].torch_dtype else ""
    text = (
        f"buffer {first[0].name} is not the same on both sides{forms}, and the operator reads it: it is no parameter, "
        f"and comes from how each side built, loaded or cast the model{cast}"
    )
    return Finding("other-buffers", text, evidence, Strength.CLASS)


def _reads(e: Evidence, buffer: str) -> bool:
    """Whether a buffer is the operator's own, or of the rotary embedding that gives its angles."""
    owner = buffer.rpartition(".")[0]
    rotary = any(word in owner.rpartition(".")[2] for word in ("rotary", "rope"))
    if rotary and (e.semantic == "rope" or e.site.operator.startswith("rope")):
        return True
    module = e.site.module
    return owner == module or owner.startswith(f"{module}.")


def _form(record: StateRecord) -> str:
    return f"{record.torch_dtype} {list(record.shape)}"
