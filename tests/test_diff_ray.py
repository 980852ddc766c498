"""The diff on Ray: the same document as on one machine, whatever becomes of the workers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_workers import descendants, killing, title, two_workers  # noqa: F401

from zkl_debug import cluster
from zkl_debug.bench.measure import run_measured, zkl_command
from zkl_debug.bench.synthetic import Flip, Synthetic, write_side
from zkl_debug.diff import on_ray
from zkl_debug.diff.on_ray import RayRunner
from zkl_debug.diff.run import diff_captures
from zkl_debug.diff.sitework import SiteWork, Unpacker, chunks, in_process
from zkl_debug.errors import UsageError

SIZE = Synthetic(digests=8 * 240 * 400, ranks=8, layers=8, seed=5)
FLIPS = (Flip(70, 2, 40, 3), Flip(71, 2, 40, 64), Flip(200, 0, 7))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    write_side(root / "train", SIZE, "train")
    write_side(root / "gen", SIZE, "gen", FLIPS)
    return root


def document(root: Path, **options: Any) -> str:
    return json.dumps(diff_captures(root / "train", root / "gen", **options).to_json(), sort_keys=True)


def through_requests(work: SiteWork, numbers: list[int]) -> Iterator[Any]:
    """As a worker does it, in this process."""
    request = on_ray.make_request(work)
    unpack = Unpacker(len(work.pairs))
    for part in chunks(numbers, 2):
        found = on_ray.compare_sites(request, part)
        assert isinstance(found, list)
        yield from map(unpack, found)


def test_without_ray_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="ray is not installed") as caught:
        RayRunner("local")
    assert "zkl-debug[ray]" in caught.value.next_step


def test_a_worker_does_the_same_work_from_the_folders(pair: Path) -> None:
    """What a worker is asked and what it answers, without Ray."""
    on_ray._open_work.cache_clear()
    assert document(pair, runner=through_requests) == document(pair, runner=in_process)
    assert on_ray._open_work.cache_info().misses == 1
    one = diff_captures(pair / "train", None, runner=through_requests)
    assert one.to_json() == diff_captures(pair / "train", None, runner=in_process).to_json()


def test_a_worker_that_finds_other_captures_refuses(pair: Path, tmp_path: Path) -> None:
    on_ray._open_work.cache_clear()
    moved = Path(shutil.copytree(pair, tmp_path / "pair"))

    def elsewhere(work: SiteWork, numbers: list[int]) -> Iterator[Any]:
        assert numbers
        request = on_ray.make_request(work)
        shutil.rmtree(moved / "gen")
        write_side(moved / "gen", Synthetic(**{**SIZE.__dict__, "seed": 6}), "gen")
        error = on_ray.compare_sites(request, [0])
        assert isinstance(error, Exception)
        yield from ()
        raise error

    verdict = diff_captures(moved / "train", moved / "gen", runner=elsewhere)
    assert verdict.verdict == "refused"
    assert verdict.refusal is not None
    assert "other captures" in verdict.refusal.found


def test_captures_in_memory_cannot_be_sent() -> None:
    with pytest.raises(UsageError, match="not in a folder"):
        on_ray.make_request(SiteWork(None, None, (), captures=(object(), object())))  # type: ignore[arg-type]


# With Ray: slow to start.


@pytest.mark.slow
@pytest.mark.usefixtures("two_workers")
def test_two_workers_give_the_same_document(pair: Path) -> None:
    assert document(pair, runner=RayRunner("local")) == document(pair, runner=in_process)
    first = document(pair, runner=RayRunner("local"), first_only=True)
    assert first == document(pair, runner=in_process, first_only=True)


@pytest.mark.slow
@pytest.mark.usefixtures("two_workers")
def test_a_killed_worker_loses_nothing(tmp_path: Path) -> None:
    size = Synthetic(digests=8 * 240 * 4000, ranks=8, layers=8)
    write_side(tmp_path / "train", size, "train")
    write_side(tmp_path / "gen", size, "gen", FLIPS)
    expected = document(tmp_path, runner=in_process)

    def comparing() -> list[int]:
        return [pid for pid in descendants(os.getpid()) if "compare_sites" in title(pid)]

    with killing(comparing, wait=0.05) as killed:
        found = document(tmp_path, runner=RayRunner("local"))
    assert killed
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(("most", "code"), [(1, 1), (400, 3)], ids=["once", "always"])
def test_a_command_that_loses_workers_prints_its_document_alone(tmp_path: Path, most: int, code: int) -> None:
    """Ray says on stdout that a worker died, and that it gives up: the document must stay the only thing there."""
    pytest.importorskip("ray")
    size = Synthetic(digests=8 * 240 * 4000, ranks=8, layers=8)
    write_side(tmp_path / "train", size, "train")
    write_side(tmp_path / "gen", size, "gen", FLIPS)

    def comparing() -> list[int]:
        return [pid for pid in descendants(os.getpid()) if "compare_sites" in title(pid)]

    with killing(comparing, most=most, wait=0.0 if most > 1 else 0.05) as killed:
        command = zkl_command("diff", tmp_path / "train", tmp_path / "gen", "--json", "--ray", "local", "--jobs", 2)
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed
    assert found.returncode == code, found.stderr
    said = json.loads(found.stdout)
    if code == 1:
        assert said["verdict"] == "diverged"
    else:
        assert "Ray gave up" in said["found"]


@pytest.mark.slow
def test_the_command_starts_a_cluster_of_its_own(pair: Path) -> None:
    pytest.importorskip("ray")
    outputs = [
        run_measured(zkl_command("diff", pair / "train", pair / "gen", "--json", *more)).output
        for more in (("--jobs", 1), ("--ray", "local", "--jobs", 2))
    ]
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0])["verdict"] == "diverged"


def test_no_cluster_at_an_address_is_an_error_of_use() -> None:
    with pytest.raises(UsageError, match=r"no Ray cluster at 127\.0\.0\.1:1: "):
        cluster.knock("127.0.0.1:1")
    cluster.knock("auto")


def test_what_ray_prints_does_not_come_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        print("python")
        os.write(1, b"library\n")

    print("before")
    with cluster.connected(_Stub(0, talk), "local"):
        talk()
    print("behind")
    out, err = capfd.readouterr()
    assert out == "before\nbehind\n"
    assert sorted(err.split()) == ["library"] * 3 + ["python"] * 3


class _Stub:
    """Ray as far as a connection needs it; the first ``bad`` starts fail as those of a busy machine do."""

    def __init__(self, bad: int, talk: Callable[[], None] = lambda: None) -> None:
        self.bad, self.started, self.stopped = bad, 0, 0
        self.talk = talk

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: Any) -> None:
        self.started += 1
        self.talk()
        if self.started <= self.bad:
            raise Exception("the node timed out\nmore")

    def shutdown(self) -> None:
        self.stopped += 1
        self.talk()


def test_a_cluster_that_does_not_start_at_once() -> None:
    slow, broken, away = _Stub(1), _Stub(9), _Stub(9)
    with cluster.connected(slow, "local"):
        assert (slow.started, slow.stopped) == (2, 1)  # the first is stopped before the second
    assert slow.stopped == 2
    with (
        pytest.raises(UsageError, match=r"no Ray cluster at local: the node timed out\n"),
        cluster.connected(broken, "local"),
    ):
        pass
    assert (broken.started, broken.stopped) == (3, 3)
    with pytest.raises(UsageError), cluster.connected(away, "auto"):
        pass
    assert away.started == 1
