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
def fp32_state() -> Iterator[None]:
    """The engine keeps recurrent states in fp32, whatever the model's dtype."""
    from zkl_debug.engines.megatron import seams

    with seams.recurrent_state_dtype(torch.float32):
        yield
