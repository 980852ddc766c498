"""Comparison of raw bytes: runs of rows that follow one another on both sides are compared where the file has them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.compare import SiteRows, comparable_blocks, gather, side_site
from zkl_debug.diff.edges import Pairs
from zkl_debug.diff.model import Bools, Ints, SiteLike
from zkl_debug.diff.rows import RowSpace
from zkl_debug.diff.sites import SitePair

_RUN = 8  # rows of a run from which on it is faster than copies of its rows


def compare_bytes(pair: SitePair, where: SiteRows, space: RowSpace, pairs: Pairs, present: Bools) -> tuple[Bools, bool]:
    """Compare raw bytes wherever both rows of a pair have them.

    Returns:
        Pairs whose bytes differ, bool [P], and whether every present pair could be compared.
    """
    differs = np.zeros(len(pairs), np.bool_)
    done = present & (pairs.sides == 2) & bool(pair.differ)
    scattered = np.zeros(len(pairs), np.bool_)
    chosen = np.flatnonzero(present & ~done)
    chosen = chosen[where.bits[pairs.left[chosen]] & where.bits[pairs.right[chosen]]]
    done[chosen] = True
    code = space.side[pairs.left[chosen]] * 2 + space.side[pairs.right[chosen]]
    for value in np.unique(code):
        scattered[_compare_runs(pair, where, space, pairs, chosen[code == value], differs)] = True
    for block in comparable_blocks(pair, where, pairs, np.flatnonzero(scattered)):
        left = gather(pair, where, space, pairs.left[block], checked=True)
        right = gather(pair, where, space, pairs.right[block], checked=True)
        differs[block] = unequal_rows(left, right)
    return differs, bool((done == present).all())


def _compare_runs(pair: SitePair, where: SiteRows, space: RowSpace, pairs: Pairs, group: Ints, differs: Bools) -> Ints:
    """Compare runs of pairs whose left rows are of one side, and so are their right rows; returns the other pairs."""
    left, right = where.at[pairs.left[group]], where.at[pairs.right[group]]
    order = np.argsort(left, kind="stable")
    group, left, right = group[order], left[order], right[order]
    starts = np.flatnonzero(np.append(True, (np.diff(left) != 1) | (np.diff(right) != 1)))
    sizes = np.diff(np.append(starts, len(group)))
    sites = [side_site(pair, int(space.side[rows[group[0]]])) for rows in (pairs.left, pairs.right)]
    long = sizes >= _RUN
    for start, count in zip(starts[long].tolist(), sizes[long].tolist(), strict=True):
        pieces = [_pieces(site, int(n[start]), count) for site, n in zip(sites, (left, right), strict=True)]
        at = start
        for one, two in _together(pieces[0], pieces[1]):
            if not equal_bytes(one, two):
                differs[group[at : at + len(one)]] = unequal_rows(one, two)
            at += len(one)
        assert at == start + count
    return group[np.repeat(~long, sizes)]


def _pieces(site: SiteLike, first: int, count: int) -> Iterator[NDArray[Any]]:
    pieces = getattr(site, "payload_pieces", None)
    if pieces is None:
        yield site.payload(np.arange(first, first + count))
    else:
        yield from pieces(first, first + count)


def _together(one: Iterator[NDArray[Any]], two: Iterator[NDArray[Any]]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """The rows of two streams side by side, in pieces that both have whole."""
    left, right = next(one, None), next(two, None)
    while left is not None and right is not None:
        count = min(len(left), len(right))
        yield left[:count], right[:count]
        left = left[count:] if count < len(left) else next(one, None)
        right = right[count:] if count < len(right) else next(two, None)


def unequal_rows(one: NDArray[Any], two: NDArray[Any]) -> Bools:
    """Which rows of two arrays of equal dtype and shape differ in any bit, bool [n]."""
    return np.asarray((one != two).any(axis=1), np.bool_)


def equal_bytes(one: NDArray[Any], two: NDArray[Any]) -> bool:
    """Whether two contiguous arrays of equal dtype and shape hold the same bytes."""
    compare = _memcmp()
    if compare is None or not (one.flags.c_contiguous and two.flags.c_contiguous):
        return bool(np.array_equal(one, two))
    return compare(one.ctypes.data, two.ctypes.data, one.nbytes) == 0


@lru_cache(maxsize=1)
def _memcmp() -> Callable[[int, int, int], int] | None:
    """The C library's memcmp, or None where it cannot be reached."""
    try:
        function = ctypes.CDLL(None).memcmp
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_int
    return lambda a, b, n: int(function(a, b, n))
