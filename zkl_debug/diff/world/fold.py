"""Put the ranks of a capture together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.model import CaptureLike, Ints, SiteLike, Skip
from zkl_debug.diff.world.places import Place, read_places
from zkl_debug.diff.world.rows import JoinedRows, join_rows
from zkl_debug.diff.world.sent import Sent, is_dispatch
from zkl_debug.diff.world.site import JoinedSite, Part
from zkl_debug.diff.world.states import join_states
from zkl_debug.errors import CaptureInvalid
from zkl_debug.schema import Json, SiteKind, SiteMeta, StateRecord

_STAGE = 1 << 24  # sites of a pipeline stage come behind all of the stage before


@dataclass(frozen=True)
class Disagreement:
    """Rows that two ranks have whole and not alike, at the first site where they part."""

    site: str
    rank: int
    other: int
    rows: int

    @property
    def text(self) -> str:
        """In words."""
        return f"rank {self.rank} and rank {self.other} have {self.rows} rows of {self.site} that are not alike"


class Folded:
    """A capture of several ranks as the diff sees it: one capture of the whole model.

    ``ranks`` are the captures of the single ranks, ``places`` who they are; ``skips`` is what could not be joined;
    ``disagreements`` are rows that ranks should have alike and have not. Such rows are kept beside each other, so that
    the comparison of a side with itself shows where they part first.
    """

    def __init__(self, source: Any, ranks: Mapping[int, CaptureLike], places: Mapping[int, Place]) -> None:
        self.root, self.place = source.root, source.place
        self.manifest: Mapping[str, Json] = source.manifest
        self.ranks, self.places = dict(ranks), dict(places)
        self.side: str = source.side
        self.meta: Mapping[str, Json] = next(iter(ranks.values())).meta
        self.events = list(getattr(next(iter(ranks.values())), "events", []))
        self.skips: list[Skip] = []
        self.disagreements: list[Disagreement] = []
        self._joined = join_rows(ranks, places, source.root)
        self._own: dict[tuple[str, int], SiteLike] = {}
        self._sent = Sent(ranks, places, self._joined)
        self.frames, self.frame_rank = self._joined.frames, self._joined.rank
        self.states: Mapping[int, Sequence[StateRecord]]
        self.states, lost, self.unlike_weights = join_states({r: c.states for r, c in ranks.items()})
        self.skips += lost
        sites = self._sites()
        self.rows, self.sites = _with_disagreements(self, self._joined, sites)
        self.skips += [
            Skip(f"rows of {name}", f"their tokens are on rank {rank}, which was not captured")
            for rank, name in sorted(self._sent.missing)
        ]

    @cached_property
    def layout(self) -> dict[str, int]:
        """Sizes of the groups."""
        return dict(next(iter(self.places.values())).sizes)

    def own(self, name: str, rank: int) -> tuple[SiteLike, Ints] | None:
        """A rank's own site of that joined name, and the joined row of each of its rows (-1 for none)."""
        site = self._own.get((name, rank))
        return None if site is None else (site, self._rows_of(rank, site))

    def _rows_of(self, rank: int, site: SiteLike) -> Ints:
        """Joined row of each of a rank's rows of a site; -1 for padding that was sent."""
        return self._sent.rows(rank, site.meta.name, np.asarray(site.rows, np.int64))

    def _sites(self) -> dict[str, JoinedSite]:
        found: dict[str, list[tuple[int, SiteLike]]] = {}
        for rank, capture in self.ranks.items():
            for name, site in capture.sites.items():
                if not is_dispatch(name):
                    filed = _filed(name, site.meta)
                    self._own[filed, rank] = site
                    found.setdefault(filed, []).append((rank, site))
        joined: dict[str, JoinedSite] = {}
        for name, group in found.items():
            for part in self._alike(name, group):
                joined[part.meta.name] = part
        return dict(sorted(joined.items(), key=lambda item: item[1].meta.order))

    def _alike(self, name: str, group: list[tuple[int, SiteLike]]) -> list[JoinedSite]:
        """The site over its ranks; those whose rows have another layout are filed under their rank."""
        first = group[0][1].meta
        if first.kind is SiteKind.CALL:  # of the rank's own call: no two need be alike
            each = [self._join(_at_rank(name, rank), [(rank, site)]) for rank, site in group]
            return [site for site in each if site is not None]
        same = [(rank, site) for rank, site in group if _layout(site.meta) == _layout(first)]
        made = [self._join(name, same)]
        for rank, site in group:
            if _layout(site.meta) != _layout(first):
                made.append(self._join(_at_rank(name, rank), [(rank, site)]))
        return [site for site in made if site is not None]

    def _join(self, name: str, group: list[tuple[int, SiteLike]]) -> JoinedSite | None:
        meta = group[0][1].meta
        order = min(self.places[rank].at("pp") * _STAGE + site.meta.order for rank, site in group)
        placed = [
            (rank, site, self._sent.rows(rank, site.meta.name, np.asarray(site.rows, np.int64))) for rank, site in group
        ]
        shard = meta.shard
        if shard is None or shard.partial or not shard.pieces:
            if shard is not None and not shard.partial:
                self.skips.append(
                    Skip(
                        f"site {name}", "parts of rows that are not whole 32-bit lanes: each rank is compared by itself"
                    )
                )
            return _whole(replace(meta, name=name, order=order), placed)
        return self._added(replace(meta, name=name, order=order), placed)

    def _added(self, meta: SiteMeta, placed: list[tuple[int, SiteLike, Ints]]) -> JoinedSite | None:
        """Shards: rows of which every shard is there, each once."""
        shard = meta.shard
        assert shard is not None
        by_index: dict[int, list[tuple[int, SiteLike, Ints]]] = {}
        for rank, site, rows in placed:
            assert site.meta.shard is not None
            by_index.setdefault(site.meta.shard.index, []).append((rank, site, rows))
        _check_cover(meta, [sites[0][1].meta for sites in by_index.values()], len(by_index) == shard.count)
        missing = sorted(set(range(shard.count)) - set(by_index))
        if missing:
            ranks = [r for r, p in self.places.items() if p.at(shard.group) in missing]
            who = f" (rank {ranks[0]})" if ranks else ""
            self.skips.append(
                Skip(f"site {meta.name}", f"{shard.group} part {missing[0]} of {shard.count}{who} was not captured")
            )
            return None
        tables = [_first_of(sites) for _, sites in sorted(by_index.items())]
        common = tables[0][0]
        for rows, _, _ in tables[1:]:
            common = np.intersect1d(common, rows, assume_unique=True)
        lost = max(len(rows) for rows, _, _ in tables) - len(common)
        if lost:
            self.skips.append(Skip(f"rows of {meta.name}", "not every part of them was captured", lost))
        parts = [part for rows, sites, where in tables for part in _parts(common, rows, sites, where)]
        whole = replace(meta, row_shape=shard.shape, shard=None, lane_offset=0)
        return JoinedSite(whole, common, parts, added=True)


def _filed(name: str, meta: SiteMeta) -> str:
    """Partial sums are filed as ports of their operator, one a rank: they are its inputs, and never compared."""
    if meta.shard is None or not meta.shard.partial:
        if meta.shard is not None and not meta.shard.pieces:
            return _at_rank(name, meta.shard.index, meta.shard.group)
        return name
    head, _, port = name.rpartition(":")
    return f"{head}:{port.split('.')[0]}.{meta.shard.index}"


def _at_rank(name: str, rank: int, group: str = "rank") -> str:
    owner, _, port = name.rpartition(":")
    return f"{owner}@{group}{rank}:{port}"


def _layout(meta: SiteMeta) -> tuple[Any, ...]:
    shard = meta.shard
    if shard is None or not shard.pieces:
        return meta.torch_dtype, meta.row_shape, shard is None, None
    return meta.torch_dtype, shard.shape, False, shard.count


def _check_cover(meta: SiteMeta, metas: list[SiteMeta], complete: bool) -> None:
    """Parts that overlap, or leave something out, are no parts of one row."""
    size = int(np.prod(meta.shard.shape, dtype=np.int64)) if meta.shard is not None else 0
    taken = np.zeros(size, np.int8)
    for one in metas:
        for first, count in one.shard.pieces if one.shard is not None else ():
            if first + count > size:
                raise CaptureInvalid(f"a part of {meta.name} lies outside its row", f"{size} elements")
            taken[first : first + count] += 1
    if (taken > 1).any() or (complete and (taken != 1).any()):
        raise CaptureInvalid(
            f"the ranks' parts of {meta.name} do not make up one row",
            "every element on one rank",
            "the way this module is cut over ranks is not known here: leave it out with --sites",
        )


_Table = tuple[Ints, list[tuple[int, SiteLike]], NDArray[np.int64]]


def _first_of(placed: list[tuple[int, SiteLike, Ints]]) -> _Table:
    """(rows, sites, where): distinct joined rows, increasing; of each the first site that has it, and its row there."""
    rows = np.concatenate([where for _, _, where in placed])
    owner = np.repeat(np.arange(len(placed)), [len(where) for _, _, where in placed])
    local = np.concatenate([np.arange(len(where)) for _, _, where in placed])
    keep = rows >= 0
    rows, owner, local = rows[keep], owner[keep], local[keep]
    distinct, first = np.unique(rows, return_index=True)
    return distinct, [(rank, site) for rank, site, _ in placed], np.stack([owner[first], local[first]])


def _parts(wanted: Ints, rows: Ints, sites: list[tuple[int, SiteLike]], where: NDArray[np.int64]) -> list[Part]:
    at = np.searchsorted(rows, wanted)
    owner, local = where[0][at], where[1][at]
    parts = []
    for number, (rank, site) in enumerate(sites):
        mine = np.flatnonzero(owner == number)
        if len(mine):
            parts.append(Part(rank, site, local[mine], mine))
    return parts


def _whole(meta: SiteMeta, placed: list[tuple[int, SiteLike, Ints]]) -> JoinedSite:
    rows, sites, where = _first_of(placed)
    return JoinedSite(meta, rows, _parts(rows, rows, sites, where), added=False)


def _with_disagreements(
    folded: Folded, joined: JoinedRows, sites: dict[str, JoinedSite]
) -> tuple[NDArray[Any], dict[str, JoinedSite]]:
    """Rows that a rank has unlike the rank whose row was taken get a row of their own, at every site."""
    apart: dict[int, set[int]] = {}
    for name, site in sites.items():
        if len(site.parts) and not site.added:
            _compare_ranks(folded, name, site, apart)
    if not apart:
        return joined.rows, sites
    extra: list[tuple[int, Ints]] = [(rank, np.array(sorted(rows), np.int64)) for rank, rows in sorted(apart.items())]
    table, start = [joined.rows], len(joined.rows)
    copies: list[tuple[int, Ints, int]] = []
    for rank, rows in extra:
        table.append(joined.rows[rows])
        copies.append((rank, rows, start))
        start += len(rows)
    return np.concatenate(table), {name: _copied(folded, name, site, copies) for name, site in sites.items()}


def _compare_ranks(folded: Folded, name: str, site: JoinedSite, apart: dict[int, set[int]]) -> None:
    if len(folded.ranks) < 2:
        return
    taken = np.full(len(folded._joined.rows), -1, np.int64)
    taken[site.rows] = np.arange(len(site.rows))
    digest = None
    for rank in folded.ranks:
        found = folded.own(name, rank)
        if found is None or (len(site.parts) == 1 and site.parts[0].rank == rank):
            continue
        own, rows = found
        use = np.flatnonzero(rows >= 0)
        if digest is None:
            digest = site.digest
        at = taken[rows[use]]
        unlike = use[(np.asarray(own.digest, np.uint64).reshape(-1, 2)[use] != digest[at]).any(axis=1)]
        if len(unlike):
            other = next(
                (p.rank for p in site.parts if np.isin(taken[rows[unlike[:1]]], p.place).all()), site.parts[0].rank
            )
            folded.disagreements.append(Disagreement(name, rank, other, len(unlike)))
            apart.setdefault(rank, set()).update(rows[unlike].tolist())


def _copied(folded: Folded, name: str, site: JoinedSite, copies: list[tuple[int, Ints, int]]) -> JoinedSite:
    """The site with the rows of ranks that do not agree: the rank's own where rows are whole, else the joined ones."""
    rows, parts = [site.rows], list(site.parts)
    end = len(site.rows)
    place = np.full(len(folded._joined.rows), -1, np.int64)
    place[site.rows] = np.arange(len(site.rows))
    for rank, wanted, start in copies:
        found = None if site.added else folded.own(name, rank)
        if found is not None:
            own = np.full(len(folded._joined.rows), -1, np.int64)
            own[found[1][found[1] >= 0]] = np.flatnonzero(found[1] >= 0)
            have = np.flatnonzero(own[wanted] >= 0)
            parts.append(Part(rank, found[0], own[wanted[have]], end + np.arange(len(have))))
        else:
            have = np.flatnonzero(place[wanted] >= 0)
            target = np.full(len(site.rows), -1, np.int64)
            target[place[wanted[have]]] = end + np.arange(len(have))
            for part in site.parts:
                use = np.flatnonzero(target[part.place] >= 0)
                parts.append(Part(part.rank, part.site, part.local[use], target[part.place[use]]))
        rows.append(start + have)
        end += len(have)
    return JoinedSite(site.meta, np.concatenate(rows), [p for p in parts if len(p.local)], site.added)


def fold(capture: CaptureLike) -> CaptureLike:
    """A capture of several ranks as one of the whole model; any other capture as it is.

    Raises:
        CaptureInvalid: the ranks do not make up one world.
    """
    by_rank = getattr(capture, "by_rank", None)
    if by_rank is None or int(capture.manifest.get("world", 1)) <= 1:
        return capture
    ranks = by_rank()
    places = read_places({rank: own.meta for rank, own in ranks.items()}, getattr(capture, "root", ""))
    return Folded(capture, ranks, places) if places else capture
