"""Rows and frames of all ranks in one table: what every rank has of a forward is one frame, and a token one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.model import CaptureLike, Ints
from zkl_debug.diff.rows import group_ids
from zkl_debug.diff.world.places import Place
from zkl_debug.errors import CaptureInvalid
from zkl_debug.schema import FRAME_DTYPE, ROW_DTYPE, RowFlag

_SAME = ("phase", "step", "micro_batch", "n_seqs")


@dataclass(frozen=True)
class JoinedRows:
    """Attributes:
    frames: FRAME_DTYPE of the joined frames; ``rank`` is the lowest rank of each.
    rows: ROW_DTYPE; ``frame`` indexes ``frames``.
    row_of: per rank, joined row of each of its rows, -1 for rows that other ranks sent, int64.
    turn_of: per rank, number of the frame of each of its rows among the rank's own frames, int64.
    sent: per rank, rows that other ranks sent, bool.
    """

    frames: NDArray[Any]
    rank: NDArray[np.int32]
    rows: NDArray[Any]
    row_of: Mapping[int, Ints]
    turn_of: Mapping[int, Ints]
    sent: Mapping[int, NDArray[np.bool_]]


def join_rows(ranks: Mapping[int, CaptureLike], places: Mapping[int, Place], where: object) -> JoinedRows:
    """Join the ranks' rows.

    Ranks of one data-parallel replica run the same forwards, in the same order; each has all rows of one, or (context
    parallel) some of them. Replicas run forwards of their own.

    Raises:
        CaptureInvalid: ranks of a replica ran different forwards.
    """
    frames, frame_rank, rows, start, base = [], [], [], 0, 0
    row_of: dict[int, Ints] = {}
    turn_of: dict[int, Ints] = {}
    sent: dict[int, NDArray[np.bool_]] = {}
    for replica in sorted({place.at("dp") for place in places.values()}):
        members = [rank for rank in sorted(places) if places[rank].at("dp") == replica]
        table, leads = _frames(ranks, members, places, where)
        joined = _rows(ranks, members, start, base)
        for rank in members:
            row_of[rank], turn_of[rank], sent[rank] = joined.row_of[rank], joined.turn_of[rank], joined.sent[rank]
        table["n_rows"] = np.bincount(joined.rows["frame"].astype(np.int64) - start, minlength=len(table))
        frames.append(table)
        frame_rank.append(leads)
        rows.append(joined.rows)
        start, base = start + len(table), base + len(joined.rows)
    all_frames = np.concatenate(frames) if frames else np.zeros(0, FRAME_DTYPE)
    all_frames["frame"] = np.arange(len(all_frames))
    return JoinedRows(
        all_frames,
        np.concatenate(frame_rank) if frame_rank else np.zeros(0, np.int32),
        np.concatenate(rows) if rows else np.zeros(0, ROW_DTYPE),
        row_of,
        turn_of,
        sent,
    )


def _frames(
    ranks: Mapping[int, CaptureLike], members: list[int], places: Mapping[int, Place], where: object
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """One frame for each forward of a replica; token slots of context-parallel ranks are added up."""
    lead = max(members, key=lambda rank: (len(ranks[rank].frames), -rank))
    table = np.array(ranks[lead].frames)
    slots = np.zeros(len(table), np.int64)
    counted: set[int] = set()
    for rank in members:
        own = ranks[rank].frames
        for name in _SAME:
            wrong = np.flatnonzero(own[name] != table[name][: len(own)])
            if len(wrong):
                k = int(wrong[0])
                raise CaptureInvalid(
                    f"{where}: forward {k} of rank {rank} has {name} {own[name][k]}, that of rank {lead} "
                    f"{table[name][k]}",
                    "ranks that ran the same forwards",
                )
        if places[rank].at("cp") not in counted and len(own) == len(table):
            counted.add(places[rank].at("cp"))
            slots += own["n_padded"]
    table["n_padded"] = np.where(slots > 0, slots, table["n_padded"])
    return table, np.full(len(table), lead, np.int32)


@dataclass(frozen=True)
class _Replica:
    rows: NDArray[Any]
    row_of: dict[int, Ints]
    turn_of: dict[int, Ints]
    sent: dict[int, NDArray[np.bool_]]


def _rows(ranks: Mapping[int, CaptureLike], members: list[int], start: int, base: int) -> _Replica:
    tables = {rank: ranks[rank].rows for rank in members}
    sent = {rank: (table["flags"] & np.uint32(RowFlag.SENT)) != 0 for rank, table in tables.items()}
    parts = [tables[rank][~sent[rank]] for rank in members]
    every = np.concatenate(parts) if parts else np.zeros(0, ROW_DTYPE)
    turn = every["frame"].astype(np.int64)
    prefix = every["prefix"].reshape(-1, 2)
    columns = [turn, every["sample"], every["position"], every["flags"], every["token"], prefix[:, 0], prefix[:, 1]]
    again = np.concatenate([_occurrence(table) for table in parts]) if parts else np.zeros(0, np.int64)
    ids, first = group_ids([*columns, again])
    order = np.lexsort((first, turn[first]))  # frame by frame, in the order in which the first rank has them
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order)) + base
    rows = np.array(every[first[order]])
    rows["frame"] = turn[first[order]] + start
    row_of, turn_of, at = {}, {}, 0
    for rank, part in zip(members, parts, strict=True):
        places = np.full(len(tables[rank]), -1, np.int64)
        places[~sent[rank]] = number[ids[at : at + len(part)]]
        row_of[rank], turn_of[rank] = places, tables[rank]["frame"].astype(np.int64)
        at += len(part)
    return _Replica(rows, row_of, turn_of, sent)


def _occurrence(table: NDArray[Any]) -> Ints:
    """How often the same row came before in the same frame; nearly always 0."""
    prefix = table["prefix"].reshape(-1, 2)
    columns = [table["frame"], table["sample"], table["position"], table["flags"], prefix[:, 0], prefix[:, 1]]
    ids, _ = group_ids(columns)
    order = np.argsort(ids, kind="stable")
    first = np.searchsorted(ids[order], ids[order])
    out = np.empty(len(ids), np.int64)
    out[order] = np.arange(len(ids)) - first
    return out
