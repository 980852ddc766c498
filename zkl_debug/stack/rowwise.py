"""Arithmetic in which a row's result depends on the row alone.

Reductions are trees of elementwise additions over a power-of-two axis, so neither the number of rows, nor their place,
nor the number of threads can enter. Transcendental functions run over tiles that are small enough not to be split
between threads, with rows whose length is a multiple of every vector width, so that no element falls into the scalar
tail of a vectorised loop. Matrix products run in tiles of one fixed shape (:class:`TiledMatmul`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Elements an elementwise kernel handles without being split between threads (ATen splits at 32768), with room.
_TILE_ELEMENTS = 16384
#: A multiple of twice every vector width there is: a row of this many elements has no tail.
_LANES = 64


def next_power_of_two(n: int) -> int:
    """Smallest power of two >= max(n, 1)."""
    return 1 << max(n - 1, 0).bit_length()


def pad_last(x: Tensor, size: int, value: float) -> Tensor:
    """``x`` with its last axis padded to ``size`` by ``value``."""
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]), value=value)


def tree_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Sum over one axis as a fixed tree of additions. The axis must be a power of two (pad with zeros)."""
    x = x.movedim(dim, -1)
    size = x.shape[-1]
    assert size & (size - 1) == 0, size
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def in_row_tiles(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``fn`` to the rows of ``x`` [n, width] tile by tile; ``width`` must be a multiple of 64."""
    assert x.dim() == 2, x.shape
    assert x.shape[1] % _LANES == 0, x.shape
    rows = max(1, _TILE_ELEMENTS // x.shape[1])
    return torch.cat([fn(tile.contiguous()) for tile in torch.split(x, rows)]) if len(x) else fn(x)


def log_of_scalars(x: Tensor) -> Tensor:
    """log of a vector [n], each element in a row of its own."""
    return in_row_tiles(torch.log, x[:, None].expand(-1, _LANES))[:, 0]


def _rows(x: Tensor, fill: float) -> Tensor:
    width = max(_LANES, next_power_of_two(x.shape[-1]))
    return pad_last(x.reshape(-1, x.shape[-1]).float(), width, fill)


def softmax_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(shifted, exp, sum) of the rows of ``x`` [..., n]: float32 [rows, width] twice and [rows]."""
    rows = _rows(x, float("-inf"))
    shifted = rows - rows.amax(-1, keepdim=True)
    exps = in_row_tiles(torch.exp, shifted)
    return shifted, exps, tree_sum(exps)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis, float32, shape of ``x``."""
    _, exps, total = softmax_parts(x)
    return (exps / total[:, None])[:, : x.shape[-1]].reshape(x.shape)


def log_softmax(x: Tensor) -> Tensor:
    """log-softmax over the last axis, float32, shape of ``x``."""
    shifted, _, total = softmax_parts(x)
    return (shifted - log_of_scalars(total)[:, None])[:, : x.shape[-1]].reshape(x.shape)


def mean_last(x: Tensor) -> Tensor:
    """Mean over the last axis, float32, shape [..., 1]."""
    total = tree_sum(_rows(x, 0.0)) / x.shape[-1]
    return total.reshape(*x.shape[:-1], 1)


def elementwise(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of ``x`` [..., n], any floating dtype, each element at a place without a vector tail."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    width = -(-rows.shape[-1] // _LANES) * _LANES
    return in_row_tiles(fn, pad_last(rows, width, 0.0))[:, : rows.shape[-1]].reshape(x.shape)


class TiledMatmul:
    """``a @ b`` in tiles of one fixed number of rows, so that the BLAS always sees the same problem.

    Whether a row's result still depends on its place in the tile, or on its neighbours, is tested once per shape, dtype
    and layout; where it does, tiles of a single row are used.
    """

    def __init__(self, rows: int = 16) -> None:
        self.rows = rows
        self._chosen: dict[tuple[object, ...], int] = {}

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """``a`` [m, k] times ``b`` [k, n], result [m, n] in their dtype."""
        return self._run(a, b, self.tile_rows(b))

    def tile_rows(self, b: Tensor) -> int:
        """The tile height used for right-hand sides like ``b``."""
        key = (*b.shape, *b.stride(), b.dtype)
        if key not in self._chosen:
            self._chosen[key] = self.rows if self._place_independent(b) else 1
        return self._chosen[key]

    @staticmethod
    def _run(a: Tensor, b: Tensor, rows: int) -> Tensor:
        count = -(-a.shape[0] // rows)
        padded = a.new_zeros(count * rows, a.shape[1])
        padded[: a.shape[0]] = a
        out = a.new_empty(count * rows, b.shape[1])
        for start in range(0, count * rows, rows):
            torch.mm(padded[start : start + rows], b, out=out[start : start + rows])
        return out[: a.shape[0]]

    def _place_independent(self, b: Tensor) -> bool:
        generator = torch.Generator().manual_seed(20)
        sample = torch.randn(self.rows, b.shape[0], generator=generator).to(b.dtype)
        expected = self._run(sample, b, self.rows)
        for shift in range(1, self.rows):
            if not torch.equal(self._run(sample.roll(shift, 0), b, self.rows).roll(-shift, 0), expected):
                return False
        alone = torch.cat([self._run(row[None], b, self.rows) for row in sample])
        return torch.equal(alone, expected)
