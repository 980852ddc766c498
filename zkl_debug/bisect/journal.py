"""The journal of a bisection: append-only JSON lines, one fsync per run.

The first line says which space, probe and environment the runs belong to; every other line is one run, keyed by
configuration, probe hash and environment hash, with a checksum. Kill the process anywhere: a torn last line is cut
off when the journal is opened again, and every run before it is used instead of being made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from zkl_debug.bisect.outcome import RawRun, Trial
from zkl_debug.errors import Refused, UsageError

JOURNAL_FORMAT = "zkl-bisect-journal"
JOURNAL_VERSION = 1
_LINE_RE = re.compile(rb'^\{"crc": (\d{1,10}), "body": (.*)\}$')


@dataclass(frozen=True)
class Identity:
    """What the runs of a journal have in common."""

    space: str
    probe: str
    environment: str


def trial_key(trial: Trial, identity: Identity) -> str:
    """Key of one run: configuration, repeat, width, attempt, probe hash and environment hash."""
    request = trial.request
    parts = [sorted(request.config), request.repeat, request.wide, trial.attempt, identity.probe, identity.environment]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class Journal:
    """An open journal. Use as a context manager; one process at a time.

    Args:
        path: the file; made when missing (with its folder).
        identity: what the runs belong to.
        read_only: only look runs up: nothing is written, and a journal of another probe or environment is welcome
            (that is how stored results are judged again).

    Raises:
        Refused: the journal is foreign, damaged in the middle, or open in another process.
        UsageError: it cannot be read or written.
    """

    def __init__(self, path: Path, identity: Identity, *, read_only: bool = False) -> None:
        self.path = path
        self._runs: dict[str, RawRun] = {}
        self._read_only = read_only
        self._file: IO[bytes] | None = None
        try:
            self._file = _open(path, read_only)
            self._lock()
            header, kept = self._load(self._file.read())
            self.identity = identity if header is None else self._check(header, identity)
            if not read_only:
                self._file.truncate(kept)
                self._file.seek(kept)
                if header is None:
                    self._write(_header(identity))
                    _sync_folder(path)
        except OSError as error:
            self.close()
            raise UsageError(f"cannot use the journal {path}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._runs)

    def close(self) -> None:
        """Close the file and give up the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def get(self, trial: Trial) -> RawRun | None:
        """The stored result of a run, or None."""
        return self._runs.get(trial_key(trial, self.identity))

    def put(self, trial: Trial, raw: RawRun) -> None:
        """Store the result of a run; on return it is on disk."""
        assert not self._read_only
        key = trial_key(trial, self.identity)
        assert key not in self._runs, f"a run was repeated: {sorted(trial.request.config)}"
        request = trial.request
        self._write(
            {
                "key": key,
                "on": sorted(request.config),
                "repeat": request.repeat,
                "wide": request.wide,
                "attempt": trial.attempt,
                "purpose": request.purpose.value,
                "raw": raw.to_json(),
            }
        )
        self._runs[key] = raw

    def _lock(self) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB if self._read_only else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(f"the journal {self.path} is in use by another process") from error

    def _load(self, data: bytes) -> tuple[dict[str, Any] | None, int]:
        """Header and number of sound bytes; fills the runs."""
        header: dict[str, Any] | None = None
        kept = 0
        lines = data.split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            body = _parse(line)
            if body is None and 1 < number == len(lines) - 1 and not lines[-1]:
                break  # the last run: its end reached the disk before its middle did
            if body is None or (header is None and body.get("format") != JOURNAL_FORMAT):
                what = f"line {number} of {self.path} is damaged" if header else f"{self.path} is not a bisect journal"
                raise Refused(what, "a journal as it was written", "move it away and start again")
            if header is None:
                header = body
            else:
                self._runs[str(body.get("key"))] = _raw(body, number, self.path)
            kept += len(line) + 1
        if header is None and data and not _header_prefix(data):
            raise Refused(f"{self.path} is not a bisect journal", "a new file or a journal of this command")
        return header, kept

    def _check(self, header: dict[str, Any], identity: Identity) -> Identity:
        if header.get("version") != JOURNAL_VERSION:
            raise Refused(f"{self.path} has journal version {header.get('version')!r}", f"version {JOURNAL_VERSION}")
        stored = Identity(str(header.get("space")), str(header.get("probe")), str(header.get("environment")))
        fields = ("space",) if self._read_only else ("space", "probe", "environment")
        differs = [f for f in fields if getattr(stored, f) != getattr(identity, f)]
        if differs:
            raise Refused(
                f"the journal {self.path} belongs to another {' and another '.join(differs)}",
                "the same space file, command and machine",
                "give --journal another file, or --rejudge to judge the stored runs without running",
            )
        return stored

    def _write(self, body: dict[str, Any]) -> None:
        assert self._file is not None
        text = json.dumps(body)
        line = f'{{"crc": {zlib.crc32(text.encode())}, "body": {text}}}\n'
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())


def _open(path: Path, read_only: bool) -> IO[bytes]:
    if read_only:
        return path.open("rb")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not append mode: a torn tail is cut off and written over.
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")


def _header(identity: Identity) -> dict[str, Any]:
    return {"format": JOURNAL_FORMAT, "version": JOURNAL_VERSION, **identity.__dict__}


def _header_prefix(data: bytes) -> bool:
    """Whether ``data`` can be the torn beginning of a header line."""
    start = b'{"crc": '
    return data.startswith(start) if len(data) >= len(start) else start.startswith(data)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The body of a line, or None when it is damaged."""
    match = _LINE_RE.match(line)
    if match is None or zlib.crc32(match.group(2)) != int(match.group(1)):
        return None
    try:
        body = json.loads(match.group(2))
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _raw(body: dict[str, Any], number: int, path: Path) -> RawRun:
    try:
        return RawRun.from_json(dict(body["raw"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"line {number} of {path} holds no run", "a journal as it was written") from error


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
