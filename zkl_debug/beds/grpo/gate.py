"""The gate: loops chosen to cross every edge, each compared bit by bit, and a certificate of what was crossed.

Zero alone is no pass: a run that crossed no chunk edge says nothing about chunk edges. A certificate is *zero* only
when every token of every run is bitwise equal and every edge that the configuration has was crossed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from zkl_debug.beds.grpo import data
from zkl_debug.beds.grpo.answer import document, groups
from zkl_debug.beds.grpo.drift import Drift, Say, find_drift
from zkl_debug.beds.grpo.edges import Edge, edges_of, merged
from zkl_debug.beds.grpo.faults_loop import loop_fault
from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.errors import ExitCode
from zkl_debug.schema import Json

if TYPE_CHECKING:
    from zkl_debug.beds.grpo.loop import GrpoLoop

FORMAT = "zkl-certificate"
_ALONE = 4  # sequences that are run once more, each alone


@dataclass(frozen=True)
class Mix:
    """One way to fill a batch; ``changes`` are fields of the options."""

    name: str
    changes: dict[str, object]


#: A small prefill budget, late requests and sleep in flight; everything at once; few sequences with long prompts, each
#: scored alone. With a prefix cache prompts of one group wait for each other and are not split: hence no cache in the
#: first, and no groups in the last.
MIXES: tuple[Mix, ...] = (
    Mix("split", {"max_tokens": 128, "prefix_caching": False, "nap": 4, "late": 6}),
    Mix("whole", {"max_tokens": 512, "micro_batch": 32, "steps": 3, "returns_at": 2}),
    Mix(
        "few",
        {
            "max_tokens": 64,
            "groups": 4,
            "group_size": 1,
            "returning": (1,),
            "returns_at": 2,
            "steps": 3,
            "micro_batch": 1,
            "long_from": 1,
            "long_groups": (0, 2),
            "long_length": 41,  # what is left of 64 tokens is no whole number of KV blocks
        },
    ),
)


@dataclass(frozen=True)
class Run:
    """One loop of the gate.

    Attributes:
        layout, mix: which.
        drift: what was found; its ``onset`` is None when every step was equal.
        edges: what it crossed.
        alone: texts of what differed when sequences were run once more, each alone; empty when nothing did.
    """

    layout: str
    mix: str
    drift: Drift
    edges: tuple[Edge, ...]
    alone: tuple[str, ...] = ()

    @property
    def zero(self) -> bool:
        """Whether everything was equal."""
        return self.drift.onset is None and not self.alone


@dataclass
class Certificate:
    """The outcome.

    Attributes:
        runs: what was run, in order; after the first that is not zero the gate stops.
        seconds: of the whole gate.
    """

    runs: list[Run] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def edges(self) -> list[Edge]:
        """All edges over all runs."""
        return merged([run.edges for run in self.runs])

    @property
    def missing(self) -> list[Edge]:
        """Edges that the configuration has and nothing crossed."""
        return [edge for edge in self.edges if edge.is_missing]

    @property
    def verdict(self) -> str:
        """``zero``, ``mismatch`` or ``incomplete``."""
        if any(not run.zero for run in self.runs):
            return "mismatch"
        compared = sum(r.metrics.tokens for run in self.runs for r in run.drift.records)
        return "incomplete" if self.missing or not compared else "zero"

    @property
    def exit_code(self) -> ExitCode:
        """0 for zero only; 1 mismatch; 3 when edges were not crossed."""
        return {"zero": ExitCode.OK, "mismatch": ExitCode.DIVERGED}.get(self.verdict, ExitCode.REFUSED)


def certify(options: GrpoOptions, layouts: Sequence[str], say: Say | None = None) -> Certificate:
    """Run the gate.

    Args:
        options: what all runs have in common; a fault adjusts them as it needs.
        layouts: layouts to run; those that the fault does not fit are left out.
        say: told what is being done.
    """
    tell = say or (lambda _text: None)
    started = time.perf_counter()
    done = Certificate()
    fits = loop_fault(options.fault).layouts
    for layout in [name for name in layouts if name in fits]:
        for mix in MIXES:
            done.runs.append(_run(replace(options, layout=layout), mix, tell))
            done.seconds = time.perf_counter() - started
            if not done.runs[-1].zero:
                return done
    return done


def _run(options: GrpoOptions, mix: Mix, tell: Callable[[str], None]) -> Run:
    wanted = replace(options, prompt_log_probs=True, **_within(options, mix))  # type: ignore[arg-type]
    alone: list[str] = []
    more: list[Edge] = []

    def say(text: str) -> None:
        tell(f"{options.layout}, {mix.name}: {text}")

    def after(loop: GrpoLoop) -> None:
        say("sequences again, each alone")
        texts, edges = again_alone(loop)
        alone.extend(texts)
        more.extend(edges)

    drift = find_drift(wanted, None, say, keep=3, stop=True, light=True, after=after)
    edges = (*edges_of(drift.options, drift.records), *more)
    return Run(drift.options.layout, mix.name, drift, edges, tuple(alone))


def _within(options: GrpoOptions, mix: Mix) -> dict[str, object]:
    """The mix's fields, its steps no more than those asked for."""
    steps = min(options.steps, int(str(mix.changes.get("steps", options.steps))))
    return {**mix.changes, "steps": steps}


def again_alone(loop: GrpoLoop) -> tuple[list[str], list[Edge]]:
    """Generate once more with the newest weights, then submit some whole sequences alone: as a prompt, cold and warm.

    What was decoded in company must be what is prefilled alone, and what is scored alone, to the last bit.

    Returns:
        What differed, in words, and the edges this crossed.
    """
    loop.step += 1
    loop.prepare()
    batch = data.batch(loop.options, loop.step, loop.vocab)
    results = loop.generate(batch)
    scored = loop.score(results)
    texts: list[str] = []
    rows = {"cold": 0, "warm": 0}
    picked = results[:: max(1, len(results) // _ALONE)][:_ALONE]
    for result in picked:
        single = loop.score([result])[result.sample]
        if not _equal(single, scored[result.sample]):
            texts.append(f"sequence {result.sample}: scored alone it has other log-probs than in its micro-batch")
        for cache in ("cold", "warm"):
            got = _prefilled(loop, result.tokens, batch.seed, cold=cache == "cold")
            told = ~np.isnan(got)
            rows[cache] += int(told.sum())
            if not _equal(got[told], scored[result.sample][told]):
                texts.append(f"sequence {result.sample}: prefilled alone, cache {cache}, it has other log-probs")
    off = "" if loop.options.prefix_caching and loop.options.kv != "recompute" else "nothing is kept between requests"
    return texts, [
        Edge("sequence scored alone", len(picked)),
        Edge("decoded rows prefilled alone, cold", rows["cold"]),
        Edge("decoded rows prefilled alone, warm", rows["warm"] if not off else 0, off),
    ]


def _prefilled(loop: GrpoLoop, tokens: tuple[int, ...], seed: int, *, cold: bool) -> np.ndarray:
    """Log-probs of tokens 1..n-1 of a sequence that is submitted as a prompt; NaN where the cache had them."""
    from zkl_debug.engines.megatron.generation import Request

    side = loop.layout.side
    if cold and loop.options.prefix_caching and loop.options.kv != "recompute":
        side.invalidate()
    return side.generate([Request(0, tokens, 1)], seed)[0].prompt_log_probs


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


# ---- the document ----------------------------------------------------------------------------------------------------


def causes(run: Run) -> list[dict[str, Json]]:
    """What a run that is not zero is laid to, most telling first; empty for one that is."""
    drift = run.drift
    if drift.onset is None:
        return [{"name": "neighbours", "text": text, "step": None, "event": None} for text in run.alone]
    named: list[dict[str, Json]] = [
        {"name": g.name, "text": g.text, "step": drift.onset, "event": e.name if (e := g.findings[0].event) else None}
        for g in groups(drift.state, drift.parameters)
    ]
    if drift.kind == "table":
        named += [{"name": t["name"], "text": t["text"], "step": drift.onset, "event": None} for t in drift.table]
    if named:
        return named
    first = drift.operator.get("first") if isinstance(drift.operator, dict) else None
    site = f"; first operator {first['site']}" if isinstance(first, dict) else ""
    rule = f"; {drift.rule.text}" if drift.rule else ""
    return [{"name": drift.kind, "text": f"{drift.reason}{rule}{site}", "step": drift.onset, "event": None}]


def certificate(found: Certificate, options: GrpoOptions) -> dict[str, Json]:
    """The ``zkl-certificate`` document."""
    bad = [run for run in found.runs if not run.zero]
    return {
        "format": FORMAT,
        "version": 1,
        "verdict": found.verdict,
        "claim": {
            "equality": "bytes",
            "scope": "log-probs of every generated token and of every prompt token the engine returned",
            "tokens": sum(r.metrics.tokens for run in found.runs for r in run.drift.records),
            "steps": sum(len(run.drift.records) for run in found.runs),
        },
        "options": {"dtype": options.dtype, "stack": options.stack, "seed": options.seed, "kv": options.kv},
        "runs": [
            {
                "layout": run.layout,
                "mix": run.mix,
                "zero": run.zero,
                "steps": len(run.drift.records),
                "onset": run.drift.onset,
                "alone": list(run.alone),
            }
            for run in found.runs
        ],
        "edges": {
            "crossed": [e.to_json() for e in found.edges if e.crossed],
            "not_crossed": [e.to_json() for e in found.edges if e.is_missing],
            "absent": [e.to_json() for e in found.edges if e.absent],
        },
        "causes": [cause for run in bad for cause in causes(run)],
        "drift": document(bad[0].drift) if bad and bad[0].drift.onset is not None else None,
        "seconds": round(found.seconds, 1),
        "next": _next(found, bad, options),
    }


def _next(found: Certificate, bad: Sequence[Run], options: GrpoOptions) -> list[str]:
    if bad:
        model = " --model hybrid" if options.hybrid else " --model moe" if options.experts else ""
        fault = f" --fault {options.fault}" if options.fault else ""
        return [f"zkl-debug bisect steps --layout {bad[0].layout}{model}{fault}"]
    return [f"to cross '{edge.name}': {edge.hint}" for edge in found.missing if edge.hint]
