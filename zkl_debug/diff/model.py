"""What a diff speaks in: edges, kinds, the capture it needs, and the records of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zkl_debug.schema import U64, Json, Phase, SiteMeta, StateRecord

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class SiteLike(Protocol):
    """One site of a capture: see :class:`zkl_debug.store.reader.Site`."""

    @property
    def meta(self) -> SiteMeta:
        """Name, dtype, shape, order."""

    @property
    def rows(self) -> Ints:
        """Index of each site row into the capture's rows, int64, shape [n]."""

    @property
    def digest(self) -> U64:
        """Digest of each site row, uint64, shape [n, 2]."""

    @property
    def has_payload(self) -> bool:
        """Whether raw bits of any row are there."""

    @property
    def payload_index(self) -> Ints:
        """Which of the site's rows have raw bits, int64, increasing."""

    def payload(self, i: Ints, /) -> NDArray[Any]:
        """Raw bits of the given site rows in an unsigned dtype, shape [m, W]."""


class CaptureLike(Protocol):
    """A capture as the diff sees it: see :class:`zkl_debug.store.reader.Capture`."""

    @property
    def side(self) -> str:
        """Label of the observed system."""

    @property
    def meta(self) -> Mapping[str, Json]:
        """What is known of the observed program: versions, config ..."""

    @property
    def manifest(self) -> Mapping[str, Json]:
        """The manifest: self_repeat, probe, notes ..."""

    @property
    def frames(self) -> NDArray[Any]:
        """FRAME_DTYPE, shape [F]."""

    @property
    def rows(self) -> NDArray[Any]:
        """ROW_DTYPE, shape [N]; ``frame`` is an index into ``frames``."""

    @property
    def sites(self) -> Mapping[str, SiteLike]:
        """Sites by canonical name."""

    @property
    def states(self) -> Mapping[int, Sequence[StateRecord]]:
        """State snapshots by event sequence number."""


def fact(capture: CaptureLike, key: str) -> Json:
    """A fact of a capture, from its manifest or its metadata; None where it is not there."""
    return capture.manifest.get(key, capture.meta.get(key))


class Outcome(StrEnum):
    """The verdict of a diff."""

    IDENTICAL = "identical"
    DIVERGED = "diverged"
    REFUSED = "refused"
    INCONCLUSIVE = "inconclusive"


class Kind(IntEnum):
    """What a site's output at one row says of the operator."""

    ABSENT = 0  # not compared
    EQUAL = 1  # output equal (and its captured inputs too)
    MASKED = 2  # an input differs, the output is equal
    PROPAGATED = 3  # an input differs, and so does the output
    OWN = 4  # every captured input is equal, the output differs
    UNCAPTURED_STATE = 5  # as OWN, but a replay from the captured inputs agrees

    @property
    def label(self) -> str:
        """Spelling of the verdict document."""
        return self.name.lower().replace("_", "-")


#: (left phase, right phase) of every edge between two phases, and of the same phase of two captures.
PHASE_EDGES: dict[str, tuple[Phase, Phase]] = {
    "score-prefill": (Phase.SCORE, Phase.PREFILL),
    "prefill-decode": (Phase.PREFILL, Phase.DECODE),
    "score-decode": (Phase.SCORE, Phase.DECODE),
}
SAME_PHASE_EDGES: dict[str, Phase] = {
    "score-score": Phase.SCORE,
    "prefill-prefill": Phase.PREFILL,
    "decode-decode": Phase.DECODE,
}
WITHIN_EDGES = ("within-a", "within-b")

#: Which edge to name when several first diverge at the same site: see :mod:`zkl_debug.diff.first`.
EDGE_PRIORITY = (
    "within-a",
    "within-b",
    "score-score",
    "prefill-prefill",
    "score-prefill",
    "prefill-decode",
    "decode-decode",
    "score-decode",
)
#: The five edges of train against gen; they are always part of the answer, compared or not.
MAIN_EDGES = ("score-prefill", "prefill-decode", "score-decode", "within-a", "within-b")


@dataclass(frozen=True)
class Refusal:
    """Why two captures are not compared.

    Attributes:
        code: machine-readable reason, e.g. ``weights-differ``.
        text: one sentence.
        found, expected, next: as in :class:`zkl_debug.errors.ZklError`.
        detail: what identifies the finding (names, sample, position ...).
        inconclusive: the comparison is possible but would not mean anything (exit 4 instead of 3).
    """

    code: str
    text: str
    found: str
    expected: str
    next: str
    detail: Mapping[str, Json]
    inconclusive: bool = False

    def to_json(self) -> Json:
        """The ``refusal`` object of the verdict document."""
        return {
            "code": self.code,
            "text": self.text,
            "found": self.found,
            "expected": self.expected,
            "next": self.next,
            "detail": dict(self.detail),
        }


def refuse(code: str, text: str, found: str, expected: str, next_step: str, **detail: Json) -> Refusal:
    """A :class:`Refusal` with exit code 3."""
    return Refusal(code, text, found, expected, next_step, detail)


@dataclass(frozen=True)
class Skip:
    """Something that was not compared, and why. ``count`` and ``example`` describe a group of rows."""

    what: str
    reason: str
    count: int = 1

    def to_json(self) -> Json:
        """An entry of ``coverage.skipped``."""
        return {"what": self.what, "reason": self.reason, "count": self.count}


@dataclass(frozen=True)
class Stats:
    """How much mismatching rows differ. Every field is None where there is no payload to tell.

    Attributes:
        max_ulp: largest ULP distance; None also when only NaNs differ.
        max_abs: largest absolute difference of finite values.
        mismatched_elements: elements whose bits differ.
        elements: elements looked at.
        first_element: flat index of the first mismatching element in the first mismatching row.
        rows: rows looked at.
    """

    max_ulp: int | None = None
    max_abs: float | None = None
    mismatched_elements: int | None = None
    elements: int | None = None
    first_element: int | None = None
    rows: int = 0


NO_STATS = Stats()
