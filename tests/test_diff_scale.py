"""Large captures: columns read without HDF5, shared work, early exit, and the same verdict by every way."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from zkl_debug.bench.synthetic import Flip, Synthetic, random_flip, rewrite_ranks, site_metas, write_side
from zkl_debug.diff import processes
from zkl_debug.diff.codes import CodeKeeper
from zkl_debug.diff.processes import Processes
from zkl_debug.diff.run import diff_captures
from zkl_debug.diff.sitework import Runner, SiteOutcome, SiteWork, in_process
from zkl_debug.diff.verdict import Verdict
from zkl_debug.errors import CaptureInvalid
from zkl_debug.store.layout import segment_check
from zkl_debug.store.reader import Capture, open_capture
from zkl_debug.store.table import encode_metas, metas_check, table_bytes, tabulate

REFERENCE = Path(__file__).parent.parent / "captures" / "reference"
SMALL = Synthetic(digests=4 * 60 * 80, ranks=4, layers=2, seed=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sides of four ranks that agree everywhere."""
    root = tmp_path_factory.mktemp("pair")
    write_side(root / "train", SMALL, "train")
    write_side(root / "gen", SMALL, "gen")
    return root


@pytest.fixture
def planted(pair: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the pair with bits flipped in ``gen``."""

    def make(*flips: Flip) -> Path:
        root = Path(shutil.copytree(pair, tmp_path / "planted"))
        rewrite_ranks(root / "gen", SMALL, "gen", flips)
        return root

    return make


def diff(root: Path, **options: Any) -> Verdict:
    return diff_captures(root / "train", root / "gen", **options)


def document(verdict: Verdict) -> str:
    return json.dumps(verdict.to_json(), sort_keys=True)


# Places of columns in the index.


def change_index(root: Path, change: Callable[[dict[str, Any], h5py.File], None], *, table: bool = True) -> None:
    """Change every entry of the site index of every segment, with all check values made to agree.

    With ``table`` there is a site table of the changed index, as far as there can be one; without, it is gone.
    """
    manifest = json.loads((root / "manifest.json").read_text())
    for segment in manifest["segments"]:
        path = root / segment["file"]
        with h5py.File(path, "r+") as file:
            index = json.loads(file["index"][()].tobytes())
            for entry in index:
                change(entry, file)
            raw = json.dumps(index).encode()
            checks = json.loads(file["check"][()].tobytes())
            del file["index"]
            file["index"] = np.frombuffer(raw, np.uint8)
            segment["check"] = segment_check(raw, checks["frames"], checks["rows"])
            segment.pop("table", None)
            for name in ("site_table", "site_places", "site_metas"):
                if name in file:
                    del file[name]
            if table:
                columns, metas = tabulate(index), encode_metas(index)
                file["site_table"], file["site_places"] = columns
                file["site_metas"] = np.frombuffer(metas, np.uint8)
                told = table_bytes(*columns, metas_check(metas), segment["check"])
                segment["table"] = segment_check(told, checks["frames"], checks["rows"])
        segment["bytes"] = path.stat().st_size
    (root / "manifest.json").write_text(json.dumps(manifest))


def forget_places(entry: dict[str, Any], _file: h5py.File) -> None:
    del entry["at"]


def find_places(entry: dict[str, Any], file: h5py.File) -> None:
    at = {}
    for name in ("row", "digest"):
        dset = file[f"sites/{entry['index']:05d}/{name}"]
        if dset.chunks is None:
            at[name] = [len(dset), *([dset.id.get_offset()] if len(dset) else [])]
        else:
            chunks = range(0, len(dset), dset.chunks[0])
            corner = (0,) * (dset.ndim - 1)
            at[name] = [dset.chunks[0], *(dset.id.get_chunk_info_by_coord((k, *corner)).byte_offset for k in chunks)]
    entry["at"] = at


def columns(cap: Capture) -> dict[str, tuple[bytes, bytes]]:
    return {name: (site.rows.tobytes(), site.digest.tobytes()) for name, site in cap.sites.items()}


def test_columns_are_found_without_hdf5_and_are_the_same(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Path(shutil.copytree(pair / "train", tmp_path / "old"))
    change_index(old, forget_places, table=False)
    with open_capture(old) as cap:
        expected = columns(cap)
    with open_capture(pair / "train") as cap:

        def never(*_: object) -> None:
            raise AssertionError("HDF5 was asked")

        monkeypatch.setattr("zkl_debug.store.segment_reader.SegmentReader._column", never)
        assert columns(cap) == expected


def test_places_of_long_columns(tmp_path: Path) -> None:
    """Columns of several chunks, written in several frames."""
    size = Synthetic(digests=30 * 9000, ranks=1, layers=1)
    write_side(tmp_path / "gen", size, "gen")
    old = Path(shutil.copytree(tmp_path / "gen", tmp_path / "old"))
    places: list[Any] = []
    change_index(old, lambda entry, _file: places.append(entry.pop("at")), table=False)
    assert len(places[0]["digest"]) > 2
    with open_capture(old) as one, open_capture(tmp_path / "gen") as two:
        assert columns(one) == columns(two)


def _nowhere(at: dict[str, list[int]]) -> None:
    at["digest"][1] = 1 << 60


def _before(at: dict[str, list[int]]) -> None:
    at["digest"][1] = -16


def _text(at: dict[str, list[int]]) -> None:
    at["digest"] = "here"  # type: ignore[assignment]


def _truth(at: dict[str, list[int]]) -> None:
    at["digest"][1] = True


def _nothing(at: dict[str, list[int]]) -> None:
    at["digest"] = at["digest"][:1]


def _small_chunks(at: dict[str, list[int]]) -> None:
    at["digest"][0] = 0


def _many(at: dict[str, list[int]]) -> None:
    at["digest"] = [1, *at["digest"][1:] * 1000]


def _rows_elsewhere(at: dict[str, list[int]]) -> None:
    at["row"][1] += 4


def _other_bytes(at: dict[str, list[int]]) -> None:
    at["digest"][1] += 16


def _unaligned(at: dict[str, list[int]]) -> None:
    at["digest"][1] += 1


@pytest.mark.parametrize(
    "harm",
    [
        _nowhere,
        _before,
        _text,
        _truth,
        _nothing,
        _small_chunks,
        _many,
        _rows_elsewhere,
        _other_bytes,
        _unaligned,
    ],
)
def test_hostile_places_are_refused(pair: Path, tmp_path: Path, harm: Callable[[Any], None]) -> None:
    """Whatever the index says, digests come back right or not at all."""
    root = Path(shutil.copytree(pair / "train", tmp_path / "c"))
    change_index(root, lambda entry, _file: harm(entry["at"]), table=False)
    with pytest.raises(CaptureInvalid), open_capture(root) as cap:
        columns(cap)
    verdict = diff_captures(root, pair / "gen")
    assert verdict.verdict == "refused"


def change_table(root: Path, harm: Callable[[Any, Any], Any]) -> None:
    """Change the site table of every segment, with all check values made to agree."""
    manifest = json.loads((root / "manifest.json").read_text())
    for segment in manifest["segments"]:
        path = root / segment["file"]
        with h5py.File(path, "r+") as file:
            table, places = file["site_table"][()], file["site_places"][()]
            metas = file["site_metas"][()].tobytes()
            table, places = harm(table, places) or (table, places)
            checks = json.loads(file["check"][()].tobytes())
            for name, data in (("site_table", table), ("site_places", places)):
                del file[name]
                file[name] = data
            told = table_bytes(table, places, metas_check(metas), segment["check"])
            segment["table"] = segment_check(told, checks["frames"], checks["rows"])
        segment["bytes"] = path.stat().st_size
    (root / "manifest.json").write_text(json.dumps(manifest))


def _set(name: str, value: int) -> Callable[[Any, Any], None]:
    def harm(table: Any, _places: Any) -> None:
        table[name][5] = value

    return harm


def _shift(step: int) -> Callable[[Any, Any], None]:
    def harm(_table: Any, places: Any) -> None:
        places[11] += step

    return harm


@pytest.mark.parametrize(
    "harm",
    [
        _set("rows", -1),
        _set("rows", 1 << 60),
        _set("rows", 1),
        _set("digest_pieces", 0),
        _set("digest_pieces", 2),
        _set("digest_pieces", 0xFFFFFFFE),
        _set("digest_chunk", 0),
        _set("digest_chunk", -1),
        _set("row_chunk", 3),
        _set("row_pieces", 0xFFFFFFFE),
        _set("payload_rows", 7),
        _set("payload_item", 3),
        _set("index", 0xFFFFFFFF),
        _shift(1 << 60),
        _shift(-(1 << 60)),
        _shift(16),
        _shift(1),
        lambda table, places: (table[:-1], places),
        lambda table, places: (table, places[:-1]),
        lambda table, places: (table, np.concatenate([places, places])),
        lambda table, places: (table[["index", "rows"]], places),
        lambda table, places: (table, places.astype("<f8")),
    ],
)
def test_hostile_tables_are_refused(pair: Path, tmp_path: Path, harm: Callable[[Any, Any], Any]) -> None:
    """Whatever the table says, digests come back right or not at all. HDF5 group numbers are used for payload only."""
    root = Path(shutil.copytree(pair / "train", tmp_path / "c"))
    with open_capture(root) as cap:
        expected = columns(cap)
    change_table(root, harm)
    try:
        with open_capture(root) as cap:
            assert columns(cap) == expected
    except CaptureInvalid:
        assert diff_captures(root, pair / "gen").verdict == "refused"
    else:
        assert diff_captures(root, pair / "gen").verdict == "identical"


def test_a_table_is_used_only_where_the_manifest_knows_it(pair: Path, tmp_path: Path) -> None:
    """A table that the manifest does not vouch for is left alone; one that it names must be there."""
    root = Path(shutil.copytree(pair / "train", tmp_path / "c"))
    change_table(root, _set("rows", 1))
    manifest = json.loads((root / "manifest.json").read_text())
    for segment in manifest["segments"]:
        del segment["table"]
    (root / "manifest.json").write_text(json.dumps(manifest))
    assert diff_captures(root, pair / "gen").verdict == "identical"
    for segment in manifest["segments"]:
        segment["table"] = "0" * 32
    (root / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CaptureInvalid, match="site table"):
        open_capture(root)
    other = Path(shutil.copytree(pair / "train", tmp_path / "d"))
    with h5py.File(other / "rank00001.seg000.h5", "r+") as file:
        del file["site_table"]
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["segments"][1]["bytes"] = (other / "rank00001.seg000.h5").stat().st_size
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CaptureInvalid, match="site_table is missing"):
        open_capture(other)


def test_swapped_places_are_refused(pair: Path, tmp_path: Path) -> None:
    """The digests of one site filed under another, with places that are all valid."""
    root = Path(shutil.copytree(pair / "train", tmp_path / "c"))
    last: list[Any] = [None]

    def swap(entry: dict[str, Any], _file: h5py.File) -> None:
        entry["at"]["digest"], last[0] = last[0] or entry["at"]["digest"], entry["at"]["digest"]

    change_index(root, swap)
    assert diff_captures(root, pair / "gen").verdict == "refused"


@pytest.mark.parametrize(("a", "b"), [("h200-gpt-te-stack-off", "h200-gpt-te-stack-on")])
def test_reference_captures_give_the_same_verdict_with_places(tmp_path: Path, a: str, b: str) -> None:
    """Captures of before columns had places in the index, and the same with them."""
    for name in (a, b):
        for side in ("train", "gen"):
            old, new = REFERENCE / name / side, tmp_path / name / side
            if not old.is_dir():
                pytest.fail(f"{old} is gone")
            shutil.copytree(old, new)
            change_index(new, find_places)
        before = document(diff_captures(REFERENCE / name / "train", REFERENCE / name / "gen", verify_bytes=True))
        after = document(diff_captures(tmp_path / name / "train", tmp_path / name / "gen", verify_bytes=True))
        assert after.replace(str(tmp_path), str(REFERENCE)) == before


# Who compares the sites.


def test_processes_give_the_same_verdict(planted: Callable[..., Path]) -> None:
    root = planted(Flip(33, 2, 40, 3), Flip(35, 2, 40, 64), Flip(50, 0, 7))
    alone = document(diff(root, runner=in_process))
    for runner in (Processes(1), Processes(2), Processes(3)):
        assert document(diff(root, runner=runner)) == alone


def test_a_process_that_dies_loses_nothing(planted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = planted(Flip(33, 2, 40, 3))
    alone = document(diff(root, runner=in_process))
    parent, compare = os.getpid(), SiteWork.compare

    def dying(self: SiteWork, i: int) -> SiteOutcome:
        if os.getpid() != parent and i == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return compare(self, i)

    monkeypatch.setattr(SiteWork, "compare", dying)
    assert document(diff(root, runner=Processes(2))) == alone


def test_damage_seen_by_another_process_is_a_refusal(pair: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(pair, tmp_path / "pair"))

    def harm(entry: dict[str, Any], _file: h5py.File) -> None:
        if entry["index"] == 41:
            _other_bytes(entry["at"])

    change_index(root / "gen", harm)
    alone = diff(root, runner=in_process)
    assert alone.verdict == "refused"
    assert document(diff(root, runner=Processes(2))) == document(alone)


def test_processes_are_started_only_for_much(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(processes, "_shared_out", never)
    assert diff(pair, runner=Processes()).verdict == "identical"


# First only.


@pytest.mark.parametrize("runner", [in_process, Processes(2)], ids=["alone", "shared"])
def test_first_only_gives_the_same_first(planted: Callable[..., Path], runner: Runner) -> None:
    root = planted(Flip(33, 2, 40, 3), Flip(35, 2, 40, 64), Flip(36, 0, 7))
    full, first = diff(root), diff(root, first_only=True, runner=runner)
    assert first.first == full.first
    assert first.first is not None
    assert (first.edge, first.affected, first.exit_code) == (full.edge, full.affected, full.exit_code)
    assert first.claim.scope == "up-to-first"
    skips = {skip.what: skip.count for skip in first.coverage.skipped}
    assert skips[f"sites after {first.first.site}"] == SMALL.sites - 34
    assert {row["site"] for row in first.to_json()["sites"]} == {first.first.site}


def test_first_only_of_equal_captures_compares_everything(pair: Path) -> None:
    assert document(diff(pair, first_only=True)) == document(diff(pair))


def test_first_only_stops_reading(planted: Callable[..., Path]) -> None:
    root = planted(Flip(10, 1, 0))
    asked: list[int] = []

    def counting(work: SiteWork, numbers: list[int]) -> Iterator[SiteOutcome]:
        for i in numbers:
            asked.append(i)
            yield work.compare(i)

    diff(root, first_only=True, runner=counting)
    assert asked == list(range(11))


# Where a bit was flipped.


def test_every_flipped_bit_is_found_at_its_row(pair: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(pair, tmp_path / "pair"))
    rng, metas = np.random.default_rng(1), site_metas(SMALL)
    last: list[Flip] = []
    for _ in range(20):
        flip = random_flip(SMALL, rng)
        rewrite_ranks(root / "gen", SMALL, "gen", [flip], last)
        last = [flip]
        found = diff(root)
        assert found.first is not None
        assert (found.first.site, found.first.sample, found.first.position) == (
            metas[flip.site].name,
            flip.sample,
            flip.position,
        )
        assert found.affected.rows == 1
    rewrite_ranks(root / "gen", SMALL, "gen", [], last)
    assert diff(root).verdict == "identical"


def test_codes_are_kept_once_and_go_to_a_file_when_they_are_many() -> None:
    keep = CodeKeeper(in_memory=5000)
    rng = np.random.default_rng(0)
    made = [rng.integers(0, 6, 1000).astype(np.uint8) for _ in range(20)]
    kept = [keep(codes) for codes in made]
    for codes, held in zip(made, kept, strict=True):
        np.testing.assert_array_equal(codes, held)
        with pytest.raises(ValueError, match="read-only"):
            held[0] = 1
    assert keep(made[0].copy()) is kept[0]
    assert len(keep(np.zeros(0, np.uint8))) == 0
