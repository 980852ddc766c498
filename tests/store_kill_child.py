"""Child process of the kill test: writes frames and prints the number of each one that ``flush`` has returned for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.schema import EventRecord, Phase, SiteBlock, SiteKind, SiteMeta
from zkl_debug.store.build import make_block, make_frame, make_rows
from zkl_debug.store.writer import CaptureWriter

#: name -> (rows a frame, elements a row, payload is kept, bytes a segment)
SHAPES: dict[str, tuple[int, int, bool, int]] = {
    "digest": (7, 64, False, 4 << 30),
    "small": (5, 33, True, 4 << 30),
    "chunks": (96, 4096, True, 4 << 30),  # a frame is larger than a chunk
    "rotate": (40, 1024, True, 1 << 20),
}
SITES = 3


def content(shape: str, number: int) -> tuple[NDArray[Any], NDArray[Any], list[SiteBlock]]:
    """Frame ``number`` as a function of its number only, so that the parent can tell what it should be."""
    n, width, payload, _ = SHAPES[shape]
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, 1000, n)
    bits = rng.integers(0, 1 << 16, (SITES, n, width), dtype=np.uint16)
    blocks = [
        make_block(
            SiteMeta(f"decoder.layers.{i}.mlp:out", SiteKind.MODULE, i, i, "out", "bfloat16", (width,)),
            bits[i],
            payload=payload,
        )
        for i in range(SITES)
    ]
    return make_frame(number, Phase.SCORE), make_rows(number, tokens), blocks


def run(root: Path, shape: str) -> None:
    """Write frames until killed."""
    writer = CaptureWriter(root, side="train", meta={"shape": shape}, segment_bytes=SHAPES[shape][3])
    ready = [content(shape, number) for number in range(12)]
    number = 0
    while True:
        frame, rows, blocks = ready[number] if number < len(ready) else content(shape, number)
        writer.write_frame(frame, rows, blocks)
        writer.write_event(EventRecord(number, "tick", frame=number))
        writer.flush()
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        number += 1


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
