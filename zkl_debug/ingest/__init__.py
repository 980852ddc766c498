"""Other tools' files -> captures or log-prob tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zkl_debug.errors import Refused, UsageError
from zkl_debug.ingest import golden, nemo_rl, slime
from zkl_debug.ingest.raw import files_under
from zkl_debug.logprobs import files
from zkl_debug.logprobs.table import LogprobTable

FORMATS = ("nemo-rl", "golden", "csv", "npz", "slime")
_SNIFF_BYTES = 1 << 20


def load_logprobs(path: Path, kind: str = "auto") -> LogprobTable:
    """The log-prob table of a file, or of a folder of step dumps (NeMo-RL's, or those of slime and miles).

    Args:
        path: file or folder.
        kind: one of :data:`FORMATS`, or ``auto`` to look at the content.

    Raises:
        UsageError: when the path does not exist or its kind cannot be told.
        Refused: when the content cannot be used.
    """
    if path.is_dir():
        dumps = [] if kind == "nemo-rl" or nemo_rl.files_in(path) else files_under(path, (".pt",))[0]
        return slime.read(dumps) if dumps else nemo_rl.read(_steps(path))
    if not path.is_file():
        raise UsageError(f"{path} is not a file or folder", "a log-prob file, or a folder of train_data_stepN.jsonl")
    kind = detect(path) if kind == "auto" else kind
    if kind == "nemo-rl":
        return nemo_rl.read([path])
    if kind == "golden":
        return golden.read(path)
    if kind == "slime":
        return slime.read([path])
    return files.read_npz(path) if kind == "npz" else files.read_csv(path)


def load_steps(paths: Sequence[Path]) -> LogprobTable:
    """One table of several NeMo-RL step dumps."""
    return nemo_rl.read(paths)


def is_step_dump(path: Path, kind: str = "auto") -> bool:
    """Whether a path is a NeMo-RL dump whose name tells its step."""
    return path.is_file() and kind in ("auto", "nemo-rl") and nemo_rl.step_of(path) is not None


def detect(path: Path) -> str:
    """Format of a file by its content (its name decides only between texts).

    Raises:
        UsageError: when it is none of :data:`FORMATS`.
        Refused: when it cannot be read or is empty.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(_SNIFF_BYTES)
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}", "a readable file") from None
    if not head.strip():
        raise Refused(f"{path} is empty", "a file with log-probs")
    if path.suffix in (".pt", ".pth"):
        return "slime"
    if head.startswith(b"PK"):
        return "npz"
    if nemo_rl.step_of(path) is not None or path.suffix == ".jsonl":
        return "nemo-rl"
    first = head.lstrip()
    if first.startswith(b"{"):
        return "nemo-rl" if nemo_rl.looks_like(first.split(b"\n", 1)[0]) else "golden"
    if b"position" in first.split(b"\n", 1)[0].lower() or path.suffix == ".csv":
        return "csv"
    raise UsageError(f"cannot tell what {path} is", f"one of {', '.join(FORMATS)}", "name it with --format")


def _steps(folder: Path) -> list[Path]:
    found = nemo_rl.files_in(folder)
    if not found:
        raise UsageError(
            f"{folder} holds no {nemo_rl.PATTERN}", "a NeMo-RL log folder (exp_NNN), or .pt dumps of slime"
        )
    return found
