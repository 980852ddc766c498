"""The finished comparison of two captures, before it is put into words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zkl_debug.diff.compare import SiteRows, compare_bytes, compare_digests, locate
from zkl_debug.diff.coverage import site_row_skips
from zkl_debug.diff.edges import Pairs, build_pairs
from zkl_debug.diff.first import EdgeFirst, edge_firsts, primary_edge
from zkl_debug.diff.flow import FlowMap
from zkl_debug.diff.kinds import Classifier, ReplayOracle, SiteKinds
from zkl_debug.diff.model import Bools, CaptureLike, Skip
from zkl_debug.diff.rows import RowSpace, build_rows
from zkl_debug.diff.sites import SitePair, join_sites

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Comparison:
    """Everything the answer is made of.

    Attributes:
        a, b: the captures.
        space, pairs, sites: rows, pairs and ordered sites.
        done: kinds of every site, in the order of ``sites``.
        compared: keys compared across the sides at one site or more, bool [K].
        edge_compared, edge_mismatched: per edge, keys compared and differing at any site, bool [K].
        skips: sites' rows that could not be compared.
        all_bytes: every comparison was made on raw bytes.
    """

    a: CaptureLike
    b: CaptureLike
    space: RowSpace
    pairs: Pairs
    sites: tuple[SitePair, ...]
    done: tuple[SiteKinds, ...]
    compared: Bools
    edge_compared: Mapping[str, Bools]
    edge_mismatched: Mapping[str, Bools]
    skips: tuple[Skip, ...]
    all_bytes: bool

    def where(self, site: int) -> SiteRows:
        """Rows of a site."""
        return locate(self.sites[site], self.space)

    @cached_property
    def firsts(self) -> dict[str, EdgeFirst | None]:
        """First divergence of every edge; what was fed to the model is not a site that can be blamed."""
        blank = np.zeros(len(self.pairs), np.uint8)
        silent = SiteKinds(blank, blank)
        pairs = zip(self.sites, self.done, strict=True)
        return edge_firsts(self.pairs, [silent if site.is_input else kinds for site, kinds in pairs])

    @cached_property
    def edge(self) -> str | None:
        """The edge to name."""
        return primary_edge(self.pairs, self.done, self.firsts)


def compare(
    a: CaptureLike,
    b: CaptureLike,
    *,
    verify_bytes: bool = False,
    aliases: Mapping[str, str] | None = None,
    oracle: ReplayOracle | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Join rows and sites and compare every pair at every site.

    Args:
        a, b: the captures.
        verify_bytes: compare raw bytes as well wherever both sides have them.
        aliases: see :func:`zkl_debug.diff.sites.join_sites`.
        oracle: replays operators on captured inputs; see :class:`zkl_debug.diff.kinds.ReplayOracle`.
        progress: called with (done, total, site name).
    """
    space = build_rows(a, b)
    pairs = build_pairs(space)
    sites = join_sites(a, b, aliases)
    classifier = Classifier(FlowMap(sites), space, pairs, oracle)
    tally = _Tally(space, pairs)
    for i, pair in enumerate(sites):
        if progress is not None:
            progress(i, len(sites), pair.name)
        where = locate(pair, space)
        present, differs = compare_digests(pair, where, space, pairs)
        if verify_bytes:
            unequal, complete = compare_bytes(pair, where, space, pairs, present)
            differs = differs | unequal
            if not complete:
                tally.all_bytes = False
                tally.skips.append(Skip(f"bytes of {pair.name}", "no payload on both rows: compared by digest alone"))
        tally.skips += site_row_skips(pair, where, space)
        classifier.add(present, differs, where)
        if not pair.is_input:
            tally.count(present, differs)
    return Comparison(
        a=a,
        b=b,
        space=space,
        pairs=pairs,
        sites=sites,
        done=tuple(classifier.done),
        compared=tally.across,
        edge_compared=tally.compared,
        edge_mismatched=tally.mismatched,
        skips=tuple(tally.skips),
        all_bytes=verify_bytes and tally.all_bytes,
    )


class _Tally:
    """Row keys compared and differing so far."""

    def __init__(self, space: RowSpace, pairs: Pairs) -> None:
        self.pairs = pairs
        self.across = np.zeros(space.n_keys, np.bool_)
        self.compared = {edge: np.zeros(space.n_keys, np.bool_) for edge in pairs.slices}
        self.mismatched = {edge: np.zeros(space.n_keys, np.bool_) for edge in pairs.slices}
        self.skips: list[Skip] = []
        self.all_bytes = True

    def count(self, present: Bools, differs: Bools) -> None:
        key = self.pairs.key
        self.across[key[present & (self.pairs.sides == 2)]] = True
        for edge, part in self.pairs.slices.items():
            self.compared[edge][key[part][present[part]]] = True
            self.mismatched[edge][key[part][differs[part]]] = True
