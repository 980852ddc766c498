"""Running a bed: open it (backend, world, model, switches), then each side, generation first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.beds import spread, workload
from zkl_debug.beds.bed import SIDES, Bed, BedOptions, bed
from zkl_debug.beds.faults import Fault, fault
from zkl_debug.engines.megatron.layout import ONE, ParallelLayout
from zkl_debug.errors import UsageError
from zkl_debug.stack import Switch, resolve, switch
from zkl_debug.stack.switches import check_together

if TYPE_CHECKING:
    from zkl_debug.engines.megatron.generation import DynamicGenerator, GenResult
    from zkl_debug.engines.megatron.gpu import GpuSpec
    from zkl_debug.engines.megatron.model import ModelSpec
    from zkl_debug.engines.megatron.scoring import MicroBatch

LogProbs = NDArray[np.float32]
Sequences = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class GenSide:
    """What generation returned: the results in order of submission, and those of the re-prefill pass."""

    results: tuple[GenResult, ...]
    reprefill: tuple[GenResult, ...]
    seconds: float

    @property
    def sequences(self) -> dict[int, tuple[int, ...]]:
        """Prompt + generated tokens by sample."""
        return {r.sample: r.tokens for r in self.results}


@dataclass(frozen=True)
class TrainSide:
    """What scoring returned: log-probs of tokens 1..n-1 by sample, and the micro-batches they came from.

    ``rescored`` holds those of the second pass, empty without one.
    """

    log_probs: dict[int, LogProbs]
    rescored: dict[int, LogProbs]
    batches: tuple[MicroBatch, ...]
    seconds: float


@dataclass
class BedContext:
    """An open bed: the model, the generator, and what is switched on. Made by :func:`open_bed`.

    ``layout`` and ``rank`` (rank, world) are those of this process where the side it runs is spread over several; it
    then has a generator only if that side is the generation.
    """

    options: BedOptions
    bed: Bed
    spec: ModelSpec | GpuSpec
    model: Any
    generator: DynamicGenerator
    switches: tuple[Switch, ...]
    fault: Fault
    one_sided: Mapping[str, tuple[Switch, ...]] = field(default_factory=dict)
    layout: ParallelLayout = ONE
    rank: tuple[int, int] = (0, 1)
    sequences: dict[int, tuple[int, ...]] = field(default_factory=dict)
    prompt_lens: dict[int, int] = field(default_factory=dict)
    routing: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    @property
    def packing(self) -> bool:
        """Whether scoring packs: asked for, and possible with the attention that is in place."""
        return (
            self.options.packing and self.layout.cp == 1 and any(s.name == "attention-reference" for s in self.switches)
        )

    @contextmanager
    def side(self, name: str) -> Iterator[None]:
        """The surroundings of one side (``gen`` or ``train``). A capture session goes inside it."""
        from zkl_debug.stack.switches import applied

        before, own = self.switches, self.one_sided.get(name, ())
        self.switches = (*before, *own)
        try:
            with applied(own), self.fault.side(name, self):
                yield
        finally:
            self.switches = before

    def run_gen(self) -> GenSide:
        """Generate, then re-prefill. Repeatable; the first run defines the sequences that are scored."""
        started = time.perf_counter()
        results = self.generator.generate(workload.requests(self.options, self.spec.vocab))
        again = self.generator.reprefill(results) if self.options.reprefill else []
        done = GenSide(tuple(results), tuple(again), time.perf_counter() - started)
        self.sequences = self.sequences or done.sequences
        self.prompt_lens = self.prompt_lens or {r.sample: r.prompt_length for r in results}
        if self.options.replay_routing and not self.routing:
            self.routing = _longest_routing((*results, *again))
        return done

    def run_train(self, sequences: Sequences | None = None) -> TrainSide:
        """Score ``sequences`` (tokens by sample), by default those that :meth:`run_gen` made.

        Raises:
            UsageError: when there is nothing to score.
        """
        tokens = dict(sequences or self.sequences)
        if not tokens:
            raise UsageError("nothing to score", "sequences, or a gen run before the train run")
        tokens.update(workload.crowd(self.options, self.spec.vocab))
        started = time.perf_counter()
        batches = workload.micro_batches(self.options, tokens, packing=self.packing)
        again = workload.rescoring_batches(self.options, tokens, len(batches))
        batches, again = (spread.own_batches(group, self.layout) for group in (batches, again))
        log_probs, rescored = (self._score(group) for group in (batches, again))
        return TrainSide(log_probs, rescored, (*batches, *again), time.perf_counter() - started)

    def _score(self, batches: Sequence[MicroBatch]) -> dict[int, LogProbs]:
        from zkl_debug.engines.megatron import scoring

        log_probs: dict[int, LogProbs] = {}
        for batch in batches:
            with self._replaying(batch):
                log_probs.update(zip(batch.samples, scoring.score_microbatch(self.model, batch), strict=True))
        return log_probs

    def _replaying(self, batch: MicroBatch) -> AbstractContextManager[None]:
        if not self.options.replay_routing:
            return nullcontext()
        from zkl_debug.engines.megatron import replaying

        return replaying.replaying(batch, self.routing)


def _longest_routing(results: Sequence[GenResult]) -> dict[int, NDArray[np.int64]]:
    """Recorded experts by sample: of the re-prefill pass where there is one, for it ran the last token as well."""
    found: dict[int, NDArray[np.int64]] = {}
    for result in results:
        known = found.get(result.sample)
        if result.routing is not None and (known is None or len(result.routing) > len(known)):
            found[result.sample] = result.routing
    return found


@dataclass(frozen=True)
class BedRun:
    """Both sides of one run; either may be None when it was not asked for."""

    options: BedOptions
    gen: GenSide | None
    train: TrainSide | None

    def mismatches(self) -> dict[str, int]:
        """Log-probs not bitwise equal, in ``prompt``, ``generated`` and ``reprefill``; and how many were compared."""
        assert self.gen is not None
        assert self.train is not None
        count = {"prompt": 0, "generated": 0, "reprefill": 0, "compared": 0}
        for result in self.gen.results:
            scored = self.train.log_probs[result.sample]
            cut = result.prompt_length - 1
            for name, a, b in (
                ("prompt", result.prompt_log_probs, scored[:cut]),
                ("generated", result.generated_log_probs, scored[cut:]),
            ):
                known = ~np.isnan(a)
                count[name] += int((a.view(np.uint32) != b.view(np.uint32))[known].sum())
                count["compared"] += int(known.sum())
        for result in self.gen.reprefill:
            scored = self.train.log_probs[result.sample]
            count["reprefill"] += int((result.log_probs.view(np.uint32) != scored.view(np.uint32)).sum())
            count["compared"] += scored.size
        return count

    @property
    def zero(self) -> bool:
        """Whether every log-prob that both sides computed is bitwise equal."""
        count = self.mismatches()
        return not (count["prompt"] or count["generated"] or count["reprefill"])


OnSide = Callable[[BedContext, str], AbstractContextManager[Any]]


@contextmanager
def open_bed(options: BedOptions, side: str = "", *, other_side_spread: bool = False) -> Iterator[BedContext]:
    """Everything a run needs, set up inside the block and taken down after it: CPU backend, world, model, switches.

    Args:
        options: the run.
        side: in a process that is one rank of this side, the side; else empty.
        other_side_spread: this process runs a side that is on one rank, while the other is on several.

    Raises:
        UsageError: for a side on several ranks in a process that is none of them.
    """
    known = bed(options.bed)
    if known.on_gpu:
        from zkl_debug.beds.gpu import open_gpu_bed

        with open_gpu_bed(options, known) as context:
            yield context
        return
    put_in = fault(options.fault, options.bed, options.dtype)
    options = spread.fit_options(put_in.adjust(options))
    if options.spread and not side and not other_side_spread:
        text = " and ".join(one.text for one in spread.layouts(options))
        raise UsageError(
            f"bed {options.bed} on several ranks ({text}) in one process",
            "a run on one rank",
            "zkl-debug capture runs it",
        )
    if known.hybrid:  # mcore then caches recurrent states as well, by kernels that a CPU has not
        options = replace(options, prefix_caching=False)
    changes = {**options.switches, **dict.fromkeys(options.one_sided, False)}
    _check_experts(options)
    switches = resolve(options.stack, changes, known.hybrid)
    one_sided = _one_sided(options, switches)
    layout = spread.layout_of(options, side)

    from zkl_debug.engines.cpu import cpu_backend
    from zkl_debug.engines.megatron import generation, hybrid, model, world
    from zkl_debug.stack.switches import applied

    replay = {"routing_replay": True} if options.replay_routing else {}
    spec = spread.fit_spec(model.ModelSpec(**{**known.model, **put_in.model, **replay}), options)
    with ExitStack() as stack:
        stack.enter_context(_threads(options.threads))
        stack.enter_context(cpu_backend())
        stack.enter_context(world.ranked_world(layout) if side else world.world())
        if known.hybrid:
            stack.enter_context(hybrid.mamba_backend())
        stack.enter_context(applied(switches))
        if known.hybrid:
            built = hybrid.build_hybrid(spec, options.dtype, options.seed, known.pattern)
        else:
            built = model.build_model(spec, options.dtype, options.seed, layout)
        generator: Any = None
        if side != "train":
            generator = generation.DynamicGenerator(built, _gen_config(options, spec.max_length))
        rank = spread.rank_and_world() if side else (0, 1)
        yield BedContext(options, known, spec, built, generator, switches, put_in, one_sided, layout, rank)


def _check_experts(options: BedOptions) -> None:
    """A format of expert layers does nothing in a model that has none.

    Raises:
        UsageError: naming the switch that stands for it in a dense model.
    """
    from zkl_debug.stack.catalogue.precision import PRECISIONS

    on = {name for name, value in options.switches.items() if value} | set(options.one_sided)
    for name in (s.name for s in PRECISIONS if s.name in on and s.name.endswith("-experts")):
        if not bed(options.bed).experts:
            dense = name.replace("-experts", "-linear")
            raise UsageError(
                f"switch {name} in bed {options.bed}, which has no experts", f"{dense}, or a bed with experts: tiny-moe"
            )


def _one_sided(options: BedOptions, switches: Sequence[Switch]) -> dict[str, tuple[Switch, ...]]:
    """Switches that are on round one side alone, by side.

    Raises:
        SwitchError: they do not go together with those of both sides.
    """
    found: dict[str, tuple[Switch, ...]] = {}
    for side in SIDES:
        names = [name for name, where in options.one_sided.items() if where == side]
        own = tuple(switch(name) for name in names)
        for s in own:
            if not s.carried or s.kind in ("engine key", "model key"):
                raise UsageError(f"switch {s.name} cannot be on {side} alone", "it shapes what both sides share")
        check_together((*switches, *own))
        found[side] = own
    return found


def _gen_config(options: BedOptions, max_length: int) -> Any:
    from zkl_debug.engines.megatron.generation import GenConfig

    return GenConfig(
        max_tokens=options.chunk if options.chunked_prefill else 256,
        max_sequence_length=max_length,
        chunked_prefill=options.chunked_prefill,
        prefix_caching=options.prefix_caching,
        greedy=options.greedy,
        seed=options.seed,
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_bed(options: BedOptions, on_side: OnSide | None = None, sequences: Sequences | None = None) -> BedRun:
    """Run the sides of ``options.sides``, generation first.

    Args:
        options: the run.
        on_side: called as ``on_side(context, side)`` for each side once its surroundings (switches, fault) are in
            place; what it returns is entered round the side's work. This is where a capture session goes.
        sequences: tokens by sample to score instead of the generated ones.
    """
    gen: GenSide | None = None
    train: TrainSide | None = None
    enter = on_side or (lambda _context, _side: nullcontext())
    with open_bed(options) as context:
        if "gen" in options.sides:
            with context.side("gen"), enter(context, "gen"):
                gen = context.run_gen()
        if "train" in options.sides:
            with context.side("train"), enter(context, "train"):
                train = context.run_train(sequences)
    return BedRun(options, gen, train)
