"""The vocabulary shared by the store, the probes and the diff engine. Imports neither torch nor h5py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag, StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = "zkl-capture"
FORMAT_VERSION = 1

Json = Any
U64 = NDArray[np.uint64]


class Phase(IntEnum):
    """What kind of forward produced a row. ``MIXED`` is for frames only, never for a row."""

    SCORE = 0
    PREFILL = 1
    DECODE = 2
    MIXED = 3


class RowFlag(IntFlag):
    """Bits of the ``flags`` column of a row. The two lowest bits hold the row's :class:`Phase`."""

    NONE = 0
    PHASE_MASK = 0b11
    # A row that exists for the log-prob of its token: position and prefix include that token, which the frame
    # predicted.
    LABEL = 1 << 2
    # The token of the row was generated, not part of the prompt.
    GENERATED = 1 << 3
    # First decode row of a request.
    FIRST_DECODE = 1 << 4
    # Last row of a prefill chunk that is not the end of the prompt.
    CHUNK_EDGE = 1 << 5
    # The row lies behind tokens that came from the prefix cache.
    AFTER_CACHE_HIT = 1 << 6
    # The loss mask excludes this row.
    MASKED = 1 << 7
    # A token of another rank that was sent here (to an expert): ``sample`` is the rank's place in the expert-parallel
    # group, ``token`` the expert, ``position`` the how-manieth of the rank's tokens for this expert. The key is that
    # of the rank's own row; it is found when the ranks are put together.
    SENT = 1 << 8


class SiteKind(StrEnum):
    """How a site was observed."""

    MODULE = "module"  # forward hook of an nn.Module
    TAP = "tap"  # wrapper round a function
    INPUT = "input"  # what was fed to the model (token and position ids); compared before anything else
    CALL = "call"  # a fact of the whole call, kept beside its first row; never compared, calls may differ


#: One row of ``/rows``. ``prefix`` is the multilinear-128 digest of the int32 tokens[0..position] of the sample.
ROW_DTYPE = np.dtype(
    [
        ("frame", "<u4"),
        ("sample", "<u8"),
        ("position", "<i4"),
        ("token", "<i4"),
        ("prefix", "<u8", (2,)),
        ("flags", "<u4"),
    ]
)

#: One row of ``/frames``: one model forward (a scoring micro-batch or an engine step).
FRAME_DTYPE = np.dtype(
    [
        ("frame", "<u4"),
        ("phase", "u1"),
        ("step", "<i4"),  # training step (or -1)
        ("event_seq", "<i8"),
        ("weight_version", "<i8"),
        ("n_rows", "<u4"),  # rows of this frame in /rows, label rows included
        ("n_padded", "<u4"),  # token slots the model ran, padding included: "rows in call"
        ("graph", "<i4"),  # CUDA-graph bucket, -1 for eager
        ("n_seqs", "<u4"),  # sequences in the call
        ("max_seqlen_q", "<u4"),  # longest query in the call
        ("micro_batch", "<i4"),  # index of the scoring micro-batch or engine step
    ]
)

#: One row of ``/events``; name and detail are kept as JSON beside it.
EVENT_DTYPE = np.dtype([("event_seq", "<i8"), ("step", "<i4"), ("weight_version", "<i8"), ("frame", "<i8")])

_SITE_RE = re.compile(r"^(?P<path>[^/:]*)(?:/(?P<op>[^:]+))?:(?P<port>(?:in|out)(?:\.\d+)?)$")
_LAYER_RE = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class SiteName:
    """A parsed canonical site name.

    ``decoder.layers.0.self_attention.core_attention:out`` has ``module`` = the path and ``operator`` = its last
    component; ``decoder.layers.3.mlp/router.topk:out.0`` has ``module`` = ``decoder.layers.3.mlp.router`` and
    ``operator`` = ``router.topk``.
    """

    path: str
    op: str  # empty for a module site
    port: str

    @property
    def module(self) -> str:
        """Dotted path of the module that owns the operator."""
        if not self.op or "." not in self.op:
            return self.path
        return f"{self.path}.{self.op.rsplit('.', 1)[0]}"

    @property
    def operator(self) -> str:
        """Operator name: the tap's name, or the last component of the module path."""
        return self.op or self.path.rsplit(".", 1)[-1]

    @property
    def layer(self) -> int:
        """Index of the outermost ``layers.N`` in the path, or -1."""
        m = _LAYER_RE.search(self.path)
        return int(m.group(1)) if m else -1

    @property
    def is_input(self) -> bool:
        """Whether the port is an input port."""
        return self.port.startswith("in")

    @property
    def owner(self) -> str:
        """The site name without its port: what a module's or tap's ports have in common."""
        return f"{self.path}/{self.op}" if self.op else self.path


@lru_cache(maxsize=1 << 15)
def parse_site(name: str) -> SiteName:
    """Split a canonical site name. The parts of a name are asked for many times over.

    Raises:
        ValueError: when ``name`` is not ``path[/operator]:port``.
    """
    m = _SITE_RE.match(name)
    if m is None:
        raise ValueError(f"not a site name: {name!r} (expected path[/operator]:in|out[.N])")
    return SiteName(m.group("path"), m.group("op") or "", m.group("port"))


@dataclass(frozen=True)
class Shard:
    """What of a whole row one rank of a group has.

    Attributes:
        group: the group that shares the row: ``tp``, ``etp``.
        index, count: place in the group, and its size.
        shape: shape of the whole row.
        pieces: (first element in the whole row, elements), in the order in which the rank has them, both whole 32-bit
            lanes: the digest of each begins at its own lane, so that the digests of the ranks add up. Empty for a
            partial sum, and where the pieces cannot be placed (then each rank is compared by itself).
        partial: a partial sum, whole in shape, that is added up over the group.
    """

    group: str
    index: int
    count: int
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...] = ()
    partial: bool = False

    def lanes(self, itemsize: int) -> tuple[tuple[int, int], ...]:
        """(first 32-bit lane in the whole row, bytes) of each piece; empty when digests of ranks do not add up."""
        return tuple((first * itemsize // 4, count * itemsize) for first, count in self.pieces)


@dataclass(frozen=True)
class SiteMeta:
    """What is known of a site, stored as attributes of ``/sites/<id>``.

    Attributes:
        name: canonical site name.
        kind: how it was observed.
        layer: layer index or -1.
        order: rank of the site's first occurrence in its capture (execution order).
        port: ``in``, ``out``, ``out.1`` ...
        torch_dtype: dtype of the tensor, e.g. ``bfloat16`` (torch's name without the prefix).
        row_shape: shape of one row (without token dimensions); ``()`` for a scalar a row.
        tp_axis: axis of the row that tensor parallelism splits, -1 when whole.
        lane_offset: first 32-bit lane of this shard in the whole row.
        semantic: operator class for the semantic table (``linear``, ``norm``, ``core_attention`` ...), or empty.
        shard: the rank's part of the row, None when it has all of it.
    """

    name: str
    kind: SiteKind
    layer: int
    order: int
    port: str
    torch_dtype: str
    row_shape: tuple[int, ...]
    tp_axis: int = -1
    lane_offset: int = 0
    semantic: str = ""
    shard: Shard | None = None


@dataclass(frozen=True)
class SiteBlock:
    """One frame's rows of one site, as handed to the writer.

    Attributes:
        meta: the site. A later block may carry the same ``meta.name`` only with equal dtype and row shape;
            otherwise the writer files it under ``name`` with a suffix and notes it.
        row: indices into this frame's rows, shape [n], uint32.
        digest: multilinear-128 of each row, shape [n, 2], uint64; of a shard, of its pieces at their lanes.
        payload: raw bits of each row, shape [n, W], uint8/16/32/64, or None at digest level.
    """

    meta: SiteMeta
    row: NDArray[np.uint32]
    digest: U64
    payload: NDArray[Any] | None = None


@dataclass(frozen=True)
class StateRecord:
    """One tensor of a state snapshot: a parameter, buffer, cache or KV block."""

    name: str
    kind: str  # parameter | buffer | cache | kv | ssm
    torch_dtype: str
    shape: tuple[int, ...]
    digest: tuple[int, int]
    data_ptr: int = 0
    detail: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class EventRecord:
    """Something that happened between frames: refit, optimizer step, sleep, wake, cache reset, graph capture."""

    event_seq: int
    name: str
    step: int = -1
    weight_version: int = 0
    frame: int = -1  # last frame before the event
    detail: Mapping[str, Json] = field(default_factory=dict)


def row_phase(flags: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Phase codes of an array of row flags, same shape."""
    return flags & np.uint32(RowFlag.PHASE_MASK)
