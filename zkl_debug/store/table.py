"""The sites of a segment as columns of numbers: read in one go, checked at once, without an object a site.

A segment describes its sites twice. ``index`` is a list of JSON objects, which any release reads. ``site_table``,
``site_places`` and ``site_metas`` say the same in the form of :class:`SiteTable`; where a capture has thousands of
sites in each of many files, building objects from JSON is most of what opening it costs. Both are written when the
segment is closed, never before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.schema import U64, Json, SiteMeta
from zkl_debug.store.layout import PAYLOAD_DTYPES, encode_json, fold_digest, payload_dtype, site_from_json

#: One site. ``*_chunk`` are rows of a chunk, ``*_pieces`` how many entries of ``site_places`` are its byte offsets:
#: for each site in turn those of its row numbers, then those of its digests. ``payload_item`` is 0 without payload.
TABLE_DTYPE = np.dtype(
    [
        ("index", "<u4"),
        ("rows", "<i8"),
        ("dropped", "<i8"),
        ("check_row", "<u8", (2,)),
        ("check_digest", "<u8", (2,)),
        ("payload_rows", "<i8"),
        ("payload_width", "<i8"),
        ("payload_item", "u1"),
        ("payload_sparse", "u1"),
        ("row_chunk", "<i8"),
        ("row_pieces", "<u4"),
        ("digest_chunk", "<i8"),
        ("digest_pieces", "<u4"),
    ]
)
PLACE_DTYPE = np.dtype("<i8")
_UNPLACED = np.uint32(0xFFFFFFFF)
_COUNTS = ("rows", "dropped", "payload_rows", "payload_width", "row_chunk", "digest_chunk")
_STORAGE = {dtype.itemsize: dtype for dtype in PAYLOAD_DTYPES}
_ROW_BYTES = {"row": 4, "digest": 16}

#: Rows of a chunk and the byte offsets of the chunks.
Place = tuple[int, list[int]]
#: Sites as they were read from bytes seen before: most segments of a capture have the same.
Known = dict[Any, Any]


def tabulate(index: Sequence[Mapping[str, Json]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Table and places of a site index.

    Args:
        index: its entries. Those of older captures have no places.

    Returns:
        TABLE_DTYPE [S], PLACE_DTYPE [M].

    Raises:
        ValueError, KeyError, TypeError, OverflowError: when an entry is damaged.
    """
    table = np.zeros(len(index), TABLE_DTYPE)
    places: list[int] = []
    for k, entry in enumerate(index):
        counts = [_count(entry[key]) for key in ("index", "rows", "dropped")]
        counts += [_count(entry.get(key, 0)) for key in ("payload_rows", "payload_width")]
        item = payload_dtype(entry["payload_dtype"]).itemsize if "payload_dtype" in entry else 0
        at = {name: _place(entry["at"][name]) if "at" in entry else None for name in ("row", "digest")}
        for place in at.values():
            places += place[1] if place is not None else []
        table[k] = (
            *counts[:3],
            _check_value(entry["check_row"]),
            _check_value(entry["check_digest"]),
            *counts[3:],
            item,
            bool(entry.get("payload_sparse")),
            *(number for place in at.values() for number in ((0, _UNPLACED) if place is None else _sizes(place))),
        )
    return table, np.array(places, PLACE_DTYPE)


def _sizes(place: Place) -> tuple[int, int]:
    return place[0], len(place[1])


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("the counts of a site are damaged")
    return value


def _place(value: Any) -> Place:
    if not isinstance(value, list) or not value or any(type(n) is not int or n < 0 for n in value):
        raise ValueError("the index does not say where the columns are")
    return value[0], value[1:]


def _check_value(text: Any) -> tuple[int, int]:
    if not isinstance(text, str) or len(text) != 32:
        raise ValueError("a check value of the index is damaged")
    return int(text[:16], 16), int(text[16:], 16)


def encode_metas(index: Sequence[Mapping[str, Json]]) -> bytes:
    """The descriptions of the sites of an index, in its order."""
    return encode_json([entry["site"] for entry in index])


def table_bytes(table: NDArray[Any], places: NDArray[np.int64], metas: str, check: str) -> bytes:
    """What the check value of a site table is taken of.

    Args:
        table, places: as stored.
        metas: check value of the descriptions (:func:`metas_check`), which many segments share.
        check: that of the segment with its JSON index.
    """
    return b"".join((check.encode(), metas.encode(), table.tobytes(), places.tobytes()))


def metas_check(raw: bytes) -> str:
    """Check value of the descriptions of sites, as stored."""
    return fold_digest(np.frombuffer(raw, np.uint8))


def decode_metas(values: Any, known: Known) -> tuple[SiteMeta, ...]:
    """Sites from their descriptions, JSON values; ``known`` holds single ones of before and is added to."""
    metas = []
    for site in values:
        name = site.get("name") if isinstance(site, dict) else None
        seen = known.get(name) if isinstance(name, str) else None
        if seen is None or seen[0] != site:
            seen = (site, site_from_json(site))
            known.setdefault(seen[1].name, seen)
        metas.append(seen[1])
    return tuple(metas)


@dataclass(frozen=True)
class SiteTable:
    """Sites of a segment, in the order of its index; everything was checked against the size of the file.

    Attributes:
        metas: the sites. Segments with the same sites share one tuple.
        table: TABLE_DTYPE [S].
        rows, row_codes: per site its number of rows, and a number that sites with the same rows share.
        digest_at: per site the byte offset of its digests where they are in one piece, else -1.
        firsts: per site where its places begin, of rows and of digests, [S, 2] int64; -1 where HDF5 must be asked.
        places: byte offsets.
    """

    metas: tuple[SiteMeta, ...]
    table: NDArray[Any]
    rows: list[int]
    row_codes: list[int]
    digest_at: list[int]
    payload_rows: list[int]
    firsts: NDArray[np.int64]
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.metas)

    @property
    def check_digest(self) -> U64:
        """Check values of the digests, [S, 2] uint64."""
        found: U64 = self.table["check_digest"]
        return found

    def check_hex(self, number: int, name: str) -> str:
        """Check value of a site's ``row`` or ``digest`` column, hexadecimal."""
        low, high = self.table[f"check_{name}"][number].tolist()
        return f"{low:016x}{high:016x}"

    def place(self, number: int, name: str) -> Place | None:
        """Where a site's ``row`` or ``digest`` column is, None where only HDF5 knows."""
        first = int(self.firsts[number, int(name == "digest")])
        if first < 0:
            return None
        pieces = int(self.table[f"{name}_pieces"][number])
        return int(self.table[f"{name}_chunk"][number]), self.places[first : first + pieces].tolist()

    def payload_dtype(self, number: int) -> np.dtype[Any] | None:
        """Storage dtype of a site's payload, None for a site without."""
        return _STORAGE.get(int(self.table["payload_item"][number]))


def make_table(
    metas: tuple[SiteMeta, ...], table: NDArray[Any], places: NDArray[np.int64], file_bytes: int
) -> SiteTable:
    """Check a table as it was read, and make it ready for use.

    Raises:
        ValueError: when counts or places cannot be those of a file of ``file_bytes``.
    """
    if len(metas) != len(table):
        raise ValueError(f"{len(metas)} sites are described and {len(table)} are listed")
    if any((table[key] < 0).any() for key in _COUNTS) or (table["payload_rows"] > table["rows"]).any():
        raise ValueError("the counts of a site are damaged")
    if not np.isin(table["payload_item"], (0, *_STORAGE)).all():
        raise ValueError("a payload has a width of element that no capture has")
    if (table["payload_rows"][table["payload_item"] == 0] > 0).any():
        raise ValueError("a payload has no dtype")
    pieces = np.stack([table["row_pieces"], table["digest_pieces"]], axis=1)
    placed = pieces != _UNPLACED
    pieces = np.where(placed, pieces, 0).astype(np.int64)
    ends = np.cumsum(pieces).reshape(pieces.shape)
    if len(places) != int(pieces.sum()):
        raise ValueError("the index does not say where the columns are")
    firsts = np.where(placed, ends - pieces, -1)
    for k, name in enumerate(_ROW_BYTES):
        where = placed[:, k]
        _check_places(name, table[where], pieces[where, k], firsts[where, k], places, file_bytes)
    single = pieces[:, 1] == 1
    digest_at = np.full(len(table), -1, np.int64)
    digest_at[single] = places[firsts[single, 1]]
    return SiteTable(
        metas=metas,
        table=table,
        rows=table["rows"].tolist(),
        row_codes=_codes(table),
        digest_at=digest_at.tolist(),
        payload_rows=table["payload_rows"].tolist(),
        firsts=firsts,
        places=places,
    )


def _check_places(
    name: str, table: NDArray[Any], pieces: NDArray[Any], firsts: NDArray[Any], places: NDArray[Any], size: int
) -> None:
    """Every piece of a column of all sites must lie inside the file."""
    rows, chunk = table["rows"], np.maximum(1, table[f"{name}_chunk"])
    if (rows > size // _ROW_BYTES[name]).any():
        raise ValueError("there is more data than the file can hold")
    if (pieces != -(-rows // chunk)).any():
        raise ValueError("the index does not say where all chunks of a column are")
    site = np.repeat(np.arange(len(rows)), pieces)
    piece = np.arange(len(site)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = places[firsts[site] + piece]
    count = np.minimum(chunk[site], rows[site] - piece * chunk[site])
    if ((offset < 0) | (offset > size - count * _ROW_BYTES[name])).any():
        raise ValueError("data lies outside the file, which is truncated or damaged")


def _codes(table: NDArray[Any]) -> list[int]:
    key = np.ascontiguousarray(np.column_stack([table["check_row"], table["rows"].astype(np.uint64)]))
    _, codes = np.unique(key.view(f"V{key.shape[1] * 8}").reshape(-1), return_inverse=True)
    return [int(code) for code in codes.tolist()]
