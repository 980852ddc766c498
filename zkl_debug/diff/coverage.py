"""What was compared and what was not, with the reason. Nothing is left out silently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from zkl_debug.diff.compare import SiteRows
from zkl_debug.diff.edges import Pairs
from zkl_debug.diff.flow import is_state
from zkl_debug.diff.model import MAIN_EDGES, Bools, CaptureLike, Ints, Skip, fact
from zkl_debug.diff.rows import RowSpace
from zkl_debug.diff.sites import SitePair, site_skips
from zkl_debug.schema import Json, RowFlag

_NAMES = ("A", "B")


@dataclass(frozen=True)
class Share:
    """Distinct rows compared across the sides, of those both could have run; None where the diff stopped before."""

    of: int = 0
    compared: int | None = 0

    def to_json(self) -> Json:
        """Counts and percentage."""
        percent = 100.0 * self.compared / self.of if self.of and self.compared is not None else None
        return {"of": self.of, "compared": self.compared, "percent": percent}


@dataclass(frozen=True)
class Coverage:
    """Coverage of a diff; see ``coverage`` of the verdict document.

    Attributes:
        expected, captured, matched: sites either side knows of, captured, and has on both sides.
        looked_at: sites on both sides that were compared: all of them, unless the diff stopped at the first difference.
        stopped_at: the site it stopped at; shares and crossed rows are not known then. None when it went to the end.
        rows_a, rows_b: rows of each capture.
        compared: distinct row keys compared across the sides, as far as it went.
        prompt, generated, labels: shares of the row keys.
        crossed: distinct compared keys at a chunk edge, first decode token, behind a cache hit.
        skipped: everything that was not compared.
        dropped: a site or row that one side has was lost or left out, so "all sites" cannot be claimed.
    """

    expected: int = 0
    captured: int = 0
    matched: int = 0
    rows_a: int = 0
    rows_b: int = 0
    compared: int = 0
    prompt: Share = Share()
    generated: Share = Share()
    labels: Share = Share()
    crossed: Mapping[str, int | None] = field(default_factory=dict)
    skipped: tuple[Skip, ...] = ()
    dropped: bool = False
    looked_at: int = 0
    stopped_at: str | None = None

    def to_json(self) -> Json:
        """The ``coverage`` object of the verdict document."""
        return {
            "sites": {
                "expected": self.expected,
                "captured": self.captured,
                "matched": self.matched,
                "compared": self.looked_at,
            },
            "rows": {
                "a": self.rows_a,
                "b": self.rows_b,
                "compared": self.compared,
                "prompt": self.prompt.to_json(),
                "generated": self.generated.to_json(),
                "labels": self.labels.to_json(),
                "crossed": dict(self.crossed),
            },
            "skipped": [skip.to_json() for skip in self.skipped],
            "stopped_at": self.stopped_at,
        }


def measure(
    a: CaptureLike,
    b: CaptureLike,
    space: RowSpace,
    pairs: Pairs,
    sites: Sequence[SitePair],
    compared: Bools,
    extra: Sequence[Skip] = (),
    stopped: int | None = None,
) -> Coverage:
    """Coverage of a finished comparison.

    Args:
        a, b: the captures.
        space, pairs, sites: how they were joined.
        compared: keys of which at least one site was compared across the sides, bool [K].
        extra: entries found while comparing.
        stopped: number of the site behind which nothing was compared; None when everything was.
    """
    tails = never_forwarded(space)
    generated = space.generated
    idle = space.matched & ~compared & (stopped is None)  # a row may have sites behind the one it stopped at
    skips = [*site_skips(sites, a, b), *extra, *_row_skips(space, tails, idle), *_edge_skips(pairs)]
    skips += [skip for name, capture in zip(_NAMES, (a, b), strict=True) for skip in capture_skips(name, capture)]
    # A state handed from call to call is nothing that a side of whole sequences could have.
    alone = {pair.name for pair in sites if is_state(pair) and not pair.matched}
    names = {pair.name for pair in sites} - alone
    expected = names | (_expected(a) | _expected(b)) - alone
    unmatched = any(not pair.matched for pair in sites if pair.name not in alone)
    lost = any(skip.what.startswith(("lost ", "rows of site ")) for skip in skips)
    normal = ~space.label & ~tails
    labels = space.label & ~_beyond(space)
    known = compared if stopped is None else None
    return Coverage(
        expected=len(expected),
        captured=len(names),
        matched=sum(pair.matched for pair in sites),
        rows_a=len(a.rows),
        rows_b=len(b.rows),
        compared=int(np.count_nonzero(compared)),
        prompt=_share(normal & ~generated, known),
        generated=_share(normal & generated, known),
        labels=_share(labels, known),
        crossed=_crossed(space, known),
        skipped=tuple(skips),
        dropped=unmatched or lost or len(expected) > len(names),
        looked_at=sum(
            pair.matched and (stopped is None or i <= stopped or pair.is_input) for i, pair in enumerate(sites)
        ),
        stopped_at=None if stopped is None else sites[stopped].name,
    )


def _share(rows: Bools, compared: Bools | None) -> Share:
    part = None if compared is None else int(np.count_nonzero(rows & compared))
    return Share(int(np.count_nonzero(rows)), part)


def _crossed(space: RowSpace, compared: Bools | None) -> dict[str, int | None]:
    result: dict[str, int | None] = {}
    for flag in (RowFlag.CHUNK_EDGE, RowFlag.FIRST_DECODE, RowFlag.AFTER_CACHE_HIT):
        keys = np.zeros(space.n_keys, np.bool_)
        keys[space.key[(space.flags & np.uint32(flag)) != 0]] = True
        result[str(flag.name).lower()] = None if compared is None else int(np.count_nonzero(keys & compared))
    return result


def _expected(capture: CaptureLike) -> set[str]:
    """Sites a capture says it should have had."""
    coverage = fact(capture, "site_coverage")
    names = coverage.get("expected") if isinstance(coverage, Mapping) else None
    return {str(name) for name in names} if isinstance(names, list) else set()


def never_forwarded(space: RowSpace) -> Bools:
    """Keys of one side that are the last token of a generated sequence: sampled, but never run, bool [K]."""
    has_child = np.zeros(space.n_keys + 1, np.bool_)
    has_child[space.parent[~space.label]] = True
    generated = space.generated
    matched = np.append(space.matched, False)
    return np.asarray(~space.label & generated & ~space.matched & ~has_child[:-1] & matched[space.parent])


def _beyond(space: RowSpace) -> Bools:
    """Label keys of one side where nothing of the other goes on: tokens sampled past the end of its sequence."""
    parent = space.parent
    goes_on = np.zeros((2, space.n_keys + 1), np.bool_)
    for side in (0, 1):
        goes_on[side, parent[space.has[side]]] = True
    one_sided = space.label & ~space.matched & np.append(space.matched, False)[parent]
    return np.asarray(one_sided & ~(goes_on[0] & goes_on[1])[parent])


def _row_skips(space: RowSpace, tails: Bools, idle: Bools) -> list[Skip]:
    skips = []
    beyond = _beyond(space)
    for side, name in enumerate(_NAMES):
        other = _NAMES[1 - side]
        alone = space.has[side] & ~space.has[1 - side]
        groups = (
            (alone & tails, "last token of a generated sequence: sampled, never forwarded"),
            (alone & beyond, f"log-prob of a token sampled past the end of what {other} holds"),
            (alone & space.label & ~beyond, f"{other} has no log-prob of this token"),
            (alone & ~tails & ~space.label, f"{other} has no row of this prefix (other request, cut, or cached)"),
        )
        for keys, reason in groups:
            if keys.any():
                skips.append(_group(space, keys, f"rows of {name}", reason))
    if idle.any():
        skips.append(_group(space, idle, "rows on both sides", "no site was recorded for them on both sides"))
    return skips


def _group(space: RowSpace, keys: Bools, what: str, reason: str) -> Skip:
    first = int(space.key_row[int(keys.argmax())])
    example = f"first: sample {int(space.sample[first])} position {int(space.position[first])}"
    return Skip(f"{what} ({example})", reason, int(np.count_nonzero(keys)))


def _edge_skips(pairs: Pairs) -> list[Skip]:
    reasons = {
        "score-prefill": "no row was both scored and prefilled",
        "prefill-decode": "no row was both prefilled and decoded; re-prefill generated tokens to cross this edge",
        "score-decode": "no row was both scored and decoded",
        "within-a": "A has no row twice: its batch variance was not seen",
        "within-b": "B has no row twice: its batch variance was not seen",
    }
    return [
        Skip(f"edge {edge}", reasons[edge], 0)
        for edge in MAIN_EDGES
        if pairs.slices[edge].start == pairs.slices[edge].stop
    ]


def site_row_skips(pair: SitePair, where: SiteRows, space: RowSpace) -> list[Skip]:
    """Rows that both captures have, but of which only one recorded the site; and rows recorded twice."""
    skips = []
    if where.repeated:
        skips.append(Skip(f"rows of site {pair.name}", "recorded twice in one forward: only the first", where.repeated))
    if not pair.matched:
        return skips
    for name, count in zip(_NAMES, space.memo.get(("alone", where.place), lambda: _alone(where, space)), strict=True):
        if count:
            skips.append(Skip(f"rows of site {pair.name}", f"recorded by {name} only", count))
    return skips


def _alone(where: SiteRows, space: RowSpace) -> tuple[int, int]:
    """Row keys that both captures have, but of which only A, and only B, recorded the site."""
    has = np.zeros((2, space.n_keys), np.bool_)
    rows: Ints = np.flatnonzero(where.at >= 0)
    has[space.side[rows], space.key[rows]] = True
    alone = [int(np.count_nonzero(has[side] & ~has[1 - side] & space.matched)) for side in (0, 1)]
    return alone[0], alone[1]


def capture_skips(name: str, capture: CaptureLike) -> list[Skip]:
    """What a capture says it lost or left out."""
    skips = []
    for key, reason in (("unkeyed_rows", "rows without a row key"), ("filtered_sites", "sites left out by a filter")):
        count = fact(capture, key)
        if isinstance(count, int) and count > 0:
            skips.append(Skip(f"lost in {name}: {key}", reason, count))
    ended = fact(capture, "ended_by")
    if ended:
        skips.append(Skip(f"lost in {name}: end of the program", f"it ended by {ended}"))
    dropped = fact(capture, "dropped")
    for what, reason in dropped.items() if isinstance(dropped, Mapping) else ():
        skips.append(Skip(f"lost in {name}: {what}", str(reason)))
    for key, reason in (("not_rows", "has no token rows"), ("outside_frames", "ran outside any frame")):
        listed = fact(capture, key)
        for what, detail in listed.items() if isinstance(listed, Mapping) else ():
            skips.append(Skip(f"tensor in {name}: {what}", f"{reason} ({detail})"))
    notes = fact(capture, "notes")
    return skips + [Skip(f"note in {name}", str(note)) for note in (notes if isinstance(notes, list) else ())]
