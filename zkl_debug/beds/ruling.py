"""The referee of the first divergence: parameters from the rebuilt bed, everything else from the captures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zkl_debug.beds.rebuild import recipe_of
from zkl_debug.diff.explain.gather import evidence
from zkl_debug.diff.referee import Ruling, referee
from zkl_debug.errors import ZklError

if TYPE_CHECKING:
    from zkl_debug.diff.verdict import Verdict


def rule_first(verdict: Verdict, dir_a: Path, dir_b: Path) -> Ruling:
    """Which side of the first divergence is wrong, if any.

    Args:
        verdict: of comparing the two folders; diverged.
        dir_a, dir_b: the captures, payload level. Where they are of one run of a bed, weights come from it rebuilt.
    """
    comparison = verdict.comparison
    found = None if comparison is None or verdict.edge is None else evidence(comparison, verdict.edge)
    if found is None:
        return Ruling("", "no-ruling", reason="nothing diverges")
    from zkl_debug.beds.weights import exact_parameters

    try:
        parameters = exact_parameters(recipe_of(dir_a, dir_b), found.site)
    except (
        ZklError
    ):  # not a bed: operators without weights, such as attention and the combine, can be judged all the same
        parameters = {}
    return referee(found, parameters)
