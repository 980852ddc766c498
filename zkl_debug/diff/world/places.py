"""Who the ranks of a capture are: their coordinates, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zkl_debug.errors import CaptureInvalid
from zkl_debug.schema import Json

_SIZES = ("tp", "pp", "cp", "ep", "dp")


@dataclass(frozen=True)
class Place:
    """One rank.

    Attributes:
        rank: its global number.
        coords: its place in each group.
        sizes: sizes of the groups.
        groups: global ranks of the groups it is in.
    """

    rank: int
    coords: Mapping[str, int]
    sizes: Mapping[str, int]
    groups: Mapping[str, tuple[int, ...]]

    def at(self, group: str) -> int:
        """Its place in a group, 0 where it is in none."""
        return self.coords.get(group, 0)

    @property
    def text(self) -> str:
        """Coordinates in groups of more than one, e.g. ``tp 1, pp 0``."""
        return ", ".join(f"{name} {self.at(name)}" for name in _SIZES if self.sizes.get(name, 1) > 1) or "alone"


def read_places(metas: Mapping[int, Mapping[str, Json]], where: object) -> dict[int, Place]:
    """Places of the ranks from their metadata; empty where they do not say (then each is a program of its own).

    Raises:
        CaptureInvalid: two ranks are at one place, or they disagree about the layout.
    """
    found: dict[int, Place] = {}
    for rank, meta in metas.items():
        place = _read(rank, meta.get("parallel"))
        if place is None:
            return {}
        found[rank] = place
    taken: dict[tuple[int, ...], int] = {}
    first = next(iter(found.values()), None)
    for rank, place in found.items():
        assert first is not None
        if dict(place.sizes) != dict(first.sizes):
            raise CaptureInvalid(
                f"{where}: rank {rank} runs {_layout(place)}, rank {first.rank} {_layout(first)}", "ranks of one layout"
            )
        key = tuple(place.at(name) for name in ("tp", "pp", "cp", "dp"))
        if key in taken:
            raise CaptureInvalid(
                f"{where}: rank {rank} says that it is {place.text}, and so does rank {taken[key]}",
                "every rank of the layout once",
                "look for a process that was started twice, then capture again",
            )
        taken[key] = rank
    return found


def _layout(place: Place) -> str:
    return " ".join(f"{name}{size}" for name, size in place.sizes.items() if size > 1) or "on one rank"


def _read(rank: int, value: Any) -> Place | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("coords"), Mapping):
        return None
    try:
        return Place(
            rank,
            {str(name): int(n) for name, n in value["coords"].items()},
            {name: int(value.get(name, 1)) for name in _SIZES},
            {str(name): tuple(int(r) for r in ranks) for name, ranks in dict(value.get("groups", {})).items()},
        )
    except (TypeError, ValueError):
        return None
