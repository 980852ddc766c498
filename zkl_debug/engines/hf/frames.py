"""Row keys of transformers forwards: whole batches, and batches that go on from a key-value cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.rows import FrameRows, padded_rows, sequence_rows
from zkl_debug.schema import Phase, RowFlag


@dataclass
class BatchHistory:
    """Every column a batch has run so far.

    Attributes:
        ids: token ids of all columns, padding included, shape [b, n].
        pads: columns of left padding of each line, shape [b].
        samples: sample id of each line.
        prompt: columns of the prompt, or None outside ``generate``.
    """

    ids: NDArray[np.int64]
    pads: NDArray[np.int64]
    samples: list[int]
    prompt: int | None


@dataclass
class Histories:
    """The batches whose caches are alive, by identity of the cache object."""

    by_cache: dict[int, tuple[Any, BatchHistory]] = field(default_factory=dict)
    next_sample: int = 0
    unkeyed: dict[str, int] = field(default_factory=dict)

    def length(self, cache: Any) -> int:
        """Columns a cache holds; 0 for none, -1 where it holds some and nobody can say how many.

        Caches of recurrent layers alone have a state and no length: theirs is that of what was seen to go in.
        """
        if cache is None:
            return 0
        try:
            return int(cache.get_seq_length())
        except (ValueError, AttributeError):
            known = self.by_cache.get(id(cache))
            if known is not None and known[0] is cache:
                return int(known[1].ids.shape[1])
            states = [getattr(layer, "has_previous_state", {}) for layer in getattr(cache, "layers", ())]
            return -1 if any(any(s.values()) if isinstance(s, dict) else bool(s) for s in states) else 0

    def frame(
        self, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any, generating: bool, cached: int
    ) -> FrameRows | None:
        """Rows of the forward that is about to run.

        Args:
            ids: token ids of this call, shape [b, s].
            mask: attention mask over all columns so far, shape [b, columns], nonzero where there is a token; None when
                every column is a token (or when the mask cannot be read, in ``generate`` after the first call).
            cache: the key-value cache object, or None.
            generating: inside ``generate``.
            cached: columns the cache holds before this call.

        Returns:
            The rows, or None where they cannot be known; the reason is counted in ``unkeyed``.
        """
        tokens = ids.detach().cpu().numpy().astype(np.int64)
        if cached == 0:
            return self._fresh(tokens, mask, cache, generating)
        known = self.by_cache.get(id(cache))
        if known is None or known[0] is not cache or known[1].ids.shape != (tokens.shape[0], cached):
            self.skip("goes on from a cache whose tokens were not seen")
            return None
        history = known[1]
        history.ids = np.concatenate([history.ids, tokens], axis=1)
        if history.prompt is None and tokens.shape[1] == 1:
            history.prompt = cached  # one token on its own: from here on they are generated
        return _continued(history, cached, Phase.DECODE if tokens.shape[1] == 1 else Phase.PREFILL)

    def _fresh(
        self, tokens: NDArray[np.int64], mask: torch.Tensor | None, cache: Any, generating: bool
    ) -> FrameRows | None:
        batch, columns = tokens.shape
        lengths, pads = _padding(mask, batch, columns)
        if lengths is None:
            self.skip("the attention mask has holes: rows are not one run of tokens")
            return None
        samples = list(range(self.next_sample, self.next_sample + batch))
        self.next_sample += batch
        at_end = bool(np.all(pads + lengths == columns))
        if cache is not None and at_end:
            self.by_cache = {k: v for k, v in self.by_cache.items() if k == id(cache)}  # one batch runs at a time
            self.by_cache[id(cache)] = (cache, BatchHistory(tokens, pads, samples, columns if generating else None))
        rows = padded_rows(
            tokens,
            samples=samples,
            lengths=[int(n) for n in lengths],
            prompt_lens=[int(n) for n in lengths] if generating else None,
            offsets=[int(n) for n in pads],
            phase=Phase.PREFILL if cache is not None or generating else Phase.SCORE,
        )
        if not at_end:
            rows.last = np.zeros(0, np.int64)  # the last column is not the last token of every line
        return rows

    def skip(self, reason: str) -> None:
        """Count a forward that cannot be keyed."""
        self.unkeyed[reason] = self.unkeyed.get(reason, 0) + 1


def _padding(mask: torch.Tensor | None, batch: int, columns: int) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
    """Tokens and left padding of each line; tokens None when they are not one run."""
    if mask is None or mask.ndim != 2 or tuple(mask.shape) != (batch, columns):
        return np.full(batch, columns, np.int64), np.zeros(batch, np.int64)
    there = mask.detach().cpu().numpy() != 0
    lengths = there.sum(1).astype(np.int64)
    pads = np.where(lengths > 0, there.argmax(1), 0).astype(np.int64)
    column = np.arange(columns)
    run = (column >= pads[:, None]) & (column < (pads + lengths)[:, None])
    return (lengths if np.array_equal(run, there) else None), pads


def _continued(history: BatchHistory, cached: int, phase: Phase) -> FrameRows:
    batch, columns = history.ids.shape
    new = columns - cached
    parts, slots = [], []
    for i in range(batch):
        pad = int(history.pads[i])
        prompt = None if history.prompt is None else history.prompt - pad
        parts.append(sequence_rows(history.samples[i], history.ids[i, pad:], phase, prompt, cached - pad))
        slots.append(np.arange(new) * batch + i)
    for part, pad in zip(parts, history.pads.tolist(), strict=True):
        if phase is Phase.DECODE and history.prompt is not None:
            first = part["position"] == history.prompt - int(pad)
            part["flags"] |= np.where(first, np.uint32(RowFlag.FIRST_DECODE), np.uint32(0))
    last = new * np.arange(1, batch + 1, dtype=np.int64) - 1
    return FrameRows(
        (new, batch), np.concatenate(parts), np.concatenate(slots).astype(np.int64), phase, batch, new, last
    )
