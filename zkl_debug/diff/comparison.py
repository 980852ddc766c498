"""The finished comparison of two captures, before it is put into words."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zkl_debug.diff.compare import SiteRows, locate
from zkl_debug.diff.edges import Pairs, build_pairs
from zkl_debug.diff.first import EdgeFirst, edge_firsts, primary_edge
from zkl_debug.diff.flow import STATE_READ, FlowMap
from zkl_debug.diff.kinds import Classifier, ReplayOracle, SiteKinds
from zkl_debug.diff.model import Bools, CaptureLike, Kind, Skip
from zkl_debug.diff.rows import RowSpace, build_rows
from zkl_debug.diff.sites import SitePair, join_sites
from zkl_debug.diff.sitework import Runner, SiteWork, in_process

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Comparison:
    """Everything the answer is made of.

    Attributes:
        a, b: the captures.
        space, pairs, sites: rows, pairs and ordered sites.
        flows: what feeds each site.
        done: kinds of every site, in the order of ``sites``.
        compared: keys compared across the sides at one site or more, bool [K].
        edge_compared, edge_mismatched: per edge, keys compared and differing at any site, bool [K].
        skips: sites' rows that could not be compared.
        stopped: number of the first site behind which nothing was compared any more, because only the first was
            wanted; None when every site was compared.
        all_bytes: every comparison was made on raw bytes.
    """

    a: CaptureLike
    b: CaptureLike
    space: RowSpace
    pairs: Pairs
    sites: tuple[SitePair, ...]
    flows: FlowMap
    done: tuple[SiteKinds, ...]
    compared: Bools
    edge_compared: Mapping[str, Bools]
    edge_mismatched: Mapping[str, Bools]
    skips: tuple[Skip, ...]
    all_bytes: bool
    stopped: int | None = None

    def where(self, site: int) -> SiteRows:
        """Rows of a site."""
        return locate(self.sites[site], self.space)

    @cached_property
    def firsts(self) -> dict[str, EdgeFirst | None]:
        """First divergence of every edge.

        What was fed to the model is not a site that can be blamed; nor is a state that was read as it was written.
        """
        blank = np.zeros(len(self.pairs), np.uint8)
        silent = SiteKinds(blank, blank)
        pairs = zip(self.sites, self.done, strict=True)
        return edge_firsts(self.pairs, [silent if site.is_input else _blamed(site, kinds) for site, kinds in pairs])

    @cached_property
    def edge(self) -> str | None:
        """The edge to name."""
        return primary_edge(self.pairs, self.done, self.firsts)


def _blamed(site: SitePair, kinds: SiteKinds) -> SiteKinds:
    """Without rows whose state was wrong when it was written: later in the order of sites, but in an earlier call."""
    if site.meta.semantic != STATE_READ:
        return kinds
    kept = np.where(kinds.kind == Kind.PROPAGATED, np.uint8(Kind.EQUAL), kinds.kind)
    return SiteKinds(kept, kinds.inputs)


def compare(
    a: CaptureLike,
    b: CaptureLike,
    *,
    verify_bytes: bool = False,
    aliases: Mapping[str, str] | None = None,
    oracle: ReplayOracle | None = None,
    progress: Progress | None = None,
    first_only: bool = False,
    runner: Runner = in_process,
) -> Comparison:
    """Join rows and sites and compare every pair at every site.

    Args:
        a, b: the captures.
        verify_bytes: compare raw bytes as well wherever both sides have them.
        aliases: see :func:`zkl_debug.diff.sites.join_sites`.
        oracle: replays operators on captured inputs; see :class:`zkl_debug.diff.kinds.ReplayOracle`.
        progress: called with (done, total, site name).
        first_only: stop at the first site that differs; behind it, only what was fed to the model is compared.
        runner: who compares the sites.
    """
    space = build_rows(a, b)
    pairs = build_pairs(space)
    sites = join_sites(a, b, aliases)
    work = SiteWork(space, pairs, sites, verify_bytes, (a, b), aliases)
    flows = FlowMap(sites)
    classifier = Classifier(flows, space, pairs, oracle)
    tally = _Tally(space, pairs)
    # What was fed comes first when the rest may be left out: a difference there is a refusal.
    early = [i for i, pair in enumerate(sites) if pair.is_input] if first_only else []
    fed = dict(zip(early, in_process(work, early), strict=True))
    others = [i for i in range(len(sites)) if i not in fed]
    outcomes = runner(work, others)
    stopped: int | None = None
    for i, pair in enumerate(sites):
        if progress is not None:
            progress(i, len(sites), pair.name)
        if stopped is not None and i not in fed:
            classifier.skip()
            continue
        outcome = fed[i] if i in fed else next(outcomes)
        if verify_bytes and not outcome.complete:
            tally.all_bytes = False
        tally.skips += outcome.skips
        classifier.add(outcome.present, outcome.differs, locate(pair, space))
        if not pair.is_input:
            tally.count(outcome.present, outcome.differs)
            blamed = outcome.differs.any() and _blamed(pair, classifier.done[-1]).differs.any()
            if first_only and stopped is None and blamed and i + 1 < len(sites):
                stopped = i
    if isinstance(outcomes, Generator):
        outcomes.close()
    return Comparison(
        a=a,
        b=b,
        space=space,
        pairs=pairs,
        sites=sites,
        flows=flows,
        done=tuple(classifier.done),
        compared=tally.across,
        edge_compared=tally.compared,
        edge_mismatched=tally.mismatched,
        skips=tuple(tally.skips),
        all_bytes=verify_bytes and tally.all_bytes and stopped is None,
        stopped=stopped,
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
