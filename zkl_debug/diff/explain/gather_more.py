"""Evidence that reaches beyond the row: keys and values of its sequence and call, router choices, labels."""

from __future__ import annotations

from math import prod

import numpy as np

from zkl_debug.bits import F64, to_float64
from zkl_debug.diff.compare import gather
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.edges import named_row
from zkl_debug.diff.explain.gather_chain import Chains, spread_by_position
from zkl_debug.diff.explain.model import Grid, Keys, Labels, Routing
from zkl_debug.diff.facts import RowFacts
from zkl_debug.diff.model import Ints
from zkl_debug.diff.sites import SitePair
from zkl_debug.schema import Phase

_MOST_KEYS = 2048
_ROUTED = 4096
_HEAD_WIDTHS = (128, 64, 32, 96, 80, 256, 192, 16, 8)


def values(comparison: Comparison, site: int, rows: Ints) -> F64 | None:
    """Values of a site at unified rows, float64; None where raw bits are missing."""
    pair, where = comparison.sites[site], comparison.where(site)
    if pair.differ or not len(rows) or not where.bits[rows].all():
        return None
    return to_float64(gather(pair, where, comparison.space, rows), pair.meta.torch_dtype)


def site_at(comparison: Comparison, name: str) -> int | None:
    """Place of a site in the order."""
    return next((i for i, pair in enumerate(comparison.sites) if pair.name == name), None)


# ---- attention --------------------------------------------------------------------------------------------------
def attention(comparison: Comparison, chosen: Ints, pair: SitePair, facts: RowFacts) -> list[tuple[int, Keys, Keys]]:
    """What some of the chosen rows may have read on each side."""
    owner = pair.parsed.owner
    ports = [site_at(comparison, f"{owner}:{port}") for port in ("in", "in.1", "in.2")]
    ports[0] = site_at(comparison, f"{owner}:in.0") if ports[0] is None else ports[0]
    if any(port is None for port in ports) or not len(chosen):
        return []
    query, key, value = (port for port in ports if port is not None)
    width = _head_width(comparison, pair, query, key)
    if width is None:
        return []
    builder = _Builder(comparison, facts, (query, key, value), width, _window(comparison, pair.parsed.layer))
    found = []
    for index in spread_by_position(comparison, chosen).tolist():
        left = builder.keys(int(comparison.pairs.left[chosen[index]]))
        right = builder.keys(int(comparison.pairs.right[chosen[index]]))
        if left is not None and right is not None:
            found.append((index, left, right))
    return found


def _head_width(comparison: Comparison, pair: SitePair, query: int, key: int) -> int | None:
    """Channels of a head: from a site that keeps heads apart, the configuration, or the usual widths."""
    total = [prod(comparison.sites[i].meta.row_shape) for i in (query, key)]
    shape = comparison.sites[query].meta.row_shape
    if len(shape) == 2:
        return int(shape[1])
    path = pair.parsed.path.rpartition(".")[0]
    for name in (f"{path}/rope.q:out.0", f"{path}/qkv:out.0"):
        at = site_at(comparison, name)
        if at is not None and len(comparison.sites[at].meta.row_shape) == 2:
            return int(comparison.sites[at].meta.row_shape[1])
    config = comparison.a.meta.get("config")
    channels = config.get("kv_channels") if isinstance(config, dict) else None
    for width in (channels, *_HEAD_WIDTHS):
        if isinstance(width, int) and width > 0 and all(count % width == 0 for count in total):
            return width
    return None


def _window(comparison: Comparison, layer: int) -> int | None:
    """How many keys before its own a row of a layer sees by its configuration; None for all."""
    config = comparison.a.meta.get("config")
    window = config.get("window_size") if isinstance(config, dict) else None
    if not isinstance(window, list | tuple) or not window or not isinstance(window[0], int) or window[0] < 0:
        return None
    assert isinstance(config, dict)
    among = config.get("window_attn_skip_freq")
    if isinstance(among, int) and (layer + 1) % among == 0:
        return None
    if isinstance(among, list) and 0 <= layer < len(among) and not among[layer]:
        return None
    return window[0]


class _Builder:
    """Collects keys and values of rows; what several rows share is read once."""

    def __init__(
        self, comparison: Comparison, facts: RowFacts, ports: tuple[int, int, int], width: int, left: int | None
    ) -> None:
        self.comparison, self.facts, self.width, self.left = comparison, facts, width, left
        self.query, self.key, self.value = ports
        space = comparison.space
        usable = comparison.where(self.key).bits & comparison.where(self.value).bits
        self.usable = np.flatnonzero(usable)
        self.chains = Chains(space, self.usable)

    def keys(self, row: int) -> Keys | None:
        """What one row may have read; None where something is missing."""
        space = self.comparison.space
        chain = self.chains.of(row)
        if chain is None:
            return None
        call = self.usable[self.facts.call[self.usable] == self.facts.call[row]]
        others = call[~np.isin(space.key[call], space.key[chain]) | (space.sample[call] != space.sample[row])]
        others = others[~space.label[space.key[others]]][:_MOST_KEYS]
        rows = np.concatenate([chain, others])
        parts = [values(self.comparison, site, at) for site, at in self._reads(row, rows)]
        if any(part is None for part in parts):
            return None
        query, key, value = (part.reshape(len(part), -1, self.width) for part in parts if part is not None)
        if query.shape[1] % key.shape[1] or key.shape != value.shape:
            return None
        own = np.arange(len(rows)) < len(chain)
        inside = own if self.left is None else own & (space.position[rows] >= space.position[row] - self.left)
        same_call = self.facts.call[rows] == self.facts.call[row]
        place = np.where(same_call, self.facts.ordinal["place in call"][rows], -1)
        return Keys(
            query=query[0],
            key=key,
            value=value,
            position=space.position[rows],
            own=inside,
            chain=None if self.left is None else own,
            sample=space.sample[rows].astype(np.int64),
            place=np.where(own, self.facts.ordinal["place in call"][row], place),
            row_position=int(space.position[row]),
            row_sample=int(space.sample[row]),
            row_place=int(self.facts.ordinal["place in call"][row]),
            uncaptured=int(self.facts.ordinal["padding rows in call"][row]),
        )

    def _reads(self, row: int, rows: Ints) -> list[tuple[int, Ints]]:
        return [(self.query, np.array([row])), (self.key, rows), (self.value, rows)]


# ---- routing ----------------------------------------------------------------------------------------------------
def routing(comparison: Comparison, edge: str, site: int, facts: RowFacts) -> Routing | None:
    """Router choices of the site's layer, or of the first layer behind it whose choices differ."""
    found = _routing_site(comparison, edge, site)
    if found is None:
        return None
    pairs, space, pair = comparison.pairs, comparison.space, comparison.sites[found]
    part = pairs.slices[edge]
    bits = comparison.where(found).bits
    at = part.start + np.flatnonzero(bits[pairs.left[part]] & bits[pairs.right[part]])
    if not len(at) or pair.meta.torch_dtype != "bool":
        return None
    if len(at) > _ROUTED:
        differs = comparison.done[found].differs[at]
        at = np.sort(np.concatenate([at[differs][: _ROUTED // 2], at[~differs][: _ROUTED // 2]]))
    rows = (pairs.left[at], pairs.right[at])
    chosen = [values(comparison, found, side) for side in rows]
    logits_site = site_at(comparison, f"{pair.parsed.owner}:in.0")
    logits = [None if logits_site is None else values(comparison, logits_site, side) for side in rows]
    if chosen[0] is None or chosen[1] is None:
        return None
    named = named_row(space, *rows)
    both = None if logits[0] is None or logits[1] is None else (logits[0], logits[1])
    return Routing(
        site=pair.name,
        chosen=(chosen[0] != 0, chosen[1] != 0),
        logits=both,
        sample=space.sample[named].astype(np.int64),
        position=space.position[named],
        grid=(_grid(comparison, rows[0], facts), _grid(comparison, rows[1], facts)),
    )


def _routing_site(comparison: Comparison, edge: str, site: int) -> int | None:
    layer = comparison.sites[site].parsed.layer
    part = comparison.pairs.slices[edge]
    behind = None
    for i, pair in enumerate(comparison.sites):
        if pair.parsed.op.split("#")[0] != "router.topk" or pair.parsed.port != "out.1":
            continue
        if layer >= 0 and pair.parsed.layer == layer and "router" in comparison.sites[site].parsed.owner:
            return i
        if behind is None and i >= site and comparison.done[i].differs[part].any():
            behind = i
    return behind


def _grid(comparison: Comparison, rows: Ints, facts: RowFacts) -> Grid | None:
    """Place of rows in padded scoring batches; None where no row is in one."""
    sequences = facts.ordinal["sequences in call"][rows]
    slots = facts.ordinal["rows in call"][rows]
    longest = facts.ordinal["longest query in call"][rows]
    whole = (slots % np.maximum(sequences, 1) == 0) & (slots >= sequences * longest)
    whole &= comparison.space.phase[rows] == Phase.SCORE
    if not whole.any():
        return None
    width = np.where(whole, slots // np.maximum(sequences, 1), 0)
    place = facts.ordinal["place in call"][rows]
    return Grid(facts.call[rows], place, comparison.space.position[rows], sequences, width)


# ---- labels -----------------------------------------------------------------------------------------------------
def labels(comparison: Comparison, site: int, chosen: Ints, facts: RowFacts) -> Labels | None:
    """The label behind each chosen label row, and the log-probs it was read from."""
    space, pairs = comparison.space, comparison.pairs
    name = comparison.sites[site].parsed
    if name.op.split("#")[0] not in ("label", "selected") or not len(chosen):
        return None
    rows = (pairs.left[chosen], pairs.right[chosen])
    label_site = site_at(comparison, f"{name.path}/label:out.0")
    used = [None if label_site is None else values(comparison, label_site, side) for side in rows]
    both = None
    if used[0] is not None and used[1] is not None:
        both = (used[0][:, 0].astype(np.int64), used[1][:, 0].astype(np.int64))
    table_site = site_at(comparison, f"{name.path}/log_softmax:out.0")
    tables = [None if table_site is None else values(comparison, table_site, facts.predicting[side]) for side in rows]
    last = facts.flags["last position of its sequence in call"]
    return Labels(
        used=both,
        intended=space.token[rows[0]],
        table=tables[1],
        table_left=tables[0],
        following=(_first_tokens(comparison, rows[0], facts), _first_tokens(comparison, rows[1], facts)),
        last=np.asarray((last[rows[0]] == 1) | (last[rows[1]] == 1)),
        shifted={shift: _token_at(comparison, rows, shift) for shift in (-2, -1, 1, 2)},
    )


def _first_tokens(comparison: Comparison, rows: Ints, facts: RowFacts) -> list[set[int]]:
    """First tokens of the other sequences in each row's call."""
    space = comparison.space
    starts = np.flatnonzero((facts.flags["first position of its sequence in call"] == 1) & ~space.label[space.key])
    by_call: dict[int, list[tuple[int, int]]] = {}
    for at in starts.tolist():
        by_call.setdefault(int(facts.call[at]), []).append((int(space.sample[at]), int(space.token[at])))
    return [
        {token for sample, token in by_call.get(int(facts.call[row]), ()) if sample != int(space.sample[row])}
        for row in rows.tolist()
    ]


def _token_at(comparison: Comparison, rows: tuple[Ints, Ints], shift: int) -> Ints:
    """Token ``shift`` positions on in the same sample on either side, -1 where it is not there."""
    space = comparison.space
    result = np.full(len(rows[0]), -1, np.int64)
    plain = np.flatnonzero(~space.label[space.key])
    columns = (space.side, space.sample, space.position)
    table = dict(zip(zip(*(c[plain].tolist() for c in columns), strict=True), space.token[plain].tolist(), strict=True))
    for side_rows in rows:
        side, sample, position = (column[side_rows].tolist() for column in columns)
        there = [table.get((s, n, p + shift), -1) for s, n, p in zip(side, sample, position, strict=True)]
        result = np.where(result < 0, there, result)
    return result
