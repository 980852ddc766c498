"""The bodies of the switches of the CPU batch-invariant stack (their data is in ``catalogue/cpu.py``).

ATen kernels are replaced for the whole process while a switch is on (autograd and every thread included); mcore's
functions are replaced at the seams that :mod:`zkl_debug.engines.megatron.seams` lists.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zkl_debug.engines.patching import aten_cpu_kernels
from zkl_debug.stack import attention, rowwise
from zkl_debug.stack.combine import ordered_unpermute

# --- ATen kernels -----------------------------------------------------------------------------------------------------


@contextmanager
def gemm_row_tiles() -> Iterator[None]:
    """mm and addmm in tiles of one fixed shape."""
    multiply = rowwise.TiledMatmul()

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return multiply(a, b)

    def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        product = multiply(a, b)
        return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)

    with aten_cpu_kernels({"mm": mm, "addmm": addmm}):
        yield


@contextmanager
def norm_rows() -> Iterator[None]:
    """Means over the last axis as a fixed tree."""

    def mean(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        axes = [d % x.dim() for d in (dim or range(x.dim()))]
        if axes != [x.dim() - 1] or x.dtype != torch.float32 or dtype not in (None, torch.float32):
            out = torch.empty(0, dtype=dtype or x.dtype)
            return torch.mean(x, dim, keepdim, dtype=dtype, out=out)
        result = rowwise.mean_last(x)
        return result if keepdim else result[..., 0]

    with aten_cpu_kernels({"mean.dim": mean}):
        yield


@contextmanager
def softmax_rows() -> Iterator[None]:
    """Softmax over the last axis row by row (the router's, and attention's where no reference replaces it)."""

    def kernel(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        if dim % x.dim() != x.dim() - 1:
            return _out_of(torch.ops.aten._softmax.out, x, dim, half_to_float)
        return rowwise.softmax(x).to(x.dtype)

    with aten_cpu_kernels({"_softmax": kernel}):
        yield


@contextmanager
def log_softmax_rows() -> Iterator[None]:
    """Scoring takes F.log_softmax, as generation does, and F.log_softmax works row by row."""
    from zkl_debug.engines.megatron import scoring
    from zkl_debug.engines.patching import patched

    def kernel(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        if dim % x.dim() != x.dim() - 1:
            return _out_of(torch.ops.aten._log_softmax.out, x, dim, half_to_float)
        return rowwise.log_softmax(x).to(x.dtype)

    def same_as_generation(logits: Tensor) -> Tensor:
        return torch.nn.functional.log_softmax(logits, dim=-1)

    with (
        aten_cpu_kernels({"_log_softmax": kernel}),
        patched(scoring, "log_softmax_impl", lambda _original: same_as_generation),
    ):
        yield


@contextmanager
def activation_rows() -> Iterator[None]:
    """silu with every element away from the scalar tail of a vectorised loop."""

    def silu(x: Tensor) -> Tensor:
        def tile(rows: Tensor) -> Tensor:
            out: Tensor = torch.ops.aten.silu.out(rows, out=torch.empty_like(rows))
            return out

        return rowwise.elementwise(tile, x)

    with aten_cpu_kernels({"silu": silu}):
        yield


@contextmanager
def rope_rows() -> Iterator[None]:
    """cos and sin of the rotary angles with every element away from the scalar tail of a vectorised loop."""

    def of(operator: Any) -> Callable[[Tensor], Tensor]:
        def kernel(x: Tensor) -> Tensor:
            return rowwise.elementwise(lambda rows: operator.out(rows, out=torch.empty_like(rows)), x)

        return kernel

    with aten_cpu_kernels({"cos": of(torch.ops.aten.cos), "sin": of(torch.ops.aten.sin)}):
        yield


def _out_of(operator: Any, x: Tensor, *args: Any) -> Tensor:
    result: Tensor = operator(x, *args, out=torch.empty(0, dtype=x.dtype))
    return result


# --- mcore functions --------------------------------------------------------------------------------------------------


@contextmanager
def attention_reference() -> Iterator[None]:
    """One per-row attention for scoring (padded and packed) and for the paged generation path."""
    from zkl_debug.engines.megatron import seams

    attend = attention.reference_attention
    with (
        seams.train_core_attention(attention.training_forward(attend)),
        seams.paged_core_attention(attention.paged_varlen(attend), attention.paged_decode(attend)),
    ):
        yield


@contextmanager
def moe_ordered_combine() -> Iterator[None]:
    """Unpermute adds a token's expert outputs one by one, in expert order."""
    from zkl_debug.engines.megatron import seams

    def wrap(_original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return ordered_unpermute

    with seams.unpermute(wrap):
        yield


@contextmanager
def chunk_edge_labels() -> Iterator[None]:
    """The prompt log-prob at a prefill chunk edge is that of the next prompt token, not of the sampled one."""
    from zkl_debug.engines.megatron import seams

    following: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()

    def note_next(original: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(self: Any, req: Any, prefill_chunk_length: int | None = None, **kwargs: Any) -> Any:
            if prefill_chunk_length is not None and prefill_chunk_length < len(req.remaining_prompt_tokens):
                token = int(req.remaining_prompt_tokens[prefill_chunk_length])
                following.setdefault(self, {})[int(req.request_id)] = token
            return original(self, req, prefill_chunk_length=prefill_chunk_length, **kwargs)

        return add_request

    def relabel(original: Callable[..., Any]) -> Callable[..., Any]:
        def calculate(self: Any, logits: Tensor, new_tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
            request = int(self.chunked_prefill_request_id)
            token = following.get(self, {}).get(request)
            if request >= 0 and token is not None:
                active = self.request_ids[self.paused_request_count : self.total_request_count]
                new_tokens = torch.where(active.to(new_tokens.device) == request, token, new_tokens)
            return original(self, logits, new_tokens, *args, **kwargs)

        return calculate

    with seams.add_request(note_next), seams.gen_log_probs(relabel):
        yield


# --- switches that change nothing here, as ladders collect them -------------------------------------------------------


@contextmanager
def reseed_sides() -> Iterator[None]:
    """A fresh CUDA RNG tracker. Nothing draws from it in eval mode."""
    from zkl_debug.engines.megatron import world

    world.seed_tracker(4321)
    yield


@contextmanager
def mamba_version_pinned() -> Iterator[None]:
    """mcore does not import mamba_ssm to ask for its version. No bed of the CPU stack has a Mamba layer."""
    from zkl_debug.engines.megatron import seams

    with seams.mamba_version("2.2.2"):
        yield


@contextmanager
def fresh_rope_cache() -> Iterator[None]:
    """mcore's process-wide cache of rotary tables is emptied. Tables of one model do not change."""
    from zkl_debug.engines.megatron import seams

    seams.clear_rotary_cache()
    yield
