"""Beds on a GPU: real Transformer Engine, inference-optimised and local models through the real dynamic engine.

What such a bed lacks on a machine is said before anything is built; the same command runs unchanged where it is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from zkl_debug.beds.bed import Bed, BedOptions
from zkl_debug.beds.faults import FAULTS
from zkl_debug.errors import UsageError
from zkl_debug.stack.applying import variables_put_back
from zkl_debug.stack.switches import Switch, applied, check_together, switch

if TYPE_CHECKING:
    from zkl_debug.beds.run import BedContext
    from zkl_debug.engines.megatron.generation import GenConfig, Request

#: Requests of the full size, tokens each generates, and the longest prompt. No sequence is longer than 512: over more
#: keys FlashAttention-4 would split them when it is free to, which it cannot on SM90, and ``--stack off`` would fail.
REQUESTS, GENERATE, LONGEST = 48, 48, 460
_FIRST_SAMPLE = 1000
_NEEDS = {"te": ("transformer_engine", "flash-attn-4"), "infopt": ("transformer_engine", "flash-attn-4")}

_COMMON = (
    "cublas-workspace",
    "cublaslt-workspace",
    "attention-flash",
    "flash-attention-4",
    "batch-invariant-mode",
    "bi-mm",
    "bi-addmm",
    "bi-log-softmax",
    "bi-mean",
)
_TE = ("bi-te-gemm", "bi-te-rmsnorm", "bi-te-normalization", "te-gemm-workspace")
_MOE = ("no-permute-fusion", "train-alltoall", "index-put-routing", "moe-ordered-combine")
_REST = ("fused-log-softmax", "chunk-edge-labels", "graph-buckets-64")
#: What avoids a path instead of mending it; not part of ``--stack on``.
_AVOID = ("no-chunked-prefill", "no-prefix-caching", "no-cuda-graphs", "max-requests-64")
#: Starving a workspace is another way to what the batch-invariant GEMM does; not part of ``--stack on`` either.
_ALTERNATIVES = ("te-gemm-workspace", "cublas-workspace", "cublaslt-workspace")
_CHOICE = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_TE_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


def gpu_ladder(known: Bed, *, graphs: bool) -> tuple[Switch, ...]:
    """What a bisection over a GPU bed varies, in ladder order; switches of graphs only where graphs are on."""
    names = [*_COMMON]
    if known.engine != "local-fa4":
        names += _TE
    if known.experts:
        names += _MOE
    names += [*_REST, *_AVOID]
    return tuple(switch(n) for n in names if graphs or n not in ("graph-buckets-64", "no-cuda-graphs"))


def gpu_switches(options: BedOptions, known: Bed) -> tuple[Switch, ...]:
    """The switches that are on in a run: the stack without what avoids a path, with single ones changed."""
    ladder = gpu_ladder(known, graphs=options.graphs)
    names = {s.name for s in ladder}
    for name in options.switches:
        if name not in names:
            raise UsageError(f"bed {known.name} has no switch {name!r}", f"one of {', '.join(sorted(names))}")
    off = {*_AVOID, *_ALTERNATIVES}
    on = tuple(s for s in ladder if options.switches.get(s.name, options.stack and s.name not in off))
    check_together(on)
    return on


def lacking(known: Bed) -> str:
    """Why the bed cannot run on this machine, or an empty string."""
    import importlib.util
    from importlib import metadata

    import torch

    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU; there is none"
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU; this one runs ROCm"
    missing = []
    for name in _NEEDS.get(known.engine, ("flash-attn-4",)):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            if importlib.util.find_spec(name.replace("-", "_")) is None:
                missing.append(name)
    return f"{', '.join(missing)} not installed" if missing else ""


def require(known: Bed) -> None:
    """Raise when the bed cannot run here.

    Raises:
        UsageError: with the reason; a bisection then calls the run untestable.
    """
    reason = lacking(known)
    if reason:
        raise UsageError(
            f"bed {known.name} is untestable here: {reason}",
            "a GPU of SM90 or newer with megatron-core, transformer_engine and flash-attn-4",
            "zkl-debug doctor, or a bed of a CPU: --bed tiny-gpt",
        )


@contextmanager
def open_gpu_bed(options: BedOptions, known: Bed) -> Iterator[BedContext]:
    """Like :func:`zkl_debug.beds.run.open_bed` for a GPU bed."""
    require(known)
    from zkl_debug.beds.run import BedContext
    from zkl_debug.engines.megatron import generation, gpu, world

    switches = gpu_switches(options, known)
    fields: dict[str, Any] = {**known.model, **known.sizes[options.size], "cuda_graphs": options.graphs}
    spec = gpu.GpuSpec(kind=known.engine, **fields)
    with ExitStack() as stack:
        stack.enter_context(_attention_choice())
        stack.enter_context(applied(switches))  # before CUDA starts: it reads its variables once
        stack.enter_context(world.world(inference_rng=options.graphs))
        built = gpu.build_gpu_model(spec, options.seed)
        generator = generation.DynamicGenerator(built, gen_config(options, spec.max_length))
        yield BedContext(options, known, spec, built, generator, switches, FAULTS["Z0"])


@contextmanager
def _attention_choice() -> Iterator[None]:
    """megatron-core sets these by the model's attention backend, and refuses a model that would set them otherwise."""
    try:
        with variables_put_back(_CHOICE):
            yield
    finally:
        transformer_engine = sys.modules.get(_TE_ATTENTION)
        if transformer_engine is not None:  # it remembers which it chose
            transformer_engine._attention_backends["backend_selection_requires_update"] = True


def gen_config(options: BedOptions, max_length: int) -> GenConfig:
    """What the engine of a GPU bed is built with."""
    from zkl_debug.engines.megatron.generation import GenConfig

    full = options.size == "full"
    chunk = max(options.chunk, 256) if full else options.chunk
    return GenConfig(
        max_tokens=chunk if options.chunked_prefill else (4096 if full else 256),
        max_requests=64 if full else 8,
        max_sequence_length=max_length,
        block_size=256,
        buffer_gb=4.0 if full else 0.5,
        chunked_prefill=options.chunked_prefill,
        prefix_caching=options.prefix_caching,
        greedy=options.greedy,
        seed=options.seed,
        cuda_graphs=4 if options.graphs else None,
    )


def full_requests(options: BedOptions, vocab: int) -> list[Request]:
    """Requests of the full size: prompts of 5 to 460 tokens, some arriving while others decode."""
    from zkl_debug.engines.megatron.generation import Request

    rng = np.random.default_rng([options.seed, 7])
    lengths = np.exp(rng.uniform(np.log(5), np.log(LONGEST), REQUESTS + options.neighbours)).astype(int)
    made = []
    for i, length in enumerate(lengths.tolist()):
        tokens = np.random.default_rng([options.seed, _FIRST_SAMPLE + i]).integers(0, vocab, length)
        made.append(Request(_FIRST_SAMPLE + i, tuple(tokens.tolist()), GENERATE, arrive=4 * (i % 4)))
    return made
