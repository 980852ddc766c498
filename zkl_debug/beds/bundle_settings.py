"""What an operator is given beside its input rows: parameters and settings, of each side where the sides differ.

A bundle names tensors ``weight/NAME`` where both rows' sides have the same bits, and ``weight/NAME/a``, ``/b`` where
not. Settings that no parameter holds (a temperature, a shift of positions) are those that the diff fitted to the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zkl_debug.beds.bundle_tensors import Stored
from zkl_debug.beds.rebuild import recipe_of
from zkl_debug.diff.model import Ints
from zkl_debug.errors import ZklError
from zkl_debug.schema import Json, SiteName

if TYPE_CHECKING:
    from zkl_debug.diff.verdict import Verdict

LETTERS = ("a", "b")
#: Explanations whose ``left`` and ``right`` evidence is a setting of the operator.
_FITTED = ("temperature", "eps")


def parameters(
    site: SiteName,
    sides: tuple[str, str],
    dir_a: Path,
    dir_b: Path,
    notes: list[str],
    forms: tuple[str, str] = ("", ""),
) -> dict[str, Stored]:
    """Parameters of the operator as each side has them while it runs, from the rebuilt bed; none for other captures.

    Args:
        site: the site.
        sides: side of the bed (``gen`` or ``train``) that the left and the right row belong to.
        dir_a, dir_b: the captures.
        notes: told what is missing.
        forms: block format in which the left and the right row's side has the weight; empty for none.
    """
    try:
        recipe = recipe_of(dir_a, dir_b)
    except ZklError:
        notes.append("weights are not in the bundle: the captures are not those of a bed")
        return {}
    from zkl_debug.beds.bundle_blocks import weight_of
    from zkl_debug.beds.run import open_bed
    from zkl_debug.beds.weights import operator_parameters
    from zkl_debug.capture.layout import dtype_name, raw_bits

    found: list[dict[str, Stored]] = []
    with open_bed(recipe.options) as context:
        for side, form in zip(sides, forms, strict=True):
            with context.side(side):
                values = operator_parameters(context, site)
                if form and "weight" in values:
                    values["weight"] = weight_of(values["weight"], form)
                stored = {
                    name: Stored(raw_bits(value.reshape(1, -1)).copy(), dtype_name(value), tuple(value.shape))
                    for name, value in values.items()
                }
            found.append(stored)
    return by_side({f"weight/{name}": (found[0].get(name), found[1].get(name)) for name in {**found[0], **found[1]}})


def by_side(pairs: Mapping[str, tuple[Stored | None, Stored | None]]) -> dict[str, Stored]:
    """Tensors under one name where both sides have the same bits, else one for each side that has it."""
    tensors: dict[str, Stored] = {}
    for name, (left, right) in pairs.items():
        if left is not None and right is not None and _same(left, right):
            tensors[name] = left
            continue
        for letter, value in zip(LETTERS, (left, right), strict=True):
            if value is not None:
                tensors[f"{name}/{letter}"] = value
    return tensors


def _same(one: Stored, two: Stored) -> bool:
    return (one.dtype, one.shape) == (two.dtype, two.shape) and np.array_equal(one.bits, two.bits)


def fitted(
    verdict: Verdict, site: str, positions: Ints, samples: Sequence[int], known: Mapping[str, Stored]
) -> tuple[dict[str, Stored], dict[str, Json]]:
    """(tensors, settings in words) that the explanations of the verdict fitted to this site.

    Args:
        verdict: of the captures.
        site: the site of the bundle; explanations are of the first divergence alone.
        positions, samples: of the rows, [m].
        known: tensors that are there already: a parameter that was read is not fitted again.
    """
    tensors: dict[str, Stored] = {}
    words: dict[str, Json] = {}
    if verdict.first is None or verdict.first.site != site:
        return tensors, words
    for why in verdict.explanations:
        name, told = str(why["name"]), why["evidence"]
        if name in _FITTED and f"weight/{name}" not in known and f"weight/{name}/a" not in known:
            for letter, key in zip(LETTERS, ("left", "right"), strict=True):
                tensors[f"weight/{name}/{letter}"] = scalar(float(told[key]))
            words[name] = {"a": told["left"], "b": told["right"], "from": "fitted to the rows"}
        if name == "position-shift":
            shift = np.array([int(told["shift"].get(str(sample), 0)) for sample in samples], np.int64)
            letter = LETTERS[int(bool(told["on_right"]))]
            for each in LETTERS:
                moved = positions + shift if each == letter else positions
                tensors[f"positions/{each}"] = Stored(moved, "int64", moved.shape)
            words["position shift"] = {letter: dict(told["shift"]), "from": "fitted to the rows"}
    return tensors, words


def scalar(value: float) -> Stored:
    """A float64 scalar."""
    bits = np.array([value], np.float64).view(np.uint64)
    return Stored(bits, "float64", ())


def differing(tensors: Mapping[str, Stored]) -> dict[str, Json]:
    """Parameters that the sides do not share, in words: values of scalars, the names of others."""
    words: dict[str, Json] = {}
    for name in sorted({n[:-2] for n in tensors if n.startswith("weight/") and n[-2:] in ("/a", "/b")}):
        told = {letter: _shown(tensors[f"{name}/{letter}"]) for letter in LETTERS if f"{name}/{letter}" in tensors}
        words[name.removeprefix("weight/")] = {**told, "from": "the operator as each side runs it"}
    return words


def _shown(value: Stored) -> Json:
    if value.shape == () and value.dtype == "float64":
        return float(value.bits.reshape(-1).view(np.float64)[0])
    return f"{value.dtype} {list(value.shape)}"
