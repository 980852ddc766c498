"""Reading a capture folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zkl_debug.digest import wrong_rows
from zkl_debug.errors import CaptureInvalid, Refused
from zkl_debug.schema import (
    FORMAT,
    FORMAT_VERSION,
    FRAME_DTYPE,
    ROW_DTYPE,
    U64,
    EventRecord,
    Json,
    SiteMeta,
    StateRecord,
)
from zkl_debug.store.layout import MANIFEST, fold_equal_parts, list_segment_files
from zkl_debug.store.manifest import read_json
from zkl_debug.store.mapped import ColumnData
from zkl_debug.store.segment_reader import Known, SegmentReader, SiteEntry
from zkl_debug.store.wal import is_being_written


@dataclass(frozen=True)
class _Part:
    """A site's data in one segment; ``base`` is the capture row of the segment's first row."""

    reader: SegmentReader
    entry: SiteEntry
    base: int


class _Pages:
    """Keeps what was mapped of the files from filling the memory."""

    _LIMIT = 48 << 20

    def __init__(self, readers: Sequence[SegmentReader]) -> None:
        self._readers = readers
        self._read = 0

    def count(self, nbytes: int) -> None:
        """Take note of bytes that were read, and let go of the files' pages once they are many."""
        self._read += nbytes
        if self._read > self._LIMIT:
            self._read = 0
            for reader in self._readers:
                reader.release()


class Site:
    """One site of a capture, over all its segments. Data is read on first use and checked against the manifest.

    Attributes:
        meta: the site; ``order`` is its place in execution order.
    """

    def __init__(self, meta: SiteMeta, parts: list[_Part], shared: dict[Any, NDArray[np.int64]], pages: _Pages) -> None:
        self.meta = meta
        self._parts = parts
        self._shared = shared  # row numbers of the capture's sites, by their check values
        self._pages = pages
        self._starts = np.cumsum([0, *(part.entry.rows for part in parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Capture row of each row of the site, [n] int64. Sites with equal rows share one array: never write to it."""
        key = tuple((part.base, part.entry.rows, part.entry.check_row) for part in self._parts)
        known = self._shared.get(key)
        if known is None:
            parts = [part.reader.site_rows(part.entry).astype(np.int64) + part.base for part in self._parts]
            known = self._shared[key] = _join(parts, np.zeros(0, np.int64))
        return known

    @property
    def digest(self) -> U64:
        """multilinear-128 of each row, [n, 2] uint64. Read anew each time: those of all sites could fill the memory."""
        if len(self._parts) == 1:
            return self._parts[0].reader.site_digest(self._parts[0].entry)
        digest = _join([p.reader.unchecked_digest(p.entry) for p in self._parts], np.zeros((0, 2), np.uint64))
        self._confirm(digest)
        self._pages.count(digest.nbytes)
        return digest

    def _confirm(self, digest: U64) -> None:
        """Compare every part that was not checked yet with its check value, runs of parts of one size at once."""
        for rows, run in groupby(range(len(self._parts)), key=lambda k: self._parts[k].entry.rows):
            numbers = list(run)
            new = [self._parts[k] for k in numbers if not self._parts[k].reader.is_sound(self._parts[k].entry)]
            if not new:
                continue
            start = int(self._starts[numbers[0]])
            checks = fold_equal_parts(digest[start : start + rows * len(numbers)], len(numbers))
            for k, check in zip(numbers, checks, strict=True):
                self._parts[k].reader.confirm(self._parts[k].entry, check)

    @property
    def head(self) -> U64:
        """Digests of the first rows, as many as the first segment that has any holds, [m, 2] uint64; m <= n."""
        for part in self._parts:
            if part.entry.rows:
                return part.reader.site_digest(part.entry)
        return np.zeros((0, 2), np.uint64)

    @property
    def has_payload(self) -> bool:
        """Whether any row has a payload."""
        return any(part.entry.payload_rows for part in self._parts)

    @property
    def payload_rows(self) -> int:
        """Number of rows that have a payload."""
        return sum(part.entry.payload_rows for part in self._parts)

    @property
    def payload_bytes(self) -> int:
        """Bytes of payload."""
        return sum(
            p.entry.payload_rows * p.entry.payload_width * p.entry.payload_dtype.itemsize
            for p in self._parts
            if p.entry.payload_dtype is not None
        )

    @property
    def payload_dropped(self) -> int:
        """Rows whose payload was not taken because of the byte budget."""
        return sum(part.entry.dropped for part in self._parts)

    @cached_property
    def payload_index(self) -> NDArray[np.int64]:
        """Which of the site's rows (0 .. n-1) have a payload, [m] int64, increasing."""
        return _join(
            [
                part.reader.site_payload_row(part.entry) + self._starts[k]
                for k, part in enumerate(self._parts)
                if part.entry.payload_rows
            ],
            np.zeros(0, np.int64),
        )

    @cached_property
    def _columns(self) -> list[ColumnData]:
        return [part.reader.site_payload(part.entry) for part in self._parts if part.entry.payload_rows]

    @cached_property
    def _column_starts(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(len(column) for column in self._columns)])

    def payload(self, i: NDArray[np.int64] | slice) -> NDArray[Any]:
        """Raw bits of rows of the site, mapped from the file.

        Args:
            i: numbers of the site's rows (0 .. n-1, as in :attr:`rows`), or a slice of them.

        Returns:
            [len(i), W] in the storage dtype; read-only where it is a view of the file.

        Raises:
            Refused: when a row has no payload.
        """
        wanted = np.arange(*i.indices(len(self))) if isinstance(i, slice) else np.asarray(i, np.int64)
        if not self.has_payload:
            raise Refused(f"site {self.meta.name} has no payload", "a capture made with --level payload")
        index = self.payload_index
        place = np.searchsorted(index, wanted)
        if len(wanted) and (place >= len(index)).any() | (index[np.minimum(place, len(index) - 1)] != wanted).any():
            raise Refused(
                f"site {self.meta.name}: {len(wanted)} rows asked for, some have no payload",
                "rows of Site.payload_index",
            )
        part = np.searchsorted(self._column_starts, place, side="right") - 1
        if len(place) and (part == part[0]).all():
            return self._columns[int(part[0])].take(place - self._column_starts[part[0]])
        out = np.empty((len(place), self._columns[0].shape[1]), self._columns[0].dtype)
        for k in np.unique(part):
            where = np.flatnonzero(part == k)
            out[where] = self._columns[int(k)].take(place[where] - self._column_starts[k])
        return out

    def payload_pieces(self, start: int, stop: int) -> Iterator[NDArray[Any]]:
        """Yield raw bits of the site's rows ``start`` .. ``stop - 1``, which all must have them, without copies.

        Yields:
            [k, W] in the storage dtype, in order; each is as long as the file has it in one piece.
        """
        first, last = np.searchsorted(self.payload_index, [start, stop]).tolist()
        if last - first != stop - start:
            raise Refused(f"site {self.meta.name}: some of its rows have no payload", "rows of Site.payload_index")
        for k, column in enumerate(self._columns):
            base = int(self._column_starts[k])
            yield from column.pieces(max(0, first - base), min(len(column), last - base))
        self._pages.count(self.row_bytes * (stop - start))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's payload; 0 without payload."""
        return self._columns[0].row_bytes if self._columns else 0

    def payload_blocks(self) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Yield (site rows [k], raw bits [k, W]) over all payload in file order, about 1 MiB at a time, no copies."""
        for start, column in zip(self._column_starts, self._columns, strict=False):
            for first, block in column.blocks():
                at = int(start) + first
                self._pages.count(block.nbytes)
                yield self.payload_index[at : at + len(block)], block


class Capture:
    """An open capture; also a context manager.

    Attributes:
        root: the folder; ``place`` is it without links and dots.
        manifest: its manifest.
        side, meta: label of the observed system, and the versions, configuration and environment it was given.
        frames: FRAME_DTYPE, [F], over all ranks and segments; ``frame`` is the index in this array.
        frame_rank: rank of each frame, [F] int32.
        rows: ROW_DTYPE, [N]; ``frame`` indexes :attr:`frames`.
        sites: by name, in execution order. A site that other ranks have with another layout or shard is filed under
            ``owner@rank:port``.
        events, states: what happened between frames, and state snapshots by event sequence number. An event's
            ``frame`` indexes :attr:`frames`, or is -1.
    """

    def __init__(
        self, root: Path, manifest: dict[str, Json], readers: list[SegmentReader], meta: dict[str, Json] | None = None
    ) -> None:
        self.root, self.manifest, self._readers = root, manifest, readers
        self.place = root.resolve()
        self.side: str = manifest["side"]
        self.meta: dict[str, Json] = manifest["meta"] if meta is None else meta
        self.frames, self.frame_rank, self.rows, bases = _join_tables(readers)
        self.sites = _join_sites(readers, bases)
        self.events = _join_events(readers)
        self.states: dict[int, list[StateRecord]] = {}
        for reader in readers:
            for seq, records in reader.states.items():
                self.states.setdefault(seq, []).extend(records)

    def by_rank(self) -> dict[int, Capture]:
        """What each rank recorded, as captures of their own over the same open files."""
        own: dict[int, list[SegmentReader]] = {}
        for reader in self._readers:
            own.setdefault(reader.rank, []).append(reader)
        return {r: Capture(self.root, self.manifest, own[r], dict(own[r][0].meta)) for r in sorted(own)}

    def close(self) -> None:
        """Close the files; arrays that were read stay valid."""
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _join[T: np.generic](parts: Sequence[NDArray[T]], empty: NDArray[T]) -> NDArray[T]:
    if not parts:
        return empty
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _join_tables(
    readers: list[SegmentReader],
) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[Any], list[int]]:
    frames = np.array(_join([r.frames for r in readers], np.zeros(0, FRAME_DTYPE)))
    rows = np.array(_join([r.rows for r in readers], np.zeros(0, ROW_DTYPE)))
    ranks = np.repeat(np.array([r.rank for r in readers], np.int32), [len(r.frames) for r in readers])
    frames["frame"] = np.arange(len(frames))
    rows["frame"] = np.repeat(frames["frame"], frames["n_rows"])
    bases = [0, *np.cumsum([len(r.rows) for r in readers]).tolist()]
    return frames, ranks, rows, bases[:-1]


def _join_sites(readers: list[SegmentReader], bases: list[int]) -> dict[str, Site]:
    found: dict[str, tuple[SiteMeta, list[_Part]]] = {}
    for reader, base in zip(readers, bases, strict=True):
        for entry in reader.sites:
            meta = entry.meta
            first = found.get(meta.name)
            if first is not None and first[0] is not meta and not _same_layout(first[0], meta):
                owner, _, port = meta.name.rpartition(":")
                meta = replace(meta, name=f"{owner}@{reader.rank}:{port}")
            found.setdefault(meta.name, (meta, []))[1].append(_Part(reader, entry, base))
    ordered = sorted(found.values(), key=lambda item: item[0].order)
    shared: dict[Any, NDArray[np.int64]] = {}
    pages = _Pages(readers)
    return {meta.name: Site(meta, parts, shared, pages) for meta, parts in ordered}


def _same_layout(a: SiteMeta, b: SiteMeta) -> bool:
    return (a.torch_dtype, a.row_shape, a.tp_axis, a.lane_offset, a.shard) == (
        b.torch_dtype,
        b.row_shape,
        b.tp_axis,
        b.lane_offset,
        b.shard,
    )


def _join_events(readers: list[SegmentReader]) -> list[EventRecord]:
    numbers: dict[int, dict[int, int]] = {}
    start = 0
    for reader in readers:
        own = numbers.setdefault(reader.rank, {})
        for k, number in enumerate(reader.frames["frame"].tolist()):
            own[number] = start + k
        start += len(reader.frames)
    return [
        replace(event, frame=numbers[reader.rank].get(event.frame, -1)) for reader in readers for event in reader.events
    ]


def open_capture(path: Path, *, partial: bool = False) -> Capture:
    """Open a capture folder after checking that it is whole.

    Args:
        path: the folder.
        partial: accept a capture whose manifest says it is incomplete (one that was repaired).

    Raises:
        CaptureInvalid: no manifest, another format or version, a missing, truncated, altered or unreadable segment, a
            link out of the folder, or an incomplete capture without ``partial``.
    """
    root = Path(path)
    manifest = load_manifest(root)
    if not manifest["complete"] and not partial:
        raise CaptureInvalid(
            f"{root} is incomplete: {manifest.get('reason', 'it was not closed')}",
            "a capture that was closed",
            "pass --partial to use what is there",
        )
    readers: list[SegmentReader] = []
    known: Known = {}
    try:
        for segment in manifest["segments"]:
            readers.append(_open_segment(root, segment, manifest, known))  # noqa: PERF401 - closed below when one fails
        _check_ranks(root, manifest, readers, partial)
        return Capture(root, manifest, readers)
    except BaseException:
        for reader in readers:
            reader.close()
        raise


def load_manifest(root: Path) -> dict[str, Json]:
    """The manifest of a capture folder, checked for format, version and the fields every manifest has.

    Raises:
        CaptureInvalid: when there is none or it is not one.
    """
    if not root.is_dir():
        raise CaptureInvalid(f"{root} is not a folder", "a capture folder", "zkl-debug capture --help")
    path = root / MANIFEST
    if not path.exists() and not path.is_symlink():
        files = list_segment_files(root)
        if any(file.kind == "wal" and is_being_written(file.path) for file in files):
            raise CaptureInvalid(
                f"{root} is still being written", "a capture that was closed", "wait until it is closed"
            )
        if files:
            raise CaptureInvalid(
                f"{root} has no {MANIFEST}: the capture was not closed",
                "a complete capture",
                f"run `zkl-debug repair {root}`",
            )
        below = sorted(child.name for child in root.iterdir() if (child / MANIFEST).is_file())
        hint = f"one of its captures: {', '.join(str(root / name) for name in below[:4])}" if below else ""
        raise CaptureInvalid(f"{root} is not a capture: it has no {MANIFEST}", "a capture folder", hint)
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CaptureInvalid(f"{path} is not a capture manifest", f'"format": "{FORMAT}"')
    if manifest.get("version") != FORMAT_VERSION:
        raise CaptureInvalid(
            f"{path} has format version {manifest.get('version')!r}",
            f"version {FORMAT_VERSION}",
            "use the release of zkl-debug that wrote it",
        )
    for key, kind in _FIELDS.items():
        if not isinstance(manifest.get(key), kind):
            raise CaptureInvalid(f"{path}: field {key!r} is missing or damaged", "a manifest written by zkl-debug")
    return manifest


_FIELDS: dict[str, type] = {
    "side": str,
    "world": int,
    "complete": bool,
    "segments": list,
    "counts": dict,
    "sites": dict,
    "meta": dict,
    "notes": list,
}


def _open_segment(root: Path, segment: Any, manifest: dict[str, Json], known: Known) -> SegmentReader:
    if not isinstance(segment, dict) or not isinstance(segment.get("file"), str):
        raise CaptureInvalid(f"{root / MANIFEST}: an entry of segments is damaged")
    name = segment["file"]
    if name != Path(name).name:
        raise CaptureInvalid(f"{root / MANIFEST}: segment {name!r} lies outside the folder", "a file name")
    path = root / name
    if path.is_symlink():
        raise CaptureInvalid(f"{path} is a symbolic link", "a file inside the capture folder")
    if not path.exists():
        raise CaptureInvalid(f"{path} is missing", f"the file of rank {segment.get('rank')} named in the manifest")
    size = path.stat().st_size
    if size != segment.get("bytes"):
        raise CaptureInvalid(
            f"{path} has {size} bytes, the manifest says {segment.get('bytes')}", "the file as it was written"
        )
    reader = SegmentReader(path, str(segment.get("check", "")), known)
    wrong = ""
    if (reader.rank, reader.side, reader.world) != (segment.get("rank"), manifest["side"], manifest["world"]):
        wrong = "rank, side or world"
    elif (len(reader.frames), len(reader.rows)) != (segment.get("frames"), segment.get("rows")):
        wrong = "frames or rows"
    if wrong:
        reader.close()
        raise CaptureInvalid(f"{path} and the manifest disagree about {wrong}", "files of one capture")
    return reader


def _check_ranks(root: Path, manifest: dict[str, Json], readers: list[SegmentReader], partial: bool) -> None:
    seen: set[tuple[int, int]] = set()
    for reader in readers:
        if (reader.rank, reader.segment) in seen:
            raise CaptureInvalid(f"{root}: rank {reader.rank} has segment {reader.segment} twice", "every segment once")
        seen.add((reader.rank, reader.segment))
    missing = sorted(set(range(min(manifest["world"], 1 << 20))) - {reader.rank for reader in readers})
    if missing and not partial:
        raise CaptureInvalid(
            f"{root} has no segment of rank {', '.join(map(str, missing[:8]))}", f"{manifest['world']} ranks"
        )
    counts = manifest["counts"]
    have = (sum(len(r.frames) for r in readers), sum(len(r.rows) for r in readers))
    if have != (counts.get("frames"), counts.get("rows")):
        raise CaptureInvalid(
            f"{root} holds {have[0]} frames and {have[1]} rows",
            f"{counts.get('frames')} frames and {counts.get('rows')} rows, as counted in the manifest",
        )


def lanes(meta: SiteMeta, bits: NDArray[Any]) -> tuple[tuple[int, int], ...]:
    """Where the pieces of a shard lie, for :func:`zkl_debug.digest.wrong_rows`; ``bits`` tell the element size."""
    return () if meta.shard is None else meta.shard.lanes(bits.dtype.itemsize)


@dataclass(frozen=True)
class BadRow:
    """A payload row whose bytes do not have the digest recorded for it; ``row`` is a capture row."""

    site: str
    row: int
    site_row: int


def verify_payload(cap: Capture, names: Iterable[str] | None = None) -> list[BadRow]:
    """Recompute the digest of every payload row.

    Args:
        cap: an open capture.
        names: sites to check; default all that have a payload.

    Returns:
        The rows that fail, empty when every byte is as it was digested.
    """
    bad: list[BadRow] = []
    for name in cap.sites if names is None else names:
        site = cap.sites[name]
        digest = site.digest
        for rows, block in site.payload_blocks():
            wrong = wrong_rows(block, digest[rows], lanes(site.meta, block))
            bad += [BadRow(name, int(site.rows[k]), int(k)) for k in rows[wrong]]
    return bad
