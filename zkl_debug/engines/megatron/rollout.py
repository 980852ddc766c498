"""Rollouts of a loop through the real dynamic engine: sampled, one seed a step, with sleep and wake in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn

from zkl_debug.engines.cpu import quiet
from zkl_debug.engines.megatron.generation import DynamicGenerator, GenConfig, GenResult, Request, result_of


@dataclass(frozen=True)
class BlockUse:
    """KV blocks a request was given when (a chunk of) its prompt was admitted, or, with ``length`` 0, while it decoded.

    Attributes:
        request: request id.
        blocks: all blocks of the request so far, in order.
        cached: how many of the blocks admitted now came from the prefix cache.
        first: index of the first block admitted now.
        start: prompt tokens admitted before.
        length: prompt tokens admitted now.
        prompt: prompt length.
        held_by: other requests in flight that held one of the blocks given now, those of the prefix cache aside.
        written_by: those of them that were writing into it: it was their last block.
    """

    request: int
    blocks: tuple[int, ...]
    cached: int
    first: int
    start: int
    length: int
    prompt: int
    held_by: tuple[int, ...] = ()
    written_by: tuple[int, ...] = ()

    @property
    def hit(self) -> tuple[int, ...]:
        """Blocks that came from the prefix cache."""
        return self.blocks[self.first : self.first + self.cached]


@dataclass
class Traffic:
    """What the steps of one generation were made of.

    Attributes:
        steps: (prefill requests, decode requests, tokens, tokens after padding) of every engine step.
        naps: times the engine slept with requests in flight.
        arrivals: requests submitted while others were decoding.
        graphs: steps that ran a captured CUDA graph.
        leftovers: (request, slot, request that had the slot before or -1) where a recurrent slot was given to a request
            and was not zero when its first step ran.
    """

    steps: list[tuple[int, int, int, int]] = field(default_factory=list)
    naps: int = 0
    arrivals: int = 0
    graphs: int = 0
    leftovers: list[tuple[int, int, int]] = field(default_factory=list)


class RolloutGenerator(DynamicGenerator):
    """The dynamic engine as a loop uses it.

    Prompt log-probs are not asked for, as in NeMo-RL, unless ``prompt_log_probs``. ``uses`` tells, after a generation,
    which KV blocks every request was given. ``naps`` are engine steps before which the engine sleeps and wakes while
    requests are in flight; ``on_nap`` is called between.
    """

    def __init__(self, model: nn.Module, config: GenConfig, prompt_log_probs: bool = False) -> None:
        super().__init__(model, config)
        self.prompt_log_probs = prompt_log_probs
        self.uses: list[BlockUse] = []
        self.traffic = Traffic()
        self.naps: tuple[int, ...] = ()
        self.on_nap: Callable[[], None] = lambda: None
        self.context.add_request = self._noted
        self._given: list[tuple[int, int]] = []  # (request, recurrent slot), not looked at yet
        self._had: dict[int, int] = {}  # request that had a recurrent slot last
        if self.context.is_hybrid_model:
            self.context._execute_pending_mamba_ops = self._slots_prepared

    def reseed(self, seed: int) -> None:
        """Sampling of the next generation starts from ``seed``."""
        self.config = replace(self.config, seed=seed)

    def generate(self, requests: Sequence[Request]) -> list[GenResult]:
        """Run all requests to their end; ``cached`` of a result counts tokens served by the prefix cache."""
        self.uses, self.traffic = [], Traffic()
        finished: dict[int, Any] = {}
        waiting = deque(sorted(requests, key=lambda r: r.arrive))
        with quiet():
            self.engine.resume()
            try:
                self._seed_sampling()
                self._run(waiting, finished)
            finally:
                self.engine.suspend()
        told = result_of if self.prompt_log_probs else _result
        return [told(request, finished[request.sample]) for request in requests]

    def _run(self, waiting: deque[Request], finished: dict[int, Any]) -> None:
        step = 0
        while waiting or self.engine.has_unfinished_requests():
            if step and step in self.naps and self.engine.has_unfinished_requests():
                self.traffic.naps += 1
                self.engine.suspend()
                self.on_nap()
                self.engine.resume()
            idle = not self.engine.has_unfinished_requests()
            while waiting and (waiting[0].arrive <= step or idle):
                self.traffic.arrivals += not idle and step > 0
                self._submit(waiting.popleft())
                idle = False
            self._note_growth()
            for record in self.engine.step_modern()["finished_request_records"]:
                request = record.merge()
                finished[request.request_id] = request
            self._count_step()
            step += 1
            self.steps += 1

    def _submit(self, request: Request) -> None:
        from megatron.core.inference.sampling_params import SamplingParams

        sampling = SamplingParams(
            num_tokens_to_generate=request.n_generate,
            return_log_probs=True,
            skip_prompt_log_probs=not self.prompt_log_probs,
            top_k=1 if self.config.greedy else 0,
            temperature=self.config.temperature,
            termination_id=-1,
        )
        self.engine.add_request(request.sample, list(request.prompt), sampling)

    def _count_step(self) -> None:
        """What the step that just ran was made of; mcore keeps its dimensions until the next one."""
        real, padded = self.context.batch_dimensions, self.context.padded_batch_dimensions
        counts = (real.prefill_req_count, real.decode_req_count, real.token_count, padded.token_count)
        self.traffic.steps.append(counts)
        self.traffic.graphs += bool(self.context.using_cuda_graph_this_step())

    def _slots_prepared(self) -> None:
        """mcore zeroes new recurrent slots right before a step; those that are not zero then hold someone's state."""
        context = self.context
        type(context)._execute_pending_mamba_ops(context)
        for request, slot in self._given:
            if bool(context.mamba_ssm_states[:, slot].any()) or bool(context.mamba_conv_states[:, slot].any()):
                self.traffic.leftovers.append((request, slot, self._had.get(slot, -1)))
            self._had[slot] = request
        self._given.clear()

    def _note_growth(self) -> None:
        """Blocks that requests in flight were given since they were last looked at."""
        known = {use.request: use for use in self.uses}
        table = block_table(self.context)
        for request, blocks in table.items():
            last = known.get(request)
            if last is not None and len(blocks) > len(last.blocks):
                first, start = len(last.blocks), last.start + last.length
                others = _holders(table, blocks[first:], request)
                self.uses.append(BlockUse(request, blocks, 0, first, start, 0, last.prompt, *others))

    def _noted(self, req: Any, prefill_chunk_length: int | None = None, **kwargs: Any) -> Any:
        context = self.context
        before, cached_before = int(req.finished_chunk_token_count), int(req.num_cached_tokens)
        slot, table = int(context.total_request_count), block_table(context)
        length = prefill_chunk_length if prefill_chunk_length is not None else int(req.remaining_prompt_length)
        # Looked up on the class at every call: taps and switches replace it there.
        result = type(context).add_request(context, req, prefill_chunk_length=prefill_chunk_length, **kwargs)
        size = int(context.block_size_tokens)
        count = int(context.request_kv_block_counts[slot])
        blocks = tuple(int(b) for b in context.request_to_kv_block_ids[slot][:count].tolist())
        cached = (int(req.num_cached_tokens) - cached_before) // size
        request, first = int(req.request_id), -(-before // size)
        if context.is_hybrid_model and before == 0:
            self._given.append((request, int(context.mamba_metadata.request_to_mamba_state_idx[slot])))
        others = _holders(table, blocks[first + cached :], request)
        self.uses.append(BlockUse(request, blocks, cached, first, before, length, len(req.prompt_tokens), *others))
        return result


def _holders(
    table: Mapping[int, tuple[int, ...]], blocks: Sequence[int], request: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Other requests of a block table that hold one of ``blocks``, and those of them whose last block it is."""
    others = {r: held for r, held in table.items() if r != request and not set(blocks).isdisjoint(held)}
    return tuple(others), tuple(r for r, held in others.items() if held[-1] in blocks)


def block_table(context: Any) -> dict[int, tuple[int, ...]]:
    """Blocks of every request that is in flight, by request id."""
    count = int(context.total_request_count)
    ids = context.request_ids[:count].tolist() if count else []
    table = context.request_to_kv_block_ids[:count].tolist() if count else []
    return {int(r): tuple(int(b) for b in row if b >= 0) for r, row in zip(ids, table, strict=True)}


def _result(request: Request, finished: Any) -> GenResult:
    generated = tuple(int(t) for t in finished.generated_tokens)
    log_probs = np.array(finished.generated_log_probs or (), dtype=np.float32)
    return GenResult(
        sample=request.sample,
        request_id=request.sample,
        tokens=request.prompt + generated,
        prompt_length=len(request.prompt),
        cached=int(finished.num_cached_tokens),
        generated_log_probs=log_probs,
        prompt_log_probs=np.full(max(0, len(request.prompt) - 1), np.nan, dtype=np.float32),
    )
