"""Generation through mcore's real dynamic engine: paged KV, mixed steps, chunked prefill, prefix cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from zkl_debug.engines.cpu import quiet

#: Request ids of the re-prefill pass are the sample id plus this.
REPREFILL_OFFSET = 10_000


@dataclass(frozen=True)
class Request:
    """One prompt. ``arrive`` is the engine step before which it is submitted (0: at the start)."""

    sample: int
    prompt: tuple[int, ...]
    n_generate: int
    arrive: int = 0


@dataclass(frozen=True)
class GenConfig:
    """What the engine is built with. ``max_tokens`` is the token budget of a step, hence the longest prefill chunk."""

    max_tokens: int = 256
    max_requests: int = 8
    max_sequence_length: int = 128
    block_size: int = 16
    chunked_prefill: bool = False
    prefix_caching: bool = False
    keep_prefix_blocks: bool = False  # LRU instead of dropping a block with its last user
    kv_management: str = "persist"  # persist | offload | recompute
    greedy: bool = True
    temperature: float = 1.0
    seed: int = 0
    buffer_gb: float = 0.01
    cuda_graphs: int | None = None  # number of CUDA graphs to capture; None for eager steps
    graphs_for_prefill: bool = False  # mixed and prefill steps replay graphs too


@dataclass(frozen=True)
class GenResult:
    """What the engine returned for one request.

    Attributes:
        sample: sample id (the re-prefill offset removed).
        request_id: id within the engine.
        tokens: prompt and generated tokens.
        prompt_length: number of prompt tokens.
        cached: leading prompt tokens that came from the prefix cache; their rows were never run.
        generated_log_probs: float32 [generated].
        prompt_log_probs: float32 [prompt_length - 1], entry i for token i + 1; NaN where the cache made it unknown.
        routing: experts of every token that ran, int64 [rows, MoE layers, top-k]; None where none was handed back.
    """

    sample: int
    request_id: int
    tokens: tuple[int, ...]
    prompt_length: int
    cached: int
    generated_log_probs: NDArray[np.float32]
    prompt_log_probs: NDArray[np.float32]
    routing: NDArray[np.int64] | None = None

    @property
    def log_probs(self) -> NDArray[np.float32]:
        """Log-probs of tokens 1..n-1, float32 [n - 1], NaN where unknown."""
        return np.concatenate([self.prompt_log_probs, self.generated_log_probs])


class DynamicGenerator:
    """``DynamicInferenceEngine`` over a model, built from the real context, wrapper and controller.

    ``engine``, ``controller``, ``context`` and ``model`` are the mcore objects. The engine is suspended between calls,
    so that the model takes training paths outside :meth:`generate`.
    """

    def __init__(self, model: nn.Module, config: GenConfig | None = None) -> None:
        self.config = config or GenConfig()
        self.model = model
        with quiet():
            self.context = _dynamic_context(model, self.config)
            self.controller = _controller(model, self.context)
            self.engine = _dynamic_engine(self.controller, self.context)
        self.engine.suspend()
        self.steps = 0

    def record_graphs(self) -> None:
        """Record this engine's CUDA graphs anew, so that a probe attached now is inside them.

        Only for an engine of one's own: graphs of the process are deleted first. Without graphs nothing happens.
        """
        if self.config.cuda_graphs is None:
            return
        from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

        with quiet():
            self.engine.resume()
            try:
                delete_cuda_graphs()
                self.engine.create_cuda_graphs()
            finally:
                self.engine.suspend()

    def generate(self, requests: Sequence[Request]) -> list[GenResult]:
        """Run all requests to their end; results in the order of ``requests``.

        A request with ``arrive == k`` is submitted before step k of this call (or as soon as the engine is idle).
        """
        waiting = deque(sorted(requests, key=lambda r: r.arrive))
        finished: dict[int, Any] = {}
        with quiet():
            self.engine.resume()
            try:
                self._seed_sampling()
                self._run(waiting, finished)
            finally:
                self.engine.suspend()
        return [result_of(request, finished[request.sample]) for request in requests]

    def reprefill(self, results: Iterable[GenResult], block: int | None = None) -> list[GenResult]:
        """Submit prompt + generated tokens as new prompts, so that generated positions exist as prefill rows.

        Sequences that share a first block go in separate waves: the prefix cache would skip the rows wanted here.
        The one token mcore samples behind each prompt is dropped.
        """
        size = block or self.config.block_size
        out: list[GenResult] = []
        for wave in _waves(list(results), size):
            requests = [Request(r.sample + REPREFILL_OFFSET, r.tokens, 1) for r in wave]
            out.extend(_without_generated(r) for r in self.generate(requests))
        return out

    def _seed_sampling(self) -> None:
        self.controller.sampling_rng.manual_seed(self.config.seed)

    def _run(self, waiting: deque[Request], finished: dict[int, Any]) -> None:
        step = 0
        while waiting or self.engine.has_unfinished_requests():
            idle = not self.engine.has_unfinished_requests()
            while waiting and (waiting[0].arrive <= step or idle):
                self._submit(waiting.popleft())
                idle = False
            for record in self.engine.step_modern()["finished_request_records"]:
                request = record.merge()
                finished[request.request_id] = request
            step += 1
            self.steps += 1

    def _submit(self, request: Request) -> None:
        from megatron.core.inference.sampling_params import SamplingParams

        sampling = SamplingParams(
            num_tokens_to_generate=request.n_generate,
            return_log_probs=True,
            skip_prompt_log_probs=False,
            top_k=1 if self.config.greedy else 0,
            temperature=self.config.temperature,
            termination_id=-1,
        )
        self.engine.add_request(request.sample, list(request.prompt), sampling)


def _dynamic_context(model: nn.Module, config: GenConfig) -> Any:
    from megatron.core.inference.config import (
        InferenceConfig,
        KVCacheManagementMode,
        MambaInferenceStateConfig,
        PrefixCachingEvictionPolicy,
    )
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    policy = PrefixCachingEvictionPolicy.LRU if config.keep_prefix_blocks else PrefixCachingEvictionPolicy.REF_ZERO
    inference = InferenceConfig(
        block_size_tokens=config.block_size,
        buffer_size_gb=config.buffer_gb,
        max_requests=config.max_requests,
        max_tokens=config.max_tokens,
        max_sequence_length=config.max_sequence_length,
        materialize_only_last_token_logits=False,
        enable_chunked_prefill=config.chunked_prefill,
        enable_prefix_caching=config.prefix_caching,
        prefix_caching_eviction_policy=policy,
        kv_cache_management_mode=KVCacheManagementMode(config.kv_management),
        num_cuda_graphs=config.cuda_graphs,
        use_cuda_graphs_for_non_decode_steps=config.graphs_for_prefill,
        mamba_inference_state_config=MambaInferenceStateConfig.from_model(model),
    )
    return DynamicInferenceContext(model.config, inference)


def _controller(model: nn.Module, context: Any) -> Any:
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

    return TextGenerationController(GPTInferenceWrapper(model, context), TokenIds())


def _dynamic_engine(controller: Any, context: Any) -> Any:
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

    return DynamicInferenceEngine(controller, context)


class TokenIds:
    """The tokenizer mcore asks for: a token's text is its number."""

    eod = -1
    bos: int | None = None

    def tokenize(self, text: str) -> list[int]:
        """Numbers separated by blanks."""
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: Sequence[int], **_options: Any) -> str:
        """Numbers separated by blanks."""
        return " ".join(str(token) for token in tokens)


def result_of(request: Request, finished: Any) -> GenResult:
    """What mcore returned for a request whose prompt log-probs were asked for; those it skipped become NaN."""
    generated = tuple(int(t) for t in finished.generated_tokens)
    known = np.array([*(finished.prompt_log_probs or ()), *(finished.generated_log_probs or ())], dtype=np.float32)
    prompt_length = len(request.prompt)
    cached = prompt_length - 1 + len(generated) - known.size
    unknown = np.full(cached, np.nan, dtype=np.float32)
    every = np.concatenate([unknown, known])
    return GenResult(
        sample=request.sample % REPREFILL_OFFSET,
        request_id=request.sample,
        tokens=request.prompt + generated,
        prompt_length=prompt_length,
        cached=cached,
        generated_log_probs=every[prompt_length - 1 :],
        prompt_log_probs=every[: prompt_length - 1],
        routing=_routing(finished),
    )


def _routing(finished: Any) -> NDArray[np.int64] | None:
    found = getattr(finished, "routing_indices", None)
    return None if found is None else np.asarray(found, np.int64)


def _without_generated(result: GenResult) -> GenResult:
    empty = np.zeros(0, dtype=np.float32)
    return replace(result, tokens=result.tokens[: result.prompt_length], generated_log_probs=empty)


def _waves(results: list[GenResult], block: int) -> list[list[GenResult]]:
    """Split so that no two sequences of a wave share their first ``block`` tokens; order is kept."""
    waves: list[list[GenResult]] = []
    for result in results:
        for wave in waves:
            if all(other.tokens[:block] != result.tokens[:block] for other in wave):
                wave.append(result)
                break
        else:
            waves.append([result])
    return waves
