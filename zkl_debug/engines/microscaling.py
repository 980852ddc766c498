"""Block formats in plain torch: MXFP8 and per-token NVFP4, and matrix products of values kept in them.

A stand-in for the kernels of a GPU: the formats, scales and roundings are theirs, the product runs over the values
the formats stand for, in float32. Every step works on one row alone, so a row's result does not depend on the batch.
``quantise_rows`` and ``quantise_weight`` are looked up in this module at every call: wrap them to observe them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Format -> values that share a scale.
BLOCKS = {"mxfp8": 32, "nvfp4": 16}

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
#: Magnitudes where the nearest e2m1 value changes, and whether the boundary itself rounds up (ties go to even codes).
_E2M1_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Quantised:
    """Rows in a block format.

    Attributes:
        format: ``mxfp8`` or ``nvfp4``.
        data: float8_e4m3fn [m, k], or float4_e2m1fn_x2 [m, k / 2] with the even value in the low half of a byte.
        scale: one a block: float8_e8m0fnu [m, k / 32], or float8_e4m3fn [m, k / 16].
        overall: ``nvfp4`` alone: float32 [m], one a row, or [1], one for all.
    """

    format: str
    data: Tensor
    scale: Tensor
    overall: Tensor | None = None

    def values(self) -> Tensor:
        """The values it stands for, float32 [m, k]."""
        if self.format == "mxfp8":
            return _by_block(self.data.float(), _power(self.scale.view(torch.uint8).int() - 127))
        assert self.overall is not None
        codes = self.data.view(torch.uint8)
        both = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
        magnitude = torch.tensor(_E2M1)[both & 7]
        values = torch.where(both >= 8, -magnitude, magnitude)
        return _by_block(values, self.scale.float() * self.overall.reshape(-1, 1))


def quantise(rows: Tensor, form: str, *, per_row: bool = True) -> Quantised:
    """Rows [m, k] in a block format; ``k`` must be a multiple of the block.

    ``mxfp8``: a block's scale is the power of two at or above largest / 448, so that nothing saturates. ``nvfp4``: the
    row (or, with ``per_row`` false, the whole tensor) has a float32 scale that brings its largest value to 448 * 6, a
    block has an e4m3 scale within that, values are rounded to e2m1, ties to even.
    """
    block = BLOCKS[form]
    if rows.shape[1] % block:
        raise ValueError(f"rows of {rows.shape[1]} values do not divide into blocks of {block}")
    wide = rows.detach().float()
    largest = wide.abs().reshape(len(wide), rows.shape[1] // block, block).amax(-1)
    return _mxfp8(wide, largest) if form == "mxfp8" else _nvfp4(wide, largest, per_row)


def mx_exponents(largest: Tensor) -> Tensor:
    """Unbiased exponents of the e8m0 scales of blocks with these largest magnitudes; looked up at every call."""
    part = torch.frexp(largest / _E4M3_MAX)
    exponent = torch.where(part.mantissa == 0.5, part.exponent - 1, part.exponent)
    return torch.where(largest > 0, exponent, -127).clamp(-127, 127)


def _mxfp8(wide: Tensor, largest: Tensor) -> Quantised:
    exponent = mx_exponents(largest)
    data = e4m3(_by_block(wide, _power(-exponent)).clamp(-_E4M3_MAX, _E4M3_MAX))
    codes = torch.where(torch.isfinite(largest), exponent + 127, 255).to(torch.uint8)
    return Quantised("mxfp8", data, codes.view(torch.float8_e8m0fnu))


def e4m3(values: Tensor) -> Tensor:
    """Nearest e4m3 values, ties to even; looked up at every call."""
    return values.to(torch.float8_e4m3fn)


def _power(exponent: Tensor) -> Tensor:
    """2 ** exponent for exponents of -127 .. 127, made of bits: exact; 128 stands for NaN, as in e8m0."""
    bits = torch.where(exponent > -127, (exponent + 127) << 23, 1 << 22)
    return torch.where(exponent == 128, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def _nvfp4(wide: Tensor, largest: Tensor, per_row: bool) -> Quantised:
    top = largest.amax(-1) if per_row else largest.amax().reshape(1)
    overall = top / (_E4M3_MAX * _E2M1_MAX)
    overall = torch.where(overall > 0, overall, 1.0)
    scale = block_scales(largest, overall.reshape(-1, 1))
    unit = scale.float() * overall.reshape(-1, 1)
    split = wide.reshape(*unit.shape, BLOCKS["nvfp4"]) / torch.where(unit > 0, unit, 1.0)[..., None]
    scaled = torch.where(unit[..., None] > 0, split, 0.0).reshape(wide.shape)
    code = e2m1_codes(scaled.abs()) | torch.where(torch.signbit(scaled), 8, 0).to(torch.uint8)
    packed = code[:, 0::2] | (code[:, 1::2] << 4)
    return Quantised("nvfp4", packed.view(torch.float4_e2m1fn_x2), scale, overall)


def block_scales(largest: Tensor, overall: Tensor) -> Tensor:
    """e4m3 scales of blocks with these largest magnitudes under float32 scales; looked up at every call."""
    return e4m3((largest / _E2M1_MAX / overall).clamp(max=_E4M3_MAX))


def e2m1_codes(magnitude: Tensor) -> Tensor:
    """Codes 0..7 of the nearest e2m1 magnitudes, ties to even, uint8; looked up at every call."""
    code = torch.zeros(magnitude.shape, dtype=torch.uint8)
    for bound, closed in _E2M1_STEPS:
        code += (magnitude >= bound) if closed else (magnitude > bound)
    return code


def _by_block(values: Tensor, factor: Tensor) -> Tensor:
    """``values`` [m, k] times ``factor`` [m, blocks]."""
    split = values.reshape(*factor.shape, values.shape[1] // factor.shape[1])
    return (split * factor[..., None]).reshape(values.shape)


def quantise_rows(rows: Tensor, form: str) -> Quantised:
    """The activation operand of a product, [m, k]."""
    return quantise(rows, form)


def quantise_weight(weight: Tensor, form: str) -> Quantised:
    """The weight operand of a product, [n, k]; its float32 scale, where it has one, is one for the whole weight."""
    return quantise(weight, form, per_row=False)


class _Product(torch.autograd.Function):
    """``x @ weight.T`` over quantised operands; the gradient is that of the product as if nothing were quantised."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, form: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, form)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x, None


def _product(x: Tensor, weight: Tensor, form: str) -> Tensor:
    left, right = quantise_rows(x, form), quantise_weight(weight, form)
    return torch.mm(left.values(), right.values().t()).to(x.dtype)


def linear(x: Tensor, weight: Tensor, form: str) -> Tensor:
    """``x`` [..., k] times ``weight`` [n, k] with both operands in a block format, result in the dtype of ``x``.

    Straight-through: the backward pass is that of the plain product.
    """
    rows = x.reshape(-1, x.shape[-1])
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    product: Callable[..., Tensor] = _Product.apply if needs_grad else _product
    return product(rows, weight, form).reshape(*x.shape[:-1], weight.shape[0])
