"""Ways to break one thing in a bed, with the constants and the place left open."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zkl_debug.engines.megatron import scoring, seams
from zkl_debug.engines.patching import patched
from zkl_debug.stack import attention, rowwise
from zkl_debug.stack.combine import ordered_unpermute

F16 = torch.float16


def module_output(path: str, change: Callable[[Tensor], Tensor]) -> Any:
    """Change what one module returns."""

    @contextmanager
    def breaks(context: Any) -> Iterator[None]:
        module = context.model.get_submodule(path)

        def wrap(original: Any) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                out = original(*args, **kwargs)
                return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

            return forward

        with patched(module, "forward", wrap):
            yield

    return breaks


def added(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(operator.add, parts)


def rounded(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(dtype).to(t.dtype)


def norm_forward(path: str, make: Callable[[Any, Tensor], Tensor]) -> Any:
    @contextmanager
    def breaks(context: Any) -> Iterator[None]:
        module = context.model.get_submodule(path)
        with patched(module, "forward", lambda _original: lambda x: make(module, x)):
            yield

    return breaks


def norm_partials(parts: int, limit: int) -> Any:
    """Sum of squares in ``parts`` strided partial sums in calls of at least ``limit`` rows, else in one go."""

    @contextmanager
    def breaks(_context: Any) -> Iterator[None]:
        def wrap(original: Any) -> Any:
            def forward(self: Any, x: Tensor) -> Tensor:
                if x.numel() // x.shape[-1] < limit:
                    plain: Tensor = original(self, x)
                    return plain
                squares = x.float().square().reshape(*x.shape[:-1], -1, parts)
                sums = squares[..., 0, :]
                for step in range(1, squares.shape[-2]):
                    sums = sums + squares[..., step, :]
                total = sums[..., 0]
                for part in range(1, parts):
                    total = total + sums[..., part]
                scale = torch.rsqrt(total[..., None] / x.shape[-1] + self.eps)
                result: Tensor = (x.float() * scale * self.weight.float()).to(x.dtype)
                return result

            return forward

        with patched(torch.nn.RMSNorm, "forward", wrap):
            yield

    return breaks


def linear_split(path: str, cuts: int, applies: Callable[[int], bool]) -> Any:
    """One linear layer sums K in ``cuts`` chunks for calls of some numbers of rows."""

    @contextmanager
    def breaks(context: Any) -> Iterator[None]:
        weight = context.model.get_submodule(path).weight

        def wrap(original: Any) -> Any:
            def linear(*args: Any, **kwargs: Any) -> Any:
                x: Tensor = kwargs["input"] if "input" in kwargs else args[0]
                w: Tensor = kwargs["weight"] if "weight" in kwargs else args[1]
                rows = x.reshape(-1, x.shape[-1])
                if w is not weight or not applies(rows.shape[0]):
                    return original(*args, **kwargs)
                parts = zip(rows.chunk(cuts, 1), w.chunk(cuts, 1), strict=True)
                out = added(torch.mm(a, b.t()) for a, b in parts)
                return out.reshape(*x.shape[:-1], w.shape[0])

            linear.warned = True  # type: ignore[attr-defined]
            return linear

        with seams.linear_forward(wrap):
            yield

    return breaks


def gen_attention(attend: Any, decode: Any = None) -> Any:
    @contextmanager
    def breaks(context: Any) -> Iterator[None]:
        n_decode = (lambda: int(context.generator.context.num_decode_requests)) if decode else (lambda: 0)
        mixed = attention.paged_varlen(attend, decode, n_decode)
        with seams.paged_core_attention(mixed, attention.paged_decode(decode or attend)):
            yield

    return breaks


def split_keys(parts: int) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        m = k.shape[0]
        if m < parts:
            return attention.reference_attention(q, k, v, scale)
        edges = [m * i // parts for i in range(parts + 1)]
        outs, lses = [], []
        for a, b in pairwise(edges):
            out, total, top = attention.attention_parts(q, k, v, scale, slice(a, b))
            safe = torch.where(total > 0, total, 1.0)
            outs.append((out / safe[..., None]).to(q.dtype).float())
            lses.append(torch.where(total > 0, top + safe.log(), float("-inf")))
        lse = torch.logsumexp(torch.stack(lses), 0)
        merged = added(o * (part - lse).exp()[..., None] for o, part in zip(outs, lses, strict=True))
        return merged.to(q.dtype)

    return attend


def window(keys: int) -> Any:
    """Only the last ``keys`` keys are seen."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        n, m = q.shape[0], k.shape[0]
        rows = [
            attention.reference_attention(
                q[i : i + 1], k[max(0, p - keys + 1) : p + 1], v[max(0, p - keys + 1) : p + 1], scale
            )
            for i, p in enumerate(range(m - n, m))
        ]
        return torch.cat(rows)

    return attend


def bf16_probabilities(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    exps, total = attention.key_weights(q, k, scale)
    probs = (exps / total[..., None]).to(torch.bfloat16).float()
    values = attention.padded_heads(v, q.shape[1], probs.shape[-1])
    return rowwise.tree_sum(probs[..., None] * values[None], 2).to(q.dtype)


def other_scale(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return attention.reference_attention(q, k, v, scale * 1.25)


def other_kv_heads(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return attention.reference_attention(q, k.roll(1, 1), v.roll(1, 1), scale)


def left_out(path: str) -> Any:
    """A module that hands on what it was given."""

    @contextmanager
    def breaks(context: Any) -> Iterator[None]:
        module = context.model.get_submodule(path)
        with patched(module, "forward", lambda _original: lambda x, *_args, **_kwargs: x):
            yield

    return breaks


def activated(function: Callable[[Tensor], Tensor]) -> Any:
    """Another activation in every layer."""

    @contextmanager
    def breaks(context: Any) -> Iterator[None]:
        config = context.model.config
        before, config.activation_func = config.activation_func, function
        try:
            yield
        finally:
            config.activation_func = before

    return breaks


def one_expert(which: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Change what one expert of every layer returns."""

    @contextmanager
    def breaks(_context: Any) -> Iterator[None]:
        def wrap(original: Any) -> Any:
            def forward(self: Any, hidden: Tensor, counts: Any, probs: Tensor, *args: Any, **kwargs: Any) -> Any:
                out, bias = original(self, hidden, counts, probs, *args, **kwargs)
                ends = [0, *torch.as_tensor(counts).cumsum(0).tolist()]
                out = out.clone()
                out[ends[which] : ends[which + 1]] = change(out[ends[which] : ends[which + 1]])
                return out, bias

            return forward

        with seams.expert_forward(wrap):
            yield

    return breaks


def combine(layer: int, change: Callable[..., Tensor]) -> Any:
    """Another combine in the one MoE layer with that number."""

    @contextmanager
    def breaks(context: Any) -> Iterator[None]:
        inside = [False]
        mlp = context.model.get_submodule(f"decoder.layers.{layer}.mlp")

        def around(original: Any) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                inside[0] = True
                try:
                    return original(*args, **kwargs)
                finally:
                    inside[0] = False

            return forward

        def wrap(original: Any) -> Any:
            return lambda *args, **kwargs: (change if inside[0] else original)(*args, **kwargs)

        with patched(mlp, "forward", around), seams.unpermute(wrap):
            yield

    return breaks


def rotated_combine(permuted_tokens: Tensor, sorted_indices: Tensor, restore_shape: Any, **_options: Any) -> Tensor:
    """Starts with the last expert of a token, then the others in order."""
    order = sorted_indices.argsort(stable=True)
    out = permuted_tokens.new_zeros(tuple(restore_shape))
    counts = torch.bincount(sorted_indices, minlength=int(restore_shape[0]))
    ends = counts.cumsum(0)
    for turn in range(int(counts.max())):
        which = (counts > turn).nonzero()[:, 0]
        place = ends[which] - 1 if turn == 0 else ends[which] - counts[which] + turn - 1
        out[which] = out[which] + permuted_tokens[order[place]]
    return out


def wide_combine(permuted_tokens: Tensor, sorted_indices: Tensor, restore_shape: Any, **options: Any) -> Tensor:
    """Adds in float32 and rounds once."""
    wide = ordered_unpermute(permuted_tokens.float(), sorted_indices, restore_shape, **options)
    return wide.to(permuted_tokens.dtype)


def log_softmax_of(make: Callable[[Any, Tensor], Tensor]) -> Any:
    @contextmanager
    def breaks(_context: Any) -> Iterator[None]:
        with patched(scoring, "log_softmax_impl", lambda original: lambda logits: make(original, logits)):
            yield

    return breaks


def top_k_only(original: Any, logits: Tensor) -> Any:
    limit = logits.topk(20, -1).values[..., -1:]
    return original(logits.masked_fill(logits < limit, float("-inf")))


def gen_log_softmax_of(make: Callable[[Tensor], Tensor]) -> Any:
    @contextmanager
    def breaks(_context: Any) -> Iterator[None]:
        def wrap(original: Any) -> Any:
            return lambda self, logits, *args, **kwargs: original(self, make(logits), *args, **kwargs)

        with seams.gen_log_softmax(wrap):
            yield

    return breaks


def chunked_log_softmax(chunks: int, limit: int) -> Any:
    def make(original: Any, logits: Tensor) -> Any:
        if logits.shape[0] < limit:
            return original(logits)
        rows = logits.reshape(-1, logits.shape[-1])
        shifted = rows - rows.amax(-1, keepdim=True)
        total = added(
            rowwise.tree_sum(
                rowwise.in_row_tiles(
                    torch.exp,
                    torch.nn.functional.pad(part, (0, 64 - part.shape[-1] % 64), value=float("-inf"))
                    if part.shape[-1] % 64
                    else part.contiguous(),
                )
            )
            for part in torch.chunk(shifted, chunks, -1)
        )
        return (shifted - rowwise.log_of_scalars(total)[:, None]).reshape(logits.shape)

    return log_softmax_of(make)


def rolled_selection(by: int) -> Any:
    @contextmanager
    def breaks(_context: Any) -> Iterator[None]:
        with patched(scoring, "select_logprobs", lambda original: lambda *args: original(*args).roll(by, -1)):
            yield

    return breaks


def rolled_labels(by: int) -> Any:
    @contextmanager
    def breaks(_context: Any) -> Iterator[None]:
        def wrap(original: Any) -> Any:
            def padded_batch(*args: Any, **kwargs: Any) -> Any:
                mb = original(*args, **kwargs)
                mb.labels[:] = mb.labels.roll(by, -1)
                return mb

            return padded_batch

        with patched(scoring, "padded_batch", wrap):
            yield

    return breaks


def old_weight(path: str, size: float = 1e-2) -> Any:
    @contextmanager
    def breaks(context: Any) -> Iterator[None]:
        module = context.model.get_submodule(path)
        kept = module.weight.data
        update = torch.randn(kept.shape, generator=torch.Generator().manual_seed(5)) * size
        module.weight.data = (kept.float() + update).to(kept.dtype)
        try:
            yield
        finally:
            module.weight.data = kept

    return breaks


def frequencies(change: Callable[[Tensor], Tensor]) -> Any:
    @contextmanager
    def breaks(context: Any) -> Iterator[None]:
        seams.clear_rotary_cache()
        try:
            with patched(context.model.rotary_pos_emb, "inv_freq", change):
                yield
        finally:
            seams.clear_rotary_cache()

    return breaks


def other_base(base: float) -> Callable[[Tensor], Tensor]:
    def change(f: Tensor) -> Tensor:
        n = f.shape[0]
        return (1.0 / base ** (torch.arange(n, dtype=torch.float32) / n)).to(f.dtype)

    return change


def gen_rope_freqs(change: Callable[[Tensor], Tensor]) -> Any:
    @contextmanager
    def breaks(_context: Any) -> Iterator[None]:
        def wrap(original: Any) -> Any:
            return lambda t, freqs, *args, **kwargs: original(t, change(freqs), *args, **kwargs)

        with seams.gen_rope(wrap):
            yield

    return breaks


def eps(value: float, path: str = "") -> Any:
    @contextmanager
    def breaks(context: Any) -> Iterator[None]:
        from zkl_debug.engines.patching import PatchSet

        with PatchSet() as patches:
            for name, module in context.model.named_modules():
                if isinstance(module, torch.nn.RMSNorm) and (not path or name == path):
                    patches.set(module, "eps", value)
            yield

    return breaks


def early_rounding(module: Any, x: Tensor) -> Tensor:
    wide = x.float()
    unit = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.eps)).to(x.dtype)
    result: Tensor = unit * module.weight
    return result


def gating(dtype: torch.dtype) -> Any:
    @contextmanager
    def breaks(_context: Any) -> Iterator[None]:
        with seams.router_gating(lambda original: lambda *a, **k: original(*a, **k).to(dtype).float()):
            yield

    return breaks


def scaled_routing(factor: float) -> Any:
    @contextmanager
    def breaks(_context: Any) -> Iterator[None]:
        def wrap(original: Any) -> Any:
            def route(*args: Any, **kwargs: Any) -> Any:
                probs, chosen = original(*args, **kwargs)
                return probs * factor, chosen

            return route

        with seams.topk_routing(wrap):
            yield

    return breaks


def zero_rows(t: Tensor) -> Tensor:
    out = t.clone()
    out.view(-1, out.shape[-1])[::7] = 0
    return out


def tiles(small: int, large: int, limit: int) -> Any:
    """Generation's attention adds tiles of keys, of another size when the longest query of the call is short."""

    def tiled(size: int) -> Any:
        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            exps, total = attention.key_weights(q, k, scale)
            probs = exps / total[..., None]
            weighted = probs[..., None] * attention.padded_heads(v, q.shape[1], probs.shape[-1])[None]
            blocks = weighted.reshape(*weighted.shape[:2], -1, size, weighted.shape[-1])
            parts = rowwise.tree_sum(blocks, 3).to(q.dtype)
            return added(parts.unbind(2))

        return attend

    @contextmanager
    def breaks(_context: Any) -> Iterator[None]:
        def varlen(_original: Any) -> Any:
            def call(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *lengths: int, **kwargs: Any) -> Any:
                size = small if int(cu_q.diff().max()) <= limit else large
                return attention.paged_varlen(tiled(size))(None)(q, k, v, cu_q, cu_k, *lengths, **kwargs)

            return call

        with seams.paged_core_attention(varlen, attention.paged_decode(tiled(small))):
            yield

    return breaks


def topk_routing(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """Another result of the router, from (logits, probabilities, map)."""

    @contextmanager
    def breaks(_context: Any) -> Iterator[None]:
        def wrap(original: Any) -> Any:
            return lambda logits, *args, **kwargs: change(logits, *original(logits, *args, **kwargs))

        with seams.topk_routing(wrap):
            yield

    return breaks


def sigmoid_weights(logits: Tensor, probs: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    return (torch.sigmoid(logits.float()) * chosen).to(probs.dtype), chosen
