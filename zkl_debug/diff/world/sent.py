"""Rows that experts of one rank saw of another rank's tokens, given back to the tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from zkl_debug.diff.model import CaptureLike, Ints
from zkl_debug.diff.sound import sound_bits
from zkl_debug.diff.world.places import Place
from zkl_debug.diff.world.rows import JoinedRows

#: Where ranks record which experts their tokens go to; not a site that can be compared: it depends on the batch.
DISPATCH = re.compile(r"^(?P<moe>.*)/dispatch(?:#\d+)?:out\.0$")
_EXPERT = re.compile(r"^(?P<moe>.*)\.experts\.local_experts\.\d+(?:\.|:|/|$)")


def is_dispatch(name: str) -> bool:
    """Whether a site is the record of a dispatch."""
    return DISPATCH.match(name) is not None


class Sent:
    """Finds the joined row of a row that was sent.

    Args:
        ranks: what each rank recorded.
        places: who they are.
        joined: their rows.
    """

    def __init__(self, ranks: Mapping[int, CaptureLike], places: Mapping[int, Place], joined: JoinedRows) -> None:
        self._ranks, self._places, self._joined = ranks, places, joined
        self._tables: dict[tuple[int, str], tuple[Ints, Ints]] = {}
        self.missing: set[tuple[int, str]] = set()

    def rows(self, rank: int, name: str, rows: Ints) -> Ints:
        """Joined rows of the rank's ``rows`` under site ``name``; -1 for padding and what cannot be found."""
        found = np.array(self._joined.row_of[rank][rows])
        chosen = np.flatnonzero(self._joined.sent[rank][rows])
        match = _EXPERT.match(name)
        if not len(chosen) or match is None:
            return found
        table = self._ranks[rank].rows[rows[chosen]]
        turn = self._joined.turn_of[rank][rows[chosen]]
        group = self._places[rank].groups.get("ep", ())
        for source in np.unique(table["sample"]).tolist():
            mine = np.flatnonzero(table["sample"] == source)
            if source >= len(group) or group[source] not in self._ranks:
                self.missing.add((group[source] if source < len(group) else -1, name))
                continue
            keys, values = self._dispatch(group[source], match.group("moe"))
            wanted = _key(turn[mine], table["token"][mine], table["position"][mine])
            if not len(keys):
                self.missing.add((group[source], name))
                continue
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            found[chosen[mine]] = np.where(keys[at] == wanted, values[at], -1)
        return found

    def _dispatch(self, rank: int, moe: str) -> tuple[Ints, Ints]:
        """Keys (forward, expert, how-manieth), increasing, and the joined row of each, of one rank's layer."""
        known = self._tables.get((rank, moe))
        if known is not None:
            return known
        empty = np.zeros(0, np.int64)
        site = self._ranks[rank].sites.get(f"{moe}/dispatch:out.0")
        if site is None or not site.has_payload:
            self._tables[rank, moe] = (empty, empty)
            return empty, empty
        index = site.payload_index
        chosen = sound_bits(site, index).view(np.int32).reshape(len(index), -1, 2).astype(np.int64)
        rows = np.asarray(site.rows, np.int64)[index]
        turn = np.repeat(self._joined.turn_of[rank][rows], chosen.shape[1])
        there = chosen[:, :, 0].reshape(-1) >= 0
        keys = _key(turn, chosen[:, :, 0].reshape(-1), chosen[:, :, 1].reshape(-1))[there]
        values = np.repeat(self._joined.row_of[rank][rows], chosen.shape[1])[there]
        order = np.argsort(keys)
        self._tables[rank, moe] = (keys[order], values[order])
        return self._tables[rank, moe]


def _key(turn: Ints, expert: Ints, number: Ints) -> Ints:
    parts = [np.asarray(column).astype(np.int64) for column in (turn, expert, number)]
    return np.asarray((parts[0] << 44) | (parts[1] << 28) | parts[2], np.int64)
