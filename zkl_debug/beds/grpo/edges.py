"""Edges a loop crossed: the places at which kernels take another path, and at which state is kept or reused.

A pass says something only about the edges that were crossed. Everything here is counted from what the engine did, not
from what it was asked to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.beds.grpo.record import StepRecord
from zkl_debug.schema import Json


@dataclass(frozen=True)
class Edge:
    """One edge.

    Attributes:
        name: of the edge.
        crossed: how often it was crossed.
        absent: why this configuration has no such edge; empty where it has.
        hint: what would cross it.
    """

    name: str
    crossed: int
    absent: str = ""
    hint: str = ""

    @property
    def is_missing(self) -> bool:
        """The configuration has the edge, and nothing crossed it."""
        return not self.crossed and not self.absent

    def to_json(self) -> Json:
        """All fields."""
        return {"name": self.name, "crossed": self.crossed, "absent": self.absent, "hint": self.hint}


def edges_of(options: GrpoOptions, records: Sequence[StepRecord]) -> list[Edge]:
    """Edges of a loop, with how often its steps crossed them."""
    return [*_prompts(options, records), *_cache(options, records), *_steps(records), *_life(options, records)]


def merged(runs: Sequence[Sequence[Edge]]) -> list[Edge]:
    """Edges of several runs, by name; absent only where every run says so."""
    found: dict[str, Edge] = {}
    for edge in (e for run in runs for e in run):
        before = found.get(edge.name)
        if before is None:
            found[edge.name] = edge
        else:
            absent = edge.absent if before.absent else ""
            found[edge.name] = Edge(edge.name, before.crossed + edge.crossed, absent, edge.hint)
    return list(found.values())


def _prompts(options: GrpoOptions, records: Sequence[StepRecord]) -> list[Edge]:
    sequences = [s for r in records for s in r.sequences]
    starts = [[u.start for u in s.uses if u.length and u.start] for s in sequences]
    off = "" if options.chunked_prefill else "chunked prefill is off"
    longer = f"prompts of more than the {options.max_tokens} tokens of an engine step, together"
    inside = sum(any(at % options.block for at in s) for s in starts)
    return [
        Edge("prefill chunk edge", sum(map(bool, starts)), off, longer),
        Edge("chunk edge inside a KV block", inside, off, longer),
        Edge(
            "KV block edge in a prompt",
            sum(s.prompt_length > options.block for s in sequences),
            hint=f"prompts of more than {options.block} tokens",
        ),
        Edge(
            "KV block edge while decoding",
            sum(any(not u.length for u in s.uses) for s in sequences),
            hint=f"rollouts of more than {options.block} tokens",
        ),
    ]


def _cache(options: GrpoOptions, records: Sequence[StepRecord]) -> list[Edge]:
    sequences = [s for r in records for s in r.sequences]
    off = "" if options.prefix_caching else "prefix caching is off"
    seen: set[tuple[int, ...]] = set()
    again = 0
    for record in records:
        prompts = {s.tokens[: s.prompt_length] for s in record.sequences}
        again += len(prompts & seen)
        seen |= prompts
    return [
        Edge("warm prefix cache", sum(bool(s.cached_blocks) for s in sequences), off, "rollouts that share a prompt"),
        Edge("cold prefix cache", sum(not s.cached_blocks for s in sequences), off),
        Edge("prompt of an earlier step", again, hint=f"{options.returns_at} steps or more"),
    ]


def _steps(records: Sequence[StepRecord]) -> list[Edge]:
    steps = [s for r in records for s in r.traffic.steps]
    buckets = {padded for _, _, _, padded in steps}
    graphs = sum(r.traffic.graphs for r in records)
    return [
        Edge("step with prefill only", sum(p > 0 and d == 0 for p, d, _, _ in steps)),
        Edge("step with prefill and decode", sum(p > 0 and d > 0 for p, d, _, _ in steps), hint="late requests"),
        Edge("step with decode only", sum(p == 0 and d > 0 for p, d, _, _ in steps)),
        Edge("token bucket", max(0, len(buckets) - 1), hint="batches of other sizes"),
        Edge("bucket filled to its edge", sum(n == padded for _, _, n, padded in steps), hint="an exact batch size"),
        Edge("CUDA graph", graphs, "" if graphs else "no CUDA graphs in this bed", "a GPU"),
    ]


def _life(options: GrpoOptions, records: Sequence[StepRecord]) -> list[Edge]:
    late = sum(r.traffic.arrivals for r in records)
    naps = sum(r.traffic.naps for r in records)
    updates = sum(r.grad_norm > 0 for r in records[:-1])
    return [
        Edge("weight update and refit", updates, hint="two steps or more"),
        Edge("request that arrives while others decode", late, hint="late requests"),
        Edge("sleep with requests in flight", naps, hint="--nap"),
        Edge("Mamba state", len(records) * options.hybrid, "" if options.hybrid else "no Mamba layers in this model"),
        Edge("experts", len(records) * bool(options.experts), "" if options.experts else "no experts in this model"),
    ]
