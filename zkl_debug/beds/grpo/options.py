"""How one run of the GRPO bed is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zkl_debug.errors import UsageError

LAYOUTS = ("colocated-shared", "colocated-inference-model", "dedicated")
DTYPES = ("fp32", "bf16")
KV_MODES = ("persist", "offload", "recompute")


@dataclass(frozen=True)
class GrpoOptions:
    """A synchronous GRPO loop. Everything is deterministic given these.

    Attributes:
        layout: who holds the weights that generate: the trainer's model itself, a second model of the same process
            that stays in eval mode, or a model of another process.
        steps: steps of the loop.
        seed: weights, prompts and sampling.
        dtype: ``fp32`` or ``bf16``.
        stack, switches: the batch-invariant stack, whole and one by one.
        fault: id of a loop fault, or None.
        groups, group_size: prompts a step, and rollouts of each.
        prompt_tokens: tokens of the shortest prompt; the longest has five more.
        layers, hidden: size of the model.
        experts: 0 for a dense model; otherwise experts of layer 1, top-2.
        hybrid: layer 0 is a Mamba layer, layer 1 attention (two layers, fp32, no experts, no prefix caching).
        tied: output layer and embedding share one weight.
        block: KV block size in tokens.
        kv: what the engine does with its KV cache while it sleeps.
        prefix_caching: share KV blocks between prompts with a common prefix; unused blocks are kept (LRU).
        invalidate: forget cached KV blocks after every refit, which mcore does not do by itself.
        refresh: let the engine's model see ``train()`` after every refit, which drops what modules derived from their
            weights; mcore does not do that by itself either.
        chunked_prefill: split prompts at the token budget of an engine step.
        prompt_log_probs: ask the engine for log-probs of prompt tokens too, and compare those it returns.
        max_tokens: that budget; a multiple of 64.
        nap: 0, or the engine step before which the engine sleeps and wakes while requests are in flight.
        late: that many of the last requests are submitted only after the nap.
        returns_at: step from which on prompts of earlier steps come back (0: never): step s repeats those of step
            ``1 + (s - 1) % (returns_at - 1)``. The default is the flagship's step 4.
        returning: groups whose prompts come back.
        long_from: step from which on some prompts are long (0: never).
        long_groups: groups with long prompts.
        long_length: prompt tokens of a long prompt.
        micro_batch: sequences in a scoring or training batch.
        pad_multiple: width of these batches.
        alone_from: sequences of at least so many tokens are scored alone, unpadded (dynamic batching); 0: never.
        lr: learning rate.
        frozen: parameters (a glob over names) that are not trained in the steps before ``trained_from``.
        trained_from: see ``frozen``.
        threads: torch threads during the run; 0 leaves the process's setting.
    """

    layout: str = "colocated-shared"
    steps: int = 8
    seed: int = 0
    dtype: str = "bf16"
    stack: bool = True
    switches: Mapping[str, bool] = field(default_factory=dict)
    fault: str | None = None
    groups: int = 16
    group_size: int = 2
    prompt_tokens: int = 12
    layers: int = 2
    hidden: int = 64
    experts: int = 0
    hybrid: bool = False
    tied: bool = False
    block: int = 8
    kv: str = "persist"
    prefix_caching: bool = True
    invalidate: bool = True
    refresh: bool = True
    chunked_prefill: bool = True
    prompt_log_probs: bool = False
    max_tokens: int = 512
    nap: int = 0
    late: int = 0
    returns_at: int = 4
    returning: tuple[int, ...] = (3,)
    long_from: int = 0
    long_groups: tuple[int, ...] = ()
    long_length: int = 40
    micro_batch: int = 8
    pad_multiple: int = 8
    alone_from: int = 0
    lr: float = 3e-3
    frozen: str = ""
    trained_from: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("layout", self.layout, LAYOUTS),
            ("kv", self.kv, KV_MODES),
            ("dtype", self.dtype, DTYPES),
        ):
            if value not in allowed:
                raise UsageError(f"{name} {value!r}", f"one of {', '.join(allowed)}")
        for name in ("steps", "groups", "group_size", "prompt_tokens", "layers", "micro_batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}", "1 or more")
        if self.hybrid and self.dtype != "fp32":
            raise UsageError(f"a hybrid model in {self.dtype}", "fp32: the engine keeps recurrent states in that dtype")
        if self.hybrid and (self.layers != 2 or self.experts or self.tied or self.prefix_caching):
            raise UsageError("a hybrid model with experts, a tied output layer, other layers or prefix caching", "none")
        if self.max_tokens <= 0 or self.max_tokens % 64:
            raise UsageError(
                f"max_tokens {self.max_tokens}", "a positive multiple of 64: mcore pads steps to 64 tokens"
            )

    @property
    def sequences(self) -> int:
        """Rollouts of a step."""
        return self.groups * self.group_size
