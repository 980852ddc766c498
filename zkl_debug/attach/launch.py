"""Run a program with the start-up hook in its environment, and say what was captured."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zkl_debug.attach import told
from zkl_debug.attach.settings import Settings
from zkl_debug.errors import CaptureInvalid, Refused, UsageError
from zkl_debug.store.layout import MANIFEST, part_path
from zkl_debug.store.manifest import finalize_manifest, read_json
from zkl_debug.store.repair import repair
from zkl_debug.store.rest import rest_path

_RANKS = 4096  # looked at for the part of a rank


@dataclass(frozen=True)
class Ended:
    """What is left of a program.

    Attributes:
        status: exit status as a shell gives it (128 + signal).
        folders: captures it left.
        facts: what its processes told (:mod:`zkl_debug.attach.told`).
    """

    status: int
    folders: tuple[Path, ...]
    facts: tuple[str, ...]


def run_attached(command: Sequence[str], settings: Settings) -> Ended:
    """Run ``command`` to its end.

    Standard streams are the program's own. Interrupts go to it as they would without the command: this process waits.

    Raises:
        UsageError: when the folder is in use or the program cannot be started.
    """
    out = Path(settings.out)
    if out.exists():
        raise UsageError(f"{out} exists", "a new folder", f"rm -r {out}, or another --out")
    with tempfile.TemporaryDirectory(prefix="zkl-told-") as name:
        facts = Path(name) / "facts"
        status = _run(command, os.environ | settings.environment() | {told.VARIABLE: str(facts)})
        return Ended(status, tuple(collect(out)), told.read(facts))


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the program as well
    try:
        with subprocess.Popen(list(command), env=environment, preexec_fn=_default_interrupt) as process:
            status = process.wait()
    except OSError as error:
        raise UsageError(
            f"cannot start {command[0]}: {error.strerror or error}", "a program and its arguments after --"
        ) from error
    finally:
        signal.signal(signal.SIGINT, before)
    return 128 - status if status < 0 else status


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else it would inherit that this process ignores it


def collect(out: Path) -> list[Path]:
    """Capture folders a program left under this name; the ranks of a world are joined into one.

    Those whose process was ended from outside while it rested are closed here.
    """
    for path in out.parent.glob(f"{out.name}*"):
        if _of(path, out) and rest_path(path, 0).exists() and not (path / MANIFEST).exists():
            with contextlib.suppress(CaptureInvalid, Refused):  # it stays as it is, for `repair`
                repair(path)
    folders = sorted(path for path in out.parent.glob(f"{out.name}*") if _of(path, out) and any(path.iterdir()))
    for folder in folders:
        part = next((part_path(folder, rank) for rank in range(_RANKS) if part_path(folder, rank).exists()), None)
        if part is not None and not (folder / MANIFEST).exists():
            with contextlib.suppress(CaptureInvalid):  # a rank is missing: what is there is for `repair`
                finalize_manifest(folder, int(read_json(part)["world"]))
    return folders


def _of(path: Path, out: Path) -> bool:
    tail = path.name[len(out.name) :]
    return path.is_dir() and (not tail or tail.startswith((".model", ".process")))
