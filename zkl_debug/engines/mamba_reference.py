"""The state-space kernels of Mamba-2 in plain torch: what mcore calls where mamba_ssm and causal_conv1d are missing.

Training and prefill scan in blocks, decode token by token, as the GPU kernels do, and so they differ in the last bits.
``sequence_scan`` is looked up in this module at every call: with :func:`zkl_debug.engines.mamba_scan.recurrent` in its
place one recurrence serves all three. So are ``conv_batch``, ``scan_batch`` and ``gate_batch``, the three parts of the
training kernel. Signatures are those mcore calls with; arguments that only tune a GPU kernel have no effect.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zkl_debug.engines import mamba_scan
from zkl_debug.engines.mamba_scan import Scan, conv_sequence, conv_token, gate, scan_token

#: The algorithm behind training and prefill.
sequence_scan: Scan = mamba_scan.chunked

# ---- training --------------------------------------------------------------------------------------------------------


def conv_batch(xbc: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None = None) -> Tensor:
    """Convolution of xbc [batch, l, d]; where ``seq_idx`` [batch, l] changes, another sequence begins."""
    rows = []
    for i, row in enumerate(xbc):
        rows.append(torch.cat([conv_sequence(row[part], weight, bias, None) for part in _sequences(row, i, seq_idx)]))
    return torch.stack(rows)


def scan_batch(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    block: int,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Scan of x [batch, l, h, p], every sequence from zero; y like x, not gated, fp32."""
    rows = []
    for i in range(len(x)):
        parts = [
            sequence_scan(x[i, at], dt[i, at], a, b[i, at], c[i, at], d, dt_bias, None, block)[0]
            for at in _sequences(x[i], i, seq_idx)
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def gate_batch(y: Tensor, z: Tensor) -> Tensor:
    """The gate inside the training kernel: y [batch, l, h, p] fp32, before it is rounded to the model's dtype."""
    return torch.stack([gate(one, other) for one, other in zip(y, z, strict=True)])


def split_conv1d_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    d: Tensor,
    headdim: int,
    ngroups: int,
    block: int,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolution and scan of zxbcdt [batch, l, z + x + B + C + dt]; y and z, [batch, l, h, p] each, y fp32."""
    heads = dt_bias.shape[0]
    inner = heads * headdim
    n = (zxbcdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, xbc, dt = torch.split(zxbcdt, [inner, inner + 2 * ngroups * n, heads], -1)
    mixed = conv_batch(xbc, conv1d_weight, conv1d_bias, seq_idx)
    x, b, c = torch.split(mixed, [inner, ngroups * n, ngroups * n], -1)
    x, z = (t.reshape(*t.shape[:2], heads, headdim) for t in (x, z))
    b, c = (t.reshape(*t.shape[:2], ngroups, n) for t in (b, c))
    return scan_batch(x, dt, a, b, c, d, dt_bias, block, seq_idx), z


# ---- what mcore calls ------------------------------------------------------------------------------------------------


class GatedNorm(nn.Module):
    """RMSNorm over groups of channels of ``x * silu(z)``, in fp32; without z of x alone.

    Args:
        hidden_size: channels.
        eps: added to the mean square.
        group_size: channels of a group; all by default.
        norm_before_gate: only False, which is what mcore builds.
        device, dtype: of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """x, z [..., hidden_size]; result in x's dtype."""
        value = x.float()
        if z is not None:
            value = value * functional.silu(z.float())
        groups = value.reshape(*value.shape[:-1], -1, self.group_size)
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (normed.reshape(value.shape) * self.weight.float()).to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    *,
    headdim: int,
    ngroups: int = 1,
    chunk_size: int = 16,
    seq_idx: Tensor | None = None,
    **_tuning: Any,
) -> Tensor:
    """Training: convolution, scan and gate of zxbcdt [batch, l, z + x + B + C + dt]; returns [batch, l, h * p]."""
    y, z = split_conv1d_scan(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, headdim, ngroups, chunk_size, seq_idx)
    return gate_batch(y, z).to(zxbcdt.dtype).flatten(-2)


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last ``state_len`` inputs of every packed sequence of x [t, d], zeros in front: [sequences, d, state_len]."""
    spans = _spans(cu_seqlens)
    states = x.new_zeros(len(spans), x.shape[1], state_len)
    for i, (start, stop) in enumerate(spans):
        count = min(state_len, stop - start)
        if count > 0:
            states[i, :, state_len - count :] = x[stop - count : stop].T
    return states


def causal_conv1d_varlen_fn(
    x: Tensor, weight: Tensor, bias: Tensor, cu_seqlens: Tensor, initial_states: Tensor, **_tuning: Any
) -> Tensor:
    """Prefill convolution of packed x [t, d]; ``initial_states`` [sequences, d, w - 1]."""
    out = torch.zeros_like(x)
    for i, (start, stop) in enumerate(_spans(cu_seqlens)):
        if stop > start:
            out[start:stop] = conv_sequence(x[start:stop], weight, bias, initial_states[i])
    return out


def mamba_chunk_scan_combined_varlen(
    *,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor,
    out: Tensor,
    D: Tensor,  # noqa: N803
    z: Tensor | None,
    dt_bias: Tensor,
    initial_states: Tensor,
    chunk_size: int = 16,
    **_tuning: Any,
) -> Tensor:
    """Prefill scan of packed x [t, h, p] into ``out``; returns the last state of every sequence."""
    states = torch.zeros_like(initial_states)
    start = int(cu_chunk_seqlens[0])
    for i, last in enumerate(last_chunk_indices.tolist()):
        stop = int(cu_chunk_seqlens[last + 1])
        if stop > start:
            part = slice(start, stop)
            y, state = sequence_scan(x[part], dt[part], A, B[part], C[part], D, dt_bias, initial_states[i], chunk_size)
            out[part] = (y if z is None else gate(y, z[part])).to(out.dtype)
            states[i] = state.to(states.dtype)
        start = max(start, stop)
    return states


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor,
    _activation: str | None = None,
    *,
    conv_state_indices: Tensor | None = None,
    **_tuning: Any,
) -> Tensor:
    """Decode convolution of x [batch, 1, d]; ``conv_state`` [slots, d, w] moves on by one token, slots < 0 do not."""
    out = torch.zeros_like(x)
    for row, slot in enumerate(_slots(x, conv_state_indices)):
        if slot >= 0:
            window = torch.cat([conv_state[slot, :, 1:], x[row, 0, :, None].to(conv_state.dtype)], 1)
            conv_state[slot] = window
            out[row, 0] = conv_token(window, weight, bias).to(x.dtype)
    return out


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    z: Tensor | None = None,
    *,
    dt_bias: Tensor,
    state_batch_indices: Tensor | None = None,
    **_tuning: Any,
) -> Tensor:
    """Decode scan of x [batch, 1, h, p]; ``state`` [slots, h, p, n] moves on; ``A``, ``dt`` repeat one value a head."""
    out = torch.zeros_like(x)
    for row, slot in enumerate(_slots(x, state_batch_indices)):
        if slot >= 0:
            step = functional.softplus(dt[row, 0, :, 0].float() + dt_bias[:, 0].float())
            moved, y = scan_token(state[slot].float(), x[row, 0], step, A[:, 0, 0], B[row, 0], C[row, 0], D[:, 0])
            y = y if z is None else gate(y[None], z[row, 0][None])[0]
            state[slot], out[row, 0] = moved.to(state.dtype), y.to(x.dtype)
    return out


def tensor_masked_update(states: Tensor, indices: Tensor, new: Tensor) -> None:
    """``states[indices[i]] = new[i]`` where the index is not negative."""
    for row, slot in enumerate(indices.tolist()):
        if slot >= 0:
            states[slot] = new[row].to(states.dtype)


def tensor_get_slice_after(source: Tensor, out: Tensor, position: Tensor, check_bounds: bool = False) -> None:
    """Rows of ``source`` from ``position[0]`` on, to the front of ``out``."""
    del check_bounds
    start = int(position[0])
    out[: len(source) - start] = source[start:]


def tensor_merge(first: Tensor, second: Tensor, position: Tensor, output_tensor: Tensor) -> None:
    """``position[0]`` rows of ``first``, then rows of ``second`` as far as there is room."""
    start = int(position[0])
    output_tensor[:start] = first[:start]
    count = min(len(second), len(output_tensor) - start)
    output_tensor[start : start + count] = second[:count]


def _spans(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    edges = [int(e) for e in cu_seqlens.tolist()]
    return list(itertools.pairwise(edges))


def _slots(x: Tensor, indices: Tensor | None) -> list[int]:
    return list(range(len(x))) if indices is None else [int(i) for i in indices.tolist()]


def _sequences(row: Tensor, index: int, seq_idx: Tensor | None) -> list[slice]:
    """Where the sequences of a batch row [l, ...] lie."""
    if seq_idx is None:
        return [slice(0, len(row))]
    marks = seq_idx[index]
    edges = [0, *((marks[1:] != marks[:-1]).nonzero()[:, 0] + 1).tolist(), len(row)]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]
