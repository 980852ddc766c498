"""A bed on several ranks: what its options, model and micro-batches become."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zkl_debug.engines.megatron.layout import ONE, ParallelLayout
from zkl_debug.errors import UsageError

if TYPE_CHECKING:
    from zkl_debug.beds.bed import BedOptions
    from zkl_debug.engines.megatron.scoring import MicroBatch

#: The switch with which the number of tensor-parallel ranks does not matter.
TREE = "tp-tree-reduce"


def layout_of(options: BedOptions, side: str) -> ParallelLayout:
    """The layout of a side; one rank for a process that runs both."""
    fields = {"train": options.layout, "gen": options.gen_layout}.get(side)
    return ParallelLayout(**fields) if fields else ONE


def layouts(options: BedOptions) -> tuple[ParallelLayout, ParallelLayout]:
    """The layouts of training and generation."""
    return layout_of(options, "train"), layout_of(options, "gen")


def fit_options(options: BedOptions) -> BedOptions:
    """With the stack on and tensor parallel on a side, both sides add over K as one tree unless told otherwise.

    Raises:
        UsageError: for a generation layout that the dynamic engine is not run in, or padding that does not share out.
    """
    if not options.spread:
        return options
    train, gen = layouts(options)
    if gen.pp > 1 or gen.cp > 1 or gen.sp:
        raise UsageError(f"generation on {gen.text}", "tensor, expert and data parallel ranks alone")
    parts = 2 * train.cp if train.cp > 1 else train.tp if train.sp else 1
    if options.pad_multiple % parts:
        raise UsageError(
            f"padding to multiples of {options.pad_multiple} over {train.text}", f"--pad-multiple {parts} or a multiple"
        )
    if max(train.tp, gen.tp) > 1 and options.stack and TREE not in options.switches:
        return replace(options, switches={**options.switches, TREE: True})
    return options


def fit_spec(spec: Any, options: BedOptions) -> Any:
    """The model with KV groups enough for every rank that shares them out, on both sides alike."""
    if not options.spread:
        return spec
    needed = max(one.tp * (one.cp if one.cp_comm == "a2a" else 1) for one in layouts(options))
    spec = replace(spec, kv_groups=max(spec.kv_groups, needed))
    for one in layouts(options):
        one.check_model(spec)
    return spec


def own_batches(batches: Sequence[MicroBatch], layout: ParallelLayout) -> list[MicroBatch]:
    """The micro-batches of this process's replica, as many as every replica has: the last ones are run again."""
    batches = list(batches)
    if layout == ONE or not batches:
        return batches
    from zkl_debug.engines.megatron import world

    place = world.place()
    turns = -(-len(batches) // layout.dp)
    mine = place.at("dp")[0]
    own = [batches[min(turn * layout.dp + mine, len(batches) - 1)] for turn in range(turns)]
    part = place.at("cp")
    return [replace(batch, part=part) for batch in own]


def rank_and_world() -> tuple[int, int]:
    """This process among those of its world, as torchrun says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
