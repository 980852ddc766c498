"""Payload writing through the store against plain file writes of the same bytes."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bench.children import scratch, writing
from zkl_debug.bench.space import require_space
from zkl_debug.schema import Json, Phase, SiteBlock, SiteKind, SiteMeta
from zkl_debug.store.build import make_block, make_frame, make_rows
from zkl_debug.store.writer import CaptureWriter

#: Payload writing speed the store is held to, as a share of plain file writing.
GOAL = 0.70


def bench_store(
    nbytes: int = 512 << 20,
    *,
    rows: int = 512,
    width: int = 1024,
    sites: int = 16,
    repeats: int = 5,
    folder: Path | None = None,
) -> dict[str, Json]:
    """Write the same payload with the store and with ``os.write``, alternating, from opening to closing the file.

    Neither side calls fsync. Digests are made beforehand: they belong to the capture, not to the store.

    Args:
        nbytes: payload bytes a run, rounded up to whole frames.
        rows: rows a frame.
        width: float32 elements a row.
        sites: sites a frame.
        repeats: runs of each side. The best run of each counts: other programs and the disk only ever add time.
        folder: where to write; default the folder for temporary files.

    Returns:
        ``ratio`` (store speed over plain speed), ``median_ratio`` (median over the pairs), ``goal``, ``ok``,
        ``store_bytes_per_s``, ``raw_bytes_per_s``, and the sizes used.

    Raises:
        UsageError: there is no room for them; nothing was written then.
    """
    blocks, frame_bytes = _one_frame(rows, width, sites)
    frames = max(1, -(-nbytes // frame_bytes))
    require_space(folder, int(1.05 * frames * frame_bytes), "a smaller --size")
    with scratch(folder, "zkl-bench-") as root:
        _timed(_store, root, blocks, 1, rows)  # warm up: imports, thread, folders
        pairs = []
        for _ in range(repeats):
            raw = _timed(_raw, root, blocks, frames, rows)
            pairs.append((raw, _timed(_store, root, blocks, frames, rows)))
    total = frames * frame_bytes
    raw_s, store_s = (min(side) for side in zip(*pairs, strict=True))
    ratio = raw_s / store_s
    return {
        "bench": "store",
        "ratio": ratio,
        "median_ratio": statistics.median(raw / store for raw, store in pairs),
        "goal": GOAL,
        "ok": ratio >= GOAL,
        "store_bytes_per_s": total / store_s,
        "raw_bytes_per_s": total / raw_s,
        "bytes": total,
        "frames": frames,
        "rows_per_frame": rows,
        "row_bytes": 4 * width,
        "sites": sites,
        "repeats": repeats,
    }


def _one_frame(rows: int, width: int, sites: int) -> tuple[list[SiteBlock], int]:
    rng = np.random.default_rng(0)
    blocks = []
    for k in range(sites):
        bits = rng.integers(0, 1 << 32, (rows, width), dtype=np.uint64).astype(np.uint32)
        meta = SiteMeta(f"decoder.layers.{k}.mlp:out", SiteKind.MODULE, k, k, "out", "float32", (width,))
        blocks.append(make_block(meta, bits))
    return blocks, 4 * rows * width * sites


def _timed(run: Callable[..., None], root: Path, *args: Any) -> float:
    target = root / "run"
    start = time.perf_counter()
    run(target, *args)
    elapsed = time.perf_counter() - start
    shutil.rmtree(target, ignore_errors=True)
    return elapsed


def _store(target: Path, blocks: Sequence[SiteBlock], frames: int, rows: int) -> None:
    table: NDArray[Any] = make_rows(0, np.arange(rows))
    writer = CaptureWriter(target, side="bench", meta={})
    with writing(writer):
        for number in range(frames):
            writer.write_frame(make_frame(number, Phase.SCORE), table, blocks)


def _raw(target: Path, blocks: Sequence[SiteBlock], frames: int, rows: int) -> None:  # noqa: ARG001
    target.mkdir()
    fd = os.open(target / "raw", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    for _ in range(frames):
        for block in blocks:
            assert block.payload is not None
            view = memoryview(block.payload.reshape(-1).view(np.uint8))
            while view:
                view = view[os.write(fd, view) :]
    os.close(fd)
