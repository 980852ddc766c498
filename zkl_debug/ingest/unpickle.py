"""Reads files of ``torch.save`` in a process of its own and sends what is in them as JSON and raw bytes.

Run as a script by :mod:`zkl_debug.ingest.pickled`, isolated, with the standard library and torch alone. Only
``weights_only=True`` is ever used: tensors and plain containers, no code. Memory, CPU time and file writes are limited.

Wire format, for each file: 8 bytes little-endian length, that many bytes of JSON, then the bytes of its tensors in the
order in which they stand in it. In the JSON a mapping is ``{"d": pairs}``, a tensor ``{"t": dtype, "shape", "size"}``,
and anything else ``{"o": what it is}``.
"""

from __future__ import annotations

import json
import os
import re
import resource
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

INT64 = 2**63
DEPTH = 32


class UnusableError(Exception):
    """What is in the file cannot be handed over."""


def limit(file_bytes: int, seconds: int) -> None:
    """Cap address space at what torch itself takes plus room for the largest file, and CPU time."""
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        soft(resource.RLIMIT_AS, mapped + 3 * file_bytes + (768 << 20))
    except OSError:
        pass  # no /proc: the other limits hold
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds + 1)


def soft(kind: int, value: int) -> None:
    """Set a soft limit within the hard one."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


class Flattener:
    """A tree of plain values with its tensors taken out."""

    def __init__(self, torch: Any, file_bytes: int, shapes_only: bool) -> None:
        self.torch = torch
        self.room = 4 * file_bytes  # one tensor may be there under several names
        self.values = file_bytes + 1000  # no value takes less than a byte of a file
        self.shapes_only = shapes_only
        self.tensors: list[Any] = []

    def plain(self, value: Any, depth: int = 0) -> Any:
        """JSON form of a value."""
        torch = self.torch
        self.values -= 1
        if self.values < 0:
            raise UnusableError("more values than the file has bytes: the same containers many times")
        if depth > DEPTH:
            raise UnusableError("nested too deeply")
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            return int(value) if -INT64 <= value < INT64 else {"o": "an integer beyond 64 bits"}
        if isinstance(value, float):
            return float(value)
        if isinstance(value, (list, tuple)):
            return [self.plain(v, depth + 1) for v in value]
        if isinstance(value, dict):
            return {"d": [[str(k), self.plain(v, depth + 1)] for k, v in value.items()]}
        return {"o": type(value).__name__}

    def tensor(self, value: Any) -> Any:
        """JSON form of a tensor, whose bytes are kept for later."""
        torch = self.torch
        if value.is_quantized or value.layout != torch.strided or value.is_complex():
            return {"o": "a tensor that is quantized, sparse or complex"}
        size = value.element_size() * value.nelement()
        held = value.untyped_storage().nbytes()
        if size > held:
            raise UnusableError(f"a tensor of {size} bytes over {held} bytes of storage")
        self.room -= size
        if self.room < 0:
            raise UnusableError("tensors larger than the file they are in")
        if not self.shapes_only:
            self.tensors.append(value.detach())
        return {"t": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "size": size}

    def raw(self) -> Iterator[Any]:
        """The bytes of the tensors, in order."""
        torch = self.torch
        for value in self.tensors:
            flat = value.contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data if flat.numel() else b""


def reason(error: Exception) -> str:
    """One line of torch's long explanations."""
    text = str(error)
    named = re.search(r"(?:GLOBAL |Unsupported class )([\w.]+)", text)
    if named is not None:
        return f"it holds {named.group(1)[:80]}, which is not plain data"
    if "Unsupported operand" in text or "Weights only load failed" in text:
        return "it holds more than tensors and plain containers"
    first = text.splitlines()[0][:120] if text else "its data end too early"
    return f"{type(error).__name__}: {first}"


def send(out: BinaryIO, document: Any, parts: Any = ()) -> None:
    """Write one answer."""
    data = json.dumps(document, separators=(",", ":")).encode("utf-8", "replace")
    out.write(struct.pack("<Q", len(data)))
    out.write(data)
    for part in parts:
        out.write(part)
    out.flush()


def read(torch: Any, path: str, shapes_only: bool) -> tuple[Any, Flattener]:
    """Load one file as plain data."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        source = path if shapes_only else stream
        value = torch.load(source, map_location="cpu", weights_only=True, mmap=shapes_only)
        flat = Flattener(torch, size, shapes_only)
        return flat.plain(value), flat


def requests() -> Iterator[dict[str, Any]]:
    """What the parent asks for, until it goes away."""
    while True:
        head = sys.stdin.buffer.read(8)
        if len(head) < 8:
            return
        yield json.loads(sys.stdin.buffer.read(struct.unpack("<Q", head)[0]))


def main() -> None:
    """Answer the requests on standard input."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that is loaded may write into the answer
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (0, 0))  # no file is written from here on
    import torch

    torch.set_num_threads(1)
    for request in requests():
        limit(request["largest"], request["seconds"])
        for path in request["paths"]:
            answer(torch, out, path, request["shapes_only"])


def answer(torch: Any, out: BinaryIO, path: str, shapes_only: bool) -> None:
    """Load one file and send what is in it, or why not."""
    try:
        tree, flat = read(torch, path, shapes_only)
    except UnusableError as error:
        send(out, {"error": str(error)})
    except MemoryError:
        send(out, {"error": "it takes more memory than its size allows"})
    except Exception as error:
        what = "it takes more memory than its size allows" if "alloc" in str(error) else reason(error)
        send(out, {"error": what})
    else:
        send(out, {"tree": tree}, flat.raw())


if __name__ == "__main__":
    main()
