"""What a diff costs: synthetic captures of growing size, one bit flipped, compared in a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zkl_debug.bench.children import child, scratch
from zkl_debug.bench.diff_parts import bench_join, bench_payload
from zkl_debug.bench.linear import growth, is_judged
from zkl_debug.bench.measure import Measured, run_measured, zkl_command
from zkl_debug.bench.space import FREE_SPACE, require_space
from zkl_debug.bench.synthetic import Flip, Synthetic, random_flip, rewrite_ranks, site_metas, writing_command
from zkl_debug.diff.bytewise import equal_bytes
from zkl_debug.errors import UsageError
from zkl_debug.schema import Json
from zkl_debug.store.mapped import MappedFile

#: What a diff is held to.
GOALS: dict[str, float] = {
    "seconds_100M": 120.0,
    "peak_rss": float(2 << 30),
    "first_seconds_100M": 30.0,
    "over_linear": 1.3,
    "join_rows_per_min_core": 20e6,
    "payload_over_memcmp": 0.8,
}
#: Goals that a figure must reach; the others it must not exceed.
AT_LEAST = ("join_rows_per_min_core", "payload_over_memcmp")
_MILLION = 1_000_000
_PAYLOAD, _LITTLE_PAYLOAD = 512 << 20, 64 << 20
_FIRST_LAYER = 12  # number of the flipped site: in layer 0

Say = Callable[[str], None]


@dataclass(frozen=True)
class DiffBench:
    """What is measured.

    Attributes:
        sizes: digests of one side, increasing.
        ranks, layers: files and layers of the captures.
        rank_size: digests of a file; the number of files then grows with the size, up to ``ranks``. 0: always
            ``ranks`` files.
        trials: flipped bits to look for, at ``trial_size`` digests.
        trial_size: size of their captures; 0 for the smallest of ``sizes``.
        jobs: processes; None leaves it to the diff.
        join_rows: rows of each side for the join alone.
        payload_bytes: raw bytes of one side for the comparison of payload; 0 for 512 MiB, and 64 MiB where no size has
            a million digests. Three times as many are written.
    """

    sizes: tuple[int, ...] = (300_000, 1_000_000, 3_000_000)
    ranks: int = 8
    layers: int = 48
    rank_size: int = 0
    trials: int = 20
    trial_size: int = 0
    jobs: int | None = None
    join_rows: int = 1_000_000
    payload_bytes: int = 0

    def captures(self) -> list[Synthetic]:
        """The captures of each of ``sizes``."""
        return [Synthetic(digests, _ranks(self, digests), self.layers) for digests in self.sizes]

    def trial(self) -> Synthetic:
        """The captures in which bits are looked for."""
        digests = self.trial_size or self.sizes[0]
        return Synthetic(digests, max(2, _ranks(self, digests)), self.layers)

    @property
    def payload(self) -> int:
        """Raw bytes of one side for the comparison of payload."""
        return self.payload_bytes or (_PAYLOAD if self.sizes[-1] >= _MILLION else _LITTLE_PAYLOAD)

    @property
    def nbytes(self) -> int:
        """Bytes on disk at the worst moment, about: each part removes what it wrote."""
        trials = [self.trial()] if self.trials else []
        return max(3 * self.payload, *(size.nbytes for size in [*self.captures(), *trials]))


def bench_diff(what: DiffBench, folder: Path | None = None, progress: Say | None = None) -> dict[str, Json]:
    """Measure the diff.

    Args:
        what: sizes.
        folder: where captures are written; default the folder for temporary files. 100 million digests take 4.3 GB.
        progress: told what is being done.

    Returns:
        Figures by part; the goals; ``judged``, the figure of each; ``met``, None where nothing here says so.

    Raises:
        UsageError: sizes that mean nothing, or for which there is no room; nothing was written then.
    """
    say = progress or (lambda _text: None)
    refuse(what, folder)
    say("join of row keys")
    join = bench_join(what.join_rows)
    with scratch(folder, "zkl-bench-") as root:
        say("comparison of payload")
        payload = bench_payload(root / "payload", what.payload)
        shutil.rmtree(root / "payload")
        sizes = [_measure_size(what, size, root / "size", say) for size in what.captures()]
        trials = _trials(what, root / "trials", say) if what.trials else None
    found: dict[str, Json] = {"join": join, "payload": payload, "sizes": sizes, "trials": trials}
    found["growth"] = {unit: _growth(sizes, unit) for unit in ("seconds", "cpu_seconds")}
    judged = _judged(found)
    met = {name: None if value is None else _is_met(name, value) for name, value in judged.items()}
    return {"bench": "diff", **found, "goals": GOALS, "judged": judged, "met": met}


def refuse(what: DiffBench, folder: Path | None) -> None:
    """Look at what is asked before anything is written.

    Raises:
        UsageError: fewer digests than one a file and site, two sizes that come to the same, or too little room.
    """
    sizes = [("--rows", digests, size) for digests, size in zip(what.sizes, what.captures(), strict=True)]
    sizes += [("--trial-rows", what.trial_size, what.trial())] if what.trials and what.trial_size else []
    if what.rank_size:
        sizes += [("--rank-rows", what.rank_size, Synthetic(what.rank_size, 1, what.layers))]
    for option, digests, size in sizes:
        least = size.ranks * size.sites
        if digests < least:
            files = "one file" if size.ranks == 1 else f"{size.ranks} files"
            raise UsageError(
                f"{option} {digests:g}",
                f"at least {least:,}: one row at each of {size.sites} sites in {files}",
                f"zkl-debug bench diff {option} {least}, or fewer --ranks or --layers",
            )
    for (few, size), (many, other) in itertools.pairwise(zip(what.sizes, what.captures(), strict=True)):
        if size.total == other.total:
            raise UsageError(
                f"--rows {few} and {many} are both {size.total:,} digests",
                f"sizes of their own; files of equal length make steps of {size.ranks * size.sites:,}",
                "leave one of them out, or fewer --ranks",
            )
    require_space(folder, what.nbytes, "fewer --rows, --ranks or --layers")


def _write(root: Path, size: Synthetic, flips: Sequence[Flip]) -> None:
    """Write both sides, each in a process of its own: the store of a rank is one thread's work.

    Raises:
        UsageError: one of them could not be written.
    """
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(child(writing_command(root / side, size, side, flips if side == "gen" else ())))
            for side in ("train", "gen")
        ]
        for job in jobs:
            _, errors = job.communicate()
            if job.returncode:
                told = (errors.strip().splitlines() or [f"status {job.returncode}"])[-1]
                raise UsageError(f"synthetic captures could not be written: {told}", next_step=FREE_SPACE)


def _measure_size(what: DiffBench, size: Synthetic, root: Path, say: Say) -> dict[str, Json]:
    flip = Flip(_FIRST_LAYER, size.ranks // 2, size.positions // 2, 77)
    say(f"{size.total:,} digests: writing")
    _write(root, size, [flip])
    say(f"{size.total:,} digests: memcmp")
    memcmp_s = _compare_files(root)
    try:
        runs = {}
        for name, options in (("full", ()), ("first", ("--first",))):
            say(f"{size.total:,} digests: diff ({name})")
            runs[name] = _run(root, what.jobs, *options)
        nbytes = sum(path.stat().st_size for path in root.glob("*/*.h5"))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {
        "digests": size.total,
        "bytes": nbytes,
        "ranks": size.ranks,
        "sites": size.sites,
        "memcmp_seconds": memcmp_s,
        **{name: _figures(run, size, flip, memcmp_s) for name, run in runs.items()},
    }


def _ranks(what: DiffBench, digests: int) -> int:
    if not what.rank_size:
        return what.ranks
    return max(1, min(what.ranks, round(digests / what.rank_size)))


def _run(root: Path, jobs: int | None, *options: str) -> Measured:
    more = () if jobs is None else ("--jobs", jobs)
    return run_measured(zkl_command("diff", root / "train", root / "gen", "--json", *options, *more))


def _figures(run: Measured, size: Synthetic, flip: Flip, memcmp_s: float) -> dict[str, Json]:
    return {
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "peak_rss": run.peak_rss,
        "digests_per_s": size.total / run.seconds,
        "over_memcmp": run.seconds / memcmp_s,
        "found": _is_found(json.loads(run.output), size, flip),
    }


def _is_found(document: Json, size: Synthetic, flip: Flip) -> bool:
    """Whether a verdict names the flipped bit: site, sample and position, and no other row."""
    first = document["first"] or {}
    named = (first.get("site"), first.get("sample"), first.get("position"))
    right = (site_metas(size)[flip.site].name, flip.sample, flip.position)
    return document["verdict"] == "diverged" and named == right and document["affected"]["rows"] == 1


def _compare_files(root: Path) -> float:
    """Seconds that memcmp takes over as many bytes as both sides have: every file against itself, mapped twice."""
    start = time.perf_counter()
    for path in sorted(root.glob("*/*.h5")):
        left, right = MappedFile(path), MappedFile(path)
        assert equal_bytes(left.bytes, right.bytes)
    return time.perf_counter() - start


def _trials(what: DiffBench, root: Path, say: Say) -> dict[str, Json]:
    """Flip one bit after another anywhere in one side, and look for each."""
    size = what.trial()
    rng = np.random.default_rng(7)
    say(f"trials of {size.total:,} digests: writing")
    _write(root, size, ())
    last: list[Flip] = []
    missed: list[Json] = []
    begin = time.perf_counter()
    for number in range(what.trials):
        say(f"trial {number + 1} of {what.trials}")
        flip = random_flip(size, rng)
        rewrite_ranks(root / "gen", size, "gen", [flip], last)
        last = [flip]
        if not _is_found(json.loads(_run(root, what.jobs).output), size, flip):
            missed.append([flip.site, flip.sample, flip.position, flip.bit])
    shutil.rmtree(root, ignore_errors=True)
    return {
        "digests": size.total,
        "of": what.trials,
        "found": what.trials - len(missed),
        "missed": missed,
        "seconds": time.perf_counter() - begin,
    }


def _growth(sizes: Sequence[dict[str, Json]], unit: str) -> dict[str, Json] | None:
    """The line through the cost of the full diffs."""
    return growth([size["digests"] for size in sizes], [size["full"][unit] for size in sizes])


def _judged(found: dict[str, Json]) -> dict[str, Json]:
    """The figure of each goal, and of the bits that were to be found; None where nothing here was measured for it."""
    sizes, line, trials = found["sizes"], found["growth"]["cpu_seconds"], found["trials"]
    large = next((size for size in sizes if size["digests"] >= 99_000_000), None)
    bits = [size[run]["found"] for size in sizes for run in ("full", "first")]
    return {
        "found": [sum(bits), len(bits)],
        "trials": None if trials is None else [trials["found"], trials["of"]],
        "over_linear": max(line["off_line"], line["over_proportional"]) if is_judged(line) else None,
        "peak_rss": max(size["full"]["peak_rss"] for size in sizes),
        "join_rows_per_min_core": found["join"]["rows_per_min_core"],
        # of less, what it takes to begin with a site is as much as comparing it
        "payload_over_memcmp": found["payload"]["over_memcmp"] if found["payload"]["bytes"] >= _PAYLOAD else None,
        "seconds_100M": large and large["full"]["seconds"],
        "first_seconds_100M": large and large["first"]["seconds"],
    }


def _is_met(name: str, value: Json) -> bool:
    if name not in GOALS:
        return bool(value[0] == value[1])
    return bool(value >= GOALS[name] if name in AT_LEAST else value <= GOALS[name])
