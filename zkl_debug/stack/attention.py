"""One attention for both sides: a query row's arithmetic depends on its position and on its own K and V rows only."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zkl_debug.engines.paged_attention import gather_pages
from zkl_debug.stack.rowwise import in_row_tiles, next_power_of_two, tree_sum

#: Keys are padded to at least this many, so that sequences of up to this length share one summation tree. Beyond it the
#: tree grows by adding exact zeros, which changes nothing.
MIN_KEYS = 128
_TILE = 16384

#: (q [n, heads, d], k [m, groups, d], v [m, groups, d], scale) -> [n, heads, d]: attention of the last n rows of m.
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def reference_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None = None) -> Tensor:
    """Causal attention of the last ``len(q)`` rows of a sequence of ``len(k)``, in float32, rounded once at the end.

    With a sliding window a row sees itself and the ``left`` rows before it.
    """
    out, total, _ = attention_parts(q, k, v, scale, left=left)
    return (out / total[..., None]).to(q.dtype)


def attention_parts(
    q: Tensor, k: Tensor, v: Tensor, scale: float, keys: slice | None = None, left: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised attention over a part of the keys.

    Args:
        q: [n, heads, d], the last n rows of the sequence.
        k, v: [m, groups, d].
        scale: softmax scale.
        keys: the keys to use (all by default), still subject to causality.
        left: with a sliding window, how many keys before its own a row sees.

    Returns:
        sum of exp(score - max) * v, float32 [n, heads, d]; sum of exp(score - max) [n, heads]; max [n, heads]
        (-inf where a row sees none of the keys).
    """
    n, heads, _ = q.shape
    m = k.shape[0]
    size = max(MIN_KEYS, next_power_of_two(m))
    k32, v32 = (padded_heads(t, heads, size) for t in (k, v))
    index = torch.arange(size)
    allowed = index <= torch.arange(m - n, m)[:, None]
    if left is not None:
        allowed &= index >= torch.arange(m - n, m)[:, None] - left
    if keys is not None:
        allowed &= (index >= (keys.start or 0)) & (index < (m if keys.stop is None else keys.stop))
    rows = max(1, _TILE // (heads * size))
    tiles = [
        _tile(qt.float(), k32, v32, scale, at)
        for qt, at in zip(torch.split(q, rows), torch.split(allowed, rows), strict=True)
    ]
    out, total, top = (torch.cat(parts) for parts in zip(*tiles, strict=True))
    return out, total, top


def padded_heads(t: Tensor, heads: int, size: int) -> Tensor:
    """[m, groups, d] -> float32 [heads, size, d], zero rows behind m."""
    wide = t.float().repeat_interleave(heads // t.shape[1], 1).transpose(0, 1)
    out = wide.new_zeros(heads, size, t.shape[2])
    out[:, : t.shape[0]] = wide
    return out


def key_weights(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """exp(score - max) of the last n rows over all keys, float32 [n, heads, size] (0 where hidden), and its sum.

    ``size`` is the padded number of keys; :func:`padded_heads` brings V to the same size.
    """
    n, heads, _ = q.shape
    m = k.shape[0]
    size = max(MIN_KEYS, next_power_of_two(m))
    k32 = padded_heads(k, heads, size)
    allowed = torch.arange(size) <= torch.arange(m - n, m)[:, None]
    rows = max(1, _TILE // (heads * size))
    tiles = [
        _weights(qt.float(), k32, scale, at)[:2]
        for qt, at in zip(torch.split(q, rows), torch.split(allowed, rows), strict=True)
    ]
    exps, total = (torch.cat(parts) for parts in zip(*tiles, strict=True))
    return exps, total


def _tile(q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [r, heads, d], k and v [heads, size, d], allowed [r, size]."""
    exps, total, top = _weights(q, k, scale, allowed)
    return tree_sum(exps[..., None] * v[None], 2), total, top


def _weights(q: Tensor, k: Tensor, scale: float, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(score - max) [r, heads, size], its sum and the max, both [r, heads]."""
    depth = next_power_of_two(q.shape[-1])
    products = torch.nn.functional.pad(q[:, :, None, :] * k[None], (0, depth - q.shape[-1]))
    scores = (tree_sum(products) * scale).masked_fill(~allowed[:, None, :], float("-inf"))
    top = scores.amax(-1)
    shifted = scores - torch.where(top.isinf(), 0.0, top)[..., None]
    exps = in_row_tiles(torch.exp, shifted.reshape(-1, shifted.shape[-1])).reshape(shifted.shape)
    return exps, tree_sum(exps), top


def windowed(attend: Attend, window: Any) -> Attend:
    """``attend`` with mcore's (left, right) window; as it is where there is none."""
    left = -1 if window is None else int(window[0])
    if left < 0:
        return attend
    inside: Any = attend
    return functools.partial(inside, left=left)


def training_forward(attend: Attend) -> Callable[[Any], Any]:
    """A wrap of ``DotProductAttention.forward`` that runs ``attend`` per sequence, padded or packed (thd)."""

    def wrap(_original: Any) -> Any:
        def forward(
            self: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: Any = None,
            attention_bias: Tensor | None = None,
            packed_seq_params: Any = None,
        ) -> Tensor:
            assert attention_bias is None
            del attn_mask_type
            from zkl_debug.engines.megatron.seams import attention_window

            inside = windowed(attend, attention_window(self))
            if packed_seq_params is not None:
                return packed_attention(inside, query, key, value, packed_seq_params, self.softmax_scale)
            out = torch.zeros_like(query)
            for seq, first in enumerate(_first_keys(attention_mask, query.shape[1], key.shape[0])):
                rows = slice(max(0, first - (key.shape[0] - query.shape[0])), None)
                args = (query[rows, seq], key[first:, seq], value[first:, seq])
                out[rows, seq] = inside(*args, self.softmax_scale)
            return out.flatten(2)

        return forward

    return wrap


def _first_keys(mask: Tensor | None, batch: int, keys: int) -> list[int]:
    """For each sequence the first key its last query sees (left padding hides those before it)."""
    if mask is None or mask.shape[0] != batch or mask.shape[-1] != keys:
        return [0] * batch
    return [int(row.logical_not().to(torch.int8).argmax()) for row in mask[:, 0, -1]]


def segments(packed_seq_params: Any) -> list[tuple[int, int]]:
    """(start, length) of every sequence of a pack, padding excluded."""
    lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
    padded = packed_seq_params.cu_seqlens_q_padded
    starts = (packed_seq_params.cu_seqlens_q if padded is None else padded)[:-1].tolist()
    return list(zip(starts, lengths, strict=True))


def packed_attention(attend: Attend, q: Tensor, k: Tensor, v: Tensor, packed_seq_params: Any, scale: float) -> Tensor:
    """Attention within each sequence of a pack; q [t, heads, d]; padding rows are zero."""
    out = torch.zeros_like(q)
    for start, length in segments(packed_seq_params):
        span = slice(start, start + length)
        out[span] = attend(q[span], k[span], v[span], scale)
    return out


def paged_varlen(
    attend: Attend, attend_decode: Attend | None = None, n_decode: Callable[[], int] = lambda: 0
) -> Callable[[Any], Any]:
    """A wrap of ``flash_attn_varlen_func`` (prefill and mixed steps).

    In a mixed step the decoding sequences come first; the first ``n_decode()`` of a call take ``attend_decode``.
    """

    def wrap(_original: Any) -> Any:
        def varlen(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            cu_seqlens_q: Tensor,
            cu_seqlens_k: Tensor,
            *_lengths: int,
            softmax_scale: float | None = None,
            block_table: Tensor | None = None,
            window_size: tuple[int, int] | None = None,
            **_options: Any,
        ) -> Tensor:
            assert block_table is not None
            scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
            out = torch.zeros_like(q)
            ends, lengths = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
            decoding = n_decode()
            for seq, (first, last) in enumerate(itertools.pairwise(ends)):
                if last > first and lengths[seq] > 0:
                    fn = attend_decode if attend_decode is not None and seq < decoding else attend
                    keys, values = (gather_pages(t, block_table[seq], lengths[seq]) for t in (k, v))
                    out[first:last] = windowed(fn, window_size)(q[first:last], keys, values, scale)
            return out

        return varlen

    return wrap


def paged_decode(attend: Attend) -> Callable[[Any], Any]:
    """A wrap of ``flash_attn_with_kvcache`` (decode-only steps)."""

    def wrap(_original: Any) -> Any:
        def decode(
            q: Tensor,
            k_cache: Tensor,
            v_cache: Tensor,
            cache_seqlens: Tensor,
            softmax_scale: float | None = None,
            block_table: Tensor | None = None,
            window_size: tuple[int, int] | None = None,
            **_options: Any,
        ) -> Tensor:
            assert block_table is not None
            scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
            out = torch.zeros_like(q)
            for seq, length in enumerate(cache_seqlens.tolist()):
                if length > 0:
                    keys, values = (gather_pages(t, block_table[seq], length) for t in (k_cache, v_cache))
                    out[seq] = windowed(attend, window_size)(q[seq], keys, values, scale)
            return out

        return decode

    return wrap
