"""Files of ``torch.save`` as plain data. They are read by a limited child process; nothing in them is ever run.

Before the child sees a file, its archive is looked at here: torch stores its records as they are, so an entry that is
compressed, or that claims more bytes than the file has, is not from ``torch.save``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from zkl_debug.bits import DTYPES
from zkl_debug.errors import Refused
from zkl_debug.ingest.raw import RawTensor

MAX_BYTES = 16 << 30
_MAX_JSON = 1 << 30
_MAX_ENTRIES = 100_000
_SCRIPT = Path(__file__).with_name("unpickle.py")
_EXPECTED = "a file of torch.save that holds tensors and plain containers"


@dataclass(frozen=True)
class Loaded:
    """One file. ``tree`` is JSON-like with :class:`RawTensor` leaves; ``error`` says why there is none."""

    path: Path
    tree: Any = None
    error: str = ""


@dataclass(frozen=True)
class Other:
    """A leaf that is neither plain data nor a tensor; ``kind`` says what it was."""

    kind: str


def load_one(path: Path) -> Any:
    """The content of one file.

    Raises:
        Refused: when it cannot be read, or holds anything but plain data.
    """
    loaded = next(iter(load([path])))
    if loaded.error:
        raise Refused(f"{path} is not used: {loaded.error}", _EXPECTED, "nothing in it was run")
    return loaded.tree


def load(paths: Sequence[Path], *, shapes_only: bool = False, seconds: int = 0) -> Iterator[Loaded]:
    """The content of files, in order, one at a time in memory.

    Args:
        paths: the files.
        shapes_only: leave the bytes of tensors unread.
        seconds: limit for all of them; default by their size.

    Raises:
        Refused: when the child dies or takes too long.
    """
    checked = [(path, check_archive(path)) for path in paths]
    good = [path for path, why in checked if not why]
    sizes = [path.stat().st_size for path in good]
    limit = seconds or 60 + len(good) // 50 + sum(sizes) // (20 << 20)
    stream = _answers(good, max(sizes, default=0), shapes_only, limit) if good else iter(())
    for path, why in checked:
        yield Loaded(path, error=why) if why else next(stream)


def check_archive(path: Path) -> str:
    """Why a file is not one of ``torch.save``, or an empty string."""
    try:
        if path.is_symlink() or not path.is_file():
            return "it is not a regular file"
        size = path.stat().st_size
        if size > MAX_BYTES:
            return f"it has {size} bytes, more than {MAX_BYTES}"
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
        return f"it is not an archive of torch.save, or cut off ({str(error)[:60]})"
    if len(entries) > _MAX_ENTRIES:
        return f"it has {len(entries)} entries"
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        return "its entries are compressed, which torch.save never does"
    if sum(entry.file_size for entry in entries) > size:
        return "its entries claim more bytes than it has"
    return ""


class _Child:
    """A reading process. Starting one takes as long as importing torch, so an idle one is used again."""

    idle: ClassVar[list[_Child]] = []

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    @classmethod
    def take(cls) -> _Child:
        """An idle process that is alive, or a new one."""
        while cls.idle:
            child = cls.idle.pop()
            if child._process.poll() is None:
                return child
        return cls()

    def ask(self, request: dict[str, Any]) -> IO[bytes]:
        """Send a request; the answers come on the returned stream."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        data = json.dumps(request).encode()
        try:
            self._process.stdin.write(struct.pack("<Q", len(data)) + data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Refused("the reading process did not start", "a Python with torch installed") from None
        return self._process.stdout

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


@atexit.register
def _end_idle() -> None:
    while _Child.idle:
        _Child.idle.pop().kill()


def _answers(paths: Sequence[Path], largest: int, shapes_only: bool, seconds: int) -> Iterator[Loaded]:
    child = _Child.take()
    watchdog = threading.Timer(seconds, child.kill)
    watchdog.daemon = True
    watchdog.start()
    left = len(paths)
    try:
        stream = child.ask(
            {
                "paths": [str(path.absolute()) for path in paths],
                "largest": largest,
                "seconds": seconds,
                "shapes_only": shapes_only,
            }
        )
        for path in paths:
            loaded = _receive(stream, path, not shapes_only)
            left -= 1
            if not left:  # the caller need not come back after the last one
                watchdog.cancel()
                _Child.idle.append(child)
            yield loaded
    finally:
        if left:  # answers are still on their way: they must not be taken for those of another request
            watchdog.cancel()
            child.kill()


def _receive(stream: IO[bytes], path: Path, read: bool) -> Loaded:
    head = stream.read(8)
    if len(head) < 8:
        raise Refused(
            f"{path} could not be read: the reading process ended, out of its limits of memory or time",
            _EXPECTED,
            "nothing in it was run; leave the file out",
        )
    (length,) = struct.unpack("<Q", head)
    if length > _MAX_JSON:
        raise Refused(f"{path} holds {length} bytes of plain data", f"at most {_MAX_JSON}")
    document = json.loads(_exactly(stream, length, path))
    if "error" in document:
        return Loaded(path, error=str(document["error"]))
    return Loaded(path, _tree(document["tree"], stream, path, read))


def _tree(value: Any, stream: IO[bytes], path: Path, read: bool) -> Any:
    """The tree with its tensors put back, in the order in which their bytes come."""
    if isinstance(value, list):
        return [_tree(v, stream, path, read) for v in value]
    if not isinstance(value, dict):
        return value
    if "d" in value:
        return {k: _tree(v, stream, path, read) for k, v in value["d"]}
    if "t" not in value:
        return Other(str(value["o"]))
    dtype, shape, size = str(value["t"]), tuple(value["shape"]), int(value["size"])
    data = _exactly(stream, size, path) if read else None
    info = DTYPES.get(dtype)
    if info is None:
        return Other(f"a tensor of {dtype}")
    return RawTensor(dtype, shape, None if data is None else np.frombuffer(data, info.storage))


def _exactly(stream: IO[bytes], count: int, path: Path) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise Refused(f"{path} could not be read to its end: the reading process ended", _EXPECTED)
    return data
