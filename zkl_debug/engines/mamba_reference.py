"""The state-space kernels of Mamba-2 in plain torch: what mcore calls where mamba_ssm and causal_conv1d are missing.

One recurrence serves training, prefill and decode. It goes token by token with operands of one shape, so that a token's
result depends on its sequence only, never on the batch, the padding or the path. Signatures are those mcore calls with;
arguments that only tune a GPU kernel are accepted and have no effect. fp32 inside, as the kernels do it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _conv_token(window: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """SiLU of the depthwise convolution at one token: window [d, w], weight [d, w], bias [d] -> [d] fp32."""
    return functional.silu((window.float() * weight.float()).sum(-1) + bias.float())


def _conv_sequence(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor | None) -> Tensor:
    """Causal convolution of one sequence, x [l, d]; ``before`` [d, w - 1] are the inputs in front of it, or zeros."""
    width = weight.shape[-1]
    padded = torch.cat([x.new_zeros(x.shape[1], width - 1) if before is None else before.to(x.dtype), x.T], 1)
    return torch.stack([_conv_token(padded[:, t : t + width], weight, bias) for t in range(len(x))]).to(x.dtype)


def _scan_token(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One step of the recurrence.

    Args:
        state: [h, p, n] fp32.
        x: [h, p]; ``dt`` [h], bias and softplus already in; ``a`` [h], negative; ``b``, ``c`` [g, n]; ``d`` [h].
        z: gate [h, p] or None.

    Returns:
        The new state and y [h, p], both fp32.
    """
    repeats = x.shape[0] // b.shape[0]
    b, c = (t.float().repeat_interleave(repeats, 0) for t in (b, c))
    x = x.float()
    kept = state * torch.exp(dt * a)[:, None, None]
    state = kept + (dt[:, None] * x)[..., None] * b[:, None, :]
    y = (state * c[:, None, :]).sum(-1) + d.float()[:, None] * x
    return state, y if z is None else y * functional.silu(z.float())


def _scan_sequence(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    z: Tensor | None,
    dt_bias: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The recurrence over x [l, h, p]; returns y [l, h, p] in x's dtype and the last state [h, p, n] fp32."""
    carried = x.new_zeros(*x.shape[1:], b.shape[-1], dtype=torch.float32) if state is None else state.float()
    out = []
    for t in range(len(x)):
        step = functional.softplus(dt[t].float() + dt_bias.float())
        carried, y = _scan_token(carried, x[t], step, a, b[t], c[t], d, None if z is None else z[t])
        out.append(y)
    return torch.stack(out).to(x.dtype), carried


# ---- what mcore calls ------------------------------------------------------------------------------------------------


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
    **_tuning: Any,
) -> Tensor:
    """Training: convolution, scan and gate of zxbcdt [batch, l, z + x + B + C + dt]; returns [batch, l, h * p]."""
    heads = dt_bias.shape[0]
    inner = heads * headdim
    n = (zxbcdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    out = []
    for row in zxbcdt:
        z, xbc, dt = torch.split(row, [inner, inner + 2 * ngroups * n, heads], -1)
        mixed = _conv_sequence(xbc, conv1d_weight, conv1d_bias, None)
        x, b, c = torch.split(mixed, [inner, ngroups * n, ngroups * n], -1)
        x, z = (t.reshape(-1, heads, headdim) for t in (x, z))
        b, c = (t.reshape(-1, ngroups, n) for t in (b, c))
        out.append(_scan_sequence(x, dt, A, b, c, D, z, dt_bias, None)[0].flatten(-2))
    return torch.stack(out)


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
            out[start:stop] = _conv_sequence(x[start:stop], weight, bias, initial_states[i])
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
    **_tuning: Any,
) -> Tensor:
    """Prefill scan of packed x [t, h, p] into ``out``; returns the last state of every sequence."""
    states = torch.zeros_like(initial_states)
    start = int(cu_chunk_seqlens[0])
    for i, last in enumerate(last_chunk_indices.tolist()):
        stop = int(cu_chunk_seqlens[last + 1])
        if stop > start:
            part = slice(start, stop)
            gate = None if z is None else z[part]
            y, state = _scan_sequence(x[part], dt[part], A, B[part], C[part], D, gate, dt_bias, initial_states[i])
            out[part], states[i] = y, state.to(states.dtype)
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
            out[row, 0] = _conv_token(window, weight, bias).to(x.dtype)
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
            gate = None if z is None else z[row, 0]
            moved, y = _scan_token(
                state[slot].float(), x[row, 0], step, A[:, 0, 0], B[row, 0], C[row, 0], D[:, 0], gate
            )
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
