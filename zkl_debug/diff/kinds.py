"""Own, propagated or masked: what each site's output says, given what fed it. Sites are taken in execution order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.carried import CarriedState
from zkl_debug.diff.codes import CodeKeeper, Codes
from zkl_debug.diff.compare import SiteRows
from zkl_debug.diff.edges import Pairs
from zkl_debug.diff.flow import STATE_WRITE, Flow, FlowMap, Via, enclosing, is_state
from zkl_debug.diff.keyed import KeyFlags, differing_keys, key_flags
from zkl_debug.diff.model import Bools, Ints, Kind
from zkl_debug.diff.rows import RowSpace, ancestor_tables, any_ancestor


class Inputs(IntEnum):
    """How much of what feeds an output was compared, for one pair."""

    ALL = 0  # every input was captured on both sides
    PARTIAL = 1
    NOT_CAPTURED = 2

    @property
    def label(self) -> str:
        """Spelling of the verdict document, for inputs that do not differ."""
        return ("equal", "partly captured", "not captured")[self]


class ReplayOracle(Protocol):
    """Re-runs an operator on captured inputs; the seam for teacher forcing."""

    def replay(self, site: str, left: Ints, right: Ints) -> NDArray[np.int8]:
        """Does the right side's operator, on the left side's inputs, give the left side's output?

        Args:
            site: canonical name of an output.
            left, right: unified rows of the pairs, [n].

        Returns:
            1 yes, 0 no, -1 cannot tell, int8 [n].
        """


@dataclass(frozen=True)
class SiteKinds:
    """Kinds of one site: codes of :class:`~zkl_debug.diff.model.Kind` and of :class:`Inputs`, uint8 [P] each."""

    kind: Codes
    inputs: Codes

    @property
    def present(self) -> Bools:
        """Pairs that were compared."""
        return np.asarray(self.kind != Kind.ABSENT)

    @property
    def differs(self) -> Bools:
        """Pairs whose outputs differ."""
        return np.asarray(self.kind >= Kind.PROPAGATED)


def refine(codes: Codes, site: str, pairs: Pairs, oracle: ReplayOracle) -> Codes:
    """Settle own against uncaptured state, and propagated against own, by replay.

    An own difference that the replay does not show comes from something the capture does not hold; a propagated one
    that stays when the inputs are substituted is the operator's own as well.
    """
    asked = np.flatnonzero(codes >= Kind.PROPAGATED)
    if not len(asked):
        return codes
    answer = oracle.replay(site, pairs.left[asked], pairs.right[asked])
    settled = codes.copy()
    settled[asked[(answer == 1) & (codes[asked] == Kind.OWN)]] = Kind.UNCAPTURED_STATE
    settled[asked[(answer == 0) & (codes[asked] == Kind.PROPAGATED)]] = Kind.OWN
    return settled


class Classifier:
    """Classifies the sites of a diff one after the other, in execution order."""

    def __init__(self, flows: FlowMap, space: RowSpace, pairs: Pairs, oracle: ReplayOracle | None = None) -> None:
        self.flows, self.space, self.pairs, self.oracle = flows, space, pairs, oracle
        self.done: list[SiteKinds] = []
        self._tables = ancestor_tables(space.parent)
        self._seen = np.zeros(len(pairs), np.bool_)  # something earlier differs in the pair
        self._gap = np.zeros(len(pairs), np.bool_)  # an output just before was not compared in the pair
        self._seen_keys = np.zeros((3, space.n_keys), np.bool_)
        self._inside: dict[str, Bools] = {path: np.zeros(len(pairs), np.bool_) for path in flows.containers}
        self._last_port = {pair.parsed.path: i for i, pair in enumerate(flows.sites) if not pair.parsed.op}
        self._kept = CodeKeeper()
        self._key_flags: dict[int, KeyFlags] = {}
        self._history: dict[int, KeyFlags] = {}
        self._carried = CarriedState(flows, space, pairs, self._tables)

    def add(self, present: Bools, differs: Bools, where: SiteRows) -> SiteKinds:
        """Classify the next site.

        Args:
            present, differs: from :func:`zkl_debug.diff.compare.compare_digests`, bool [P].
            where: rows of the site.
        """
        i = len(self.done)
        flow = self.flows.flow(i)
        codes = np.where(present, np.uint8(Kind.EQUAL), np.uint8(Kind.ABSENT)).astype(np.uint8)
        inputs = np.zeros(len(codes), np.uint8)
        if flow.is_port:
            codes[differs] = Kind.PROPAGATED
        elif present.any():
            codes, inputs = self._judge(flow, codes, differs)
        self._keep_key_flags(i, present, differs, where)
        self._note(i, differs)
        if not is_state(self.flows.sites[i]):  # handed over between calls only: most rows have none
            self._gap = self._gap & ~present if flow.is_port else ~present
        if self.oracle is not None and not self.flows.sites[i].parsed.is_input:
            codes = refine(codes, self.flows.sites[i].name, self.pairs, self.oracle)
        result = SiteKinds(self._kept(codes), self._kept(inputs))
        self.done.append(result)
        return result

    def skip(self) -> None:
        """Pass over the next site: nothing of it was compared."""
        nothing = self._kept(np.zeros(len(self.pairs), np.uint8))
        self.done.append(SiteKinds(nothing, nothing))

    def _judge(self, flow: Flow, codes: Codes, differs: Bools) -> tuple[Codes, Codes]:
        dirty = np.zeros(len(codes), np.bool_)
        unknown = np.zeros(len(codes), np.bool_)
        known = np.zeros(len(codes), np.bool_)
        for feed in flow.feeds:
            if feed.via is Via.STATE:  # known from what is compared of it: it never hides an input
                read, _ = self.flows.state_sites(feed.site)
                read_kinds = self.done[read] if read is not None and read < len(self.done) else None
                dirty |= self._carried.dirty(feed.site, None if read_kinds is None else read_kinds.differs)
                continue
            feed_dirty, feed_unknown = self._feed(feed.site, feed.via)
            dirty |= feed_dirty
            unknown |= feed_unknown
            known |= ~feed_unknown
        if not flow.complete:
            unknown[:] = True
        if not flow.feeds and flow.complete:
            known[:] = True
        inside = self._inside.get(flow.container)
        upstream = dirty if inside is None else dirty | inside
        doubtful = differs & unknown & ~upstream
        if doubtful.any():
            upstream = upstream | (doubtful & (self._gap | self._anything_earlier()))
        codes[differs & upstream] = Kind.PROPAGATED
        codes[differs & ~upstream] = Kind.OWN
        codes[~differs & (codes == Kind.EQUAL) & dirty] = Kind.MASKED
        inputs = np.where(unknown, np.where(known, Inputs.PARTIAL, Inputs.NOT_CAPTURED), 0).astype(np.uint8)
        return codes, inputs

    def _feed(self, site: int, via: Via) -> tuple[Bools, Bools]:
        """(differs, not compared) of one input for every pair."""
        if via is Via.ROW:
            kinds = self.done[site] if site < len(self.done) else None
            if kinds is None:  # ordered after what it feeds: nothing is known of it yet
                nothing = np.zeros(len(self.pairs), np.bool_)
                return nothing, ~nothing
            return kinds.differs, ~kinds.present
        flags = self._history_of(site) if via is Via.HISTORY else self._flags_of(site)
        if flags is None:
            nothing = np.zeros(len(self.pairs), np.bool_)
            return nothing, ~nothing
        key = self.pairs.key
        if via is Via.HISTORY:
            return flags[0][self.pairs.sides, key], flags[1][self.pairs.sides, key]
        parent = np.minimum(self.space.parent[key], self.space.n_keys - 1)
        there = self.space.parent[key] < self.space.n_keys
        unknown = (flags[1][self.pairs.sides, parent] & there) | self.space.orphan[key]
        return flags[0][self.pairs.sides, parent] & there, unknown

    def _flags_of(self, site: int) -> KeyFlags | None:
        if self.flows.sites[site].meta.semantic == STATE_WRITE:  # comes after what reads it in the order of sites
            return self._carried.flags(site)
        return self._key_flags.get(site)

    def _history_of(self, site: int) -> KeyFlags | None:
        if site not in self._key_flags:
            return None
        if site not in self._history:
            dirty, unknown = self._key_flags[site]
            broken = unknown | self.space.orphan
            self._history[site] = (
                np.stack([any_ancestor(flag, self._tables) for flag in dirty]),
                np.stack([any_ancestor(flag, self._tables) for flag in broken]),
            )
        return self._history[site]

    def _keep_key_flags(self, site: int, present: Bools, differs: Bools, where: SiteRows) -> None:
        """Remember, per row key and for A, B and both: do any copies differ, and was it captured at all."""
        if not self._is_read_later(site):
            return
        self._key_flags[site] = key_flags(self.space, self.pairs, present, differs, where)

    def _is_read_later(self, site: int) -> bool:
        name = self.flows.sites[site].parsed
        return name.is_input or name.op == "log_softmax" or self.flows.sites[site].meta.semantic == "ssm_weights"

    def _anything_earlier(self) -> Bools:
        """Pairs in which an earlier site differs, in the row itself or in a row before it."""
        closed = np.stack([any_ancestor(flag, self._tables) for flag in self._seen_keys])
        return self._seen | closed[self.pairs.sides, self.pairs.key]

    def _note(self, site: int, differs: Bools) -> None:
        if differs.any():
            self._seen |= differs
            self._seen_keys |= differing_keys(self.space, self.pairs, differs)
            for path in enclosing(self.flows.sites[site]):
                if path in self._inside:
                    self._inside[path] |= differs
        path = self.flows.sites[site].parsed.path
        if path in self._inside and self._last_port.get(path) == site:
            del self._inside[path]


def count_kinds(codes: Codes, n_keys: int, key: Ints) -> dict[Kind, int]:
    """Distinct row keys of each kind over some pairs; a key has the strongest kind of its pairs.

    Args:
        codes: kinds of the pairs, uint8 [n].
        n_keys: number of keys.
        key: key of each pair, int64 [n].
    """
    counts: dict[Kind, int] = {}
    taken = np.zeros(n_keys, np.bool_)
    for kind in sorted(Kind, reverse=True)[:-1]:
        flags = np.zeros(n_keys, np.bool_)
        flags[key[codes == kind]] = True
        counts[kind] = int(np.count_nonzero(flags & ~taken))
        taken |= flags
    return counts
