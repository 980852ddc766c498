"""Faults of kernel order: the same mathematics, another order of reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.faults.registry import BOTH_BEDS, BOTH_DTYPES, Answer, Fault, register

if TYPE_CHECKING:
    from torch import Tensor

    from zkl_debug.beds.run import BedContext


@contextmanager
def norm_partials(_context: BedContext) -> Iterator[None]:
    """RMSNorm adds x^2 in 8 strided partial sums in calls of fewer than 256 rows, in 2 in larger ones."""
    import torch

    from zkl_debug.engines.patching import patched
    from zkl_debug.stack.rowwise import tree_sum

    def wrap(_original: Any) -> Any:
        def forward(self: Any, x: Tensor) -> Tensor:
            width = x.shape[-1]
            partials = 2 if x.numel() // width >= 256 else 8
            squares = x.float().square().reshape(*x.shape[:-1], width // partials, partials)
            sums = squares[..., 0, :]
            for step in range(1, width // partials):
                sums = sums + squares[..., step, :]
            mean = tree_sum(sums)[..., None] / width
            normed = x.float() * torch.rsqrt(mean + self.eps)
            result: Tensor = (normed * self.weight.float()).to(x.dtype)
            return result

        return forward

    with patched(torch.nn.RMSNorm, "forward", wrap):
        yield


@contextmanager
def linear_chunks(_context: BedContext) -> Iterator[None]:
    """Linear layers sum K in one chunk for calls of 1 or 33 rows, in two chunks for all others."""
    import torch

    from zkl_debug.engines.megatron import seams

    def wrap(_original: Any) -> Any:
        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *_args: Any, **_kwargs: Any) -> Tensor:
            rows = input.reshape(-1, input.shape[-1])
            cuts = 1 if rows.shape[0] in (1, 33) else 2
            parts = zip(rows.chunk(cuts, 1), weight.chunk(cuts, 1), strict=True)
            products = [torch.mm(a, b.t()) for a, b in parts]
            out = products[0] if cuts == 1 else products[0] + products[1]
            out = out.reshape(*input.shape[:-1], weight.shape[0])
            return out if bias is None else out + bias

        return linear

    with seams.linear_forward(wrap):
        yield


@contextmanager
def split_decode(context: BedContext) -> Iterator[None]:
    """Decode attention runs over two halves of the keys and merges them by log-sum-exp; prefill takes one pass.

    The halves' results are kept in the model's dtype before the merge.
    """
    import torch

    from zkl_debug.engines.megatron import seams
    from zkl_debug.stack import attention

    def halves(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        middle = k.shape[0] // 2
        if middle == 0:  # one key has no two halves
            return attention.reference_attention(q, k, v, scale)
        outs, lses = [], []
        for part in (slice(0, middle), slice(middle, None)):
            out, total, top = attention.attention_parts(q, k, v, scale, part)
            outs.append((out / total[..., None]).to(q.dtype).float())
            lses.append(top + total.log())
        both = torch.logaddexp(*lses)
        first, second = (out * (lse - both).exp()[..., None] for out, lse in zip(outs, lses, strict=True))
        return (first + second).to(q.dtype)

    def n_decode() -> int:
        return int(context.generator.context.num_decode_requests)

    mixed = attention.paged_varlen(attention.reference_attention, halves, n_decode)
    with seams.paged_core_attention(mixed, attention.paged_decode(halves)):
        yield


@contextmanager
def attention_tiles(_context: BedContext) -> Iterator[None]:
    """Attention goes over the keys in tiles of 4 when the longest query of the call is at most 9, else in tiles of 8.

    A tile's contribution is rounded to the model's dtype. Another request's prompt changes a row's arithmetic.
    """
    from zkl_debug.engines.megatron import seams
    from zkl_debug.stack import attention

    def train(_original: Any) -> Any:
        def forward(self: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            packed = kwargs.get("packed_seq_params")
            longest = query.shape[0] if packed is None else int(packed.max_seqlen_q)
            return attention.training_forward(_tiled(longest))(None)(self, query, *args, **kwargs)

        return forward

    def varlen(_original: Any) -> Any:
        def call(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *lengths: int, **kwargs: Any) -> Any:
            longest = int(cu_q.diff().max())
            return attention.paged_varlen(_tiled(longest))(None)(q, k, v, cu_q, cu_k, *lengths, **kwargs)

        return call

    def decode(_original: Any) -> Any:
        return attention.paged_decode(_tiled(1))(None)

    with seams.train_core_attention(train), seams.paged_core_attention(varlen, decode):
        yield


def _tiled(longest: int) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    tile = 4 if longest <= 9 else 8

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        from zkl_debug.stack import attention
        from zkl_debug.stack.rowwise import tree_sum

        exps, total = attention.key_weights(q, k, scale)
        probs = exps / total[..., None]
        values = attention.padded_heads(v, q.shape[1], probs.shape[-1])
        weighted = probs[..., None] * values[None]
        tiles = weighted.reshape(*weighted.shape[:2], -1, tile, weighted.shape[-1])
        parts = tree_sum(tiles, 3).to(q.dtype)
        out = parts[:, :, 0]
        for index in range(1, parts.shape[2]):
            out = out + parts[:, :, index]
        return out

    return attend


@contextmanager
def reversed_combine(_context: BedContext) -> Iterator[None]:
    """The combine adds a token's expert outputs as they arrive, here last expert first."""
    from functools import partial

    from zkl_debug.engines.megatron import seams
    from zkl_debug.stack.combine import ordered_unpermute

    with seams.unpermute(lambda _original: partial(ordered_unpermute, reverse=True)):
        yield


@contextmanager
def log_softmax_chunks(_context: BedContext) -> Iterator[None]:
    """Scoring's log-softmax reduces the vocabulary in two chunks in calls of 44 sequences or more."""
    import torch

    from zkl_debug.engines.megatron import scoring
    from zkl_debug.engines.patching import patched
    from zkl_debug.stack.rowwise import in_row_tiles, log_of_scalars, tree_sum

    def wrap(original: Any) -> Any:
        def log_softmax(logits: Tensor) -> Any:
            if logits.shape[0] < 44:
                return original(logits)
            rows = logits.reshape(-1, logits.shape[-1])
            shifted = rows - rows.amax(-1, keepdim=True)
            first, second = (
                tree_sum(in_row_tiles(torch.exp, half.contiguous())) for half in torch.chunk(shifted, 2, -1)
            )
            return (shifted - log_of_scalars(first + second)[:, None]).reshape(logits.shape)

        return log_softmax

    with patched(scoring, "log_softmax_impl", wrap):
        yield


@contextmanager
def one_pass_log_softmax(_context: BedContext) -> Iterator[None]:
    """Scoring computes x - logsumexp(x); generation shifts by the maximum first."""
    from zkl_debug.engines.megatron import scoring
    from zkl_debug.engines.patching import patched
    from zkl_debug.stack import rowwise

    def log_softmax(logits: Tensor) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        _, _, total = rowwise.softmax_parts(rows)
        lse = rows.amax(-1) + rowwise.log_of_scalars(total)
        return (rows - lse[:, None]).reshape(logits.shape)

    with patched(scoring, "log_softmax_impl", lambda _original: log_softmax):
        yield


_NORM = "decoder.layers.0.input_layernorm:out"
_QKV = "decoder.layers.0.self_attention.linear_qkv:out"
_CORE = "decoder.layers.0.self_attention.core_attention:out"

register(
    Fault(
        "K1",
        "RMSNorm sums x^2 in 8 partials below 256 rows, in 2 from 256 rows on",
        "vllm#48271",
        BOTH_BEDS,
        ("fp32",),
        ("gen", "train"),
        norm_partials,
        Answer(
            (_NORM,),
            "score-prefill",
            "own",
            "rows in call >= 256",
            "reduction order",
            rule_says=("rows in call.*",),
            names=("reduction-order",),
        ),
        options={"micro_batch": 4},
    ),
    Fault(
        "K2",
        "linear sums K in one chunk for 1 or 33 rows, in two otherwise",
        "TransformerEngine#2986",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("gen", "train"),
        linear_chunks,
        Answer(
            (_QKV,),
            "score-prefill",
            "own",
            "depends on M, not on row offset",
            "reduction order",
            rule_says=("rows in call",),
            names=("reduction-order",),
        ),
    ),
    Fault(
        "K4",
        "decode attention merges two KV halves by log-sum-exp, prefill takes one pass",
        "flash-attention#2604",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("gen",),
        split_decode,
        Answer(
            (_CORE,),
            "prefill-decode",
            "own",
            "phase decode",
            "reduction order",
            rule_says=("phase decode",),
            names=("reduction-order",),
        ),
    ),
    Fault(
        "K5",
        "attention tile of 4 keys when the longest query of the call is <= 9, else 8",
        "vllm#51902",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("gen", "train"),
        attention_tiles,
        Answer(
            (_CORE,),
            "within-b|prefill-decode",
            "own|uncaptured-state",
            "max_seqlen_q >= 10",
            "another request changed",
            rule_says=("longest query in call",),
            names=("reduction-order",),
        ),
    ),
    Fault(
        "K7",
        "the combine adds expert outputs in arrival order, not in expert order",
        "vllm#45683",
        ("tiny-moe",),
        BOTH_DTYPES,
        ("gen",),
        reversed_combine,
        Answer(
            ("decoder.layers.1.mlp/unpermute:out*",),
            "score-prefill",
            "own",
            "every row",
            "reduction order",
            rule_says=("^every row",),
            names=("reduction-order",),
        ),
    ),
    Fault(
        "K8",
        "log-softmax over the vocabulary in two chunks from 44 sequences a call on",
        "vllm#51187",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("train",),
        log_softmax_chunks,
        Answer(
            ("logprobs/log_softmax:out*",),
            "score-prefill",
            "own",
            "sequences in call >= 44",
            "reduction order",
            rule_says=("sequences in call of score >= ",),
            names=("reduction-order",),
        ),
        options={"crowd": 42, "micro_batch": 64},
    ),
    Fault(
        "K9",
        "the same rows scored in another micro-batch size under K2: not a generation fault",
        "verl#6280",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("gen", "train"),
        linear_chunks,
        Answer(
            (_QKV,),
            "within-a",
            "own",
            "depends on M, not on row offset",
            "reduction order",
            rule_says=("rows in call",),
            names=("reduction-order",),
        ),
        options={"rescore": 4},
    ),
    Fault(
        "K12",
        "scoring's log-softmax is x - logsumexp(x), generation's shifts first",
        "torchtitan#3498",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("train",),
        one_pass_log_softmax,
        Answer(
            ("logprobs/log_softmax:out*",),
            "score-prefill",
            "own",
            "every row",
            "function mismatch, <= 2 ulp",
            rule_says=("^every row", "^no rule: every row alike"),
            names=("log-softmax-formula",),
            says=("benign",),
        ),
    ),
)
