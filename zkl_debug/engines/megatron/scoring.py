"""Scoring: the training forward of a model over given tokens, and the log-probs of these tokens.

``forward_logits``, ``log_softmax`` and ``select_logprobs`` are looked up in this module at every call, so that a
wrapper installed on the module (``scoring.log_softmax = tap(scoring.log_softmax)``) sees each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from zkl_debug.engines.megatron import pipeline, seams
from zkl_debug.engines.megatron.zigzag import own_slots

Layout = Literal["padded", "packed"]
Tokens = Sequence[int]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One training forward.

    Attributes:
        index: number of the micro-batch within its pass.
        layout: ``padded`` (one sequence a row) or ``packed`` (thd: all sequences in one row).
        tokens: [b, s], or [1, T] when packed; int64.
        position_ids: like ``tokens``; position of each token within its own sequence, 0 in padding.
        samples: sample id of each sequence.
        lengths: number of real tokens of each sequence.
        offsets: where each sequence starts: columns of left padding when padded, token offset when packed.
        mask_kind: ``causal``, ``causal+left-pad`` or ``causal+segments``.
        cu_seqlens: packed only: cumulative lengths, [n + 1].
        cu_seqlens_padded: packed only: cumulative lengths including the padding behind each sequence, or None.
        part: (rank, size) of the context-parallel group: the forward is given this rank's columns.
        labels: token that each column predicts: [b, s - 1]; of the rank's columns, [b, s / size], where there are more
            ranks (0 behind the last).
    """

    index: int
    layout: Layout
    tokens: Tensor
    position_ids: Tensor
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    mask_kind: str
    cu_seqlens: tuple[int, ...] | None = None
    cu_seqlens_padded: tuple[int, ...] | None = None
    part: tuple[int, int] = (0, 1)
    labels: Tensor = field(init=False)

    def __post_init__(self) -> None:
        labels = self.tokens[:, 1:].clone()
        if self.part[1] > 1:
            labels = torch.nn.functional.pad(labels, (0, 1))[:, self.columns()]
        object.__setattr__(self, "labels", labels)

    @property
    def n_slots(self) -> int:
        """Token slots the forward runs, padding included."""
        return self.tokens.numel()

    def columns(self) -> Tensor:
        """Columns of ``tokens`` that this rank's forward is given, int64 [s / size]."""
        rank, size = self.part
        return own_slots(self.tokens.shape[1], size, rank)

    def attention_mask(self) -> Tensor | None:
        """What ``GPTModel`` gets: [1 or b, 1, s, s] bool, True = hidden; None when packed."""
        if self.layout == "packed":
            return None
        size = self.tokens.shape[1]
        causal = torch.ones(1, 1, size, size, dtype=torch.bool).triu(1)
        if not any(self.offsets):
            return causal
        columns = torch.arange(size)
        left = columns[None, :] < torch.tensor(self.offsets)[:, None]
        diagonal = torch.eye(size, dtype=torch.bool)
        return (causal | left[:, None, None, :]) & ~diagonal

    def locate(self, which: int) -> tuple[int, int]:
        """(row, first column) of sequence number ``which`` in ``tokens``."""
        return (0 if self.layout == "packed" else which), self.offsets[which]


def padded_batch(
    index: int,
    sequences: Sequence[tuple[int, Tokens]],
    *,
    multiple: int = 1,
    left: bool = False,
    pad_token: int = 0,
) -> MicroBatch:
    """A padded micro-batch of ``(sample, tokens)``; the width is the longest length rounded up to ``multiple``."""
    lengths = tuple(len(tokens) for _, tokens in sequences)
    width = -(-max(lengths) // multiple) * multiple
    ids = torch.full((len(sequences), width), pad_token, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    offsets = tuple(width - n if left else 0 for n in lengths)
    for row, (_, tokens) in enumerate(sequences):
        span = slice(offsets[row], offsets[row] + lengths[row])
        ids[row, span] = torch.tensor(list(tokens), dtype=torch.int64)
        positions[row, span] = torch.arange(lengths[row])
    kind = "causal+left-pad" if any(offsets) else "causal"
    return MicroBatch(index, "padded", ids, positions, tuple(s for s, _ in sequences), lengths, offsets, kind)


def packed_batch(
    index: int, sequences: Sequence[tuple[int, Tokens]], *, multiple: int = 1, pad_token: int = 0
) -> MicroBatch:
    """A packed (thd) micro-batch of ``(sample, tokens)``; each sequence is padded to ``multiple`` when that is > 1."""
    lengths = [len(tokens) for _, tokens in sequences]
    slots = [-(-n // multiple) * multiple for n in lengths]
    starts = [0, *np.cumsum(slots).tolist()]
    ids = torch.full((1, starts[-1]), pad_token, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    for start, (_, tokens) in zip(starts, sequences, strict=False):
        span = slice(start, start + len(tokens))
        ids[0, span] = torch.tensor(list(tokens), dtype=torch.int64)
        positions[0, span] = torch.arange(len(tokens))
    return MicroBatch(
        index,
        "packed",
        ids,
        positions,
        tuple(s for s, _ in sequences),
        tuple(lengths),
        tuple(starts[:-1]),
        "causal+segments",
        cu_seqlens=(0, *np.cumsum(lengths).tolist()),
        cu_seqlens_padded=tuple(starts) if multiple > 1 else None,
    )


def forward_logits(model: nn.Module, mb: MicroBatch) -> Tensor:
    """Logits [b, s, V] of one micro-batch by the training forward, in eval mode, without gradients.

    A pipeline stage that is not the last gives what it sent on, [s, b, h].

    Raises:
        RuntimeError: while mcore's InferenceMode is on; the model would take inference paths.
    """
    if seams.inference_mode_active():
        raise RuntimeError("InferenceMode is on: suspend the generation engine before scoring")
    device = next(model.parameters()).device
    mask = mb.attention_mask()
    tokens, positions = mb.tokens, mb.position_ids
    if mb.part[1] > 1:
        tokens, positions = tokens[:, mb.columns()].contiguous(), positions[:, mb.columns()].contiguous()
    with torch.no_grad():
        logits: Tensor = pipeline.forward(
            model,
            tokens.to(device),
            positions.to(device),
            mask.to(device) if mask is not None else None,
            packed_seq_params=_packed_seq_params(mb, device),
        )
    return logits


def _packed_seq_params(mb: MicroBatch, device: torch.device) -> Any:
    if mb.layout != "packed":
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    assert mb.cu_seqlens is not None
    cu = torch.tensor(mb.cu_seqlens, dtype=torch.int32, device=device)
    padded = mb.cu_seqlens_padded
    cu_padded = torch.tensor(padded, dtype=torch.int32, device=device) if padded is not None else None
    bounds = padded or mb.cu_seqlens
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu_padded,
        cu_seqlens_kv_padded=cu_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=mb.n_slots,  # from it mcore tells a Mamba mixer where sequences begin
    )


def decomposed_log_softmax(logits: Tensor) -> Tensor:
    """log-softmax as NeMo-RL's training path computes it over vocabulary shards (here one): max, exp-sum, log."""
    shifted = logits - logits.amax(-1, keepdim=True)
    total = shifted.exp().sum(-1, keepdim=True)
    return shifted - total.log()


#: The implementation behind :func:`log_softmax`; the ``log-softmax`` switch replaces it.
log_softmax_impl = decomposed_log_softmax


def log_softmax(logits: Tensor) -> Tensor:
    """log-softmax over the last axis of float32 ``logits`` [b, s, V], same shape."""
    return log_softmax_impl(logits)


def select_logprobs(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Log-probs of ``labels`` [b, s - 1] or [b, s] under ``log_probs`` [b, s, V]: row t predicts label t."""
    return log_probs[:, : labels.shape[1]].gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def score_microbatch(model: nn.Module, mb: MicroBatch) -> list[NDArray[np.float32]]:
    """Per sequence the log-probs of its tokens 1..n-1, float32 [n - 1], in the order of ``mb.samples``.

    On a rank that is not given all columns, or is not the last pipeline stage, those that other ranks have are NaN.
    """
    logits = forward_logits(model, mb)
    length = mb.tokens.shape[1]
    table = np.full((len(mb.tokens), length), np.nan, np.float32)
    if pipeline.is_last_stage():
        selected = select_logprobs(log_softmax(logits.float()), mb.labels.to(logits.device)).cpu().numpy()
        columns = mb.columns().numpy() if mb.part[1] > 1 else np.arange(selected.shape[1])
        table[:, columns] = selected
    result = []
    for which, count in enumerate(mb.lengths):
        row, start = mb.locate(which)
        result.append(table[row, start : start + count - 1].copy())
    return result
