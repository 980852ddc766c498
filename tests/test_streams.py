"""Alignment of operator streams by value, on streams made by hand."""

from __future__ import annotations

import numpy as np

from zkl_debug.diff.explain.numeric import rounded
from zkl_debug.diff.streams import INPUT, Op, align, roundings, rows_of

RNG = np.random.default_rng(3)
VALUES = {name: np.sort(RNG.standard_normal(32)) for name in "abcdefgh"}


def op(index: int, name: str, value: str = "", inputs: tuple[int, ...] = (), dtype: str = "float32") -> Op:
    """An operator whose result is one of ``VALUES``, or has no row value."""
    found = {value: VALUES[value]} if value else {}
    return Op(index, name, dtype, (2, 32), "lib.py", index + 1, "f", inputs, (frozenset(found),), found)


def test_equal_streams_have_no_first() -> None:
    left = [op(0, "mul", "a"), op(1, "add", "b", (0,))]
    right = [op(0, "mul", "a"), op(1, "clone", "a", (0,)), op(2, "add", "b", (1,))]
    found = align(left, right)
    assert found.first == (None, None)
    assert [(one.index, two.index) for one, two in found.anchors] == [(0, 0), (1, 2)]


def test_the_first_behind_the_anchors() -> None:
    left = [op(0, "mul", "a"), op(1, "exp", "b", (0,)), op(2, "sum", "c", (1,))]
    right = [op(0, "mul", "a"), op(1, "exp", "d", (0,)), op(2, "sum", "e", (1,))]
    found = align(left, right)
    assert [None if o is None else (o.name, o.source) for o in found.first] == [("exp", "lib.py:2")] * 2
    assert len(found.anchors) == 1


def test_a_detour_that_comes_back_to_a_common_value_is_no_divergence() -> None:
    left = [op(0, "mul", "a"), op(1, "add", "b", (0,)), op(2, "sum", "c", (1,))]
    right = [op(0, "half", "d"), op(1, "double", "a", (0,)), op(2, "add", "b", (1,)), op(3, "sum", "e", (2,))]
    found = align(left, right)
    assert [None if o is None else o.name for o in found.first] == ["sum", "sum"]


def test_the_same_addends_in_another_order() -> None:
    left = [
        op(0, "index", "a"),
        op(1, "index", "b"),
        op(2, "index", "c"),
        op(3, "add", "d", (0, 1)),
        op(4, "add", "e", (2, 3)),
    ]
    right = [
        op(0, "index", "c"),
        op(1, "index", "b"),
        op(2, "index", "a"),
        op(3, "add", "f", (0, 1)),
        op(4, "add", "g", (2, 3)),
    ]
    found = align(left, right)
    assert [None if o is None else o.index for o in found.first] == [3, 3]
    assert len(found.anchors) == 3


def test_what_the_whole_comes_to_is_no_anchor_where_it_differs() -> None:
    """A last rounding that leaves alike values behind does not hide what went before it."""
    left = [op(0, "mean", "a"), op(1, "add", "b", (0,)), op(2, "mul", "c", (1,)), op(3, "cast", "d", (2,), "bfloat16")]
    right = [op(0, "mean", "a"), op(1, "add", "e", (0,)), op(2, "mul", "f", (1,)), op(3, "cast", "d", (2,), "bfloat16")]
    found = align(left, right, results=(["d"], ["d"]))
    assert [None if o is None else o.name for o in found.first] == ["add", "add"]
    assert [(one.name, two.name) for one, two in found.anchors] == [("mean", "mean")]
    assert [mark for one, two, mark in rows_of(found) if one is not None and two is not None] == ["="]
    assert not roundings(found.left, found.matched[0], found.results[0])
    equal = align(left, right)  # the whole is equal: a detour that comes back
    assert equal.first == (None, None)


def test_what_comes_of_the_first_that_differs_is_no_anchor() -> None:
    """The relu of the right side happens to be equal behind an add that is not."""
    left = [op(0, "mul", "a"), op(1, "relu", "b", (0,)), op(2, "add", "c", (1,))]
    right = [op(0, "mul", "a"), op(1, "add", "d", (0,)), op(2, "sub", "e", (1,)), op(3, "relu", "b", (1,))]
    found = align(left, right)
    assert [None if o is None else o.name for o in found.first] == ["add", "sub"]
    assert [(one.index, two.index) for one, two in found.anchors] == [(0, 0), (1, 3)]
    fed = [op(0, "mul", "a"), op(1, "add", "d", (0,)), op(2, "relu", "b", (0,))]  # the relu does not read the add
    assert len(align(left, fed).anchors) == 2


def test_values_that_both_were_given_are_anchors() -> None:
    left = [op(0, "clone", "a"), op(1, "mm", "b", (0,))]
    right = [op(0, "mm", "c")]
    found = align(left, right, ([frozenset("a")], [frozenset("a")]))
    assert found.matched[0] == {0: INPUT}
    assert [None if o is None else o.name for o in found.first] == ["mm", "mm"]
    differing = align(left, right, ([frozenset("a")], [frozenset("h")]))
    assert differing.first[0] is not None
    assert differing.first[0].name == "clone"


def test_one_more_rounding_is_told_of_the_nearest_result() -> None:
    plain = VALUES["a"]
    narrow = np.sort(rounded(plain, "bfloat16"))
    left = [Op(0, "baddbmm", "bfloat16", (32,), slices=(frozenset("x"),), values={"x": narrow})]
    right = [
        Op(0, "bmm", "float32", (32,), slices=(frozenset("y"),), values={"y": plain * 4}),
        Op(1, "mul", "float32", (32,), inputs=(0,), slices=(frozenset("z"),), values={"z": plain}),
    ]
    found = align(left, right)
    assert found.relation is not None
    assert (found.relation.left.name, found.relation.right.name) == ("baddbmm", "mul")
    assert found.relation.equal_after == "bfloat16"
    assert "in all 32 values" in found.relation.text
    assert roundings(found.left, found.matched[0]) == tuple(left)
    assert roundings(found.right, found.matched[1]) == ()


def test_a_part_of_a_common_result_is_no_divergence_unless_it_is_another_rows() -> None:
    """One side splits what the other reads in place."""
    wide = Op(0, "mm", slices=(frozenset("w"),), values={"w": VALUES["a"]})
    part = Op(1, "aten.clone", inputs=(0,), slices=(frozenset("p"),), values={"p": VALUES["a"][4:12]})
    other = Op(1, "aten.clone", inputs=(0,), slices=(frozenset("p"),), values={"p": VALUES["b"][4:12]})
    left, right = op(2, "exp", "c", (1,)), op(1, "exp", "d", (0,))
    assert align([wide, part, left], [wide, right]).first == (left, right)
    assert align([wide, other, left], [wide, right]).first == (other, right)


def test_every_row_must_agree() -> None:
    """An equal value in the first row alone is chance."""
    one = Op(0, "mul", slices=(frozenset("a"), frozenset("b")), values={"a": VALUES["a"]})
    two = Op(0, "mul", slices=(frozenset("a"), frozenset("c")), values={"a": VALUES["a"]})
    assert align([one], [two]).first == (one, two)
    assert align([one], [one]).first == (None, None)


def test_side_by_side_keeps_both_orders() -> None:
    left = [op(0, "mul", "a"), op(1, "exp", "b", (0,)), op(2, "nonzero"), op(3, "sum", "c", (1,))]
    right = [op(0, "mul", "a"), op(1, "log", "d", (0,))]
    table = [(a and a.name, b and b.name, mark) for a, b, mark in rows_of(align(left, right))]
    assert table == [("mul", "mul", "="), ("exp", None, "!"), ("sum", None, ""), (None, "log", "!")]


def test_operators_of_other_rows_are_left_out() -> None:
    other = Op(1, "bmm", slices=(), related=False)
    found = align([op(0, "mul", "a"), other], [op(0, "mul", "a")])
    assert [o.index for o in found.left] == [0]
