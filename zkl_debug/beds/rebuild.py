"""Rebuild the run that made a capture, from the ``run.json`` beside it, and go through its sides once more."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zkl_debug.beds.bed import BedOptions
from zkl_debug.beds.run import BedContext, open_bed
from zkl_debug.errors import Refused

Probe = Callable[[BedContext], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Recipe:
    """How a pair of captures was made.

    Attributes:
        options: of the bed.
        plain_runs: runs of each side before the probed one.
    """

    options: BedOptions
    plain_runs: int


def recipe_of(*folders: Path) -> Recipe:
    """The recipe of captures that come from one run of a bed.

    Raises:
        Refused: when a capture is not from a bed, or they are not from one run.
    """
    files = {(Path(folder).resolve().parent / "run.json") for folder in folders}
    missing = [file for file in files if not file.is_file()]
    if missing or len(files) != 1:
        found = "the captures come from different runs" if not missing else "no run.json beside the capture"
        raise Refused(
            f"{found}: the operator cannot be brought to life again",
            "both folders of one `zkl-debug capture --bed ...`",
            "zkl-debug capture --bed NAME --level payload --out DIR",
        )
    file = files.pop()
    try:
        document = json.loads(file.read_text())
        options = dict(document["options"])
        options["sides"] = tuple(options["sides"])
        return Recipe(BedOptions(**options), 2 if document["record"]["certify"] else 1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(
            f"{file} cannot be used: {type(error).__name__}: {error}",
            "the run.json that `zkl-debug capture --bed ...` wrote",
            "capture again",
        ) from None


def run_again(recipe: Recipe, probes: Mapping[str, Probe], say: Callable[[str], None]) -> None:
    """Run the sides in the order and as often as they were captured, the last run of each under its probe.

    Args:
        recipe: what to run.
        probes: by side, what to enter round the probed run; a side without one runs plainly.
        say: told what happens.
    """
    with open_bed(recipe.options) as context:
        work: dict[str, Callable[[], Any]] = {"gen": context.run_gen, "train": context.run_train}
        for side, go in work.items():
            if side == "train" and "train" not in probes:
                return  # nothing comes after it
            with context.side(side):
                say(f"{side}: run again")
                for _ in range(recipe.plain_runs):
                    go()
                if side not in probes:
                    go()
                    continue
                say(f"{side}: run again with the operator under the probe")
                with probes[side](context):
                    go()
