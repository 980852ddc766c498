"""Plain tables: CSV and NPZ files with named columns. Read as data only, within fixed limits.

Columns: ``position`` and the log-probs, ``gen`` and ``train`` (or one column ``logprob``); optional ``step``,
``sample``, ``token``, ``token_train``, ``mask``, ``generated``, ``curr``. NeMo-RL's names are understood too.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.errors import Refused
from zkl_debug.logprobs.pair import token_mismatch
from zkl_debug.logprobs.table import UNKNOWN_TOKEN, LogprobTable, make_table

MAX_BYTES = 1 << 30
MAX_ROWS = 50_000_000
_ALIASES = {
    "generation_logprobs": "gen",
    "generation_logprob": "gen",
    "gen_logprob": "gen",
    "prev_logprobs": "train",
    "train_logprob": "train",
    "logprobs": "logprob",
    "curr_logprobs": "curr",
    "token_ids": "token",
    "token_id": "token",
    "token_loss_mask": "mask",
    "token_mask": "mask",
    "idx": "sample",
    "pos": "position",
}
_KNOWN = ("step", "sample", "position", "token", "token_train", "gen", "train", "logprob", "mask", "generated", "curr")
_NEED = "columns position, gen and train (or position and logprob); optional: step, sample, token, token_train, mask"


def read_csv(path: Path) -> LogprobTable:
    """Table of a CSV file with a header line.

    Raises:
        Refused: for a file that is too large, not text, ragged, or without the needed columns.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}", "a readable file") from None
    if len(data) > MAX_BYTES:
        raise Refused(f"{path} is larger than {MAX_BYTES} bytes", "a file within the limit")
    try:
        lines = list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"{path} is not a CSV file ({str(error)[:80]})", _NEED) from None
    lines = [line for line in lines if any(cell.strip() for cell in line)]
    if not lines:
        raise Refused(f"{path} is empty", _NEED)
    header = [_canonical(cell) for cell in lines[0]]
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(header):
            raise Refused(
                f"row {number} of {path} has {len(line)} cells, the header {len(header)}", "rows of equal length"
            )
    columns: dict[str, NDArray[Any]] = {}
    for place, name in enumerate(header):
        if name in _KNOWN:
            columns[name] = _numbers(path, name, [line[place].strip() for line in lines[1:]])
    return _table(path, columns)


def read_npz(path: Path) -> LogprobTable:
    """Table of an NPZ archive of one-dimensional numeric arrays; nothing in it is unpickled.

    Raises:
        Refused: for a damaged archive, an array that is not numeric, or sizes that do not add up.
    """
    columns: dict[str, NDArray[Any]] = {}
    room = MAX_BYTES
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = _canonical(info.filename.removesuffix(".npy"))
                if name not in _KNOWN:
                    continue
                with archive.open(info) as member:
                    data = member.read(room + 1)
                room -= len(data)
                if room < 0:
                    raise Refused(f"{path} unpacks to more than {MAX_BYTES} bytes", "an archive within the limit")
                columns[name] = _npy(path, name, data)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise Refused(f"{path} is not a readable NPZ archive ({str(error)[:80]})", _NEED) from None
    except Exception as error:
        if type(error).__module__ in ("zlib", "_lzma", "lzma"):
            raise Refused(f"{path} is a damaged archive ({str(error)[:80]})", _NEED) from None
        raise
    return _table(path, columns, _lossy(columns))


def write_npz(path: Path, table: LogprobTable) -> None:
    """A table as an NPZ archive that :func:`read_npz` reads back with the same bits.

    Raises:
        Refused: when the file cannot be written.
    """
    columns: dict[str, NDArray[Any]] = {
        "step": table.step,
        "sample": table.sample,
        "position": table.position,
        "token": table.token,
        "mask": table.mask,
        "generated": table.generated,
    }
    columns |= {"logprob": table.gen} if table.train is None else {"gen": table.gen, "train": table.train}
    columns |= {} if table.curr is None else {"curr": table.curr}
    try:
        with path.open("xb") as stream:
            np.savez(stream, allow_pickle=False, **columns)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror or error}", "a place to write to") from None


def _npy(path: Path, name: str, data: bytes) -> NDArray[Any]:
    """An array from the bytes of a .npy member; its header must agree with the bytes that are there."""
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(stream)
    except (ValueError, SyntaxError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise Refused(f"{name} in {path} is not an array ({str(error)[:60]})", _NEED) from None
    body = data[stream.tell() :]
    if len(shape) != 1 or dtype.kind not in "iufb" or dtype.itemsize > 8:
        raise Refused(f"{name} in {path} has shape {shape} and dtype {dtype}", "one-dimensional numbers")
    if shape[0] * dtype.itemsize != len(body):
        raise Refused(f"{name} in {path} claims {shape[0]} values, {len(body)} bytes are there", "an undamaged array")
    return np.frombuffer(body, dtype)


def _table(path: Path, columns: Mapping[str, NDArray[Any]], extra: Sequence[str] = ()) -> LogprobTable:
    have = set(columns)
    if "position" not in have or not ({"gen", "train"} <= have or "logprob" in have or "gen" in have):
        raise Refused(f"{path} has the columns {', '.join(sorted(have)) or '(none known)'}", _NEED)
    if columns["position"].shape[0] > MAX_ROWS:
        raise Refused(f"{path} has more than {MAX_ROWS} rows", "fewer rows")
    n = columns["position"].shape[0]
    columns = {name: _known(values) if name.startswith("token") else values for name, values in columns.items()}
    notes = [] if "mask" in have else ["no mask column: every row counts"]
    notes += [] if "sample" in have else ["no sample column: all rows are taken for one sample"]
    notes += list(extra)
    gen = columns["gen"] if "gen" in have else columns["logprob"]
    table = make_table(
        sample=columns.get("sample", np.zeros(n, np.int64)),
        position=columns["position"],
        gen=gen,
        train=columns.get("train") if "gen" in have else None,
        step=columns.get("step", np.zeros(n, np.int64)),
        token=columns.get("token"),
        mask=columns.get("mask"),
        generated=columns["generated"] != 0 if "generated" in have else None,
        curr=columns.get("curr"),
        meta={"format": "table"},
        notes=notes,
    )
    if {"token", "token_train"} <= have:
        _refuse_retokenised(table, columns)
    return table


def _known(token: NDArray[Any]) -> NDArray[Any]:
    """Token ids with empty cells as unknown."""
    return np.where(np.isnan(token), UNKNOWN_TOKEN, token) if token.dtype.kind == "f" else token


def _refuse_retokenised(table: LogprobTable, columns: Mapping[str, NDArray[Any]]) -> None:
    zero = np.zeros(len(table), np.int64)
    keys = [columns["position"], columns.get("sample", zero), columns.get("step", zero)]
    theirs = columns["token_train"].astype(np.int64)[np.lexsort(keys)]
    other = np.flatnonzero((theirs != table.token) & (theirs != UNKNOWN_TOKEN) & (table.token != UNKNOWN_TOKEN))
    if other.shape[0]:
        row = int(other[0])
        raise Refused(*token_mismatch(table, row, int(table.token[row]), int(theirs[row]), int(other.shape[0])))


def _lossy(columns: Mapping[str, NDArray[Any]]) -> list[str]:
    """A note when a float64 column (NPZ) does not fit float32 exactly."""
    for name in ("gen", "train", "logprob"):
        values = columns.get(name)
        if values is None or values.dtype != np.float64:
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            lost = int((values.astype(np.float32).astype(np.float64) != values).sum() - np.isnan(values).sum())
        if lost:
            return [f"{lost} values of {name} are no float32 numbers; the nearest float32 was compared"]
    return []


def _canonical(name: str) -> str:
    text = name.strip().lower()
    return _ALIASES.get(text, text)


def _numbers(path: Path, name: str, cells: list[str]) -> NDArray[Any]:
    try:
        return np.array([float(_WORDS.get(cell.lower(), cell)) for cell in cells], np.float64)
    except ValueError as error:
        raise Refused(
            f"column {name} of {path}: {str(error)[:80]}", "numbers (nan, inf and -inf are allowed)"
        ) from None


#: Spellings of cells that float() does not know.
_WORDS = {"": "nan", "null": "nan", "none": "nan", "true": "1", "false": "0"}
