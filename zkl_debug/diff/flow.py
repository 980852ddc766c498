"""What feeds a site: its own input ports, or the known producer where the operator has none.

A causal row depends on other rows only through attention and recurrent mixers. An attention output at position p
reads q at p and K, V of every row up to p; a module that contains an attention reads its input at every row up to p.
A scan or convolution at p reads its inputs at every row up to p and, where an earlier call has run some of these, the
state that this call left behind: a state read at p is what was written one token before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from zkl_debug.diff.sites import SitePair


class Via(IntEnum):
    """How a feeding site reaches the row."""

    ROW = 0  # the same row
    HISTORY = 1  # the same row and every row before it in the prefix
    PARENT = 2  # the row one token earlier (label rows, states)
    STATE = 3  # what an earlier call left behind: the state that this row's call started from


@dataclass(frozen=True)
class Feed:
    """One input of a site. ``site`` is an index into the ordered sites."""

    site: int
    via: Via


@dataclass(frozen=True)
class Flow:
    """Inputs of one site.

    Attributes:
        feeds: captured inputs.
        complete: no input is known to be missing (an operator on token ids has all of its input in the row key).
        is_port: the site is an input port itself: it computes nothing. Not so where the code between the modules that
            feed it and this port is known to be one operator, such as the activation between two linear layers.
        container: path of the module when other sites lie inside it, else empty.
    """

    feeds: tuple[Feed, ...]
    complete: bool
    is_port: bool
    container: str


# Modules that mix rows though they are not an attention themselves.
_MIXES_ROWS = re.compile(
    r"(?:^|\.)(?:layers\.\d+|h\.\d+|\w*attention|\w*attn|mixer|decoder|encoder|backbone|block|model)(?:#\d+)?$"
)
# Parts of a fused linear layer, as the join of names files them.
_PARTS = frozenset({"q", "k", "v", "gate", "up"})
_RECURRENT = frozenset({"ssm", "scan", "conv"})
#: Operators of a mixer, by the state that they carry from call to call.
_CARRIES = {"scan": "ssm_state", "conv": "conv_state"}
STATE_READ, STATE_WRITE = "state_read", "state_write"
_STATES = frozenset({STATE_READ, STATE_WRITE})
#: Operators inside a recurrent mixer: they go over sequences, and their buffers are not those of the call's rows.
_INSIDE_MIXER = frozenset({"scan", "conv", "ssm_weights", "gated"}) | _STATES
# Modules whose only input is token and position ids, which the row key holds.
_FROM_TOKENS = re.compile(
    r"(?:^|\.)(?:embedding|word_embeddings|embed_tokens|wte|wpe|position_embeddings|tokentype_embeddings)(?:\.|$)"
)
# Ports whose value is made in the code of the enclosing module, out of the outputs named here and nothing else.
_ACTIVATED = {"linear_fc2": ("linear_fc1",), "down_proj": ("gate_proj", "up_proj"), "w2": ("w1", "w3")}
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?:local_experts\.)?\d+$")
_ROUTED = re.compile(r"(?P<mlp>.*\.mlp)(?:/(?:permute|unpermute)|\.experts(?:\..*)?)$")


class FlowMap:
    """Data flow between the ordered sites of a diff."""

    def __init__(self, sites: Sequence[SitePair]) -> None:
        self.sites = sites
        self.index = {pair.name: i for i, pair in enumerate(sites)}
        self._ports: dict[str, list[int]] = defaultdict(list)
        self._outs: dict[str, list[int]] = defaultdict(list)
        inside: set[str] = set()
        for i, pair in enumerate(sites):
            ports = self._ports if pair.parsed.is_input else self._outs
            ports[pair.parsed.owner].append(i)
            inside.update(enclosing(pair))
        self.containers = {pair.parsed.path for pair in sites if not pair.parsed.op} & inside

    def flow(self, i: int) -> Flow:
        """Inputs of site ``i``."""
        site = self.sites[i].parsed
        container = site.path if not site.op and site.path in self.containers else ""
        if site.is_input:
            made = self.made_of(i)
            return (
                Flow(tuple(Feed(feed, Via.ROW) for feed in made), True, False, "")
                if made
                else Flow((), False, True, container)
            )
        ports = self._ports.get(site.owner, [])
        if self._is_attention(i):
            return self._attention(ports, container)
        if is_state(self.sites[i]):
            return self._state(i, container)
        mixes = self._mixes_rows(i)
        feeds = [Feed(port, Via.HISTORY if mixes else Via.ROW) for port in ports]
        feeds += self._known(site.path, site.op)
        feeds += self._routing(site.owner)
        feeds += self._scales(i)
        from_tokens = not ports and (site.op == "label" or bool(_FROM_TOKENS.search(site.path)))
        from_weights = self.sites[i].meta.semantic == "ssm_weights"  # of which a diff has seen that they are equal
        complete = bool(feeds) or from_tokens or from_weights
        return Flow((*feeds, *self._carried(i)), complete, False, container)

    def carries_state(self, i: int) -> bool:
        """Whether the operator hands a state from call to call."""
        return self.sites[i].parsed.op.split("#")[0] in _CARRIES and not self.sites[i].parsed.is_input

    def state_sites(self, i: int) -> tuple[int | None, int | None]:
        """Where the state that an operator carries is (read, written); None where it was not captured."""
        site = self.sites[i].parsed
        state = _CARRIES.get(site.op.split("#")[0], site.op.partition(".")[0])
        found = (self._all_outs(f"{site.path}/{state}.{end}", Via.ROW) for end in ("read", "write"))
        read, written = (feeds[0].site if feeds else None for feeds in found)
        return read, written

    def _carried(self, i: int) -> list[Feed]:
        """What a recurrent operator reads besides its ports: the state, and what a scan was given of its weights."""
        site = self.sites[i].parsed
        if not self.carries_state(i):
            return []
        weights = self._all_outs(f"{site.path}/ssm_weights", Via.HISTORY) if site.op.startswith("scan") else []
        return [*weights, Feed(i, Via.STATE)]

    def _state(self, i: int, container: str) -> Flow:
        """A state that is read is what was written behind the row before; one that is written is the operator's."""
        site = self.sites[i].parsed
        written = self.state_sites(i)[1]
        if self.sites[i].meta.semantic == STATE_READ:
            feeds = () if written is None else (Feed(written, Via.PARENT),)
            return Flow(feeds, written is not None, False, container)
        operator = next(op for op, state in _CARRIES.items() if site.op.startswith(state))
        ports = [Feed(port, Via.HISTORY) for port in self._ports.get(f"{site.path}/{operator}", [])]
        carried = [feed for out in self._outs.get(f"{site.path}/{operator}", [])[:1] for feed in self._carried(out)]
        return Flow((*ports, *carried), bool(ports), False, container)

    def made_of(self, i: int) -> tuple[int, ...]:
        """Sites that alone make the value of an input port; empty where that is not known, or one is not captured."""
        site = self.sites[i].parsed
        if site.op or not site.is_input:
            return ()
        head, _, last = site.path.rpartition(".")
        if site.port in ("in", "in.0") and last in _ACTIVATED:
            outs = [self._outs.get(f"{head}.{name}", ()) for name in _ACTIVATED[last]]
            # An expert scales what it activates by the probability it was handed.
            found = [i for each in outs for i in each] + [
                i for i in self._ports.get(head, ()) if self.sites[i].parsed.port == "in.1"
            ]
            return self._both(found) if all(outs) else ()
        expert = _EXPERT.match(site.path)
        return self._both(self._ports.get(expert["experts"], ())) if expert else ()

    def _both(self, found: Sequence[int]) -> tuple[int, ...]:
        return tuple(found) if all(self.sites[i].matched for i in found) else ()

    def _is_attention(self, i: int) -> bool:
        pair = self.sites[i]
        return pair.meta.semantic == "core_attention" or pair.parsed.operator.split("#")[0] == "core_attention"

    def _attention(self, ports: Sequence[int], container: str) -> Flow:
        by_port = {self.sites[i].parsed.port.removesuffix(".0"): i for i in ports}
        feeds = [Feed(site, Via.ROW if port == "in" else Via.HISTORY) for port, site in by_port.items()]
        return Flow(tuple(feeds), {"in", "in.1", "in.2"} <= set(by_port), False, container)

    def _mixes_rows(self, i: int) -> bool:
        pair = self.sites[i]
        if pair.meta.semantic in _RECURRENT:
            return True
        return not pair.parsed.op and bool(_MIXES_ROWS.search(pair.parsed.path))

    def _known(self, path: str, op: str) -> list[Feed]:
        """Producers of operators that are recorded without input ports."""
        if op.split("#")[0] == "qkv":
            return self._all_outs(f"{path}.linear_qkv", Via.ROW)
        if op in _PARTS and not self._ports.get(f"{path}/{op}"):  # lanes of a fused layer read what the layer reads
            return [Feed(i, Via.ROW) for i in self._ports.get(path, ())]
        if op == "selected":
            return [
                *self._all_outs(f"{path}/log_softmax", Via.PARENT),
                *self._all_outs(f"{path}/label", Via.ROW),
            ]
        return []

    def _routing(self, owner: str) -> list[Feed]:
        """Expert-side operators also read what the router chose."""
        match = _ROUTED.match(owner)
        return self._all_outs(f"{match.group('mlp')}/router.topk", Via.ROW) if match else []

    def _scales(self, i: int) -> list[Feed]:
        """Values in a block format depend on the scales of their blocks, and those on the scale of the row."""
        site = self.sites[i].parsed
        if site.operator != "quantize":
            return []
        above = {"out.0": ("out.1", "out.2"), "out.1": ("out.2",)}.get(site.port, ())
        feeds = (self.index.get(f"{site.owner}:{port}") for port in above)
        return [Feed(at, Via.ROW) for at in feeds if at is not None and self.sites[at].matched]

    def _all_outs(self, owner: str, via: Via) -> list[Feed]:
        return [Feed(i, via) for i in self._outs.get(owner, ())]


def is_state(pair: SitePair) -> bool:
    """Whether a site is a state handed from one call of an engine to the next."""
    return pair.meta.semantic in _STATES


def is_inside_mixer(semantic: str) -> bool:
    """Whether an operator of this class runs over sequences inside a recurrent mixer: it has no rows to follow."""
    return semantic in _INSIDE_MIXER


def enclosing(pair: SitePair) -> list[str]:
    """Paths of the modules a site lies inside; a module's own ports do not lie inside it."""
    parts = pair.parsed.module.split(".")
    end = len(parts) + 1 if pair.parsed.op else len(parts)
    return [".".join(parts[:n]) for n in range(1, end)]
