"""Options that spread the sides of a bed over several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_SIZE = click.IntRange(1, 64)
_TRAIN = ("tp", "sp", "pp", "cp", "cp_comm", "ep", "dp")
_GEN = ("tp", "ep", "dp")

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--tp", type=_SIZE, default=1, help="Training side: tensor-parallel ranks."),
    click.option("--sp", is_flag=True, help="Training side: sequence parallel among them."),
    click.option("--pp", type=_SIZE, default=1, help="Training side: pipeline stages."),
    click.option("--cp", type=_SIZE, default=1, help="Training side: context-parallel ranks (zigzag)."),
    click.option("--cp-comm", type=click.Choice(["a2a", "p2p"]), default="a2a", help="How they exchange."),
    click.option("--ep", type=_SIZE, default=1, help="Training side: expert-parallel ranks, among tp x cp x dp."),
    click.option("--dp", type=_SIZE, default=1, help="Training side: replicas with micro-batches of their own."),
    click.option("--gen-tp", type=_SIZE, default=1, help="Generation side: tensor-parallel ranks."),
    click.option("--gen-ep", type=_SIZE, default=1, help="Generation side: expert-parallel ranks."),
    click.option("--gen-dp", type=_SIZE, default=1, help="Generation side: replicas."),
)


def layout_options[F: Callable[..., Any]](function: F) -> F:
    """Add the options to a click command; :func:`take_layouts` turns them into fields of ``BedOptions``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def take_layouts(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """``layout`` and ``gen_layout`` from the values of :func:`layout_options`, which are taken out of ``values``.

    Raises:
        UsageError: sizes that do not go together.
    """
    from zkl_debug.engines.megatron.layout import ParallelLayout

    train = {name: values.pop(name) for name in _TRAIN}
    gen = {name: values.pop(f"gen_{name}") for name in _GEN}
    if gen["ep"] > 1 and gen["tp"] * gen["dp"] == 1:
        gen["dp"] = gen["ep"]  # the ranks that share the experts out
    if train["ep"] > 1 and train["tp"] * train["cp"] * train["dp"] == 1:
        train["dp"] = train["ep"]
    found = {}
    for field, sizes in (("layout", train), ("gen_layout", gen)):
        known = ParallelLayout(**sizes)
        found[field] = sizes if known.world > 1 else {}
    return found
