"""Two parts of a diff by themselves: the join of row keys beside a sort, the comparison of payload beside memcmp."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bench.children import writing
from zkl_debug.diff.bytewise import compare_bytes, equal_bytes
from zkl_debug.diff.compare import compare_digests, locate
from zkl_debug.diff.edges import build_pairs
from zkl_debug.diff.model import CaptureLike
from zkl_debug.diff.rows import build_rows
from zkl_debug.diff.sites import join_sites
from zkl_debug.schema import Json, Phase, SiteBlock, SiteKind, SiteMeta
from zkl_debug.store.build import make_block, make_frame, make_rows
from zkl_debug.store.mapped import MappedFile
from zkl_debug.store.reader import open_capture
from zkl_debug.store.writer import CaptureWriter

_LENGTH = 4096  # tokens of a sample
_WIDTH = 2048  # bfloat16 elements of a payload row
_SITES = 4  # 128 MiB each of the default; finding a column in the file costs as much as comparing 4 MB
_REPEATS = 5


@dataclass(frozen=True)
class _Tables:
    """A capture of rows alone."""

    frames: NDArray[Any]
    rows: NDArray[Any]
    side: str = ""
    meta: dict[str, Json] = field(default_factory=dict)
    manifest: dict[str, Json] = field(default_factory=dict)
    sites: dict[str, Any] = field(default_factory=dict)
    states: dict[int, Any] = field(default_factory=dict)


def _tables(tokens: Sequence[NDArray[Any]], order: Sequence[int], phase: Phase) -> CaptureLike:
    frames, rows = [], []
    for number, sample in enumerate(order):
        table = make_rows(sample, tokens[sample], flags=int(phase))
        table["frame"] = number
        frames.append(make_frame(number, phase, step=0, n_rows=len(table)))
        rows.append(table)
    return _Tables(np.concatenate(frames), np.concatenate(rows))


def bench_join(rows: int) -> dict[str, Json]:
    """Join the rows of two sides that hold the same samples in another order.

    Args:
        rows: of each side, rounded to whole samples of 4096 tokens.

    Returns:
        ``rows_per_min_core`` (rows of one side, all of which find their partner), and the time against sorting as many
        128-bit keys.
    """
    samples = max(1, rows // _LENGTH)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 32000, _LENGTH) for _ in range(samples)]
    a = _tables(tokens, range(samples), Phase.SCORE)
    b = _tables(tokens, rng.permutation(samples).tolist(), Phase.PREFILL)
    keys = np.concatenate([a.rows["prefix"], b.rows["prefix"]])

    def join() -> None:
        space = build_rows(a, b)
        assert len(build_pairs(space)) >= len(a.rows)

    def sort() -> None:
        np.lexsort((keys[:, 1], keys[:, 0]))

    join_s, sort_s = (_best(call, 3) for call in (join, sort))
    return {
        "rows": len(a.rows),
        "seconds": join_s,
        "sort_seconds": sort_s,
        "over_sort": join_s / sort_s,
        "rows_per_min_core": len(a.rows) / join_s * 60,
    }


def bench_payload(root: Path, nbytes: int) -> dict[str, Json]:
    """Compare the raw bytes of two captures, samples in another order, and beside it a file and its copy by memcmp.

    Both start from files mapped anew, so both bring the pages in, and both read every byte.

    Returns:
        ``over_memcmp``: speed of the comparison over that of memcmp, median of the pairs of runs.
    """
    samples = max(1, nbytes // (_SITES * _WIDTH * 2 * 512))
    one = _write_payload(root / "a", range(samples), Phase.SCORE)
    _write_payload(root / "b", range(samples)[::-1], Phase.PREFILL)
    paths = [one, Path(shutil.copyfile(one, root / "copy"))]
    pairs = [(_timed(lambda: _memcmp(paths)), _compare(root)) for _ in range(_REPEATS)]
    with open_capture(root / "a") as cap:
        total = sum(site.payload_bytes for site in cap.sites.values())
    memcmp_s, compare_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {
        "bytes": total,
        "seconds": compare_s,
        "memcmp_seconds": memcmp_s,
        "over_memcmp": statistics.median(base / mine for base, mine in pairs),
        "bytes_per_s": total / compare_s,
    }


def _write_payload(root: Path, order: Sequence[int], phase: Phase) -> Path:
    with writing(CaptureWriter(root, side=root.name, meta={})) as writer:
        for number, sample in enumerate(order):
            tokens = np.random.default_rng(sample).integers(0, 32000, 512)
            rows = make_rows(sample, tokens, flags=int(phase))
            frame = make_frame(number, phase, step=0, n_rows=len(rows))
            writer.write_frame(frame, rows, [_block(sample, k) for k in range(_SITES)])
    return next(root.glob("*.h5"))


def _block(sample: int, site: int) -> SiteBlock:
    bits = np.random.default_rng([sample, site]).integers(0, 1 << 16, (512, _WIDTH), dtype=np.uint16)
    meta = SiteMeta(f"decoder.layers.{site}.mlp:out", SiteKind.MODULE, site, site, "out", "bfloat16", (_WIDTH,))
    return make_block(meta, bits)


def _memcmp(paths: Sequence[Path]) -> None:
    left, right = (MappedFile(path) for path in paths)
    assert equal_bytes(left.bytes, right.bytes)


def _compare(root: Path) -> float:
    """Seconds of comparing all payload; opening the files and joining the rows are not counted."""
    seconds = 0.0
    with open_capture(root / "a") as a, open_capture(root / "b") as b:
        space = build_rows(a, b)
        pairs = build_pairs(space)
        for pair in join_sites(a, b):
            where = locate(pair, space)
            present, _ = compare_digests(pair, where, space, pairs)
            start = time.perf_counter()
            differs, complete = compare_bytes(pair, where, space, pairs, present)
            seconds += time.perf_counter() - start
            assert complete
            assert not differs.any()
    return seconds


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _best(call: Callable[[], None], repeats: int) -> float:
    return min(_timed(call) for _ in range(repeats))
