"""Which of several facts to name when the data cannot tell them apart: the one that is a cause more often."""

from __future__ import annotations

from zkl_debug.diff.rules_atoms import Atom

_SHAPE = ("rows in call", "longest query in call", "sequences in call")
# What the operator's kernels look at first when they choose how to run.
_SHAPE_OF = {
    "core_attention": ("longest query in call", "sequences in call", "rows in call"),
    "scan": ("longest query in call", "rows in call", "sequences in call"),
    "conv": ("longest query in call", "rows in call", "sequences in call"),
    "log_softmax": ("sequences in call", "rows in call", "longest query in call"),
    "selected": ("sequences in call", "rows in call", "longest query in call"),
    "label": ("sequences in call", "rows in call", "longest query in call"),
}
_READS_POSITIONS = frozenset({"rope", "embedding", "core_attention", "scan", "conv"})
_ORDER = (
    "after cache hit",
    "chunk edge",
    "first decode token",
    "packed",
    "reused recurrent slot",
    "first sequence in call",
    "last position of its sequence in call",
    "position",
    "first position of its sequence in call",
    *_SHAPE,
    "padding of its sequence",
    "graph bucket",
    "padding rows in call",
    "cached tokens",
    "rows after the cached prefix",
    "position of the chunk's first row",
    "rows of its sequence in call",
    "place in call",
    "last sequence in call",
    "weight version",
    "step",
    "rank",
    "rows after the chunk's first",
    "rows before the chunk's last",
)
_SELDOM = ("generated", "masked by the loss", "sample", "token", "micro-batch", "frame")
# One limit is likelier a cause than a list of so many values that happens to name the same rows.
_MANY, _ENUMERATED = 3, 8
_OPERATION = {"is": 0.0, ">=": 0.0, "<=": 0.0, "is not": 0.1, "==": 0.1, "in": 0.3, "!=": 0.4}


def is_cause(fact: str) -> bool:
    """Whether a fact can be a cause, not only a name for some rows (a sample, a frame)."""
    return fact in _ORDER


def preference(atom: Atom, semantic: str = "") -> float:
    """Rank of a condition, the likeliest cause lowest.

    Args:
        atom: the condition.
        semantic: operator class of the site, e.g. ``core_attention``.
    """
    order = list(_ORDER)
    shape = _SHAPE_OF.get(semantic.split("#")[0], _SHAPE)
    start = order.index(_SHAPE[0])
    order[start : start + len(_SHAPE)] = shape
    any_padding = atom.fact == "padding of its sequence" and atom.operation == ">=" and atom.interval[0] <= 1
    if any_padding and semantic in _READS_POSITIONS:
        place = start - 1
    elif atom.fact in order:
        place = order.index(atom.fact)
    elif atom.fact in _SELDOM:
        place = len(order) + 10 + _SELDOM.index(atom.fact)
    else:
        place = len(order) + 5  # blocks, experts, neighbours
    if len(atom.values) >= _MANY:
        place += _ENUMERATED
    # Two rows of a pair are only blamed together when no condition on one of them does.
    return (
        place + _OPERATION.get(atom.operation, 0.5) + (30 if atom.operation in ("crosses", "differs", "one in") else 0)
    )
