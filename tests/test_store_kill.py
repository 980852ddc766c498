"""A capture that is killed at a random moment keeps every flushed frame and invents none."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from store_kill_child import SHAPES, SITES, content

from zkl_debug.errors import CaptureInvalid
from zkl_debug.store.reader import open_capture, verify_payload
from zkl_debug.store.repair import repair

CHILD = Path(__file__).with_name("store_kill_child.py")


def kill_one(root: Path, shape: str, delay: float) -> list[int]:
    """Run the child, kill it ``delay`` seconds after its first frame; returns the frames it said were flushed."""
    process = subprocess.Popen([sys.executable, str(CHILD), str(root), shape], stdout=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read()
    process.wait()
    lines = (first + rest).decode().splitlines(keepends=True)
    return [int(line) for line in lines if line.endswith("\n")]


def check(root: Path, shape: str, flushed: list[int]) -> None:
    assert flushed == list(range(len(flushed)))
    assert flushed
    with pytest.raises(CaptureInvalid, match="repair"):
        open_capture(root)
    report = repair(root)
    assert report.dropped == []
    with pytest.raises(CaptureInvalid, match="incomplete"):
        open_capture(root)
    assert sorted(p.suffix for p in root.iterdir() if p.suffix not in (".h5", ".json")) == []
    with open_capture(root, partial=True) as capture:
        assert capture.manifest["repaired"] is True
        # The frame under way when the kill came may have reached the log; nothing later can be there.
        assert len(flushed) <= len(capture.frames) <= len(flushed) + 1
        assert verify_payload(capture) == []
        assert len(flushed) <= len(capture.events) + 1
        for number in range(len(capture.frames)):
            _, rows, blocks = content(shape, number)
            mine = np.flatnonzero(capture.rows["frame"] == number)
            for name in ("sample", "position", "token", "prefix", "flags"):
                assert np.array_equal(capture.rows[name][mine], rows[name])
            assert len(capture.sites) == SITES
            for block in blocks:
                site = capture.sites[block.meta.name]
                at = np.flatnonzero(np.isin(site.rows, mine))
                assert np.array_equal(site.digest[at], block.digest)
                if block.payload is not None:
                    assert np.array_equal(site.payload(at), block.payload)
    again = repair(root)
    assert again.already_complete
    assert again.frames == report.frames


@pytest.mark.parametrize("shape", SHAPES)
def test_killed(shape: str, tmp_path: Path) -> None:
    delay = random.Random(shape).uniform(0.005, 0.12)
    check(tmp_path / "c", shape, kill_one(tmp_path / "c", shape, delay))


@pytest.mark.slow
def test_killed_thirty_times(tmp_path: Path) -> None:
    rng = random.Random(30)
    frames = 0
    for k in range(30):
        shape = list(SHAPES)[k % len(SHAPES)]
        root = tmp_path / str(k)
        flushed = kill_one(root, shape, rng.uniform(0.005, 0.12))
        frames += len(flushed)
        check(root, shape, flushed)
    assert frames > 100
