"""Every known fault put into a bed, captured, compared by the public functions and scored against its answer."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from zkl_debug.beds.bed import DTYPES, BedOptions
from zkl_debug.beds.faults import FAULTS, Fault
from zkl_debug.beds.faults.registry import no_fault
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.bench.children import scratch
from zkl_debug.bench.scoreboard import Clean, Document, Score, judge, told
from zkl_debug.diff import diff_captures
from zkl_debug.errors import UsageError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """One fault in one bed."""

    fault: Fault
    bed: str
    dtype: str
    seed: int

    @property
    def name(self) -> str:
        """For progress."""
        return f"{self.fault.id} {self.bed} {self.dtype} seed {self.seed}"


def cases(faults: Sequence[str] = (), dtypes: Sequence[str] = DTYPES, seeds: int = 1) -> list[Case]:
    """What to run: every fault in the dtypes where it applies; beds take turns over the seeds.

    Raises:
        UsageError: a fault that is not there, or that none of the dtypes has.
    """
    unknown = [name for name in faults if name not in FAULTS]
    if unknown:
        raise no_fault(unknown[0])
    for fault in (FAULTS[name] for name in faults):
        if not set(fault.dtypes) & set(dtypes):
            raise UsageError(
                f"fault {fault.id} is not there in {' or '.join(dtypes)}",
                f"{' or '.join(fault.dtypes)}, in {' or '.join(fault.beds)}",
                f"zkl-debug bench faults --fault {fault.id} --dtype {fault.dtypes[0]}",
            )
    chosen = [f for f in FAULTS.values() if f.id != "Z0" and (not faults or f.id in faults)]
    return [
        Case(f, f.beds[seed % len(f.beds)], dtype, seed)
        for f in chosen
        for dtype in f.dtypes
        if dtype in dtypes
        for seed in range(seeds)
    ]


def run_case(case: Case, folder: Path) -> Score:
    """Put the fault in, capture both sides with their raw bits, compare, score. Never raises: a failure is a score."""
    started = time.perf_counter()
    options = BedOptions(bed=case.bed, dtype=case.dtype, seed=case.seed, fault=case.fault.id)
    at = (case.fault.id, case.bed, case.dtype, case.seed)
    try:
        said = told(_diagnose(options, folder, "payload"))
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        return Score(*at, None, seconds=time.perf_counter() - started, failure=failure)
    right, edge = judge(case.fault.answer, said)
    return Score(*at, said, right, edge, time.perf_counter() - started)


def run_clean(number: int, folder: Path, dtypes: Sequence[str] = DTYPES) -> Clean:
    """A run with nothing broken; beds, dtypes, order of requests and neighbours change with the number."""
    beds = FAULTS["Z0"].beds
    bed, dtype = beds[number % len(beds)], dtypes[number // len(beds) % len(dtypes)]
    seed = 1000 + number
    options = BedOptions(bed=bed, dtype=dtype, seed=seed, permute=number % 3, neighbours=number % 4)
    try:
        said = told(_diagnose(options, folder, "digest"))
    except Exception as error:
        return Clean(bed, dtype, seed, "failed", f"{type(error).__name__}: {error}")
    return Clean(bed, dtype, seed, said.verdict, said.site or said.text if said.verdict != "identical" else "")


def _diagnose(options: BedOptions, folder: Path, level: str) -> Document:
    with tempfile.TemporaryDirectory(dir=folder) as out:
        record_bed(options, Path(out), RecordOptions(level=level))
        verdict = diff_captures(Path(out) / "train", Path(out) / "gen")
        document: Document = verdict.to_json()
        return document


def run_all(
    chosen: Sequence[Case], clean: int, dtypes: Sequence[str], say: Say, jobs: int = 1
) -> Iterator[Score | Clean]:
    """Scores one by one, then the clean runs; every run opens its bed anew, in this process or in one of ``jobs``."""
    if jobs > 1:
        yield from _run_by_processes(chosen, clean, dtypes, say, jobs)
        return
    with scratch(None, "zkl-scoreboard-") as root:
        for number, case in enumerate(chosen, 1):
            say(f"fault {number} of {len(chosen)}: {case.name}")
            yield run_case(case, root)
        for number in range(clean):
            say(f"clean run {number + 1} of {clean}")
            yield run_clean(number, root, dtypes)


def _run_by_processes(
    chosen: Sequence[Case], clean: int, dtypes: Sequence[str], say: Say, jobs: int
) -> Iterator[Score | Clean]:
    """The same in ``jobs`` processes; results come in the same order."""
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_share_cores, initargs=(jobs,))
    done = False
    with scratch(None, "zkl-scoreboard-") as root:
        try:
            runs = [pool.submit(_run_named, c.fault.id, c.bed, c.dtype, c.seed, str(root)) for c in chosen]
            cleans = [pool.submit(run_clean, number, root, tuple(dtypes)) for number in range(clean)]
            for number, (case, run) in enumerate(zip(chosen, runs, strict=True), 1):
                say(f"fault {number} of {len(chosen)}: {case.name}")
                yield run.result()
            for number, nothing in enumerate(cleans, 1):
                say(f"clean run {number} of {clean}")
                yield nothing.result()
            done = True
        finally:
            if not done:  # an interrupted run waits for nobody
                for worker in list((pool._processes or {}).values()):
                    worker.kill()
            pool.shutdown(cancel_futures=True)


def _share_cores(jobs: int) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends this one
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))


def _run_named(fault: str, bed: str, dtype: str, seed: int, root: str) -> Score:
    """A case by its names: what breaks things cannot be sent to another process."""
    return run_case(Case(FAULTS[fault], bed, dtype, seed), Path(root))
