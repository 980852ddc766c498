"""Plain CPU stand-ins for flash attention's two entry points, over a paged KV cache.

Written the way one writes attention down first (einsum, softmax, einsum, in float32): another implementation than the
training side's ``DotProductAttention``, as flash attention is on a GPU. The two sides therefore differ here, by
rounding, for the usual reason.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor


def gather_pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first ``length`` rows [length, heads, d] of a sequence, out of pages ``cache`` [blocks, size, heads, d]."""
    size = cache.shape[1]
    pages = cache[table[: -(-length // size)].long()]
    return pages.reshape(-1, *cache.shape[2:])[:length]


def naive_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: tuple[int, int] | None = None) -> Tensor:
    """Causal attention of the last ``len(q)`` rows of a sequence; q [sq, h, d], k and v [sk, hk, d], result like q.

    ``window``: how many keys before its own, and behind, a row sees; -1 for all.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    behind = k.shape[0] - q.shape[0]
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(behind + 1)
    if window is not None and window[0] >= 0:
        hidden |= torch.ones_like(hidden).tril(behind - window[0] - 1)
    probs = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    return torch.einsum("hqk,khd->qhd", probs, v).to(q.dtype)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    _max_seqlen_q: int,
    _max_seqlen_k: int,
    softmax_scale: float | None = None,
    block_table: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
    **_options: Any,
) -> Tensor:
    """Prefill and mixed steps. q [tokens, h, d]; k, v paged; one sequence a row of ``block_table``."""
    assert block_table is not None
    scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
    out = torch.zeros_like(q)
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for seq, (first, last) in enumerate(itertools.pairwise(q_ends)):
        length = k_ends[seq + 1] - k_ends[seq]
        if last > first and length > 0:
            keys, values = (gather_pages(t, block_table[seq], length) for t in (k, v))
            out[first:last] = naive_attention(q[first:last], keys, values, scale, window_size)
    return out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float | None = None,
    block_table: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
    **_options: Any,
) -> Tensor:
    """Decode-only steps. q [sequences, tokens, h, d]; k_cache, v_cache paged; padding sequences have length 0."""
    assert block_table is not None
    scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
    out = torch.zeros_like(q)
    for seq, length in enumerate(cache_seqlens.tolist()):
        if length > 0:
            keys, values = (gather_pages(t, block_table[seq], length) for t in (k_cache, v_cache))
            out[seq] = naive_attention(q[seq], keys, values, scale, window_size)
    return out
