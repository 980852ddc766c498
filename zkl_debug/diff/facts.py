"""What a capture knows of each compared pair of rows: the table that rules are learned from. numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from zkl_debug.bits import DTYPES
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.edges import named_row
from zkl_debug.diff.flow import is_state
from zkl_debug.diff.model import Bools, CaptureLike, Ints
from zkl_debug.diff.rows import RowSpace, group_ids
from zkl_debug.schema import Phase, RowFlag, parse_site

_NEIGHBOURS = 96
_EXPERTS = 512
_MODULI = (8, 16, 32, 64, 128, 256)
_LONGEST_TOKEN_LIST = 4096
_WIDE = 8  # elements of a row, for two equal rows to mean the same content


class FactKind(StrEnum):
    """How the values of a fact may be used in a rule."""

    ORDINAL = "ordinal"  # equal, at least, at most
    NOMINAL = "nominal"  # equal, or one of a few
    FLAG = "flag"  # 0 or 1


@dataclass(frozen=True)
class Fact:
    """One column of the table.

    Attributes:
        name: stable name, e.g. ``rows in call``.
        of: which row of the pair it belongs to: a phase (``score``), ``first copy``, or empty for both.
        kind: how its values may be used.
        values: int64 [N]; for a flag 0 or 1.
        family: facts that count as one choice: all ``sample k in the call`` flags are one family.
        words: names of nominal values where the number says little.
    """

    name: str
    of: str
    kind: FactKind
    values: Ints
    family: str = ""
    words: dict[int, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name with its row: ``rows in call of score``."""
        return f"{self.name} of {self.of}" if self.of else self.name


@dataclass(frozen=True)
class FactTable:
    """Facts of some pairs.

    Attributes:
        facts: the columns.
        unit: what each pair is a case of, int64 [N]: pairs of one row key, or of the same content, are not independent.
        sides: names of the left and right rows, as in :attr:`Fact.of`.
    """

    facts: tuple[Fact, ...]
    unit: Ints
    sides: tuple[str, str] = ("left", "right")

    def __len__(self) -> int:
        return len(self.unit)

    def twins(self) -> Iterator[tuple[Fact, Fact]]:
        """Facts of the call that both rows of the pair have: (left, right)."""
        right = {fact.name: fact for fact in self.facts if fact.of == self.sides[1]}
        for fact in self.facts:
            if fact.of == self.sides[0] and fact.kind is not FactKind.FLAG and fact.name in right:
                yield fact, right[fact.name]


@dataclass(frozen=True)
class RowFacts:
    """Facts of every unified row, int64 [U] each.

    Attributes:
        ordinal, nominal, flags: facts of the row's call, by name.
        shared: facts that both rows of a pair have alike.
        call: number of the row's call over both captures.
        own: its sample.
        predicting: for a label row the row that predicted it, in the same call; else the row itself.
    """

    ordinal: dict[str, Ints]
    nominal: dict[str, Ints]
    flags: dict[str, Ints]
    shared: dict[str, Ints]
    call: Ints
    own: Ints
    predicting: Ints


def build_facts(comparison: Comparison, site: int, chosen: Ints) -> FactTable:
    """The table of some pairs of one site.

    Args:
        comparison: the finished comparison.
        site: place of the site in the order.
        chosen: indices of the pairs.
    """
    space, pairs = comparison.space, comparison.pairs
    left, right = pairs.left[chosen], pairs.right[chosen]
    rows = row_facts(comparison)
    named = named_row(space, left, right)
    sides = side_names(space, left, right)
    position = space.position[named]
    facts = [*_shared(space, rows, named), *_positions(position)]
    for of, index in zip(sides, (left, right), strict=True):
        # Distances from the start of a chunk or a cached prefix are the position itself where everything starts at 0.
        facts += [fact for fact in _of_row(rows, of, index) if not np.array_equal(fact.values, position)]
        facts += _neighbours(rows, of, index)
    facts += _experts(comparison, site, left)
    return FactTable(tuple(facts), _units(comparison, site, chosen), sides)


def _units(comparison: Comparison, site: int, chosen: Ints) -> Ints:
    """Pairs of one row key are one case; and so are pairs of the same content, where a row is wide enough to tell."""
    pairs, pair = comparison.pairs, comparison.sites[site]
    key = pairs.key[chosen]
    info = DTYPES.get(pair.meta.torch_dtype)
    if is_state(pair) or info is None or not info.is_float or int(np.prod(pair.meta.row_shape)) < _WIDE:
        return key
    where = comparison.where(site)
    digest = where.digest[where.index(comparison.space, pairs.left[chosen])]
    content, first = group_ids([digest[:, 0], digest[:, 1]])
    return content if len(first) < len(np.unique(key)) else key


def side_names(space: RowSpace, left: Ints, right: Ints) -> tuple[str, str]:
    """What to call the two rows: their phases, or the copies of one phase."""
    if not len(left):
        return "left", "right"
    phases = [{Phase(int(code)).name.lower() for code in np.unique(space.phase[rows])} for rows in (left, right)]
    if phases[0] != phases[1] and all(len(phase) == 1 for phase in phases):
        return phases[0].pop(), phases[1].pop()
    if bool((space.side[left] == space.side[right]).all()):
        return "the first copy", "the other copy"
    return "A", "B"


def row_facts(comparison: Comparison) -> RowFacts:
    """Facts of all rows of both captures."""
    space = comparison.space
    calls = [_frame_columns(capture) for capture in (comparison.a, comparison.b)]
    offset = len(comparison.a.frames)
    call = space.frame + np.where(space.side == 1, offset, 0)
    frame = {name: np.concatenate([column, calls[1][name]])[call] for name, column in calls[0].items()}
    place = _places(space, call)
    ordinal = {
        "rows in call": frame["n_padded"],
        "longest query in call": frame["max_seqlen_q"],
        "sequences in call": frame["n_seqs"],
        "padding rows in call": np.maximum(frame["n_padded"] - place["rows in call"], 0),
        "cached tokens": _cached(space),
        "rows of its sequence in call": place["length"],
        "place in call": place["place"],
        "rows after the chunk's first": space.position - place["start"],
        "rows before the chunk's last": place["stop"] - space.position,
        "position of the chunk's first row": place["start"],
        "micro-batch": frame["micro_batch"],
        "weight version": frame["weight_version"],
    }
    ordinal["rows after the cached prefix"] = space.position - ordinal["cached tokens"]
    ordinal["padding of its sequence"] = _own_padding(frame, space, place)
    row = _predicting(space, call)
    flags = {
        "first decode token": _flag(space, RowFlag.FIRST_DECODE)[row],
        "chunk edge": _flag(space, RowFlag.CHUNK_EDGE)[row],
        "after cache hit": _flag(space, RowFlag.AFTER_CACHE_HIT)[row],
        "first position of its sequence in call": (space.position == place["start"]).astype(np.int64),
        "last position of its sequence in call": (space.position == place["stop"]).astype(np.int64),
        "first sequence in call": (place["place"] == 0).astype(np.int64),
        "last sequence in call": (place["place"] == place["places"] - 1).astype(np.int64),
        "packed": _packed(frame, space),
        "reused recurrent slot": _reused(comparison),
    }
    nominal = {"graph bucket": frame["graph"], "rank": frame["rank"], "frame": frame["frame"]}
    shared = {
        "generated": _flag(space, RowFlag.GENERATED),
        "masked": _flag(space, RowFlag.MASKED),
        "step": space.step,
    }
    return RowFacts(ordinal, nominal, flags, shared, call, space.sample.astype(np.int64), row)


def _frame_columns(capture: CaptureLike) -> dict[str, Ints]:
    frames = capture.frames
    names = ("n_padded", "max_seqlen_q", "n_seqs", "micro_batch", "weight_version", "graph")
    columns = {name: np.asarray(frames[name], np.int64) for name in names}
    rank = getattr(capture, "frame_rank", None)
    columns["rank"] = np.zeros(len(frames), np.int64) if rank is None else np.asarray(rank, np.int64)
    columns["frame"] = np.arange(len(frames), dtype=np.int64)
    return columns


def _predicting(space: RowSpace, call: Ints) -> Ints:
    """The row that predicted each label row, in the same call; a row itself where there is none, int64 [U]."""
    label = space.label[space.key]
    own = np.arange(len(call))
    if not label.any():
        return own
    place, first = group_ids([call, space.sample, space.position - label])
    row = np.full(len(first), -1, np.int64)
    row[place[~label]] = own[~label]
    return np.where(label & (row[place] >= 0), row[place], own)


def _flag(space: RowSpace, flag: RowFlag) -> Ints:
    return np.asarray((space.flags & np.uint32(flag)) != 0, np.int64)


def _places(space: RowSpace, call: Ints) -> dict[str, Ints]:
    """Where each row lies in its call: its sequence's place, extent and length; label rows by their own extent."""
    label = space.label[space.key]
    group, first = group_ids([call, space.sample, label])
    start = np.full(len(first), np.iinfo(np.int64).max)
    stop = np.full(len(first), -1)
    np.minimum.at(start, group, space.position)
    np.maximum.at(stop, group, space.position)
    sequence, sequence_first = group_ids([call, space.sample])
    plain = np.flatnonzero(~label)
    length = np.bincount(sequence[plain], minlength=len(sequence_first))
    arrival = np.full(len(sequence_first), len(call), np.int64)
    np.minimum.at(arrival, sequence, np.arange(len(call)))
    order = np.lexsort((arrival, call[sequence_first]))
    calls = call[sequence_first][order]
    place = np.empty(len(order), np.int64)
    begins = np.searchsorted(calls, calls, side="left")
    place[order] = np.arange(len(order)) - begins
    per_call = np.bincount(call, minlength=int(call.max(initial=0)) + 1)
    rows = np.bincount(call[plain], minlength=len(per_call))
    places = np.bincount(call[sequence_first], minlength=len(per_call))
    return {
        "start": start[group],
        "stop": stop[group],
        "length": length[sequence].astype(np.int64),
        "place": place[sequence],
        "places": places[call].astype(np.int64),
        "rows in call": rows[call].astype(np.int64),
    }


def _reused(comparison: Comparison) -> Ints:
    """Rows of requests whose recurrent slot was another request's before, by the events of the captures."""
    space = comparison.space
    found = np.zeros(space.n_rows, np.int64)
    for side, capture in enumerate((comparison.a, comparison.b)):
        events: Any = getattr(capture, "events", ())
        requests = [e.detail["request"] for e in events if e.name == "recurrent_slot" and e.detail["previous"] >= 0]
        found[(space.side == side) & np.isin(space.sample, np.asarray(requests, np.uint64))] = 1
    return found


def _cached(space: RowSpace) -> Ints:
    """Tokens of each row's request that came from the prefix cache: where its first captured row starts."""
    hit = _flag(space, RowFlag.AFTER_CACHE_HIT) == 1
    group, first = group_ids([space.side, space.when, space.sample])
    start = np.full(len(first), np.iinfo(np.int64).max)
    at = np.flatnonzero(hit & ~space.label[space.key])
    np.minimum.at(start, group[at], space.position[at])
    return np.where(hit & (start[group] < np.iinfo(np.int64).max), start[group], 0).astype(np.int64)


def _rectangle(frame: dict[str, Ints], space: RowSpace) -> Bools:
    """Scoring calls whose slots form a padded [b, s] batch."""
    sequences = np.maximum(frame["n_seqs"], 1)
    whole = frame["n_padded"] % sequences == 0
    return np.asarray((space.phase == Phase.SCORE) & whole & (frame["n_padded"] >= sequences * frame["max_seqlen_q"]))


def _own_padding(frame: dict[str, Ints], space: RowSpace, place: dict[str, Ints]) -> Ints:
    width = frame["n_padded"] // np.maximum(frame["n_seqs"], 1)
    return np.where(_rectangle(frame, space), width - place["length"], 0).astype(np.int64)


def _packed(frame: dict[str, Ints], space: RowSpace) -> Ints:
    """Scoring calls whose slots are no padded batch of their sequences: too few, or not so many for each."""
    several = (space.phase == Phase.SCORE) & (frame["n_seqs"] > 1)
    few = frame["n_padded"] < frame["n_seqs"] * frame["max_seqlen_q"]
    return np.asarray(several & (few | (frame["n_padded"] % np.maximum(frame["n_seqs"], 1) != 0)), np.int64)


def _shared(space: RowSpace, rows: RowFacts, named: Ints) -> list[Fact]:
    sample = space.sample[named].astype(np.int64)
    facts = [
        Fact("sample", "", FactKind.NOMINAL, sample),
        Fact("position", "", FactKind.ORDINAL, space.position[named]),
        Fact("step", "", FactKind.ORDINAL, rows.shared["step"][named]),
        Fact("generated", "", FactKind.FLAG, rows.shared["generated"][named]),
        Fact("masked by the loss", "", FactKind.FLAG, rows.shared["masked"][named]),
    ]
    token = space.token[named]
    if len(np.unique(token)) <= _LONGEST_TOKEN_LIST:
        facts.append(Fact("token", "", FactKind.NOMINAL, token))
    return facts


def _positions(position: Ints) -> list[Fact]:
    facts = []
    for modulus in _MODULI:
        if int(position.max(initial=0)) < modulus:
            break
        for rest, name in ((0, "starts"), (modulus - 1, "ends")):
            flag = (position % modulus == rest).astype(np.int64)
            title = f"position {name} a block of {modulus}"
            facts.append(Fact(title, "", FactKind.FLAG, flag, "position in block"))
    return facts


def _of_row(rows: RowFacts, of: str, index: Ints) -> list[Fact]:
    kinds = ((rows.ordinal, FactKind.ORDINAL), (rows.nominal, FactKind.NOMINAL), (rows.flags, FactKind.FLAG))
    return [Fact(name, of, kind, column[index]) for columns, kind in kinds for name, column in columns.items()]


def _neighbours(rows: RowFacts, of: str, index: Ints) -> list[Fact]:
    """A flag per sample: was it in the call."""
    call = rows.call[index]
    calls, inverse = np.unique(call, return_inverse=True)
    samples = np.unique(rows.own[np.isin(rows.call, calls)])
    if not 1 < len(samples) <= _NEIGHBOURS or len(calls) < 2:
        return []
    member = np.zeros((len(calls), len(samples)), np.int64)
    inside = np.flatnonzero(np.isin(rows.call, calls))
    member[np.searchsorted(calls, rows.call[inside]), np.searchsorted(samples, rows.own[inside])] = 1
    return [
        Fact(f"sample {sample} in the call", of, FactKind.FLAG, member[inverse, k], f"neighbour of {of}")
        for k, sample in enumerate(samples.tolist())
        if 0 < member[:, k].sum() < len(calls)
    ]


def _experts(comparison: Comparison, site: int, rows: Ints) -> list[Fact]:
    """A flag per expert of the site's layer: was the row routed to it. Needs the router's map as raw bits."""
    layer = comparison.sites[site].parsed.layer
    for number, pair in enumerate(comparison.sites):
        name = parse_site(pair.name)
        is_map = name.op == "router.topk" and name.port == "out.1" and name.layer == layer
        if not is_map or pair.meta.torch_dtype != "bool":
            continue
        where = comparison.where(number)
        if not len(rows) or not where.bits[rows].all() or int(np.prod(pair.meta.row_shape)) > _EXPERTS:
            return []
        chosen = _gathered(comparison, number, rows) != 0
        flags = chosen.astype(np.int64)
        return [Fact(f"routed to expert {e}", "", FactKind.FLAG, flags[:, e], "expert") for e in range(flags.shape[1])]
    return []


def _gathered(comparison: Comparison, site: int, rows: Ints) -> Any:
    from zkl_debug.diff.compare import gather

    return gather(comparison.sites[site], comparison.where(site), comparison.space, rows)


def varying(facts: Sequence[Fact]) -> list[Fact]:
    """Facts that are not the same for every pair: a constant one separates nothing."""
    return [fact for fact in facts if len(fact.values) and int(fact.values.min()) != int(fact.values.max())]
