"""One run of a bed for a bisection, ready to be made by any process, and what it left."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from zkl_debug.beds.client import ForkServer
from zkl_debug.beds.observe import RUN, VERDICT, Spec
from zkl_debug.bisect.oracle import environment_hash, run_command
from zkl_debug.bisect.outcome import EXIT_UNTESTABLE, RawRun
from zkl_debug.bisect.process import Limits

_NO_MEMORY = re.compile(r"MemoryError|can't allocate memory|out of memory")
_PACKAGES = ("megatron-core", "torch", "numpy", "transformer_engine", "flash-attn-4", "triton")
_SPEC = "spec.json"
#: What a verdict keeps in the journal; the whole verdict lies in the run's folder.
_KEPT = ("format", "version", "verdict", "claim", "coverage", "edge", "first", "affected", "explanations", "reason")


@dataclass(frozen=True)
class BedJob:
    """One run of a bed.

    Attributes:
        spec: what to run, and where.
        limits: of the run.
        fresh: a new interpreter instead of a fork of one that has imported everything.
        env: variables of the process that asks for it.
    """

    spec: Spec
    limits: Limits
    fresh: bool
    env: dict[str, str]

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return self.spec.folder

    @property
    def command(self) -> list[str]:
        """A fresh interpreter that makes the run."""
        return [sys.executable, "-m", "zkl_debug.beds.observe", str(self.folder / _SPEC)]

    def environment_hash(self) -> str:
        """As that of the oracle, of the machine this is called on."""
        return bed_environment(self.env)

    def make(self, extra: Mapping[str, str]) -> RawRun:
        """Make the run, from the beginning; ``extra`` are variables that this machine adds."""
        for path in self.folder.iterdir():  # of a process that was lost in the middle of this very run
            if path.name != _SPEC:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        env = {**self.env, **extra}
        if self.fresh:
            return collect(
                run_command(self.command, env, self.folder, self.folder, self.limits, tied=True), self.folder
            )
        server = _server(env)
        try:
            return collect(server.run(self.spec, self.limits), self.folder)
        except BaseException:
            server.close()  # which ends the run that nobody waits for any more
            raise


def make_job(spec: Spec, limits: Limits, fresh: bool) -> BedJob:
    """The job of a run, its folder prepared."""
    (spec.folder / _SPEC).write_text(json.dumps(spec.to_json()) + "\n")
    return BedJob(spec, limits, fresh, dict(os.environ))


_servers: list[tuple[dict[str, str], ForkServer]] = []  # of a worker: one at most


def _server(env: dict[str, str]) -> ForkServer:
    """The fork server of this worker; another one where the last has other variables, or is gone."""
    while _servers and (_servers[-1][0] != env or not _servers[-1][1].alive):
        _servers.pop()[1].close()
    if not _servers:
        _servers.append((env, ForkServer(threading.Event(), env=env)))
    return _servers[-1][1]


def bed_environment(env: Mapping[str, str]) -> str:
    """Hash of machine, interpreter, numeric variables and the versions of the libraries that compute."""
    parts = [environment_hash(env), {name: _version(name) for name in _PACKAGES}]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def collect(ended: RawRun, folder: Path) -> RawRun:
    """The result of a run from how its process ended and what it wrote."""
    report = _read(folder / RUN)
    verdict = _read(folder / VERDICT)
    document = {key: verdict[key] for key in _KEPT if key in verdict} if verdict else None
    raw = replace(ended, document=document, folder=str(folder), failure="", reason="")
    if raw.timed_out or raw.out_of_memory or raw.signal:
        return raw
    if report is None:
        return replace(raw, failure=f"the run wrote no report: {_last_line(folder / 'stderr.txt')}")
    if report["failure"]:
        return replace(raw, failure=report["failure"], out_of_memory=bool(_NO_MEMORY.search(report["failure"])))
    if report["exit_code"] == EXIT_UNTESTABLE:
        return replace(raw, exit_code=EXIT_UNTESTABLE, reason=report["untestable"])
    return replace(raw, exit_code=report["exit_code"])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def _last_line(path: Path) -> str:
    try:
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "no output"
    return lines[-1].strip()[:300] if lines else "no output"
