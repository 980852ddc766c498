"""Properties that hold for any input: alignment and verdict, raw bytes, the store under kills, the search."""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_bisect_search import check_sound, drive, random_world
from test_diff_world import Call, Ctx, MemoryCapture, Options, Part, default_world, generation, memory, plant, scoring
from test_store import frames, same

from zkl_debug.diff import diff_captures
from zkl_debug.diff.bytewise import compare_bytes
from zkl_debug.diff.compare import compare_digests, locate
from zkl_debug.diff.edges import build_pairs
from zkl_debug.diff.rows import build_rows, group_ids
from zkl_debug.diff.sites import join_sites
from zkl_debug.errors import CaptureInvalid
from zkl_debug.schema import EventRecord, Phase
from zkl_debug.store.reader import open_capture, verify_payload
from zkl_debug.store.repair import repair
from zkl_debug.store.writer import CaptureWriter

WORLD = default_world()
BASE = "decoder.layers.1."
SITES = [
    f"{BASE}self_attention.linear_qkv:out",
    f"{BASE}self_attention.core_attention:out",
    f"{BASE}self_attention.linear_proj:out",
    "decoder.layers.1/self_attn_bda:out.0",
    f"{BASE}mlp.linear_fc1:out",
    f"{BASE}mlp.linear_fc2:out",
]
#: Rows whose prefix no other sample has, the last token left out: it is never run by the engine.
ROWS = [(0, p) for p in range(4, 8)] + [(1, p) for p in range(4, 6)] + [(2, p) for p in range(5, 7)]


@st.composite
def engine_calls(draw: st.DrawFn) -> list[Call]:
    """The same requests in any order, prompts in chunks of any size, some of them run again."""
    order = draw(st.permutations(list(WORLD.tokens)))
    calls = generation(WORLD, order, chunk=draw(st.integers(1, 9)), reprefill=draw(st.booleans()))
    for number, sample in enumerate(draw(st.lists(st.sampled_from(sorted(WORLD.tokens)), max_size=2))):
        cuts = sorted(draw(st.sets(st.integers(1, WORLD.prompts[sample] - 1), max_size=2)))
        for start, stop in zip([0, *cuts], [*cuts, WORLD.prompts[sample]], strict=True):
            calls.append(Call(Phase.PREFILL, (Part(sample, start, stop, again=20 + number),)))
    return calls


@st.composite
def scorer_calls(draw: st.DrawFn) -> list[Call]:
    """Samples in any order, in micro-batches of any size, some twice."""
    order = [
        *draw(st.permutations(list(WORLD.tokens))),
        *draw(st.lists(st.sampled_from(sorted(WORLD.tokens)), max_size=1)),
    ]
    calls = scoring(WORLD, order, draw(st.integers(1, 4)))
    seen: set[int] = set()
    out = []
    for call in calls:
        parts = []
        for part in call.parts:
            parts.append(Part(part.sample, part.start, part.stop, again=30 if part.sample in seen else 0))
            seen.add(part.sample)
        out.append(Call(call.phase, tuple(parts), call.step))
    return out


@settings(max_examples=8, deadline=None)
@given(scorer_calls(), engine_calls(), st.integers(0, 3))
def test_no_split_order_padding_or_copy_makes_a_difference(score: list[Call], run: list[Call], padding: int) -> None:
    verdict = diff_captures(
        memory(WORLD, "train", score, Options(padding=padding)), memory(WORLD, "gen", run), verify_bytes=True
    )
    assert verdict.verdict == "identical"
    assert verdict.coverage.compared > 0


@settings(max_examples=8, deadline=None)
@given(scorer_calls(), engine_calls(), st.integers(0, 3), st.sampled_from(SITES), st.sampled_from(ROWS))
def test_one_element_is_named_whatever_the_split(
    score: list[Call], run: list[Call], padding: int, site: str, row: tuple[int, int]
) -> None:
    def there(ctx: Ctx) -> bool:
        return (ctx.sample, ctx.position) == row

    engine = memory(WORLD, "gen", run, Options(tweak=plant(site, there)))
    train = memory(WORLD, "train", score, Options(padding=padding))
    for first_only in (False, True):
        verdict = diff_captures(train, engine, first_only=first_only)
        assert verdict.first is not None
        assert (verdict.first.site, verdict.first.sample, verdict.first.position) == (site, *row)
        assert verdict.first.kind.label == "own"


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_groups_are_numbered_as_a_sort_of_all_columns_would(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    kinds: list[tuple[Any, Any]] = [
        (np.int64, st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1])),
        (np.uint64, st.sampled_from([0, 1, 2**63, 2**64 - 1])),
        (np.int64, st.integers(-3, 3)),
        (np.bool_, st.booleans()),
        (np.uint8, st.integers(0, 255)),
    ]
    chosen = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    columns = [np.array(data.draw(st.lists(kind, min_size=n, max_size=n)), dtype) for dtype, kind in chosen]
    ids, first = group_ids(columns)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    ordered = sorted(set(rows))
    assert ids.tolist() == [ordered.index(row) for row in rows]
    assert first.tolist() == [rows.index(row) for row in ordered]


def _flipped(capture: MemoryCapture, data: st.DataObject) -> None:
    """Change raw bits of some rows behind the back of their digests."""
    for name in data.draw(st.lists(st.sampled_from(sorted(capture.sites)), max_size=4)):
        held = capture.sites[name].bits
        assert held is not None
        row = data.draw(st.integers(0, len(held) - 1))
        held[row, data.draw(st.integers(0, held.shape[1] - 1))] ^= held.dtype.type(1)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.data_too_large])
@given(st.data(), scorer_calls(), engine_calls())
def test_bytes_are_compared_as_row_by_row(data: st.DataObject, score: list[Call], run: list[Call]) -> None:
    a, b = memory(WORLD, "train", score), memory(WORLD, "gen", run)
    _flipped(a, data)
    _flipped(b, data)
    space = build_rows(a, b)
    pairs = build_pairs(space)
    for pair in join_sites(a, b):
        where = locate(pair, space)
        present, _ = compare_digests(pair, where, space, pairs)
        differs, complete = compare_bytes(pair, where, space, pairs, present)
        assert complete
        for k in np.flatnonzero(present).tolist():
            rows = [_raw(pair, where.at, space.side, int(side[k])) for side in (pairs.left, pairs.right)]
            assert differs[k] == (rows[0] != rows[1])
        assert not differs[~present].any()


def _raw(pair: Any, at: NDArray[np.int64], side: NDArray[np.uint8], row: int) -> bytes:
    site = pair.b if side[row] else pair.a
    raw: bytes = site.bits[at[row]].tobytes()
    return raw


# The store: any writing, any kill.


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_what_was_flushed_survives_a_kill_at_any_byte(data: st.DataObject) -> None:
    """Frames, events and flushes in any order; then the files as a kill leaves them, the log cut anywhere behind."""
    with tempfile.TemporaryDirectory() as name:
        root, left = Path(name) / "live", Path(name) / "left"
        made = frames(6, data.draw(st.integers(1, 40)), data.draw(st.sampled_from([1, 7, 600])), seed=1)
        segment_bytes = data.draw(st.sampled_from([4 << 30, 60_000]))
        writer = CaptureWriter(root, side="train", meta={}, segment_bytes=segment_bytes)
        written = flushed = 0
        sizes: dict[str, int] = {}
        for step in data.draw(st.lists(st.sampled_from("wwwfe"), min_size=1, max_size=12)):
            if step == "w" and written < len(made):
                writer.write_frame(*made[written])
                written += 1
            elif step == "e":
                writer.write_event(EventRecord(written, "refit"))
            elif step == "f":
                writer.flush()
                flushed, sizes = written, {log.name: log.stat().st_size for log in root.glob("*.wal")}
        writer.flush()  # whatever is behind the last flush may or may not be there: it is cut below
        shutil.copytree(root, left)
        writer.abort("killed")
        for log in left.glob("*.wal"):
            size = log.stat().st_size
            keep = data.draw(st.integers(min(sizes.get(log.name, 0), size), size))
            with log.open("r+b") as file:
                file.truncate(keep)
        try:
            report = repair(left)
        except CaptureInvalid:  # not even the header of the log is whole
            assert not sizes
            return
        if not report.frames:
            assert flushed == 0
            return
        with open_capture(left, partial=True) as capture:
            assert flushed <= len(capture.frames) <= written
            same(capture, copy.deepcopy(made[: len(capture.frames)]))
            assert verify_payload(capture) == []


# The search.


@settings(max_examples=60, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.integers(2, 9),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 4),
)
def test_search_is_sound_in_any_world(
    rnd: random.Random, n: int, k: int, ors: bool, harm: bool, requires: bool, width: int
) -> None:
    world = random_world(rnd, n, min(k, n), ors=ors, harm=harm, requires=requires, broken=False)
    if not world.truth(world.space.top) or world.truth(world.space.bottom):
        return
    result = drive(world.space, world.judge, width=width)
    check_sound(world, result)
    alone = drive(world.space, world.judge)
    assert result.minimal == alone.minimal
