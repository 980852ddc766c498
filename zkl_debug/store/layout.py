"""Names, sizes and small encodings of capture format 1. Knows nothing about models and imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.digest import digest_bytes, digest_rows
from zkl_debug.errors import ProbeError
from zkl_debug.schema import U64, EventRecord, Json, Shard, SiteKind, SiteMeta, StateRecord

MANIFEST = "manifest.json"
#: Bytes of a payload chunk: as many whole rows as fit, at least one.
CHUNK_BYTES = 1 << 20
#: Bytes of a chunk of row indices, digests, frames and rows.
INDEX_CHUNK_BYTES = 64 << 10
#: Unsigned dtypes a payload may be stored in.
PAYLOAD_DTYPES = tuple(np.dtype(kind) for kind in ("<u1", "<u2", "<u4", "<u8"))

_SEGMENT_RE = re.compile(r"^rank(\d{5})\.seg(\d{3,})\.(h5|h5\.partial|wal)$")


class StoreError(ProbeError):
    """A capture could not be written."""


@dataclass(frozen=True)
class SegmentFile:
    """A file of a capture folder that belongs to a segment; ``kind`` is ``h5``, ``h5.partial`` or ``wal``."""

    path: Path
    rank: int
    segment: int
    kind: str


def segment_path(root: Path, rank: int, segment: int, kind: str = "h5") -> Path:
    """Path of a segment's file; ``kind`` is ``h5``, ``h5.partial`` or ``wal``."""
    return root / f"rank{rank:05d}.seg{segment:03d}.{kind}"


def part_path(root: Path, rank: int) -> Path:
    """Path of one rank's part of the manifest, for captures of more than one rank."""
    return root / f"rank{rank:05d}.json"


def list_segment_files(root: Path) -> list[SegmentFile]:
    """Segment files of a folder in order of rank, segment and kind; anything else there is ignored."""
    found = []
    for path in root.iterdir():
        match = _SEGMENT_RE.match(path.name)
        if match:
            found.append(SegmentFile(path, int(match.group(1)), int(match.group(2)), match.group(3)))
    return sorted(found, key=lambda f: (f.rank, f.segment, f.kind))


def chunk_rows(row_bytes: int, chunk_bytes: int) -> int:
    """Rows a chunk: whole rows within ``chunk_bytes``, at least one."""
    return max(1, chunk_bytes // max(1, row_bytes))


def fold_blocks(data: NDArray[Any]) -> U64:
    """Digests [k, 2] of the blocks of a contiguous array [n, ...]: whole rows within 64 KiB, the last one shorter."""
    if not data.size:
        return np.zeros((0, 2), np.uint64)
    row_bytes = data.nbytes // len(data)
    block = chunk_rows(row_bytes, INDEX_CHUNK_BYTES) * row_bytes
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    whole = flat.size // block
    parts = [digest_rows(flat[: whole * block].reshape(whole, block))] if whole else []
    if flat.size % block:
        parts.append(digest_rows(flat[None, whole * block :]))
    return np.concatenate(parts)


def fold_hex(blocks: U64, nbytes: int) -> str:
    """Check value of an array from the digests of its blocks and its size; 32 hexadecimal digits."""
    low, high = digest_bytes(np.append(blocks.reshape(-1), np.uint64(nbytes)).tobytes())
    return f"{low:016x}{high:016x}"


def fold_digest(data: NDArray[Any]) -> str:
    """Check value of a contiguous array [n, ...]; 32 hexadecimal digits."""
    return fold_hex(fold_blocks(data), data.nbytes)


def fold_parts(data: NDArray[Any], parts: Sequence[int]) -> U64:
    """Check values of the parts that a contiguous array falls into along its first axis.

    Args:
        data: [n, ...].
        parts: rows of each part, in order; they add up to n.

    Returns:
        [len(parts), 2] uint64: what :func:`fold_digest` gives for each part alone; small ones are folded at once.
    """
    counts = np.array(parts, np.int64)
    row_bytes = data.nbytes // max(1, len(data))
    largest = int(counts.max(initial=0)) * row_bytes
    if len(parts) < 2 or not largest or largest > INDEX_CHUNK_BYTES or not counts.all():
        return _fold_each(data, counts)
    flat = data.reshape(-1).view(np.uint8)
    if (counts == counts[0]).all():
        padded = flat.reshape(len(parts), largest)
    elif len(parts) * largest > _PADDING * data.nbytes:
        return _fold_each(data, counts)
    else:  # zeros behind a row of bytes leave its digest as it is
        padded = np.zeros((len(parts), largest), np.uint8)
        padded[np.arange(largest) < counts[:, None] * row_bytes] = flat
    folded = np.empty((len(parts), 3), np.uint64)
    folded[:, :2] = digest_rows(padded)
    folded[:, 2] = counts * row_bytes
    return digest_rows(folded.view(np.uint8))


_PADDING = 4  # bytes with zeros, over those without, up to which folding all at once is worth it


def _fold_each(data: NDArray[Any], counts: NDArray[np.int64]) -> U64:
    stops = np.cumsum(counts).tolist()
    checks = [fold_digest(data[stop - count : stop]) for stop, count in zip(stops, counts.tolist(), strict=True)]
    return np.array([(int(c[:16], 16), int(c[16:], 16)) for c in checks], np.uint64).reshape(-1, 2)


def segment_check(index: bytes, frames: str, rows: str) -> str:
    """Check value of a segment: of its site index (JSON bytes), frames and rows."""
    low, high = digest_bytes(index + b"\0" + frames.encode() + rows.encode())
    return f"{low:016x}{high:016x}"


def kept_check(meta: bytes, events: Sequence[EventRecord], states: Mapping[int, Sequence[StateRecord]]) -> str:
    """Check value of what a segment says of its program, its events and its state.

    Args:
        meta: as it is stored, JSON bytes.
        events, states: as they are written, or were read back.
    """
    told = [[e.event_seq, e.name, e.step, e.weight_version, e.frame, dict(e.detail)] for e in events]
    kept = [
        [
            seq,
            [[r.name, r.kind, r.torch_dtype, list(r.shape), list(r.digest), r.data_ptr, dict(r.detail)] for r in part],
        ]
        for seq, part in sorted(states.items())
    ]
    low, high = digest_bytes(meta + b"\0" + encode_json([told, kept]))
    return f"{low:016x}{high:016x}"


def encode_json(value: Json) -> bytes:
    """Compact JSON as UTF-8; non-JSON values become their ``repr`` so that a capture never fails on its environment."""
    return json.dumps(value, separators=(",", ":"), default=_plain, ensure_ascii=False).encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    return repr(value)


def site_to_json(meta: SiteMeta) -> dict[str, Json]:
    """A site's attributes as a JSON object."""
    shard = {} if meta.shard is None else {"shard": _shard_to_json(meta.shard)}
    return {
        **shard,
        "name": meta.name,
        "kind": str(meta.kind),
        "layer": meta.layer,
        "order": meta.order,
        "port": meta.port,
        "torch_dtype": meta.torch_dtype,
        "row_shape": list(meta.row_shape),
        "tp_axis": meta.tp_axis,
        "lane_offset": meta.lane_offset,
        "semantic": meta.semantic,
    }


def _shard_to_json(shard: Shard) -> dict[str, Json]:
    return {
        "group": shard.group,
        "index": shard.index,
        "count": shard.count,
        "shape": list(shard.shape),
        "pieces": [list(piece) for piece in shard.pieces],
        "partial": shard.partial,
    }


def _shard_from_json(value: Any) -> Shard:
    if not isinstance(value["partial"], bool):
        raise TypeError(f"{value['partial']!r} is not a truth value")
    shard = Shard(
        group=_text(value["group"]),
        index=_integer(value["index"]),
        count=_integer(value["count"]),
        shape=tuple(_integer(n) for n in value["shape"]),
        pieces=tuple((_integer(first), _integer(count)) for first, count in value["pieces"]),
        partial=value["partial"],
    )
    if not 0 <= shard.index < shard.count:
        raise ValueError(f"shard {shard.index} of {shard.count}")
    if any(first < 0 or count <= 0 for first, count in shard.pieces):
        raise ValueError("a piece of a shard lies outside the row")
    return shard


def site_from_json(value: Any) -> SiteMeta:
    """Inverse of :func:`site_to_json`.

    Raises:
        ValueError: when a field is missing or of the wrong type.
    """
    if not isinstance(value, Mapping):
        raise ValueError("a site is not a JSON object")
    try:
        shape = tuple(_integer(n) for n in value["row_shape"])
        return SiteMeta(
            name=_text(value["name"]),
            kind=SiteKind(value["kind"]),
            layer=_integer(value["layer"]),
            order=_integer(value["order"]),
            port=_text(value["port"]),
            torch_dtype=_text(value["torch_dtype"]),
            row_shape=shape,
            tp_axis=_integer(value["tp_axis"]),
            lane_offset=_integer(value["lane_offset"]),
            semantic=_text(value["semantic"]),
            shard=_shard_from_json(value["shard"]) if "shard" in value else None,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"a site's description is damaged: {error!r}") from None


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not an integer")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def variant_name(name: str, number: int) -> str:
    """Name of the ``number``-th site that arrived under ``name`` with another dtype or row shape.

    The suffix goes on the owner, so that the result is still a site name: ``a.b:out`` becomes ``a.b~2:out``.
    """
    owner, colon, port = name.rpartition(":")
    return f"{owner}~{number}:{port}" if colon else f"{name}~{number}"


def payload_dtype(code: Any) -> np.dtype[Any]:
    """The storage dtype of a payload from its text form, e.g. ``<u2``.

    Raises:
        ValueError: for anything that is not an unsigned integer dtype.
    """
    for dtype in PAYLOAD_DTYPES:
        if code == dtype.str or (code == "|u1" and dtype.itemsize == 1):
            return dtype
    raise ValueError(f"{code!r} is not a payload dtype")


#: Suffixes of files that hold log-probs and no capture.
TABLES = (".npz", ".csv", ".json", ".jsonl", ".pt")


def what_to_do_with(path: Path) -> str:
    """The next step for a path that was taken for a capture folder."""
    if path.suffix in TABLES and path.name != MANIFEST and path.is_file():
        return f"log-probs of a file: zkl-debug logprobs {quote(str(path))}"
    inside = path.is_file() and (path.parent / MANIFEST).is_file()
    return f"the folder it is in: {quote(str(path.parent))}" if inside else "zkl-debug capture --help"
