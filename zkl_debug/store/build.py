"""A whole capture from arrays in memory, in one call: for synthetic captures, ingestion and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.digest import digest_array, prefix_digests
from zkl_debug.schema import (
    FRAME_DTYPE,
    ROW_DTYPE,
    EventRecord,
    Json,
    Phase,
    RowFlag,
    SiteBlock,
    SiteMeta,
    StateRecord,
)
from zkl_debug.store.writer import CaptureWriter


def write_capture(
    root: Path,
    side: str,
    frames: Sequence[NDArray[Any]] | NDArray[Any],
    rows: Sequence[NDArray[Any]],
    sites: Sequence[Sequence[SiteBlock]],
    meta: Mapping[str, Json] | None = None,
    *,
    events: Sequence[EventRecord] = (),
    states: Mapping[int, Sequence[StateRecord]] | None = None,
    manifest: Mapping[str, Json] | None = None,
    rank: int = 0,
    world: int = 1,
    **options: Any,
) -> Path:
    """Write a capture.

    Args:
        root: new or empty folder.
        side: label.
        frames: one FRAME_DTYPE record per frame.
        rows: for each frame its ROW_DTYPE rows.
        sites: for each frame its blocks.
        meta, manifest: as for :class:`~zkl_debug.store.writer.CaptureWriter` and its ``close``.
        events, states: events, and state records by event sequence number; written before the frames.
        rank, world: of the process.
        options: further arguments of the writer (``budget_bytes``, ``segment_bytes``).

    Returns:
        Path of the manifest.
    """
    writer = CaptureWriter(root, side=side, rank=rank, world=world, meta=meta or {}, **options)
    for event in events:
        writer.write_event(event)
    for seq, records in (states or {}).items():
        writer.write_state(seq, records)
    for frame, table, blocks in zip(frames, rows, sites, strict=True):
        writer.write_frame(np.asarray(frame), table, blocks)
    return writer.close(manifest=manifest or {})


def make_frame(number: int, phase: Phase, **fields: int) -> NDArray[Any]:
    """One FRAME_DTYPE record, shape [1]; ``graph`` and ``step`` default to -1, other fields to 0."""
    frame = np.zeros(1, FRAME_DTYPE)
    frame["frame"], frame["phase"], frame["graph"], frame["step"] = number, int(phase), -1, -1
    for name, value in fields.items():
        frame[name] = value
    return frame


def make_rows(
    sample: int, tokens: NDArray[Any], start: int = 0, stop: int | None = None, flags: int = 0
) -> NDArray[Any]:
    """ROW_DTYPE rows of positions ``start`` .. ``stop - 1`` of one sample.

    Args:
        sample: sample id.
        tokens: all tokens of the sample from position 0, [n].
        start, stop: positions; ``stop`` defaults to the number of tokens.
        flags: :class:`~zkl_debug.schema.RowFlag` bits, the phase included.
    """
    end = len(tokens) if stop is None else stop
    rows = np.zeros(end - start, ROW_DTYPE)
    rows["sample"] = sample
    rows["position"] = np.arange(start, end)
    rows["token"] = tokens[start:end]
    rows["prefix"] = prefix_digests(np.asarray(tokens[:end], np.int32))[start:end]
    rows["flags"] = np.uint32(RowFlag(flags))
    return rows


def make_block(meta: SiteMeta, bits: NDArray[Any], row: NDArray[Any] | None = None, payload: bool = True) -> SiteBlock:
    """A block of raw bits with its digests.

    Args:
        meta: the site.
        bits: raw bits in an unsigned dtype, [n, ...].
        row: rows of the frame, default 0 .. n-1.
        payload: keep the bits as payload.
    """
    flat = np.ascontiguousarray(bits).reshape(len(bits), -1)
    index = np.arange(len(bits), dtype=np.uint32) if row is None else np.asarray(row, np.uint32)
    return SiteBlock(meta, index, digest_array(flat), flat if payload else None)
