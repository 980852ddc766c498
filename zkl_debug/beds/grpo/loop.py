"""The synchronous GRPO loop: refit, generate, score, loss, optimizer step; everything real, everything small."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import numpy as np

from zkl_debug.beds.grpo import data
from zkl_debug.beds.grpo.data import Batch
from zkl_debug.beds.grpo.layouts import Layout, build_layout, model_spec
from zkl_debug.beds.grpo.loss import LossConfig, clipped_loss
from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.beds.grpo.record import F32, StepRecord, make_record
from zkl_debug.beds.grpo.side import EngineSide
from zkl_debug.stack import resolve

if TYPE_CHECKING:
    from zkl_debug.capture.events import EventLog
    from zkl_debug.engines.megatron.generation import GenResult
    from zkl_debug.engines.megatron.scoring import MicroBatch

#: Keys are padded to this many in the bed's attention; sequences are shorter, and zeros change no sum.
_MIN_KEYS = 64


@dataclass
class GrpoLoop:
    """An open loop. Made by :func:`open_loop`.

    Attributes:
        options: the run.
        layout: trainer, engine and the way between them.
        step: last step begun; 0 before the first.
        version: weight version of the trainer: optimizer steps made.
        events: where events go, or None.
        on_ready: called before a step generates, when its weights are in the engine.
        records: steps done.
    """

    options: GrpoOptions
    layout: Layout
    step: int = 0
    version: int = 0
    events: EventLog | None = None
    on_ready: Callable[[GrpoLoop, Batch], None] = lambda _loop, _batch: None
    records: list[StepRecord] = field(default_factory=list)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: Any = None

    def __post_init__(self) -> None:
        from zkl_debug.engines.megatron.training import MasterAdamW

        self.vocab = model_spec(self.options).vocab
        self.optimizer = MasterAdamW(self.layout.trainer, self.options.lr)

    # ---- one step -------------------------------------------------------------------------------------------------
    def run(self, steps: int | None = None) -> list[StepRecord]:
        """Run ``steps`` more steps (default: those of the options); returns all records."""
        for _ in range(self.options.steps if steps is None else steps):
            self.run_step()
        return self.records

    def run_step(self) -> StepRecord:
        """Refit, generate, score and update once."""
        started = time.perf_counter()
        self.step += 1
        self._tell()
        batch = data.batch(self.options, self.step, self.vocab)
        if self.step > 1:
            self.prepare()
        self.on_ready(self, batch)
        results = self.generate(batch)
        uses, traffic = tuple(self.layout.side.uses), self.layout.side.traffic
        scored = self.score(results)
        version = self.version
        loss, norm = self.update(results, scored, batch)
        seconds = time.perf_counter() - started
        record = make_record(self.options, batch, version, results, scored, uses, loss, norm, seconds, traffic)
        self.records.append(record)
        return record

    def prepare(self) -> None:
        """Bring the new weights to the engine, and forget what the engine computed with the old ones."""
        with self._around("refit"):
            self.layout.refit()
        if self.options.invalidate and self.options.prefix_caching and self.options.kv != "recompute":
            with self._around("cache_reset"):
                self.layout.side.invalidate()
        if self.options.refresh:
            self.layout.side.refresh()

    def generate(self, batch: Batch, side: EngineSide | None = None) -> list[GenResult]:
        """Rollouts of a batch by the loop's engine, or by another one."""
        naps = (self.options.nap,) if self.options.nap else ()
        with self._around("generate"):
            return (side or self.layout.side).generate(batch.requests(), batch.seed, naps)

    def score(self, results: Sequence[GenResult]) -> dict[int, F32]:
        """The trainer's log-probs of tokens 1..n-1 of every sequence, by sample, before the update."""
        from zkl_debug.engines.megatron import scoring

        self.layout.trainer.eval()
        found: dict[int, F32] = {}
        for mb in self.batches(results):
            found.update(zip(mb.samples, scoring.score_microbatch(self.layout.trainer, mb), strict=True))
        return found

    def batches(self, results: Sequence[GenResult]) -> list[MicroBatch]:
        """Scoring and training batches: in order of samples, long sequences alone where the options say so."""
        from zkl_debug.engines.megatron import scoring

        options = self.options
        limit = options.alone_from or 1 << 30
        short = [(r.sample, r.tokens) for r in results if len(r.tokens) < limit]
        alone = [(r.sample, r.tokens) for r in results if len(r.tokens) >= limit]
        size = options.micro_batch
        made = [
            scoring.padded_batch(i, short[at : at + size], multiple=options.pad_multiple)
            for i, at in enumerate(range(0, len(short), size))
        ]
        return made + [scoring.padded_batch(len(made) + i, [member]) for i, member in enumerate(alone)]

    def update(self, results: Sequence[GenResult], scored: dict[int, F32], batch: Batch) -> tuple[float, float]:
        """Loss, backward and optimizer step; returns loss and gradient norm."""
        import torch

        from zkl_debug.engines.megatron.training import microbatch_logprobs

        by_sample = {r.sample: r for r in results}
        reward = data.rewards([r.tokens for r in results], [r.prompt_length for r in results])
        advantage = dict(zip(by_sample, data.advantages(reward, batch.group_size).tolist(), strict=True))
        valid = float(sum(len(r.generated_log_probs) for r in results))
        self.layout.trainer.train()
        total = 0.0
        for mb in self.batches(results):
            masks = [torch.zeros(n - 1) for n in mb.lengths]
            for mask, sample in zip(masks, mb.samples, strict=True):
                mask[by_sample[sample].prompt_length - 1 :] = 1.0
            loss = clipped_loss(
                microbatch_logprobs(self.layout.trainer, mb),
                [torch.from_numpy(scored[s]) for s in mb.samples],
                [advantage[s] for s in mb.samples],
                masks,
                valid,
                self.loss,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        for name, parameter in self.layout.trainer.named_parameters():
            if self.step < self.options.trained_from and fnmatch(name, self.options.frozen):
                parameter.grad = None
        with self._around("optimizer_step"):
            norm = self.optimizer.step()
            self.version += 1
            self._tell()
        return total, norm

    # ---- events ---------------------------------------------------------------------------------------------------
    def _around(self, name: str) -> AbstractContextManager[None]:
        return self.events.around(name) if self.events is not None else nullcontext()

    def _tell(self) -> None:
        if self.events is not None:
            self.events.step, self.events.version = self.step, self.version


@contextmanager
def surroundings(options: GrpoOptions) -> Iterator[None]:
    """What a process of the loop needs: threads, CPU backend, a world, the stack."""
    from zkl_debug.beds.run import _threads
    from zkl_debug.engines.cpu import cpu_backend
    from zkl_debug.engines.megatron import refit, world
    from zkl_debug.engines.megatron.hybrid import mamba_backend
    from zkl_debug.engines.patching import PatchSet
    from zkl_debug.stack import attention
    from zkl_debug.stack.switches import applied

    with ExitStack() as stack:
        stack.enter_context(_threads(options.threads))
        stack.enter_context(cpu_backend())
        stack.enter_context(world.world())
        if options.hybrid:
            stack.enter_context(mamba_backend())
        refit.forget_plans()
        stack.callback(refit.forget_plans)
        stack.enter_context(applied(resolve(options.stack, options.switches, options.hybrid)))
        patches = stack.enter_context(PatchSet())
        patches.set(attention, "MIN_KEYS", _MIN_KEYS)
        yield


@contextmanager
def open_loop(options: GrpoOptions) -> Iterator[GrpoLoop]:
    """A loop with everything it needs, from processes to the fault; all of it is taken down after the block."""
    from zkl_debug.beds.grpo.dedicated import Worker
    from zkl_debug.beds.grpo.faults_loop import loop_fault

    fault = loop_fault(options.fault)
    options = fault.adjust(options)
    with ExitStack() as stack:
        worker: Worker | None = None
        if options.layout == "dedicated":
            worker = Worker(options)
            stack.callback(worker.close)
        stack.enter_context(surroundings(options))
        loop = GrpoLoop(options, build_layout(options, worker))
        stack.enter_context(fault.breaks(loop))
        yield loop


def tokens_of(results: Sequence[GenResult]) -> dict[int, tuple[int, ...]]:
    """Tokens by sample."""
    return {r.sample: r.tokens for r in results}


def is_equal(results: Sequence[GenResult], scored: dict[int, F32]) -> dict[int, bool]:
    """By sample, whether every generated token's two log-probs have the same bits."""
    return {
        r.sample: bool(
            np.array_equal(
                r.generated_log_probs.view(np.uint32), scored[r.sample][r.prompt_length - 1 :].view(np.uint32)
            )
        )
        for r in results
    }
