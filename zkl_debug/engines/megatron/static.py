"""Generation on mcore's static context: one prefill of equally long prompts, then one token a step for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from zkl_debug.engines.cpu import quiet
from zkl_debug.engines.megatron.generation import GenResult, Request


class StaticGenerator:
    """``StaticInferenceContext`` under ``GPTInferenceWrapper``: the KV cache is contiguous and holds K before RoPE.

    ``wrapper``, ``context`` and ``model`` are the mcore objects; ``context`` is replaced for every batch.
    """

    def __init__(self, model: nn.Module, max_sequence_length: int = 128, max_batch: int = 8) -> None:
        with quiet():
            from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper

            self.model = model
            self.max_sequence_length = max_sequence_length
            self.max_batch = max_batch
            self.context = self._new_context(1)
            self.wrapper = GPTInferenceWrapper(model, self.context)

    def generate(self, requests: Sequence[Request]) -> list[GenResult]:
        """Greedy decoding; requests of equal prompt length share a batch; ``arrive`` is ignored.

        Results in the order of ``requests``.
        """
        results: dict[int, GenResult] = {}
        ordered = sorted(requests, key=lambda r: len(r.prompt))
        for _, same_length in groupby(ordered, key=lambda r: len(r.prompt)):
            group = list(same_length)
            for start in range(0, len(group), self.max_batch):
                for result in self._run(group[start : start + self.max_batch]):
                    results[result.sample] = result
        return [results[r.sample] for r in requests]

    def _new_context(self, batch: int) -> Any:
        from megatron.core.inference.contexts import StaticInferenceContext

        context = StaticInferenceContext(max_batch_size=batch, max_sequence_length=self.max_sequence_length)
        context.config.materialize_only_last_token_logits = False
        return context

    def _run(self, group: list[Request]) -> list[GenResult]:
        from megatron.core.inference.utils import InferenceMode

        prompt_length = len(group[0].prompt)
        total = prompt_length + max(r.n_generate for r in group)
        tokens = torch.zeros(len(group), total, dtype=torch.int64)
        tokens[:, :prompt_length] = torch.tensor([r.prompt for r in group])
        self.context = self.wrapper.inference_context = self._new_context(len(group))
        log_probs = []
        with quiet(), InferenceMode.active():
            for first, last in [(0, prompt_length), *((at, at + 1) for at in range(prompt_length, total - 1))]:
                log_probs.append(self._step(tokens, first, last))
                if last < total:
                    tokens[:, last] = log_probs[-1][:, -1].argmax(-1)
        return self._results(group, tokens, torch.cat(log_probs, 1))

    def _step(self, tokens: Tensor, first: int, last: int) -> Tensor:
        """Run columns [first, last) of ``tokens``; log-probs [b, last - first, V]."""
        if first:
            self.context.enable_decode_mode()
        size = tokens.shape[1]
        window = self.wrapper.get_batch_for_context_window(
            {
                "tokens": tokens,
                "position_ids": torch.arange(size).expand_as(tokens),
                "attention_mask": torch.ones(1, 1, size, size, dtype=torch.bool).triu(1),
            },
            first,
            last,
        )
        logits: Tensor = self.wrapper.run_one_forward_step(window)
        return torch.nn.functional.log_softmax(logits.float(), dim=-1)

    @staticmethod
    def _results(group: list[Request], tokens: Tensor, log_probs: Tensor) -> list[GenResult]:
        selected = log_probs.gather(-1, tokens[:, 1 : log_probs.shape[1] + 1, None])[..., 0]
        results = []
        for row, request in enumerate(group):
            prompt, length = len(request.prompt), len(request.prompt) + request.n_generate
            known: NDArray[np.float32] = selected[row, : length - 1].numpy().copy()
            ids = tuple(tokens[row, :length].tolist())
            results.append(
                GenResult(
                    sample=request.sample,
                    request_id=request.sample,
                    tokens=ids,
                    prompt_length=prompt,
                    cached=0,
                    generated_log_probs=known[prompt - 1 :],
                    prompt_log_probs=known[: prompt - 1],
                )
            )
        return results
