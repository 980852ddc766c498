"""Options that every command which runs a bed shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from zkl_debug.errors import UsageError


def bed_options[F: Callable[..., Any]](function: F) -> F:
    """Add the options of a bed run to a click command; :func:`make_options` turns them into ``BedOptions``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="bf16", show_default=True),
    click.option("--stack", type=click.Choice(["on", "off"]), default="on", show_default=True, help="Whole ladder."),
    click.option("--switch", "switches", multiple=True, metavar="NAME=on|off|gen|train", help="Change one switch."),
    click.option("--fault", default=None, metavar="ID", help="Put a known defect in (see `zkl-debug beds`)."),
    click.option(
        "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Weights and prompts."
    ),
    click.option("--permute", type=int, default=0, metavar="SEED", help="Shuffle requests and scored sequences."),
    click.option("--neighbours", type=int, default=0, metavar="N", help="Extra requests that share the batches."),
    click.option("--pad-multiple", type=int, default=8, show_default=True, help="Width of padded scoring batches."),
    click.option("--micro-batch", type=int, default=2, show_default=True, help="Sequences in a scoring batch."),
    click.option("--packing/--no-packing", default=True, show_default=True, help="Score some sequences packed."),
    click.option(
        "--replay-routing/--no-replay-routing",
        default=False,
        help="Scoring takes the experts of generation (tiny-moe).",
    ),
    click.option("--chunk", type=int, default=64, show_default=True, help="Longest prefill chunk, tokens."),
    click.option("--chunked-prefill/--no-chunked-prefill", default=True, show_default=True),
    click.option("--size", type=click.Choice(["small", "full"]), default="full", show_default=True, help="GPU beds."),
    click.option("--graphs/--no-graphs", default=False, show_default=True, help="Decode in CUDA graphs (GPU beds)."),
    click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True),
)

_DIRECT = (
    "dtype",
    "seed",
    "permute",
    "neighbours",
    "pad_multiple",
    "micro_batch",
    "packing",
    "replay_routing",
    "chunk",
    "chunked_prefill",
    "prefix_caching",
    "fault",
    "size",
    "graphs",
)


def make_options(bed: str, values: Mapping[str, Any], sides: tuple[str, ...]) -> Any:
    """``BedOptions`` from the values of :func:`bed_options`.

    Raises:
        UsageError: a switch that is not NAME=on, off, gen or train, or anything ``BedOptions`` does not take.
    """
    from zkl_debug.beds.bed import BedOptions

    for name in ("micro_batch", "pad_multiple"):
        if values[name] < 1:
            raise UsageError(f"--{name.replace('_', '-')} {values[name]}", "1 or more")
    if values["neighbours"] < 0:
        raise UsageError(f"--neighbours {values['neighbours']}", "0 or more")
    chosen = {name: values[name] for name in _DIRECT}
    switches, one_sided = _switches(values["switches"])
    return BedOptions(
        bed=bed, stack=values["stack"] == "on", switches=switches, one_sided=one_sided, sides=sides, **chosen
    )


def _switches(texts: tuple[str, ...]) -> tuple[dict[str, bool], dict[str, str]]:
    """What is on or off on both sides, and what is on round one side alone. The last word on a name counts."""
    both: dict[str, bool] = {}
    one: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or value not in ("on", "off", "gen", "train"):
            raise UsageError(f"--switch {text}", "NAME=on, NAME=off, or NAME=gen, NAME=train for one side alone")
        both.pop(name, None)
        one.pop(name, None)
        if value in ("on", "off"):
            both[name] = value == "on"
        else:
            one[name] = value
    return both, one
