"""Which other row of the other side has the bits a row holds: found by digest, over all rows of the site."""

from __future__ import annotations

from functools import partial

import numpy as np

from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.explain.model import Source
from zkl_debug.diff.model import Bools, Ints
from zkl_debug.diff.rows import RowSpace, group_ids

_FURTHEST = 4096


def sources(comparison: Comparison, edge: str, site: int, chosen: Ints) -> tuple[Source, Source] | None:
    """Where the right rows' bits are found among the left rows of the edge, and the left rows' among the right ones."""
    if not len(chosen):
        return None
    pairs = comparison.pairs
    part = pairs.slices[edge]
    present = part.start + np.flatnonzero(comparison.done[site].present[part])
    sides = (pairs.left, pairs.right)
    return (
        _source(comparison, site, sides[1][chosen], np.unique(sides[0][present])),
        _source(comparison, site, sides[0][chosen], np.unique(sides[1][present])),
    )


def _source(comparison: Comparison, site: int, rows: Ints, table: Ints) -> Source:
    space, where = comparison.space, comparison.where(site)
    both = np.concatenate([rows, table])
    digest = where.digest[where.index(space, both)]
    content, _ = group_ids([digest[:, 0], digest[:, 1]])
    own, other = content[: len(rows)], content[len(rows) :]
    size = int(content.max()) + 1
    key_of = np.full(size, -1, np.int64)
    row_of = np.full(size, -1, np.int64)
    key_of[other], row_of[other] = space.key[table], table
    lowest = np.full(size, space.n_keys, np.int64)
    np.minimum.at(lowest, other, space.key[table])
    unique = lowest == key_of  # the last written key is the lowest: there is no second one
    highest = np.full(size, -1, np.int64)
    np.maximum.at(highest, other, space.key[table])
    unique &= highest == key_of
    key, row = space.key[rows], row_of[own]
    found = (key_of[own] >= 0) & unique[own] & (key_of[own] != key)
    row = np.where(found, row, rows)
    shift = space.position[row] - space.position[rows]
    return Source(
        found=found,
        sample=space.sample[row].astype(np.int64),
        position=space.position[row],
        same_chain=found & _same_chain(space, key, space.key[row]),
        same_call=found & _same_call(comparison, rows, space.key[row]),
        shift=np.where(found, shift, 0),
        at=partial(_at, comparison, site, rows, table),
        row_sample=space.sample[rows].astype(np.int64),
        row_position=space.position[rows],
    )


def _base(space: RowSpace, key: Ints) -> Ints:
    """The key itself, for a label the one that predicted it; K where there is none."""
    return np.where(space.label[key], space.parent[key], key)


def _ancestor(space: RowSpace, key: Ints, steps: Ints) -> Ints:
    """The key ``steps`` tokens up, K where there is none."""
    hop = np.append(space.parent, space.n_keys)
    at = key.copy()
    for done in range(min(int(steps.max(initial=0)), _FURTHEST)):
        moving = (steps > done) & (at < space.n_keys)
        if not moving.any():
            break
        at[moving] = hop[at[moving]]
    return at


def _same_chain(space: RowSpace, key: Ints, other: Ints) -> Bools:
    """Whether one key is an ancestor of the other: both are positions of one sequence of tokens."""
    shift = space.position[space.key_row[other]] - space.position[space.key_row[key]]
    one, two = _base(space, key), _base(space, other)
    up = _ancestor(space, one, np.maximum(-shift, 0)) == two
    down = _ancestor(space, two, np.maximum(shift, 0)) == one
    real = (one < space.n_keys) & (two < space.n_keys) & (shift != 0) & (np.abs(shift) <= _FURTHEST)
    return np.asarray(np.where(shift < 0, up, down) & real)


def _at(comparison: Comparison, site: int, rows: Ints, table: Ints, shift: int) -> tuple[Bools, Bools]:
    """Whether a row ``shift`` positions on in the same sequence is in the table, and holds the same bits."""
    space, where = comparison.space, comparison.where(site)
    own, others = _base(space, space.key[rows]), _base(space, space.key[table])
    if shift < 0:
        own = _ancestor(space, own, np.full(len(own), -shift))
    else:
        others = _ancestor(space, others, np.full(len(others), shift))
    digest = [where.digest[where.index(space, at)] for at in (rows, table)]
    content, _ = group_ids([np.concatenate([part[:, half] for part in digest]) for half in (0, 1)])
    size = np.int64(content.max() + 1)
    there = (own < space.n_keys) & np.isin(own, others)
    equal = np.isin(own * size + content[: len(rows)], others * size + content[len(rows) :])
    return there, there & equal


def _same_call(comparison: Comparison, rows: Ints, keys: Ints) -> Bools:
    """Whether a row of these keys was in the same call as the rows."""
    space = comparison.space
    call = space.frame + np.where(space.side == 1, len(comparison.a.frames), 0)
    size = np.int64(space.n_keys + 1)
    return np.isin(call[rows] * size + keys, np.unique(call * size + space.key))
