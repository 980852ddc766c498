"""A capture compared with itself: its own rows of one prefix, in one phase or in two, without any other side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.coverage import Coverage
from zkl_debug.diff.model import CaptureLike, Ints, Refusal, SiteLike, refuse
from zkl_debug.schema import U64, Json, SiteMeta, StateRecord


@dataclass(frozen=True)
class _NoRows:
    """A site without rows."""

    meta: SiteMeta
    has_payload: bool = False

    @property
    def rows(self) -> Ints:
        return np.zeros(0, np.int64)

    @property
    def digest(self) -> U64:
        return np.zeros((0, 2), np.uint64)

    @property
    def payload_index(self) -> Ints:
        return np.zeros(0, np.int64)

    def payload(self, i: Ints, /) -> NDArray[Any]:
        return np.zeros((len(i), 0), np.uint8)


class Alone:
    """The other side of a capture that has none: the same sites and weights, and not a single row."""

    def __init__(self, capture: CaptureLike) -> None:
        self._capture = capture
        self.sites: Mapping[str, SiteLike] = {name: _NoRows(site.meta) for name, site in capture.sites.items()}

    @property
    def side(self) -> str:
        """As the capture's."""
        return self._capture.side

    @property
    def meta(self) -> Mapping[str, Json]:
        """As the capture's."""
        return self._capture.meta

    @property
    def manifest(self) -> Mapping[str, Json]:
        """Nothing was observed."""
        return {}

    @property
    def frames(self) -> NDArray[Any]:
        """None."""
        return self._capture.frames[:0]

    @property
    def rows(self) -> NDArray[Any]:
        """None."""
        return self._capture.rows[:0]

    @property
    def states(self) -> Mapping[int, Sequence[StateRecord]]:
        """As the capture's."""
        return self._capture.states


def nothing_twice(name: str) -> Refusal:
    """No prefix of the capture was run twice."""
    return refuse(
        "nothing-compared",
        f"{name} has no row twice: there is nothing in it to compare",
        "every token prefix was run once",
        "rows of one prefix in two batches, or both prefilled and decoded",
        "give the capture of the other side: zkl-debug diff A B",
        capture=name,
    )


def own_coverage(coverage: Coverage) -> Coverage:
    """Coverage without what is said of a second side."""
    kept = [skip for skip in coverage.skipped if not skip.what.startswith(("rows of A", "edge within-b"))]
    return replace(coverage, skipped=tuple(kept))
