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
from zkl_debug.store.layout import fold_digest, kept_check, payload_dtype, segment_check, site_from_json
from zkl_debug.store.mapped import ColumnData, MappedFile, slice_rows
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


#: Rows of a chunk and the byte offsets of the chunks.
Place = tuple[int, list[int]]


@dataclass(frozen=True, slots=True)
class SiteEntry:
    """A site of a segment as its index describes it; checks are hexadecimal check values.

    ``at_row`` and ``at_digest`` say where the bytes are, so that HDF5 need not be asked; None in older captures.
    """

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
    at_row: Place | None = None
    at_digest: Place | None = None


#: Sites seen in other segments of a capture, as stored and as read.
Known = dict[str, tuple[Any, SiteMeta]]


class SegmentReader:
    """One closed segment.

    Args:
        path: the HDF5 file.
        check: check value from the manifest, or an empty string to take the file's own word.
        known: sites of other segments of the capture, which this one most likely shares; added to.

    Raises:
        CaptureInvalid: when the file is not a whole, unaltered segment of format 1.
    """

    def __init__(self, path: Path, check: str = "", known: Known | None = None) -> None:
        self.path = path
        self._known: Known = {} if known is None else known
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
                self._map = MappedFile(path)
                self._memory = self._map.bytes
                self._read(check)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file; arrays that were handed out stay valid."""
        self._groups.clear()
        self._file.close()

    def release(self) -> None:
        """Let go of the file's pages in memory; arrays that were handed out stay valid."""
        self._map.release()

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
        if "kept" in own and own["kept"] != kept_check(self._bytes("meta"), self.events, self.states):
            raise ValueError("its events, state or facts of the program are not what was written")
        self._check = expected

    @property
    def summary(self) -> Summary:
        """What the manifest says of the segment. Reads the site index again: it is too large to keep."""
        with refusing(self.path):
            return Summary(
                frames=len(self.frames),
                rows=len(self.rows),
                events=len(self.events),
                states=sum(len(records) for records in self.states.values()),
                check=self._check,
                sites=self._json("index"),
            )

    def _entry(self, entry: Any) -> SiteEntry:
        meta = self._meta_of(entry["site"])
        dtype = payload_dtype(entry["payload_dtype"]) if "payload_dtype" in entry else None
        numbers = [entry[key] for key in ("index", "rows", "dropped")]
        numbers += [entry.get(key, 0) for key in ("payload_rows", "payload_width")]
        if any(not isinstance(n, int) or n < 0 for n in numbers):
            raise ValueError(f"the counts of site {meta.name} are damaged")
        index, rows, dropped, payload_rows, width = numbers
        checks = str(entry["check_row"]), str(entry["check_digest"])
        at = entry.get("at")
        places = (None, None) if at is None else (_place(at["row"]), _place(at["digest"]))
        sparse = bool(entry.get("payload_sparse"))
        return SiteEntry(index, meta, rows, dropped, *checks, payload_rows, dtype, width, sparse, *places)

    def _meta_of(self, site: Any) -> SiteMeta:
        name = site.get("name") if isinstance(site, dict) else None
        if isinstance(name, str) and name in self._known and self._known[name][0] == site:
            return self._known[name][1]
        meta = site_from_json(site)
        self._known.setdefault(meta.name, (site, meta))
        return meta

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

    def _index_column(self, entry: SiteEntry, name: str, place: Place | None) -> NDArray[Any]:
        """The ``row`` or ``digest`` column of a site: where the index says it is, else where HDF5 does.

        A place is bounds-checked here, and what is found there must have the check value that the index gives.
        """
        dtype, row_shape = _INDEX_COLUMNS[name]
        if place is None:
            return self._column(f"sites/{entry.index:05d}/{name}", dtype, row_shape, entry.rows).all()
        if len(place[1]) == 1 and place[0] >= entry.rows:
            return slice_rows(self._memory, dtype, row_shape, entry.rows, place[1][0])
        column = ColumnData(self._memory, dtype, (entry.rows, *row_shape))
        column.place(*place)
        return column.all()

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
            rows = self._index_column(entry, "row", entry.at_row)
            if fold_digest(rows) != entry.check_row or (len(rows) and int(rows.max()) >= len(self.rows)):
                raise ValueError(f"the row numbers of site {entry.meta.name} are not what was written")
            self._known_rows[key] = rows
            return rows

    def site_digest(self, entry: SiteEntry) -> NDArray[np.uint64]:
        """Digests of the site's rows, [n, 2] uint64."""
        digest = self.unchecked_digest(entry)
        if not self.is_sound(entry):
            self.confirm(entry, fold_digest(digest))
        return digest

    def unchecked_digest(self, entry: SiteEntry) -> NDArray[np.uint64]:
        """As :meth:`site_digest`, but the caller sees to the check value: see :meth:`confirm`."""
        with refusing(self.path):
            return self._index_column(entry, "digest", entry.at_digest)

    def is_sound(self, entry: SiteEntry) -> bool:
        """Whether the digests of a site were checked."""
        return entry.index in self._sound

    def confirm(self, entry: SiteEntry, check: str) -> None:
        """Compare the check value of a site's digests, as read, with the one the index gives."""
        with refusing(self.path):
            if check != entry.check_digest:
                raise ValueError(f"the digests of site {entry.meta.name} are not what was written")
        self._sound.add(entry.index)

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


_INDEX_COLUMNS: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
    "row": (np.dtype("<u4"), ()),
    "digest": (np.dtype("<u8"), (2,)),
}


def _place(value: Any) -> Place:
    if not isinstance(value, list) or not value or any(type(n) is not int or n < 0 for n in value):
        raise ValueError("the index does not say where the columns are")
    return value[0], value[1:]


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
