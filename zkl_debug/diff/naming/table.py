"""The join of two captures as a table: what stands against what, and what stands alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zkl_debug.diff.naming.join import Joined
from zkl_debug.diff.sites import SitePair, join_sites
from zkl_debug.schema import Json

_NUMBER = re.compile(r"(?<=layers\.)\d+|(?<=experts\.)\d+")


@dataclass(frozen=True)
class Line:
    """One site of either side, or several alike of different layers.

    Attributes:
        name: common name; empty for a site that is not in the join.
        a, b: own names, empty where a side has none.
        how: how it is joined, or why it is not.
        joined: both sides have it.
        count: sites the line stands for.
    """

    name: str
    a: str
    b: str
    how: str
    joined: bool
    count: int = 1

    def to_json(self) -> Json:
        """An entry of the names document."""
        return {"name": self.name, "a": self.a, "b": self.b, "how": self.how, "joined": self.joined}


def lines(joined: Joined) -> list[Line]:
    """Every site of both captures, in execution order; those that cannot be joined come last."""
    found = [_line(joined, pair) for pair in join_sites(joined.a, joined.b)]
    for side, left_out in enumerate(joined.left_out):
        for own, reason in left_out.items():
            found.append(Line("", own if side == 0 else "", own if side == 1 else "", reason, False))
    return found


def _line(joined: Joined, pair: SitePair) -> Line:
    own = joined.own(pair.name)
    if not pair.matched:
        return Line(pair.name, own[0] or "", own[1] or "", f"{pair.on.upper()} only", False)
    hows = [side[pair.name].how if pair.name in side else "" for side in joined.names]
    how = "; ".join(f"{name}: {text}" for name, text in zip("AB", hows, strict=True) if text) or "same name"
    return Line(pair.name, own[0] or "", own[1] or "", how + (f"; {pair.differ}" if pair.differ else ""), True)


def by_layer(found: Sequence[Line]) -> list[Line]:
    """Lines that differ in numbers of layers and experts alone, as one."""
    groups: dict[Line, int] = {}
    for line in found:
        name, a, b, how = (_NUMBER.sub("{i}", text) for text in (line.name, line.a, line.b, line.how))
        key = replace(line, name=name, a=a, b=b, how=how)
        groups[key] = groups.get(key, 0) + 1
    return [replace(line, count=count) for line, count in groups.items()]


def document(joined: Joined, found: Sequence[Line]) -> Json:
    """The ``zkl-names`` document."""
    return {
        "format": "zkl-names",
        "version": 1,
        "families": {"a": list(joined.families[0]), "b": list(joined.families[1])},
        "joined": sum(line.joined for line in found),
        "alone": sum(not line.joined for line in found),
        "sites": [line.to_json() for line in found],
    }
