"""The way of a GPU through a capture, with kernels that run on a CPU: what comes out is what a CPU capture holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_fakes import FakeKernels, Model, call, digests, steps_of, watched

from zkl_debug.beds.bed import BedOptions
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.capture import labels, session
from zkl_debug.capture.device import ChunkPool, DeviceFrame, Pending
from zkl_debug.capture.kernels import Kernels
from zkl_debug.capture.twins import RECHECK, Pair, Twins
from zkl_debug.digest_torch import digest_tensor
from zkl_debug.store.reader import open_capture


class Everything(FakeKernels):
    """Takes whatever has whole lanes, as the kernel of a GPU does."""

    def takes(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        return True


def _rows_by_site(folder: Path) -> dict[str, set[tuple[Any, ...]]]:
    """Of each site, its rows by key with their digests."""
    with open_capture(folder) as found:
        assert found.manifest["probe"] == {"ok": True, "errors": []}
        fields = ["frame", "sample", "position", "token", "prefix", "flags"]
        made = {}
        for name, site in found.sites.items():
            rows = found.rows[np.array(site.rows)]
            digest = np.array(site.digest)
            made[name] = {(*(r[f].tobytes() for f in fields), d.tobytes()) for r, d in zip(rows, digest, strict=True)}
        return made


@pytest.mark.parametrize("level", ["digest", "payload"])
def test_a_bed_captured_through_a_device_holds_the_rows_of_a_capture_on_the_host(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, record = BedOptions(bed="tiny-gpt", stack=False), RecordOptions(level, certify=False)
    record_bed(options, tmp_path / "host", record)
    late: list[int] = []
    blocks = labels.LateLabels.blocks

    def counted(self: labels.LateLabels, *args: Any) -> Any:
        late.append(len(self.parents))
        return blocks(self, *args)

    monkeypatch.setattr(session, "Kernels", Everything)
    monkeypatch.setattr(labels.LateLabels, "blocks", counted)
    record_bed(options, tmp_path / "device", record)
    assert len(late) > 10  # scoring batches and decode steps
    for side in ("train", "gen"):
        host, device = _rows_by_site(tmp_path / "host" / side), _rows_by_site(tmp_path / "device" / side)
        assert set(host) == set(device)
        for name, rows in host.items():
            assert device[name] == rows, name


def test_memory_that_was_written_is_read_again_whatever_the_version_of_a_new_tensor_over_it() -> None:
    """x, then x + 1 in place, then a tensor of its own counter over the same memory: x must not be taken for it."""
    from zkl_debug.capture.twins import Reading, memory_key

    x = torch.zeros(4, 8)
    first = Reading(x, x._version, "a:out", None)  # type: ignore[arg-type]
    assert not first.written_since(x)
    x.add_(1)
    assert first.written_since(x)
    fresh = torch.empty(0)
    fresh.data = x
    assert fresh._version == 0
    assert memory_key(fresh, None, 4) == memory_key(x, None, 4) == memory_key(x.view(4, 2, 4), None, 4)
    twins, nowhere = Twins(), Pending(0, 0, 4)
    pair = Pair("a:out", "b:out", nowhere, nowhere)
    zero, one = np.zeros((4, 2), np.uint64), np.ones((4, 2), np.uint64)
    assert not twins.trusted(0, 1, "a:out", "b:out")  # nothing is shared before it was seen equal
    twins.judge(0, pair, zero, zero)
    assert twins.trusted(0, 1, "a:out", "b:out")
    assert not twins.trusted(0, 2 * RECHECK, "a:out", "b:out")  # read again every so often
    twins.judge(0, pair, zero, one)
    assert twins.refuses(0, "a:out", "b:out")
    assert ("a:out", "b:out") in {pair[1:] for pair in twins.betrayed}
    twins.judge(0, pair, zero, zero)
    assert not twins.trusted(0, 1, "a:out", "b:out")  # never again


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LITTLE, MUCH = 100, 1 << 17  # digests: what is copied with the program's work, and what aside


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [LITTLE, MUCH])
def test_a_slot_that_nobody_writes_holds_no_digest_of_an_earlier_frame(device: str, rows: int) -> None:
    pool, at = ChunkPool(), torch.empty(0, device=device).device  # with its number, as tensors tell it
    for _ in range(3):
        frame = DeviceFrame(pool, Kernels())
        chunk = frame.reserve(rows, at)
        assert not chunk.device.any()
        for part in (slice(0, rows // 2), slice(rows // 2, rows)):  # read out in two
            chunk.device[part] = 7
            chunk.used = part.stop
            frame.copy_so_far()
        frame.copy_out()
        (read,) = frame.arrays()
        assert read.shape == (rows, 2)
        assert (read == 7).all()
    assert pool.take(at, rows) is chunk, "the one that was there before"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gaps", [False, True])
def test_words_are_read_out_one_behind_the_other(device: str, gaps: bool) -> None:
    frame = DeviceFrame(ChunkPool(), Kernels())
    first, second = (torch.arange(n, 3 * n, dtype=torch.int32, device=device) for n in (10, 13))
    if gaps:
        first, second = first[::2], second[1::2]
    at = [frame.fetch_words(words) for words in ([second], [first, second[:0], second], [first[:0]])]
    assert at[2].rows == 0
    frame.copy_out()
    (read,) = frame.arrays()
    words = read[at[1].start : at[1].start + at[1].rows].reshape(-1).view(np.int32)
    assert words[: len(first) + len(second)].tolist() == [*first.tolist(), *second.tolist()]


class Adding(FakeKernels):
    """Adds to what is there, as the Triton kernel does for wide rows, and works nothing out beforehand."""

    def job(
        self, tensor: torch.Tensor, rows: int, out: torch.Tensor, start: int, dest: torch.Tensor | None, *, clear: bool
    ) -> Any:
        if clear:
            out[start : start + rows] = 0

        def step() -> None:
            found = torch.from_numpy(digest_tensor(tensor, rows).view(np.int64))
            at = torch.arange(rows) if dest is None else dest
            out[start + at[at >= 0]] += found[at >= 0]

        return step

    def several(self, *_args: Any, **_options: Any) -> None:  # type: ignore[override]
        return None

    def again(self, *_args: Any, **_options: Any) -> None:  # type: ignore[override]
        return None


def test_kernels_that_add_give_what_those_that_write_do(tmp_path: Path) -> None:
    found = []
    for kernels in (FakeKernels, Adding):
        model = Model()
        capture = watched(model, tmp_path / kernels.__name__)
        capture.session.kernels = kernels()
        for number, tokens in enumerate(steps_of(12)):
            call(model, capture, tokens[: 1 + number % 4], False)
            if number % 3 == 2:
                capture.session.flush()  # chunks are taken again
        capture.__exit__(None, None, None)
        found.append(digests(tmp_path / kernels.__name__))
    written, added = found
    assert written.keys() == added.keys()
    assert all(np.array_equal(rows, added[name]) for name, rows in written.items())
