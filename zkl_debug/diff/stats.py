"""How far mismatching rows are apart: ULP, absolute difference, elements. Explains a verdict, never makes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bits import DTYPES, ULP_UNDEFINED, to_float64, ulp_distance
from zkl_debug.diff.compare import SiteRows, comparable_blocks, gather
from zkl_debug.diff.edges import Pairs
from zkl_debug.diff.model import NO_STATS, Ints, Stats
from zkl_debug.diff.rows import RowSpace
from zkl_debug.diff.sites import SitePair

#: Mismatching rows of a site whose elements are looked at for the site table.
ROW_LIMIT = 4096


@dataclass(frozen=True)
class PairBits:
    """Element differences of some pairs of one site.

    Attributes:
        pairs: indices of the pairs, int64 [m].
        max_ulp: largest ULP distance of each pair, -1 where it is not defined (only NaNs differ), int64 [m].
        max_abs: largest absolute difference of finite elements, float64 [m].
        mismatched: elements whose bits differ, int64 [m].
        first: flat index of the first of them, int64 [m].
        width: elements of a row.
    """

    pairs: Ints
    max_ulp: Ints
    max_abs: NDArray[np.float64]
    mismatched: Ints
    first: Ints
    width: int


def pair_bits(pair: SitePair, where: SiteRows, space: RowSpace, pairs: Pairs, chosen: Ints) -> PairBits | None:
    """Element differences of chosen pairs (indices into the pairs); None where the raw bits are not there.

    Pairs without raw bits, and those across sides of different dtype or width, are left out.
    """
    if any(site.meta.torch_dtype not in DTYPES for site in (pair.a, pair.b) if site is not None):
        return None
    parts = []
    for block in comparable_blocks(pair, where, pairs, chosen):
        left = gather(pair, where, space, pairs.left[block])
        right = gather(pair, where, space, pairs.right[block])
        name = _dtype_of(pair, pairs, block)
        parts.append((block, *_row_differences(left, right, name), left.shape[1]))
    if not parts:
        return None
    return PairBits(
        pairs=np.concatenate([part[0] for part in parts]),
        max_ulp=np.concatenate([part[1] for part in parts]),
        max_abs=np.concatenate([part[2] for part in parts]),
        mismatched=np.concatenate([part[3] for part in parts]),
        first=np.concatenate([part[4] for part in parts]),
        width=parts[0][5],
    )


def _dtype_of(pair: SitePair, pairs: Pairs, block: Ints) -> str:
    """Dtype of the rows of a block, whose pairs all lie on the same side or across equal dtypes."""
    if int(pairs.sides[block[0]]) == 1 and pair.b is not None:
        return pair.b.meta.torch_dtype
    return pair.meta.torch_dtype


def _row_differences(
    left: NDArray[Any], right: NDArray[Any], dtype: str
) -> tuple[Ints, NDArray[np.float64], Ints, Ints]:
    unequal = left != right
    distance = ulp_distance(left, right, dtype)
    packed = distance.shape[1] // max(1, left.shape[1])
    values_differ = np.repeat(unequal, packed, axis=1) if packed > 1 else unequal
    defined = values_differ & (distance != ULP_UNDEFINED)
    top = np.where(defined, distance, np.uint64(0)).max(axis=1, initial=0)
    ulp = np.where(defined.any(axis=1), np.minimum(top, np.uint64(2**63 - 1)).astype(np.int64), -1)
    with np.errstate(invalid="ignore"):
        gap = np.abs(to_float64(left, dtype) - to_float64(right, dtype))
    gap = np.where(np.isfinite(gap) & values_differ, gap, 0.0)
    first = np.where(unequal.any(axis=1), unequal.argmax(axis=1), -1)
    return ulp, gap.max(axis=1, initial=0.0), unequal.sum(axis=1).astype(np.int64), first.astype(np.int64)


def summarise(bits: PairBits | None) -> Stats:
    """One record over all pairs of ``bits``."""
    if bits is None or not len(bits.pairs):
        return NO_STATS
    top = int(bits.max_ulp.max())
    earliest = int(np.argmin(bits.pairs))
    return Stats(
        max_ulp=top if top >= 0 else None,
        max_abs=float(bits.max_abs.max()),
        mismatched_elements=int(bits.mismatched.sum()),
        elements=bits.width * len(bits.pairs),
        first_element=int(bits.first[earliest]),
        rows=len(bits.pairs),
    )


def site_stats(pair: SitePair, where: SiteRows, space: RowSpace, pairs: Pairs, chosen: Ints) -> Stats:
    """Statistics of the chosen (mismatching) pairs, of at most :data:`ROW_LIMIT` of them."""
    return summarise(pair_bits(pair, where, space, pairs, chosen[:ROW_LIMIT]))
