"""Sites of both captures, joined by canonical name and put into one execution order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from zkl_debug.diff.model import CaptureLike, SiteLike, Skip, fact
from zkl_debug.schema import SiteKind, SiteMeta, SiteName, parse_site


@dataclass(frozen=True)
class SitePair:
    """One site of the union of both captures.

    Attributes:
        name: canonical name.
        parsed: its parts.
        a, b: the site on each side, None where it was not captured.
        differ: how dtype or width differ between the sides; empty when rows can be compared bit by bit.
    """

    name: str
    parsed: SiteName
    a: SiteLike | None
    b: SiteLike | None
    differ: str = ""

    @property
    def meta(self) -> SiteMeta:
        """Metadata of A, else of B."""
        site = self.a if self.a is not None else self.b
        assert site is not None
        return site.meta

    @property
    def matched(self) -> bool:
        """Whether both sides have it."""
        return self.a is not None and self.b is not None

    @property
    def is_input(self) -> bool:
        """Whether it is what was fed to the model."""
        return self.meta.kind is SiteKind.INPUT

    @property
    def on(self) -> str:
        """``a``, ``b`` or ``both``."""
        return "both" if self.matched else ("a" if self.a is not None else "b")


def join_sites(a: CaptureLike, b: CaptureLike, aliases: Mapping[str, str] | None = None) -> tuple[SitePair, ...]:
    """All sites in execution order: that of A, with the sites only B has placed after their predecessor in B.

    Args:
        a, b: the captures.
        aliases: site name of either capture -> canonical name, for operators the two sides name differently.
    """
    table = aliases or {}
    left, right = (
        {table.get(name, name): site for name, site in capture.sites.items() if site.meta.kind is not SiteKind.CALL}
        for capture in (a, b)
    )
    names = _merge(_ordered(left), _ordered(right))
    plain = not any(_quantises_unseen(capture) for capture in (a, b))
    pairs = []
    for name in names:
        one, two = left.get(name), right.get(name)
        if one is not None and two is not None and not _comparable(one.meta, two.meta):
            pairs.append(SitePair(name, parse_site(name), one, None))
            continue
        differ = _differ(one.meta, two.meta) if one is not None and two is not None else ""
        if one is None or two is None:
            one, two, differ = _plain_operand(name, left, right) if plain else (one, two, "")
        pairs.append(SitePair(name, parse_site(name), one, two, differ))
    return tuple(pairs)


def _comparable(a: SiteMeta, b: SiteMeta) -> bool:
    """Partial sums are compared with those of the same rank of as many ranks, never with anything else."""
    parts = [(s.count if s.partial else 0) if s is not None else 0 for s in (a.shard, b.shard)]
    return parts[0] == parts[1]


def _differ(a: SiteMeta, b: SiteMeta) -> str:
    if a.torch_dtype != b.torch_dtype:
        return f"dtype {a.torch_dtype} on A, {b.torch_dtype} on B"
    if prod(a.row_shape) != prod(b.row_shape):
        return f"row shape {list(a.row_shape)} on A, {list(b.row_shape)} on B"
    return ""


def _quantises_unseen(capture: CaptureLike) -> bool:
    """Whether the model is configured for FP8 or FP4 kernels of its own, which quantise without being seen."""
    config = fact(capture, "config")
    return isinstance(config, Mapping) and any(config.get(key) for key in ("fp8", "fp4"))


def _plain_operand(
    name: str, left: Mapping[str, SiteLike], right: Mapping[str, SiteLike]
) -> tuple[SiteLike | None, SiteLike | None, str]:
    """What stands against the operand of a product that one side alone puts into a block format.

    The other side multiplies the input of the layer as it is: it stands against what was quantised, and against what
    became of it.
    """
    one, two = left.get(name), right.get(name)
    owner, _, port = name.rpartition(":")
    layer = owner.removesuffix("/quantize")
    other = right if two is None else left
    if layer == owner or port not in ("in.0", "out.0") or f"{owner}:out.0" in other:
        return one, two, ""
    plain = other.get(f"{layer}:in")
    one, two = (one, plain) if two is None else (plain, two)
    if one is None or two is None or port == "in.0":
        return one, two, "" if one is None or two is None else _differ(one.meta, two.meta)
    return one, two, f"{'A' if other is left else 'B'} does not quantise: {_differ(one.meta, two.meta)}"


def _ordered(sites: Mapping[str, SiteLike]) -> list[str]:
    """Names by order of first occurrence, with sites that first ran in a later frame moved where they belong.

    An expert that got no token in the first frame is first seen after everything else of that frame. A site that
    comes after the output of a module round it, or after a deeper layer began, is put behind the sites of its layer
    that share most of its path.
    """
    names = sorted(sites, key=lambda name: (sites[name].meta.order, name))
    parsed = {name: parse_site(name) for name in names}
    closed: set[str] = set()  # modules whose output was seen
    deepest: dict[str, int] = {}
    placed: list[str] = []
    late: list[str] = []
    for name in names:
        site = parsed[name]
        is_late = site.layer < deepest.get(_stack(site), -1) or not closed.isdisjoint(_ancestors(site))
        (late if is_late else placed).append(name)
        if is_late:
            continue
        deepest[_stack(site)] = max(deepest.get(_stack(site), -1), site.layer)
        if not site.op and not site.is_input:
            closed.add(site.path)
    for name in late:
        placed.insert(_place_for(parsed[name], placed, parsed), name)
    return placed


def _stack(site: SiteName) -> str:
    """What the layers of a site are counted in: the path before ``layers.N``."""
    return site.path.split("layers.")[0] if site.layer >= 0 else ""


def _ancestors(site: SiteName) -> list[str]:
    """Paths of the modules round a site, its own excluded."""
    parts = site.module.split(".")
    end = len(parts) + 1 if site.op else len(parts)
    return [".".join(parts[:n]) for n in range(1, end)]


def _place_for(site: SiteName, placed: Sequence[str], parsed: Mapping[str, SiteName]) -> int:
    parts = site.owner.split(".")
    best, where = 0, len(placed)
    for index, name in enumerate(placed):
        other = parsed[name]
        closes_over = not other.op and not other.is_input and other.path in _ancestors(site)
        closes_over |= site.is_input and not other.is_input and other.owner == site.owner
        if other.layer != site.layer or _stack(other) != _stack(site) or closes_over:
            continue
        common = _common(parts, other.owner.split("."))
        if common >= best:
            best, where = common, index + 1
    return where


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _merge(a: Sequence[str], b: Sequence[str]) -> list[str]:
    in_a = set(a)
    behind: dict[str, list[str]] = defaultdict(list)
    anchor = ""
    for name in b:
        if name in in_a:
            anchor = name
        else:
            behind[anchor].append(name)
    merged = list(behind[""])
    for name in a:
        merged.append(name)
        merged.extend(behind.get(name, ()))
    return merged


def site_skips(sites: Sequence[SitePair], a: CaptureLike, b: CaptureLike) -> list[Skip]:
    """An entry for every site that one side lacks, and for matched sites whose rows have another layout."""
    skips = []
    for pair in sites:
        if pair.a is None or pair.b is None:
            here, there = ("B", a) if pair.a is None else ("A", b)
            shard = pair.meta.shard
            if shard is not None and shard.partial:
                why = f"partial sum of rank {shard.index} of {shard.count} on {here}: never compared with a full value"
                skips.append(Skip(f"site {pair.name}", why))
                continue
            why = (
                ": a state handed from call to call"
                if pair.meta.semantic.startswith("state_")
                else _why(pair.name, there)
            )
            skips.append(Skip(f"site {pair.name}", f"captured by {here} only{why}"))
        elif not pair.differ and pair.a.meta.row_shape != pair.b.meta.row_shape:
            shapes = f"{list(pair.a.meta.row_shape)} on A, {list(pair.b.meta.row_shape)} on B"
            skips.append(Skip(f"layout of {pair.name}", f"compared as flat rows: {shapes}"))
    return skips


def _why(name: str, other: CaptureLike) -> str:
    not_rows = fact(other, "not_rows") or {}
    shape = not_rows.get(name) if isinstance(not_rows, Mapping) else None
    return f" (the other side saw it without token rows: {shape})" if shape else ""
