"""An oracle that runs a bed: one process per configuration, judged by the zkl-verdict on its two captures."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import zkl_debug
from zkl_debug.beds.bed import BedOptions
from zkl_debug.beds.client import ForkServer
from zkl_debug.beds.job import BedJob, bed_environment, collect, make_job
from zkl_debug.beds.observe import Spec
from zkl_debug.bisect.oracle import run_command
from zkl_debug.bisect.outcome import RawRun, Trial
from zkl_debug.bisect.process import Limits
from zkl_debug.bisect.space import Config, Space
from zkl_debug.bisect.space import Switch as SpaceSwitch
from zkl_debug.errors import UsageError
from zkl_debug.stack.catalogue.cpu import BED_ENGINE_KEYS
from zkl_debug.stack.switches import Switch, ladder, switch

#: Parts of the package that decide what a run computes and how it is judged.
_PROBE_PARTS = ("beds", "capture", "diff", "engines", "stack", "store", "bits.py", "digest.py", "digest_torch.py")
#: Neighbours of the wide workload on a GPU: with them it has four times the requests.
_WIDE_GPU = 24
#: Limits of a run that nobody limited.
DEFAULT_LIMITS = Limits(timeout=900.0, memory=8 << 30)


@dataclass(frozen=True)
class Probe:
    """The two workloads of a bisection.

    Attributes:
        narrow: what every configuration runs (its switches are set by the oracle).
        wide: what confirms the answer: the same requests among others, in another order, and re-prefilled.
    """

    narrow: BedOptions
    wide: BedOptions

    @classmethod
    def of(cls, options: BedOptions) -> Probe:
        """The probe for a bed as the user asked for it."""
        narrow = replace(options, stack=False, switches={}, reprefill=False)
        wide = replace(
            narrow,
            reprefill=True,
            neighbours=max(_WIDE_GPU if options.on_gpu else 6, options.neighbours),
            permute=options.permute or 1,
            micro_batch=options.micro_batch + 1,
        )
        return cls(narrow, wide)


def bed_switches(bed: str, graphs: bool = False) -> tuple[Switch, ...]:
    """What a bisection over a bed varies: the stack of the bed, then what can take the place of parts of it."""
    from zkl_debug.beds.bed import bed as known_bed

    known = known_bed(bed)
    if known.on_gpu:
        from zkl_debug.beds.gpu import gpu_ladder

        return gpu_ladder(known, graphs=graphs)
    return (*(s for s in ladder(known.hybrid) if not s.not_searched), *BED_ENGINE_KEYS)


def bed_space(switches: tuple[Switch, ...], held: Mapping[str, bool] | None = None) -> Space:
    """The space of ``switches``, some of them held on or off.

    Raises:
        UsageError: a held switch is unknown.
    """
    held = held or {}
    for name in held:
        if name not in {s.name for s in switches}:
            raise UsageError(f"no switch {name!r} to hold in this bed", f"one of {', '.join(s.name for s in switches)}")
    names = {s.name for s in switches}
    return Space(
        tuple(
            SpaceSwitch(
                s.name,
                requires=s.requires,
                conflicts=s.conflicts,
                alternatives=tuple(a for a in s.alternatives if a in names),
                held=held.get(s.name),
                doc=s.fixes,
            )
            for s in switches
        )
    )


def parse_held(texts: Iterable[str]) -> dict[str, bool]:
    """``NAME=on|off`` texts as a mapping.

    Raises:
        UsageError: a text is neither.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or value not in ("on", "off"):
            raise UsageError(f"{text!r} does not hold a switch", "NAME=on or NAME=off", "zkl-debug stack")
        found[name] = value == "on"
    return found


class BedOracle:
    """Runs a bed for each configuration.

    Args:
        space: the switches.
        options: the bed, its dtype, seed and fault; its own ``stack`` and ``switches`` are not used.
        out: folder under which each run gets a folder of its own.
        limits: time limit and memory cap of a run.
        keep: keep the captures of every run.
        fresh: a new interpreter for every run instead of a fork of one that has imported everything. Needed when a
            switch is an environment variable that libraries read while they are imported.
    """

    def __init__(
        self,
        space: Space,
        options: BedOptions,
        out: Path,
        *,
        limits: Limits | None = None,
        keep: bool = False,
        fresh: bool | None = None,
    ) -> None:
        self.space = space
        self.probe = Probe.of(options)
        self.out = out
        self.limits = limits or DEFAULT_LIMITS
        self.keep = keep
        self.fresh = _needs_fresh(space) if fresh is None else fresh
        self._stop = threading.Event()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._server: ForkServer | None = None

    @property
    def probe_hash(self) -> str:
        """Hash of both workloads and of the code that runs and judges them."""
        parts = [asdict(self.probe.narrow), asdict(self.probe.wide), code_hash()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def environment_hash(self) -> str:
        """Hash of machine, interpreter, numeric variables and the versions of the libraries that compute."""
        return bed_environment(os.environ)

    def run(self, trial: Trial) -> RawRun:
        """Run one configuration in a process of its own.

        Raises:
            Cancelled: the oracle was closed meanwhile.
            UsageError: the fork server does not start.
        """
        job = self.job(trial)
        if job.fresh:
            ended = run_command(job.command, job.env, job.folder, job.folder, job.limits, self._stop)
        else:
            ended = self._fork_server().run(job.spec, job.limits)
        return collect(ended, job.folder)

    def job(self, trial: Trial) -> BedJob:
        """The run of a configuration, to be made by another process."""
        folder = self._folder()
        spec = Spec(self._options(trial.request.config, trial.request.wide), folder, self.keep)
        return make_job(spec, self.limits, self.fresh)

    def close(self) -> None:
        """End whatever runs, and the server."""
        self._stop.set()
        with self._lock:
            if self._server is not None:
                self._server.close()

    def _options(self, config: Config, wide: bool) -> BedOptions:
        base = self.probe.wide if wide else self.probe.narrow
        return replace(base, switches={name: name in config for name in self.space.order})

    def _folder(self) -> Path:
        while True:
            folder = self.out / f"run{next(self._numbers):04d}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder.resolve()

    def _fork_server(self) -> ForkServer:
        with self._lock:
            if self._server is None or not self._server.alive:
                self._server = ForkServer(self._stop)
            return self._server


def _needs_fresh(space: Space) -> bool:
    """Whether a switch of the space must be set before the libraries are imported."""
    return any(setting.where == "env" for name in space.order for setting in switch(name).settings)


def code_hash() -> str:
    """Hash of the source of everything that decides what a run computes and how it is judged."""
    root = Path(zkl_debug.__file__).parent
    digest = hashlib.sha256()
    for part in _PROBE_PARTS:
        path = root / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
