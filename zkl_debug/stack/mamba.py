"""The bodies of the switches of a hybrid bed (their data is in ``catalogue/mamba.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def one_scan() -> Iterator[None]:
    """Training and prefill scan token by token, as decode does."""
    from zkl_debug.engines import mamba_reference, mamba_scan
    from zkl_debug.engines.patching import patched

    with patched(mamba_reference, "sequence_scan", lambda _original: mamba_scan.recurrent):
        yield


@contextmanager
def one_gate() -> Iterator[None]:
    """Training rounds what it scanned to the model's dtype and gates it in the norm, as prefill and decode do."""
    from zkl_debug.engines import mamba_reference
    from zkl_debug.engines.megatron import seams

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def training(self: Any, zxbcdt: Tensor, packed_seq_params: Any = None) -> Any:
            if not self.rmsnorm:  # there is no norm: all paths gate inside the scan
                return original(self, zxbcdt, packed_seq_params)
            y, z = mamba_reference.split_conv1d_scan(
                zxbcdt.transpose(0, 1).contiguous(),
                self.conv1d_weight[:, 0],
                self.conv1d_bias,
                self.dt_bias.float(),
                -torch.exp(self.A_log.float()),
                self.D,
                self.headdim,
                self.ngroups,
                self.chunk_size,
                None if packed_seq_params is None else packed_seq_params.seq_idx,
            )
            y, z = (t.to(zxbcdt.dtype).flatten(-2).transpose(0, 1).contiguous() for t in (y, z))
            return self.norm(y, z)

        return training

    with seams.training_ssm(wrap):
        yield


@contextmanager
def whole_conv_state() -> Iterator[None]:
    """A prefill chunk shorter than the convolution keeps the inputs of the chunk before it.

    ``causal_conv1d_varlen_states`` knows the tokens of one step only, and fills up with zeros.
    """
    from zkl_debug.engines.megatron import seams

    before: list[Tensor] = []

    def note_state(original: Callable[..., Any]) -> Callable[..., Any]:
        def prefill(self: Any, *args: Any, **kwargs: Any) -> Any:
            state, slots = kwargs.get("conv_state"), kwargs.get("batch_indices")
            if state is None or slots is None:  # the static engine: a sequence is one call
                return original(self, *args, **kwargs)
            before.append(state[slots])
            try:
                return original(self, *args, **kwargs)
            finally:
                before.pop()

        return prefill

    def keep(original: Callable[..., Any]) -> Callable[..., Any]:
        def last_inputs(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
            found: Tensor = original(x, cu_seqlens, state_len=state_len)
            return conv_state_after(before[-1], found, cu_seqlens) if before else found

        return last_inputs

    with seams.prefill_conv_state(note_state, keep):
        yield


def conv_state_after(before: Tensor, found: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Convolution states behind a prefill step.

    Args:
        before: states that the step began with, [sequences, d, w], a new sequence's zero.
        found: the last inputs of the step, zeros in front where it had fewer than w, [sequences, d, w].
        cu_seqlens: where the step's sequences begin and end, int32 [sequences + 1]; one without tokens keeps its state.

    Returns:
        [sequences, d, w] in the dtype of ``found``; made without a look at values, so that a graph can hold it.
    """
    width = found.shape[-1]
    tokens = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int64)[:, None]
    at = torch.arange(width, device=found.device)[None] + tokens
    kept = before.to(found.dtype).gather(2, at.clamp(max=width - 1)[:, None].expand_as(found))
    return torch.where((at < width)[:, None], kept, found)


@contextmanager
def fp32_state() -> Iterator[None]:
    """The engine keeps recurrent states in fp32, whatever the model's dtype."""
    from zkl_debug.engines.megatron import seams

    with seams.recurrent_state_dtype(torch.float32):
        yield
