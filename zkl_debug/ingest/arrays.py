"""Arrays of .npy, .npz and .safetensors files as raw bits. Sizes written in a file are checked, never trusted."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from zkl_debug.bits import DTYPES
from zkl_debug.errors import Refused
from zkl_debug.ingest.raw import RawTensor, from_numpy

ENDINGS = (".npy", ".npz", ".safetensors")
MAX_BYTES = 16 << 30
_MAX_HEADER = 100 << 20
_MAX_ENTRIES = 100_000
#: A large array that is packed tighter than this is no activation.
_BOMB_BYTES, _BOMB_RATIO = 64 << 20, 200
#: safetensors' names of dtypes -> torch's.
_SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "BOOL": "bool",
    **{
        f"{letter}{bits}": f"{word}{bits}" for letter, word in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
    },
}


class _BadArrayError(Exception):
    """An array that cannot be read as what it claims to be."""


@dataclass(frozen=True)
class Entry:
    """One array of a file: its key (empty for a .npy file), shape and dtype; ``error`` says why it cannot be used."""

    path: Path
    key: str
    tensor: RawTensor | None = None
    error: str = ""


def read(path: Path, *, dtype: str = "", shapes_only: bool = False, only: str | None = None) -> Iterator[Entry]:
    """Arrays of one file.

    Args:
        path: the file.
        dtype: torch's name of what unsigned integers of its width stand for (``bfloat16``); safetensors has its own.
        shapes_only: leave the bytes unread.
        only: the key of the one array to read.

    Raises:
        Refused: when the file as a whole cannot be read.
    """
    readers = {".npy": _read_npy, ".npz": _read_npz, ".safetensors": _read_safetensors}
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _BadArrayError(f"it has {path.stat().st_size} bytes, more than {MAX_BYTES}")
        yield from readers[path.suffix](path, dtype, shapes_only, only)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, _BadArrayError) as error:
        raise Refused(f"{path} cannot be read: {str(error)[:120]}", f"a whole {path.suffix} file") from None


def _read_npy(path: Path, dtype: str, shapes_only: bool, _: str | None) -> Iterator[Entry]:
    with path.open("rb") as stream:
        yield _npy(path, "", stream, path.stat().st_size, dtype, shapes_only)


def _read_npz(path: Path, dtype: str, shapes_only: bool, only: str | None) -> Iterator[Entry]:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        total = sum(entry.file_size for entry in entries)
        if len(entries) > _MAX_ENTRIES or total > MAX_BYTES:
            raise _BadArrayError(f"it claims {total} bytes in {len(entries)} arrays, at most {MAX_BYTES}")
        for entry in entries:
            key = entry.filename.removesuffix(".npy")
            if only is not None and key != only:
                continue
            if entry.file_size > _BOMB_BYTES and entry.file_size > _BOMB_RATIO * max(1, entry.compress_size):
                yield Entry(path, key, error=f"{entry.compress_size} bytes that claim to unpack to {entry.file_size}")
                continue
            try:
                with archive.open(entry) as stream:
                    yield _npy(path, key, stream, entry.file_size, dtype, shapes_only)
            except Exception as error:  # damage shows as errors of zlib, lzma, struct ... only where it is read
                yield Entry(path, key, error=f"damaged: {str(error)[:60]}")


def _npy(path: Path, key: str, stream: IO[bytes], size: int, dtype: str, shapes_only: bool) -> Entry:
    """One array; ``size`` is what the file or archive says it takes, header included."""
    try:
        version = np.lib.format.read_magic(stream)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, kind = reader(stream)
    except Exception as error:  # numpy parses the header as a Python literal: many kinds of errors
        return Entry(path, key, error=f"not an array ({str(error)[:60]})")
    if kind.hasobject or kind.kind not in "iufb" or any(n < 0 for n in shape):
        return Entry(path, key, error=f"{'Python objects' if kind.hasobject else kind}: not numbers")
    nbytes = prod(shape) * kind.itemsize
    if nbytes > size:
        return Entry(path, key, error=f"it claims {nbytes} bytes, {size} are there")
    name = dtype if kind.kind == "u" and dtype and DTYPES[dtype].itemsize == kind.itemsize else ""
    try:
        if shapes_only:
            return Entry(path, key, RawTensor(name or _torch_name(kind), tuple(shape)))
        data = stream.read(nbytes + 1)
        if len(data) != nbytes:
            return Entry(
                path, key, error=f"it claims {nbytes} bytes, {'more' if len(data) > nbytes else len(data)} are there"
            )
        array = np.frombuffer(data, kind).reshape(shape, order="F" if fortran else "C")
        return Entry(path, key, from_numpy(array, name))
    except ValueError as error:
        return Entry(path, key, error=str(error)[:80])


def _torch_name(kind: np.dtype[Any]) -> str:
    return from_numpy(np.zeros(1, kind)).dtype


def _read_safetensors(path: Path, _: str, shapes_only: bool, only: str | None) -> Iterator[Entry]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(8)
        if len(head) < 8:
            raise _BadArrayError("it is shorter than its header")
        (length,) = struct.unpack("<Q", head)
        if length > min(_MAX_HEADER, size - 8):
            raise _BadArrayError(f"its header claims {length} bytes")
        header = _header(stream.read(length))
        start = 8 + length
        for key, fields in header.items():
            if key == "__metadata__" or (only is not None and key != only):
                continue
            try:
                dtype, shape, begin, end = _fields(fields, size - start)
            except _BadArrayError as error:
                yield Entry(path, str(key), error=str(error))
                continue
            if shapes_only:
                yield Entry(path, str(key), RawTensor(dtype, shape))
                continue
            stream.seek(start + begin)
            bits = np.frombuffer(stream.read(end - begin), DTYPES[dtype].storage)
            yield Entry(path, str(key), RawTensor(dtype, shape, bits))


def _header(data: bytes) -> dict[str, Any]:
    try:
        header = json.load(io.BytesIO(data))
    except (ValueError, RecursionError) as error:
        raise _BadArrayError(f"its header is not JSON ({str(error)[:60]})") from None
    if not isinstance(header, dict):
        raise _BadArrayError("its header is not a JSON object")
    return header


def _fields(fields: Any, room: int) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, first byte, end) of one tensor, checked against each other and against the file."""
    try:
        dtype, shape = _SAFETENSORS.get(str(fields["dtype"])), tuple(fields["shape"])
        begin, end = fields["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise _BadArrayError("its description is damaged") from None
    if dtype is None:
        raise _BadArrayError(f"dtype {str(fields['dtype'])[:20]}")
    if not all(type(n) is int and 0 <= n < 2**48 for n in (*shape, begin, end)):
        raise _BadArrayError("its description holds no sizes")
    if end > room or end - begin != prod(shape) * DTYPES[dtype].itemsize:
        raise _BadArrayError(f"it claims bytes {begin} to {end} of {room} for shape {list(shape)}")
    return dtype, shape, begin, end
