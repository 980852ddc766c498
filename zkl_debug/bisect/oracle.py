"""An oracle that runs any command, one isolated process per configuration.

The command learns the configuration from its environment: ``ZKL_SWITCHES`` (JSON, name to true or false),
``ZKL_SWITCHES_FILE`` (the same in a file), ``ZKL_SWITCH_<NAME>`` = 0 or 1, and the variables the space binds.
``ZKL_RUN_DIR`` is its own output folder, ``ZKL_VERDICT_FILE`` where it may write a zkl-verdict or result document
(printing it on stdout does as well), ``ZKL_PROBE_WIDE`` = 1 asks for the wider probe, ``ZKL_REPEAT`` counts repeats.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import shutil
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zkl_debug.bisect.outcome import RawRun, Trial
from zkl_debug.bisect.process import RUN_ID, Limits, run_isolated
from zkl_debug.bisect.space import Config, Space, env_name
from zkl_debug.errors import UsageError

_MAX_DOCUMENT = 16 << 20
_MAX_HASHED = 64 << 20
#: Variables that change what kernels run; part of the environment hash (names and values, hashed).
_NUMERIC_PREFIXES = (
    *("ATEN", "CUBLAS", "CUDA", "CUDNN", "FLASH", "LD_", "MAMBA", "MKL", "NCCL", "NRL_", "NVIDIA", "NVTE", "OMP"),
    *("OPENBLAS", "PYTHONHASHSEED", "PYTHONPATH", "PYTORCH", "TE_", "TORCH", "TRITON", "VIRTUAL_ENV"),
)


@dataclass(frozen=True)
class CommandJob:
    """One run of a command, ready to be made by any process that sees the same folders.

    Attributes:
        command, env, cwd, folder, limits: of the run.
        base_env, ignore: what the environment hash is taken of.
    """

    command: tuple[str, ...]
    env: dict[str, str]
    cwd: Path
    folder: Path
    limits: Limits
    base_env: dict[str, str]
    ignore: frozenset[str]

    def environment_hash(self) -> str:
        """As :attr:`CommandOracle.environment_hash`, of the machine this is called on."""
        return environment_hash(self.base_env, ignore=set(self.ignore))

    def make(self, extra: Mapping[str, str]) -> RawRun:
        """Make the run, from the beginning; ``extra`` are variables that this machine adds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return run_command(self.command, {**self.env, **extra}, self.cwd, self.folder, self.limits, tied=True)


class CommandOracle:
    """Runs a command for each configuration; see the module's text for what it passes.

    Args:
        space: the switches, for their variables.
        command: the command and its arguments, run without a shell.
        out: folder under which each run gets a folder of its own.
        limits: time limit and memory cap of a run.
        cwd: working directory, default the current one.
        base_env: environment to start from, default this process's.

    Raises:
        UsageError: there is no command, or it is not found.
    """

    def __init__(
        self,
        space: Space,
        command: Sequence[str],
        out: Path,
        *,
        limits: Limits | None = None,
        cwd: Path | None = None,
        base_env: Mapping[str, str] | None = None,
    ) -> None:
        self.space = space
        self.command = tuple(command)
        self.out = out
        self.limits = limits or Limits()
        self.cwd = (cwd or Path.cwd()).resolve()
        self.base_env = dict(os.environ if base_env is None else base_env)
        self._stop = threading.Event()
        self._numbers = itertools.count(1)
        check_command(self.command, self.cwd, self.base_env)

    @property
    def probe_hash(self) -> str:
        """Hash of the command line and of the files it names."""
        return command_hash(self.command, self.cwd)

    @property
    def environment_hash(self) -> str:
        """Hash of the machine, the interpreter and the variables that decide which kernels run."""
        return environment_hash(self.base_env, ignore={b.name for s in self.space.switches for b in s.env})

    def run(self, trial: Trial) -> RawRun:
        """Run one configuration in its own process group and folder.

        Raises:
            Cancelled: the oracle was closed meanwhile.
        """
        job = self.job(trial)
        return run_command(job.command, job.env, job.cwd, job.folder, job.limits, self._stop)

    def job(self, trial: Trial) -> CommandJob:
        """The run of a configuration, to be made by another process."""
        folder = self._folder()
        ignore = frozenset(b.name for s in self.space.switches for b in s.env)
        env = self._environment(trial, folder)
        return CommandJob(self.command, env, self.cwd, folder, self.limits, self.base_env, ignore)

    def close(self) -> None:
        """End what is running."""
        self._stop.set()

    def _folder(self) -> Path:
        while True:
            folder = self.out / f"run{next(self._numbers):04d}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder.resolve()

    def _environment(self, trial: Trial, folder: Path) -> dict[str, str]:
        request = trial.request
        states = json.dumps({n: n in request.config for n in self.space.order})
        (folder / "switches.json").write_text(states + "\n")
        return {
            **switch_environment(self.space, request.config, self.base_env),
            "ZKL_SWITCHES": states,
            "ZKL_SWITCHES_FILE": str(folder / "switches.json"),
            "ZKL_PROBE_WIDE": str(int(request.wide)),
            "ZKL_REPEAT": str(request.repeat),
            "ZKL_ATTEMPT": str(trial.attempt),
        }


def switch_environment(space: Space, config: Config, base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with the variables of every switch set; what is on has the last word on a shared variable."""
    env = dict(base)
    for name in space.sort(set(space.order) - config) + space.sort(config):
        env[env_name(name)] = str(int(name in config))
        for binding in space.by_name[name].env:
            value = binding.when_on if name in config else binding.when_off
            if value is None:
                env.pop(binding.name, None)
            else:
                env[binding.name] = value
    return env


def run_command(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    folder: Path,
    limits: Limits,
    stop: threading.Event | None = None,
    tied: bool = False,
) -> RawRun:
    """Run a command in ``folder``'s name and collect what it left there; ``tied`` to this process's life or not.

    Raises:
        Cancelled: ``stop`` was set.
    """
    verdict = folder / "verdict.json"
    verdict.unlink(missing_ok=True)  # of a process that was lost in the middle of this very run
    full = {**env, "ZKL_RUN_DIR": str(folder), "ZKL_VERDICT_FILE": str(verdict), RUN_ID: uuid.uuid4().hex}
    ended = run_isolated(
        command,
        env=full,
        cwd=cwd,
        stdout=folder / "stdout.txt",
        stderr=folder / "stderr.txt",
        limits=limits,
        stop=stop,
        tied=tied,
    )
    document, problem = _document(verdict, folder / "stdout.txt")
    return RawRun(
        exit_code=ended.exit_code,
        signal=ended.signal,
        timed_out=ended.timed_out,
        out_of_memory=ended.out_of_memory,
        seconds=ended.seconds,
        peak_bytes=ended.peak_bytes,
        document=document,
        failure=ended.failure or problem,
        folder=str(folder),
        reason=ended.last_line,
    )


def _document(verdict: Path, stdout: Path) -> tuple[dict[str, Any] | None, str]:
    """The JSON object a run reported, and what is wrong with it."""
    if verdict.is_file():
        if verdict.stat().st_size > _MAX_DOCUMENT:
            return None, f"the verdict file is larger than {_MAX_DOCUMENT} bytes"
        try:
            body = json.loads(verdict.read_bytes())
        except (ValueError, RecursionError):
            return None, "the verdict file is not JSON"
        return (body, "") if isinstance(body, dict) else (None, "the verdict file is not a JSON object")
    if stdout.stat().st_size > _MAX_DOCUMENT:
        return None, ""
    return last_object(stdout.read_text(errors="replace")), ""


def last_object(text: str) -> dict[str, Any] | None:
    """The JSON object that ends ``text`` (log lines may come before it), or None."""
    lines = text.rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("{")]
    for start in reversed(starts[-64:]):
        try:
            body = json.loads("\n".join(lines[start:]))
        except (ValueError, RecursionError):
            continue
        if isinstance(body, dict):
            return body
    return None


def check_command(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
    """Refuse a command that cannot be found.

    Raises:
        UsageError: it is empty or not an executable.
    """
    if not command:
        raise UsageError("there is no command to run", "a command after --", "for example: ... -- python check.py")
    name = command[0]
    local = os.access(cwd / name, os.X_OK) if os.sep in name else shutil.which(name, path=env.get("PATH"))
    if not local:
        raise UsageError(f"the command {name!r} is not found or not executable", "a program on PATH or a path to one")


def command_hash(command: Sequence[str], cwd: Path) -> str:
    """Hash of a command line and of the content of every file it names."""
    parts: list[list[str]] = []
    for word in command:
        path = cwd / word
        content = ""
        with contextlib.suppress(OSError, ValueError):
            if path.is_file() and path.stat().st_size <= _MAX_HASHED:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
        parts.append([word, content])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def environment_hash(env: Mapping[str, str], ignore: set[str] | None = None) -> str:
    """Hash of machine, interpreter and numeric variables."""
    skip = ignore or set()
    named = {k: v for k, v in env.items() if k.startswith(_NUMERIC_PREFIXES) and k not in skip}
    parts = [platform.system(), platform.machine(), sys.version, _processor(), _gpus(), sorted(named.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _gpus() -> list[str]:
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            found += [x.partition(":")[2].strip() for x in path.read_text().splitlines() if x.startswith("Model")]
    return found
