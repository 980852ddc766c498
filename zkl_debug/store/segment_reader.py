"""Reading one HDF5 segment: every size, layout and link is checked before a byte of it is used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5g, h5l
from numpy.typing import NDArray

from zkl_debug.errors import CaptureInvalid
from zkl_debug.schema import (
    EVENT_DTYPE,
    FORMAT,
    FORMAT_VERSION,
    FRAME_DTYPE,
    ROW_DTYPE,
    EventRecord,
    Json,
    SiteMeta,
    StateRecord,
)
from zkl_debug.store.layout import fold_digest, payload_dtype, segment_check, site_from_json
from zkl_debug.store.segment import Summary

_DAMAGE = (OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError, IndexError, RecursionError)


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes h5py, numpy or json raise into a refusal that names the file."""
    try:
        yield
    except CaptureInvalid:
        raise
    except _DAMAGE as error:
        text = str(error).strip() or type(error).__name__
        raise CaptureInvalid(
            f"{path} cannot be read: {text}", "a segment written by zkl-debug", f"zkl-debug repair {path.parent}"
        ) from None


class ColumnData:
    """Rows of an uncompressed dataset, mapped straight from the file. ``shape`` and ``dtype`` are those of the data."""

    def __init__(self, memory: NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._memory, self.dtype, self.shape = memory, dtype, shape
        self._row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        self._chunk_rows = max(1, shape[0])
        self._offsets: list[int] = []

    def __len__(self) -> int:
        return self.shape[0]

    def place(self, chunk_rows: int, offsets: list[int]) -> None:
        """Say where the data lies: chunk ``k`` holds ``chunk_rows`` rows from byte ``offsets[k]`` on.

        Raises:
            ValueError: when part of the data would lie outside the file.
        """
        needed = -(-self.shape[0] // max(1, chunk_rows))
        if len(offsets) != needed:
            raise ValueError(f"{needed} chunks are needed and {len(offsets)} are there")
        for k, offset in enumerate(offsets):
            rows = min(chunk_rows, self.shape[0] - k * chunk_rows)
            if offset < 0 or offset + rows * self._row_bytes > self._memory.size:
                raise ValueError("data lies outside the file, which is truncated or damaged")
        self._chunk_rows, self._offsets = max(1, chunk_rows), offsets

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield (first row, rows) over all rows, without copies."""
        for k in range(len(self._offsets)):
            yield k * self._chunk_rows, self._chunk(k)

    def _chunk(self, k: int) -> NDArray[Any]:
        rows = min(self._chunk_rows, self.shape[0] - k * self._chunk_rows)
        start = self._offsets[k]
        flat = self._memory[start : start + rows * self._row_bytes]
        return flat.view(self.dtype).reshape(rows, *self.shape[1:])

    def all(self) -> NDArray[Any]:
        """All rows; a view of the file when the data is in one piece."""
        if len(self._offsets) == 1:
            return self._chunk(0)
        if not self._offsets:
            return np.zeros(self.shape, self.dtype)
        return np.concatenate([self._chunk(k) for k in range(len(self._offsets))])

    def take(self, index: NDArray[np.int64]) -> NDArray[Any]:
        """Rows by number, [len(index), ...]; a view of the file when they are consecutive and in one chunk."""
        if not len(index):
            return np.zeros((0, *self.shape[1:]), self.dtype)
        chunk = index // self._chunk_rows
        inside = index - chunk * self._chunk_rows
        if (chunk == chunk[0]).all():
            first, last = int(inside[0]), int(inside[-1])
            block = self._chunk(int(chunk[0]))
            if last - first + 1 == len(inside) and (np.diff(inside) == 1).all():
                return block[first : last + 1]
            return np.asarray(block[inside])
        out = np.empty((len(index), *self.shape[1:]), self.dtype)
        for k in np.unique(chunk):
            where = np.flatnonzero(chunk == k)
            out[where] = self._chunk(int(k))[inside[where]]
        return out


@dataclass(frozen=True)
class SiteEntry:
    """A site of a segment as its index describes it; checks are hexadecimal check values."""

    index: int
    meta: SiteMeta
    rows: int
    dropped: int
    check_row: str
    check_digest: str
    payload_rows: int
    payload_dtype: np.dtype[Any] | None
    payload_width: int
    payload_sparse: bool


class SegmentReader:
    """One closed segment.

    Args:
        path: the HDF5 file.
        check: check value from the manifest, or an empty string to take the file's own word.

    Raises:
        CaptureInvalid: when the file is not a whole, unaltered segment of format 1.
    """

    def __init__(self, path: Path, check: str = "") -> None:
        self.path = path
        self._groups: dict[str, Any] = {}
        self._sound: set[int] = set()  # sites whose digests were checked
        self._known_rows: dict[tuple[str, int], NDArray[np.uint32]] = {}
        if path.is_symlink() or not path.is_file():
            raise CaptureInvalid(f"{path} is not a regular file", "a segment inside the capture folder")
        if path.stat().st_size == 0:
            raise CaptureInvalid(f"{path} is empty", "an HDF5 segment", f"zkl-debug repair {path.parent}")
        with refusing(path):
            self._file = h5py.File(path, "r", locking=False)
        try:
            with refusing(path):
                # A plain array: every slice of a memmap object would run Python code of its own.
                self._memory: NDArray[np.uint8] = np.asarray(np.memmap(path, np.uint8, "r"))
                self._read(check)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file; arrays that were handed out stay valid."""
        self._groups.clear()
        self._file.close()

    def _read(self, check: str) -> None:
        attrs = self._file.attrs
        found = (_text(attrs["format"]), int(attrs["version"]))
        if found != (FORMAT, FORMAT_VERSION):
            raise CaptureInvalid(f"{self.path} is {found[0]} version {found[1]}", f"{FORMAT} version {FORMAT_VERSION}")
        self.side = _text(attrs["side"])
        self.rank, self.world, self.segment = (int(attrs[key]) for key in ("rank", "world", "segment"))
        self.meta: dict[str, Json] = self._json("meta")
        self.frames: NDArray[Any] = self._column("frames", FRAME_DTYPE, ()).all()
        self.rows: NDArray[Any] = self._column("rows", ROW_DTYPE, ()).all()
        if int(self.frames["n_rows"].sum(dtype=np.int64)) != len(self.rows):
            raise ValueError("the frames do not have as many rows as there are")
        index_bytes = self._bytes("index")
        raw_index = json.loads(index_bytes)
        self.sites = [self._entry(entry) for entry in raw_index]
        expected = segment_check(index_bytes, fold_digest(self.frames), fold_digest(self.rows))
        own = self._json("check")
        stored = segment_check(index_bytes, own["frames"], own["rows"])
        if expected != stored or (check and check != expected):
            raise ValueError("frames, rows or the site index are not what was written")
        self.events = self._events()
        self.states = self._states()
        self.summary = Summary(
            frames=len(self.frames),
            rows=len(self.rows),
            events=len(self.events),
            states=sum(len(records) for records in self.states.values()),
            check=expected,
            sites=raw_index,
        )

    def _entry(self, entry: Any) -> SiteEntry:
        meta = site_from_json(entry["site"])
        dtype = payload_dtype(entry["payload_dtype"]) if "payload_dtype" in entry else None
        numbers = [entry[key] for key in ("index", "rows", "dropped")]
        numbers += [entry.get(key, 0) for key in ("payload_rows", "payload_width")]
        if any(not isinstance(n, int) or n < 0 for n in numbers):
            raise ValueError(f"the counts of site {meta.name} are damaged")
        index, rows, dropped, payload_rows, width = numbers
        checks = str(entry["check_row"]), str(entry["check_digest"])
        return SiteEntry(
            index, meta, rows, dropped, *checks, payload_rows, dtype, width, bool(entry.get("payload_sparse"))
        )

    def _dataset(self, name: str) -> Any:
        """Open a dataset by path, following hard links only."""
        folder, _, last = name.rpartition("/")
        here = self._open(self._group(folder), last, name)
        if not isinstance(here, h5d.DatasetID):
            raise ValueError(f"{name} is not a dataset")
        return here

    def _group(self, path: str) -> Any:
        """The group of a path. The outermost ones are kept open: thousands of sites lie in one."""
        if not path:
            return self._file.id
        if path not in self._groups:
            folder, _, last = path.rpartition("/")
            found = self._open(self._group(folder), last, path)
            if folder:
                return found
            self._groups[path] = found
        return self._groups[path]

    @staticmethod
    def _open(here: Any, part: str, name: str) -> Any:
        key = part.encode()
        if not isinstance(here, h5g.GroupID) or not here.links.exists(key):
            raise ValueError(f"{name} is missing")
        if here.links.get_info(key).type != h5l.TYPE_HARD:
            raise ValueError(f"{name} is a link, which a capture never has")
        return h5py.h5o.open(here, key)

    def _column(
        self, name: str, dtype: np.dtype[Any], row_shape: tuple[int, ...], rows: int | None = None
    ) -> ColumnData:
        """Map a dataset after checking its dtype, shape, layout and place in the file."""
        dset = self._dataset(name)
        shape = tuple(int(n) for n in dset.shape)
        if dset.dtype != dtype or len(shape) != 1 + len(row_shape) or shape[1:] != row_shape:
            raise ValueError(f"{name} has dtype {dset.dtype} and shape {shape}")
        if rows is not None and shape[0] != rows:
            raise ValueError(f"{name} has {shape[0]} rows and the index says {rows}")
        plist = dset.get_create_plist()
        if plist.get_nfilters() or plist.get_external_count():
            raise ValueError(f"{name} has filters or external storage")
        column = ColumnData(self._memory, dtype, shape)
        if int(np.prod(shape, dtype=object)) * dtype.itemsize > self._memory.size:
            raise ValueError(f"{name} is larger than the file, which is truncated or damaged")
        if not all(shape):
            return column
        layout = plist.get_layout()
        if layout == h5d.CONTIGUOUS:
            column.place(shape[0], [int(dset.get_offset() if dset.get_offset() is not None else -1)])
        elif layout == h5d.CHUNKED:
            column.place(*self._chunks(dset, plist.get_chunk(), shape))
        else:
            raise ValueError(f"{name} has a layout that format {FORMAT_VERSION} does not use")
        return column

    @staticmethod
    def _chunks(dset: Any, chunk: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, list[int]]:
        if chunk[1:] != shape[1:]:
            raise ValueError("chunks do not hold whole rows")
        found: dict[int, int] = {}

        def visit(info: Any) -> None:
            found[int(info.chunk_offset[0]) // chunk[0]] = int(info.byte_offset)

        dset.chunk_iter(visit)
        count = -(-shape[0] // chunk[0])
        return chunk[0], [found[k] for k in range(count)]

    def _bytes(self, name: str) -> bytes:
        return self._column(name, np.dtype("u1"), ()).all().tobytes()

    def _json(self, name: str) -> Any:
        return json.loads(self._bytes(name))

    def _events(self) -> list[EventRecord]:
        table = self._column("events", EVENT_DTYPE, ()).all()
        detail = self._json("events_detail")
        if len(detail) != len(table):
            raise ValueError("events and their details do not match")
        return [
            EventRecord(
                event_seq=int(e["event_seq"]),
                name=str(d["name"]),
                step=int(e["step"]),
                weight_version=int(e["weight_version"]),
                frame=int(e["frame"]),
                detail=dict(d["detail"]),
            )
            for e, d in zip(table, detail, strict=True)
        ]

    def _states(self) -> dict[int, list[StateRecord]]:
        states: dict[int, list[StateRecord]] = {}
        for name in self._file["state"]:
            records = self._json(f"state/{name}/records")
            count = len(records)
            digest = self._column(f"state/{name}/digest", np.dtype("<u8"), (2,), count).all()
            pointer = self._column(f"state/{name}/data_ptr", np.dtype("<u8"), (), count).all()
            states[int(name)] = [
                StateRecord(
                    name=str(r["name"]),
                    kind=str(r["kind"]),
                    torch_dtype=str(r["torch_dtype"]),
                    shape=tuple(int(n) for n in r["shape"]),
                    digest=(int(digest[i, 0]), int(digest[i, 1])),
                    data_ptr=int(pointer[i]),
                    detail=dict(r["detail"]),
                )
                for i, r in enumerate(records)
            ]
        return states

    # Columns of a site. All raise CaptureInvalid, naming the file, when the data is not what was written.

    def site_rows(self, entry: SiteEntry) -> NDArray[np.uint32]:
        """Rows of the segment that the site has, [n] uint32.

        Most sites have the same rows: where the index, which was checked, gives the same 128-bit check value as for a
        site read before, the rows of that site are given.
        """
        key = (entry.check_row, entry.rows)
        known = self._known_rows.get(key)
        if known is not None:
            return known
        with refusing(self.path):
            rows = self._column(f"sites/{entry.index:05d}/row", np.dtype("<u4"), (), entry.rows).all()
            if fold_digest(rows) != entry.check_row or (len(rows) and int(rows.max()) >= len(self.rows)):
                raise ValueError(f"the row numbers of site {entry.meta.name} are not what was written")
            self._known_rows[key] = rows
            return rows

    def site_digest(self, entry: SiteEntry) -> NDArray[np.uint64]:
        """Digests of the site's rows, [n, 2] uint64."""
        with refusing(self.path):
            digest = self._column(f"sites/{entry.index:05d}/digest", np.dtype("<u8"), (2,), entry.rows).all()
            if entry.index not in self._sound:
                if fold_digest(digest) != entry.check_digest:
                    raise ValueError(f"the digests of site {entry.meta.name} are not what was written")
                self._sound.add(entry.index)
            return digest

    def site_payload(self, entry: SiteEntry) -> ColumnData:
        """Payload rows of the site, [m, W]; the entry must have a payload."""
        assert entry.payload_dtype is not None
        with refusing(self.path):
            name = f"sites/{entry.index:05d}/payload"
            return self._column(name, entry.payload_dtype, (entry.payload_width,), entry.payload_rows)

    def site_payload_row(self, entry: SiteEntry) -> NDArray[np.int64]:
        """For every payload row, the site row it belongs to; [m] int64, increasing."""
        if not entry.payload_sparse:
            return np.arange(min(entry.payload_rows, entry.rows), dtype=np.int64)
        with refusing(self.path):
            name = f"sites/{entry.index:05d}/payload_row"
            index = self._column(name, np.dtype("<u4"), (), entry.payload_rows).all().astype(np.int64)
            if len(index) and (int(index[-1]) >= entry.rows or (np.diff(index) <= 0).any()):
                raise ValueError(f"the payload of site {entry.meta.name} is filed under rows that do not exist")
            return index


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
