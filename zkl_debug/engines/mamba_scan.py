"""The selective scan of Mamba-2 in plain torch, by two algorithms; and the causal convolution in front of it.

``recurrent`` goes token by token with operands of one shape: a token's result depends on its sequence only, never on
the batch, the padding or where a chunk began. ``chunked`` works as the GPU kernels of training and prefill do: in
blocks of a fixed number of tokens, as matrix products whose operands have the model's dtype, with a state in between.
Both are the same mathematics; neither has the bits of the other.

Shapes: l tokens, h heads of p channels, g groups, n state dimensions. State and sums are fp32.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Scan(Protocol):
    """A scan over one sequence."""

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        state: Tensor | None,
        block: int,
    ) -> tuple[Tensor, Tensor]:
        """Scan x [l, h, p].

        Args:
            x: inputs, behind the convolution.
            dt: step sizes [l, h], before bias and softplus.
            a: decay rates [h], negative, fp32.
            b, c: [l, g, n].
            d: skip [h].
            dt_bias: [h].
            state: [h, p, n] in front of the first token, or None for zeros.
            block: tokens of a block, for the algorithm that has blocks.

        Returns:
            y [l, h, p] fp32, not gated, and the state behind the last token [h, p, n] fp32.
        """


def conv_token(window: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """SiLU of the depthwise convolution at one token: window [d, w], weight [d, w], bias [d] -> [d] fp32."""
    return functional.silu((window.float() * weight.float()).sum(-1) + bias.float())


def conv_sequence(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor | None) -> Tensor:
    """Causal convolution of one sequence, x [l, d]; ``before`` [d, w - 1] are the inputs in front of it, or zeros."""
    width = weight.shape[-1]
    padded = torch.cat([x.new_zeros(x.shape[1], width - 1) if before is None else before.to(x.dtype), x.T], 1)
    return torch.stack([conv_token(padded[:, t : t + width], weight, bias) for t in range(len(x))]).to(x.dtype)


def gate(y: Tensor, z: Tensor) -> Tensor:
    """``y * silu(z)`` in fp32, one token at a time; y, z [l, h, p]."""
    return torch.stack([y[t].float() * functional.silu(z[t].float()) for t in range(len(y))])


def scan_token(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of the recurrence.

    Args:
        state: [h, p, n] fp32.
        x: [h, p]; ``dt`` [h], bias and softplus already in; ``a`` [h], negative; ``b``, ``c`` [g, n]; ``d`` [h].

    Returns:
        The new state and y [h, p], both fp32.
    """
    repeats = x.shape[0] // b.shape[0]
    b, c = (t.float().repeat_interleave(repeats, 0) for t in (b, c))
    x = x.float()
    kept = state * torch.exp(dt * a)[:, None, None]
    state = kept + (dt[:, None] * x)[..., None] * b[:, None, :]
    return state, (state * c[:, None, :]).sum(-1) + d.float()[:, None] * x


def recurrent(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    block: int = 0,
) -> tuple[Tensor, Tensor]:
    """The recurrence, one token at a time; see :class:`Scan`."""
    del block
    carried = _start(x, b, state)
    out = []
    for t in range(len(x)):
        step = functional.softplus(dt[t].float() + dt_bias.float())
        carried, y = scan_token(carried, x[t], step, a, b[t], c[t], d)
        out.append(y)
    return torch.stack(out), carried


def chunked(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    block: int,
) -> tuple[Tensor, Tensor]:
    """Blocks of ``block`` tokens as matrix products, the last one filled up with zeros; see :class:`Scan`."""
    carried = _start(x, b, state)
    repeats = x.shape[1] // b.shape[1]
    steps = functional.softplus(dt.float() + dt_bias.float())
    out = []
    for start in range(0, len(x), block):
        parts = (t[start : start + block] for t in (x, steps, b, c))
        xs, dts, bs, cs = (_filled(t, block) for t in parts)
        y, carried = _block(xs, dts, a, bs.repeat_interleave(repeats, 1), cs.repeat_interleave(repeats, 1), carried)
        out.append(y)
    return torch.cat(out)[: len(x)] + d.float()[:, None] * x.float(), carried


def _block(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One block: x [q, h, p], dt [q, h] fp32, b and c [q, h, n], state [h, p, n]; y [q, h, p] and the new state."""
    narrow = x.dtype
    total = torch.cumsum(dt * a, 0)  # [q, h]: log of the decay from the block's start
    gap = (total[:, None] - total[None]).permute(2, 0, 1)  # [h, to, from]
    causal = torch.ones(gap.shape[1:], dtype=torch.bool, device=x.device).tril()
    weights = torch.einsum("ihn,jhn->hij", c.float(), b.float())
    weights = (weights * gap.masked_fill(~causal, float("-inf")).exp() * dt.T[:, None, :]).to(narrow).float()
    within = torch.einsum("hij,jhp->ihp", weights, x.float())
    before = torch.einsum("ihn,hpn->ihp", c.float(), state.to(narrow).float()) * total.exp()[..., None]
    rest = dt * (total[-1] - total).exp()
    scaled = (b.float() * rest[..., None]).to(narrow).float()
    new = state * total[-1].exp()[:, None, None] + torch.einsum("jhn,jhp->hpn", scaled, x.float())
    return within + before, new


def _start(x: Tensor, b: Tensor, state: Tensor | None) -> Tensor:
    if state is None:
        return x.new_zeros(*x.shape[1:], b.shape[-1], dtype=torch.float32)
    return state.float()


def _filled(t: Tensor, count: int) -> Tensor:
    missing = count - len(t)
    return t if missing == 0 else torch.cat([t, t.new_zeros(missing, *t.shape[1:])])
