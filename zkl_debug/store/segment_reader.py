"""Reading one HDF5 segment: every size, layout and link is checked before a byte of it is used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
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
    StateRecord,
)
from zkl_debug.store.layout import fold_digest, kept_check, segment_check
from zkl_debug.store.mapped import ColumnData, MappedFile, slice_rows
from zkl_debug.store.segment import Summary
from zkl_debug.store.table import (
    PLACE_DTYPE,
    TABLE_DTYPE,
    Known,
    SiteTable,
    decode_metas,
    make_table,
    metas_check,
    table_bytes,
    tabulate,
)

_DAMAGE = (
    OSError,
    KeyError,
    ValueError,
    TypeError,
    RuntimeError,
    AttributeError,
    IndexError,
    RecursionError,
    OverflowError,
)


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


class SegmentReader:
    """One closed segment.

    Args:
        path: the HDF5 file.
        check: check value from the manifest, or an empty string to take the file's own word.
        known: sites of other segments of the capture, which this one most likely shares; added to.
        table: check value of the site table from the manifest; the site index is then left alone. Empty to read the
            index, which is all that older captures have.

    Raises:
        CaptureInvalid: when the file is not a whole, unaltered segment of format 1.
    """

    def __init__(self, path: Path, check: str = "", known: Known | None = None, table: str = "") -> None:
        self.path = path
        self._known: Known = {} if known is None else known
        self._groups: dict[str, Any] = {}
        self._known_rows: dict[int, NDArray[np.uint32]] = {}
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
                self._view = memoryview(self._memory)
                self._read(check, table)
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

    def _read(self, check: str, table: str) -> None:
        attrs = self._file.attrs
        found = (_text(attrs["format"]), int(attrs["version"]))
        if found != (FORMAT, FORMAT_VERSION):
            raise CaptureInvalid(f"{self.path} is {found[0]} version {found[1]}", f"{FORMAT} version {FORMAT_VERSION}")
        self.side = _text(attrs["side"])
        self.rank, self.world, self.segment = (int(attrs[key]) for key in ("rank", "world", "segment"))
        raw_meta = self._bytes("meta")
        self.meta: dict[str, Json] = json.loads(raw_meta)
        self.frames: NDArray[Any] = self._column("frames", FRAME_DTYPE, ()).all()
        self.rows: NDArray[Any] = self._column("rows", ROW_DTYPE, ()).all()
        if int(self.frames["n_rows"].sum(dtype=np.int64)) != len(self.rows):
            raise ValueError("the frames do not have as many rows as there are")
        own = self._json("check")
        self._folds = fold_digest(self.frames), fold_digest(self.rows)
        if self._folds != (own["frames"], own["rows"]):
            raise ValueError("frames or rows are not what was written")
        self.table: SiteTable = self._site_table(table, check) if table else self._site_index(check)
        self.events = self._events()
        self.states = self._states()
        if "kept" in own and own["kept"] != kept_check(raw_meta, self.events, self.states):
            raise ValueError("its events, state or facts of the program are not what was written")

    def _site_index(self, check: str) -> SiteTable:
        """The sites from their JSON index."""
        raw = self._bytes("index")
        if check and check != segment_check(raw, *self._folds):
            raise ValueError("frames, rows or the site index are not what was written")
        index = json.loads(raw)
        return make_table(decode_metas((e["site"] for e in index), self._known), *tabulate(index), self._memory.size)

    def _site_table(self, expected: str, check: str) -> SiteTable:
        """The sites from their table."""
        table, places, raw = self._raw_table()
        known = self._known.get(raw)
        folded = metas_check(raw) if known is None else known[0]
        if expected != segment_check(table_bytes(table, places, folded, check), *self._folds):
            raise ValueError("frames, rows or the site table are not what was written")
        if known is None:
            known = self._known[raw] = folded, decode_metas(json.loads(raw), self._known)
        return make_table(known[1], table, places, self._memory.size)

    def _table_check(self, check: str) -> str:
        table, places, raw = self._raw_table()
        return segment_check(table_bytes(table, places, metas_check(raw), check), *self._folds)

    def _raw_table(self) -> tuple[NDArray[Any], NDArray[np.int64], bytes]:
        table = self._column("site_table", TABLE_DTYPE, ()).all()
        places = self._column("site_places", PLACE_DTYPE, ()).all()
        return table, places, self._bytes("site_metas")

    @property
    def summary(self) -> Summary:
        """What the manifest says of the segment. Reads the site index again: it is too large to keep."""
        with refusing(self.path):
            index = self._bytes("index")
            check = segment_check(index, *self._folds)
            tabulated = "table" in self._json("check")
            return Summary(
                frames=len(self.frames),
                rows=len(self.rows),
                events=len(self.events),
                states=sum(len(records) for records in self.states.values()),
                check=check,
                sites=json.loads(index),
                table=self._table_check(check) if tabulated else "",
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

    def _index_column(self, number: int, name: str) -> NDArray[Any]:
        """The ``row`` or ``digest`` column of a site: where its table says it is, else where HDF5 does.

        What is found there must have the check value that the table gives.
        """
        dtype, row_shape = _INDEX_COLUMNS[name]
        rows, place = self.table.rows[number], self.table.place(number, name)
        if place is None:
            return self._column(f"{self._site_group(number)}/{name}", dtype, row_shape, rows).all()
        if len(place[1]) == 1:
            return slice_rows(self._memory, dtype, row_shape, rows, place[1][0])
        column = ColumnData(self._memory, dtype, (rows, *row_shape))
        column.place(*place)
        return column.all()

    def _site_group(self, number: int) -> str:
        return f"sites/{int(self.table.table['index'][number]):05d}"

    # Columns of a site, by its number in the table. All raise CaptureInvalid, naming the file, when the data is not
    # what was written.

    def site_rows(self, number: int) -> NDArray[np.uint32]:
        """Rows of the segment that the site has, [n] uint32.

        Most sites have the same rows: where the table, which was checked, gives the same 128-bit check value as for a
        site read before, the rows of that site are given.
        """
        code = self.table.row_codes[number]
        known = self._known_rows.get(code)
        if known is not None:
            return known
        with refusing(self.path):
            rows = self._index_column(number, "row")
            unknown = len(rows) and int(rows.max()) >= len(self.rows)
            if fold_digest(rows) != self.table.check_hex(number, "row") or unknown:
                raise ValueError(f"the row numbers of site {self.table.metas[number].name} are not what was written")
            self._known_rows[code] = rows
            return rows

    def site_digest(self, number: int) -> NDArray[np.uint64]:
        """Digests of the site's rows, [n, 2] uint64, not checked: see :meth:`unlike`."""
        with refusing(self.path):
            return self._index_column(number, "digest")

    def copy_digest(self, number: int, out: memoryview, at: int) -> int:
        """Copy the digests of a site's rows, not checked, to ``out`` from byte ``at`` on; returns where they end."""
        end, offset = at + 16 * self.table.rows[number], self.table.digest_at[number]
        if offset >= 0:
            out[at:end] = self._view[offset : offset + end - at]
        else:
            out[at:end] = memoryview(np.ascontiguousarray(self.site_digest(number))).cast("B")
        return end

    def unlike(self, number: int) -> CaptureInvalid:
        """The error for digests that do not have the check value of the table."""
        return CaptureInvalid(
            f"{self.path} cannot be read: the digests of site {self.table.metas[number].name} are not what was written",
            "a segment written by zkl-debug",
            f"zkl-debug repair {self.path.parent}",
        )

    def site_payload(self, number: int) -> ColumnData:
        """Payload rows of the site, [m, W]; the site must have a payload."""
        dtype, table = self.table.payload_dtype(number), self.table.table
        assert dtype is not None
        with refusing(self.path):
            shape = (int(table["payload_width"][number]),)
            return self._column(f"{self._site_group(number)}/payload", dtype, shape, int(table["payload_rows"][number]))

    def site_payload_row(self, number: int) -> NDArray[np.int64]:
        """For every payload row, the site row it belongs to; [m] int64, increasing."""
        rows, payload_rows = self.table.rows[number], self.table.payload_rows[number]
        if not self.table.table["payload_sparse"][number]:
            return np.arange(payload_rows, dtype=np.int64)
        with refusing(self.path):
            name = f"{self._site_group(number)}/payload_row"
            index = self._column(name, np.dtype("<u4"), (), payload_rows).all().astype(np.int64)
            if len(index) and (int(index[-1]) >= rows or (np.diff(index) <= 0).any()):
                name = self.table.metas[number].name
                raise ValueError(f"the payload of site {name} is filed under rows that do not exist")
            return index


_INDEX_COLUMNS: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
    "row": (np.dtype("<u4"), ()),
    "digest": (np.dtype("<u8"), (2,)),
}


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
