"""Do both sides hold the same tokens? Found from the row keys alone, before any site is looked at."""

from __future__ import annotations

import numpy as np

from zkl_debug.diff.model import Bools, Refusal, refuse
from zkl_debug.diff.rows import RowSpace, group_ids


def check_tokens(space: RowSpace, tails: Bools) -> Refusal | None:
    """Token ids that differ.

    Where both sides number their samples alike, a sample must have the same prefix at the same position. Whatever the
    numbers, no prefix may go on in a way only A has and in a way only B has.

    Args:
        space: the joined rows.
        tails: keys that one side samples and never runs; their absence from the other side means nothing.
    """
    clash = _inconsistent_key(space) or _sample_conflict(space)
    if clash is not None:
        return clash
    alone = [space.has[side] & ~space.has[1 - side] & ~tails & (space.parent < space.n_keys) for side in (0, 1)]
    alone = [keys & np.append(space.matched, False)[space.parent] for keys in alone]
    for labels in (False, True):
        keys = [np.flatnonzero(side & (space.label == labels)) for side in alone]
        shared = np.intersect1d(space.parent[keys[0]], space.parent[keys[1]])
        if len(shared):
            at = [side[np.isin(space.parent[side], shared)] for side in keys]
            key_a = at[0][np.lexsort((space.sample[space.key_row[at[0]]], space.position[space.key_row[at[0]]]))[0]]
            key_b = at[1][space.parent[at[1]] == space.parent[key_a]][0]
            return _token_refusal(space, int(space.key_row[key_a]), int(space.key_row[key_b]), len(shared))
    return None


def _sample_conflict(space: RowSpace) -> Refusal | None:
    """The same sample at the same position with another prefix on each side."""
    if not _same_numbers(space):
        return None
    label = space.label[space.key]
    place, first = group_ids([space.when, space.sample, space.position, label])
    keys = np.full((2, 2, len(first)), -1, np.int64)  # side; lowest and highest key
    for side in (0, 1):
        rows = np.flatnonzero(space.side == side)
        order = rows[np.argsort(space.key[rows], kind="stable")]
        keys[side, 1][place[order]] = space.key[order]
        keys[side, 0][place[order[::-1]]] = space.key[order[::-1]]
    one_each = (keys[:, 0] == keys[:, 1]).all(axis=0) & (keys[:, 0] >= 0).all(axis=0)
    wrong = np.flatnonzero(one_each & (keys[0, 0] != keys[1, 0]))
    if not len(wrong):
        return None
    earliest = wrong[np.lexsort((label[first[wrong]], space.sample[first[wrong]], space.position[first[wrong]]))[0]]
    rows_of = [int(np.flatnonzero((place == earliest) & (space.side == side))[0]) for side in (0, 1)]
    samples = len(np.unique(space.sample[first[wrong]]))
    return _token_refusal(space, rows_of[0], rows_of[1], samples)


def _same_numbers(space: RowSpace) -> bool:
    """Whether every common row key belongs to a sample of the same number on both sides."""
    group, first = group_ids([space.key, space.sample])
    sides = np.zeros((2, len(first)), np.bool_)
    sides[space.side, group] = True
    shared = np.zeros(space.n_keys, np.bool_)
    shared[space.key[first[sides.all(axis=0)]]] = True
    return bool(shared[space.matched].all())


def _token_refusal(space: RowSpace, row_a: int, row_b: int, count: int) -> Refusal:
    sample, position = int(space.sample[row_a]), int(space.position[row_a])
    tokens = (int(space.token[row_a]), int(space.token[row_b]))
    return refuse(
        "token-ids-differ",
        f"token ids differ at sample {sample} position {position}: {tokens[0]} on A, {tokens[1]} on B",
        f"after the same prefix the sides go on with different tokens, at {count} place(s)",
        "the same token ids on both sides (hand over token ids, not text: re-tokenising changes them)",
        "compare the token ids of this sample on both sides; if these are different requests, capture the same ones",
        sample=sample,
        sample_b=int(space.sample[row_b]),
        position=position,
        token_a=tokens[0],
        token_b=tokens[1],
        places=count,
    )


def _inconsistent_key(space: RowSpace) -> Refusal | None:
    wrong = np.flatnonzero(space.token != space.token[space.key_row][space.key])
    if not len(wrong):
        return None
    row, other = int(wrong[0]), int(space.key_row[space.key[wrong[0]]])
    text = f"rows with the same prefix digest hold different tokens: {int(space.token[other])}, {int(space.token[row])}"
    found = f"sample {int(space.sample[row])} position {int(space.position[row])}"
    return refuse("row-keys-inconsistent", text, found, "prefix digests of the tokens in the rows", "capture again")
