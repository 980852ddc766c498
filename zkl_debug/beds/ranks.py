"""Starting the ranks of a side of a bed as processes, and putting together what they leave."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zkl_debug.beds.spread import layout_of
from zkl_debug.errors import ZklError
from zkl_debug.schema import Json

if TYPE_CHECKING:
    from zkl_debug.beds.bed import BedOptions
    from zkl_debug.beds.record import RecordOptions
    from zkl_debug.beds.run import GenSide, TrainSide

Processes = list[subprocess.Popen[bytes]]

_GRACE = 20.0  # seconds the other ranks have to end once one has failed
_LINES = 6


class RankFailed(ZklError):  # noqa: N818 - it is what happened to the rank
    """A rank ended with an error or was killed."""


def run_ranks(
    options: BedOptions,
    side: str,
    folder: Path | None,
    record: RecordOptions,
    sequences: Mapping[int, Sequence[int]],
    prompt_lens: Mapping[int, int],
) -> tuple[TrainSide | GenSide, Json]:
    """Run one side on its layout, a process a rank.

    Args:
        options: of the bed; the side's layout says how many ranks there are.
        side: ``train`` or ``gen``.
        folder: where every rank writes its part of the capture, or None for a plain run.
        record: how it is captured.
        sequences, prompt_lens: what is scored, by sample.

    Returns:
        The side's results over all ranks, and its self-certification.

    Raises:
        RankFailed: naming the rank that failed first. What the ranks had captured can be repaired.
    """
    from zkl_debug.store.manifest import finalize_manifest

    world = layout_of(options, side).world
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="zkl-ranks-") as name:
        where = Path(name)
        job = {
            "side": side,
            "options": asdict(options),
            "record": asdict(record),
            "folder": None if folder is None else str(folder.resolve()),
            "sequences": {str(s): [int(t) for t in tokens] for s, tokens in sequences.items()},
            "prompt_lens": {str(s): int(n) for s, n in prompt_lens.items()},
        }
        (where / "job.json").write_text(json.dumps(job))
        wait_for(start(where, world), where, folder)
        _pass_on(where, world)
        found = [dict(np.load(where / f"rank{rank:05d}.npz")) for rank in range(world)]
    if folder is not None:
        finalize_manifest(folder, world)
    certification = [json.loads(str(one.pop("certification"))) for one in found]
    seconds = time.perf_counter() - started
    merged = _gen_side(found, seconds) if side == "gen" else _train_side(found, seconds)
    return merged, merge_certification([one.get(side) for one in certification])


def start(where: Path, world: int, program: Sequence[str] = ("-m", "zkl_debug.beds.rank")) -> Processes:
    """Start the ranks of ``where/job.json``; each writes ``rankN.log`` there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, *program, str(where / "job.json")]
    started = []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **{key: str(value) for key, value in place.items()}}
        with (where / f"rank{rank}.log").open("wb") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return started


def wait_for(processes: Processes, where: Path, folder: Path | None) -> None:
    """Wait for all; when one fails the others, which wait for it, get some time to notice and are then ended.

    Raises:
        RankFailed: naming the rank that failed first.
    """
    first: int | None = None
    deadline = float("inf")
    try:
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
            if failed and first is None:
                # The first to be killed, if any was: the others fail because of it.
                first = next((rank for rank in failed if (processes[rank].returncode or 0) < 0), failed[0])
                deadline = time.monotonic() + _GRACE
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    if any(codes):
        rank = first if first is not None else next(r for r, code in enumerate(codes) if code)
        how = f"was ended by signal {-codes[rank]}" if codes[rank] < 0 else f"ended with exit code {codes[rank]}"
        said = last_words((where / f"rank{rank}.log").read_text(errors="replace"))
        raise RankFailed(
            f"rank {rank} of {len(processes)} {how}: {said[-600:]}",
            "ranks that run to their end",
            f"zkl-debug repair {folder} keeps what was captured" if folder is not None else "",
        )


_WARNING = re.compile(r"\b\w*Warning: |^\[?W\d{4}|^\[W|\bWARNING\b")
_ERROR = re.compile(r"^(zkl-debug: |(\w+\.)*\w*(Error|Exception|Interrupt|Exit|Failed|Refused)\b)")


def last_words(log: str) -> str:
    """Why a rank ended, by its log: from its last error on, else its last lines; what merely warns is left out."""
    lines: list[str] = []
    warned = False
    for line in log.splitlines():
        quoted = warned and line.startswith("  ")  # the line of source that a warning shows
        warned = bool(_WARNING.search(line))
        if line.strip() and not warned and not quoted:
            lines.append(line.strip())
    last = next((at for at in range(len(lines) - 1, -1, -1) if _ERROR.match(lines[at])), None)
    told = lines[-_LINES:] if last is None else lines[last : last + _LINES]
    return "; ".join(told) or "it said nothing of it"


def _pass_on(where: Path, world: int) -> None:
    """What the probes of the ranks said, on this process's stderr."""
    for rank in range(world):
        lines = (where / f"rank{rank}.log").read_text(errors="replace").splitlines()
        start = next((at for at, line in enumerate(lines) if line.startswith("zkl-debug:")), None)
        if start is not None:
            print(f"rank {rank}: " + "\n  ".join(lines[start : start + 8]), file=sys.stderr)


def _train_side(found: list[dict[str, Any]], seconds: float) -> TrainSide:
    from zkl_debug.beds.run import TrainSide

    tables: dict[str, dict[int, Any]] = {"log_probs": {}, "rescored": {}}
    for one in found:
        for name, values in one.items():
            kind, _, sample = name.partition("/")
            have = tables[kind].setdefault(int(sample), values)
            tables[kind][int(sample)] = np.where(np.isnan(have), values, have)
    return TrainSide(tables["log_probs"], tables["rescored"], (), seconds)


def _gen_side(found: list[dict[str, Any]], seconds: float) -> GenSide:
    from zkl_debug.beds.run import GenSide
    from zkl_debug.engines.megatron.generation import GenResult

    lists: dict[str, dict[int, GenResult]] = {"results": {}, "reprefill": {}}
    for one in found:
        for name in (name for name in one if name.endswith("/tokens")):
            head = name.removesuffix("/tokens")
            kind, sample = head.split("/")
            request, prompt_length, cached = (int(n) for n in one[f"{head}/meta"])
            tokens = tuple(int(t) for t in one[name])
            logs = one[f"{head}/generated"], one[f"{head}/prompt"]
            lists[kind].setdefault(
                int(sample), GenResult(int(sample), request, tokens, prompt_length, cached, logs[0], logs[1])
            )
    ordered = [tuple(table[s] for s in sorted(table)) for table in (lists["results"], lists["reprefill"])]
    return GenSide(ordered[0], ordered[1], seconds)


def merge_certification(parts: Sequence[Json]) -> Json:
    """One self-certification from those of the ranks: equal where all are."""
    known = [(rank, part) for rank, part in enumerate(parts) if part]
    if not known:
        return None
    merged: dict[str, Json] = {}
    for test in known[0][1]:
        entries = [(rank, part[test]) for rank, part in known if test in part]
        bad = next(((rank, e) for rank, e in entries if not e["equal"] and e["values"]), None)
        merged[test] = {
            "equal": bad is None and any(e["values"] for _, e in entries),
            "values": sum(e["values"] for _, e in entries),
            "mismatched": sum(e["mismatched"] for _, e in entries),
            "first": "" if bad is None else f"rank {bad[0]}: {bad[1]['first']}",
        }
    return merged
