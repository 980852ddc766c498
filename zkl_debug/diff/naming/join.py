"""The join of two captures by common names: what is renamed, taken apart, or left out, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from zkl_debug.bits import DTYPES
from zkl_debug.diff.model import CaptureLike, SiteLike, Skip, fact
from zkl_debug.diff.naming.derived import RenamedCapture, RenamedSite, lane_index, lanes_of, sparse_of
from zkl_debug.diff.naming.rules import Family, Lanes, families_of, filled, matches, modules_of
from zkl_debug.schema import Json, StateRecord

_NAMES = ("A", "B")


@dataclass(frozen=True)
class Renaming:
    """One site of a side in the join: its own name, and how it came to the common one (empty: it has it anyway)."""

    own: str
    how: str = ""


@dataclass
class _Side:
    """A side while it is being joined.

    Attributes:
        capture: as it was opened.
        families: that it belongs to, those of the user first.
        sites, names: by common name.
        left_out: own name -> why it cannot be joined.
        fused: common name -> (own name, lanes) of fused sites.
    """

    capture: CaptureLike
    families: tuple[Family, ...]
    modules: frozenset[str]
    sites: dict[str, SiteLike] = field(default_factory=dict)
    names: dict[str, Renaming] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    fused: dict[str, tuple[str, Lanes]] = field(default_factory=dict)

    def common(self, name: str) -> tuple[str, str]:
        """Common name, and the family it is from."""
        for family in self.families:
            found = family.common(name, self.modules)
            if found is not None:
                return found, family.name
        return name, ""

    def drop(self, common: str, reason: str) -> None:
        """Take a site out of the join; the reason is told."""
        self.left_out[self.names.pop(common).own] = reason
        del self.sites[common]


@dataclass(frozen=True)
class Joined:
    """Two captures under common names.

    Attributes:
        a, b: the captures; the very same objects where nothing had to be done.
        families: names of the families of each side.
        names: of each side, common name -> :class:`Renaming`; empty where nothing had to be done.
        left_out: of each side, own name -> why it is not in the join.
    """

    a: CaptureLike
    b: CaptureLike
    families: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    names: tuple[Mapping[str, Renaming], Mapping[str, Renaming]] = field(default_factory=lambda: ({}, {}))
    left_out: tuple[Mapping[str, str], Mapping[str, str]] = field(default_factory=lambda: ({}, {}))

    @property
    def changed(self) -> bool:
        """Whether any site goes by another name, or was taken apart."""
        return any(renaming.how for names in self.names for renaming in names.values()) or any(self.left_out)

    def own(self, common: str) -> tuple[str | None, str | None]:
        """The name of a site on each side; None where it has none."""
        if not self.names[0] and not self.names[1]:
            sides = [common if common in capture.sites else None for capture in (self.a, self.b)]
            return sides[0], sides[1]
        found = [side[common].own if common in side else None for side in self.names]
        return found[0], found[1]

    def skips(self) -> tuple[Skip, ...]:
        """Sites that are not in the join."""
        return tuple(
            Skip(f"site {own} of {name}", reason)
            for name, side in zip(_NAMES, self.left_out, strict=True)
            for own, reason in side.items()
        )

    def to_json(self) -> Json:
        """How the names were joined, for the checks of a verdict."""
        renamed = [sum(1 for r in side.values() if r.how) for side in self.names]
        return {
            "a": {"families": list(self.families[0]), "renamed": renamed[0], "left_out": dict(self.left_out[0])},
            "b": {"families": list(self.families[1]), "renamed": renamed[1], "left_out": dict(self.left_out[1])},
        }


def join_names(a: CaptureLike, b: CaptureLike, maps: Sequence[Family] = ()) -> Joined:
    """Bring the sites and parameters of two captures under common names.

    Captures of one kind of model keep their names: nothing is renamed unless their families differ, the user gives a
    map, or one of them tells a router's choice as ids.

    Args:
        a, b: the captures.
        maps: the user's own, in the format of a family; they come before the known ones.
    """
    modules = [modules_of(_all_names(capture)) for capture in (a, b)]
    families = [families_of(found) for found in modules]
    same = families[0] == families[1]
    labels = (tuple(f.name for f in families[0]), tuple(f.name for f in families[1]))
    by_id = [_dense(capture) for capture in (a, b)]
    if same and not maps and by_id[0] == by_id[1]:
        return Joined(a, b, labels)
    one, two = (
        _Side(capture, (*maps, *(() if same else known)), found)
        for capture, known, found in zip((a, b), families, modules, strict=True)
    )
    for side, told_alike in ((one, by_id[1]), (two, by_id[0])):
        _rename(side)
        _make_sparse(side, told_alike)
    for side, other in ((one, two), (two, one)):
        _take_apart(side, other)
    joined = [RenamedCapture(side.capture, side.sites, _states(side)) for side in (one, two)]
    names, left_out = (one.names, two.names), (one.left_out, two.left_out)
    return Joined(joined[0], joined[1], labels, names, left_out)


def _all_names(capture: CaptureLike) -> Iterator[str]:
    yield from capture.sites
    for records in capture.states.values():
        yield from (record.name for record in records if ":" not in record.name)


def _rename(side: _Side) -> None:
    for own, site in sorted(side.capture.sites.items(), key=lambda item: (item[1].meta.order, item[0])):
        common, how = side.common(own)
        if common in side.sites:
            side.left_out[own] = _second(side.names[common].own, side.sites[common], site)
            continue
        side.sites[common] = site if common == own else RenamedSite(site, common)
        side.names[common] = Renaming(own, how if common != own else "")
        lanes = next((x for f in side.families for x in f.lanes if matches(x.site, own) is not None), None)
        if lanes is not None:
            side.fused[common] = own, lanes


def _second(first_name: str, first: SiteLike, second: SiteLike) -> str:
    """What is said of a second site in one place."""
    equal = np.array_equal(first.rows, second.rows) and np.array_equal(first.digest, second.digest)
    if equal:
        return f"equal to {first_name} in every row, which stands for both"
    return f"not compared: {first_name} is in the same place, and they differ"


# ---- fused tensors --------------------------------------------------------------------------------------------------
def _part(common: str, part: str) -> str:
    return f"{common.rpartition(':')[0]}/{part}:out.0"


def _take_apart(side: _Side, other: _Side) -> None:
    """Split fused sites whose parts, or lanes in another order, the other side has."""
    for common, (own, lanes) in side.fused.items():
        parts = [_part(common, part) for part in lanes.parts]
        theirs = other.fused.get(common)
        if theirs is not None and theirs[1].layout == lanes.layout and theirs[1].parts == lanes.parts:
            continue
        if theirs is None and not any(name in other.sites for name in parts):
            continue
        site = side.sites[common]
        reason = _not_separable(side, site, lanes)
        index = None if reason else lane_index(lanes.layout, len(parts), site.meta.row_shape[-1], _config(side))
        if index is None:
            unknown = f"how its lanes lie ({lanes.layout}) does not follow from the configuration"
            side.drop(common, f"not joinable: {reason or unknown}")
            continue
        side.drop(common, f"compared by parts: {', '.join(lanes.parts)}")
        for name, elements in zip(parts, index, strict=True):
            side.sites[name] = lanes_of(site, name, elements)
            side.names[name] = Renaming(own, f"lanes, {lanes.layout}")


def _not_separable(side: _Side, site: SiteLike, lanes: Lanes) -> str:
    if not site.has_payload:
        return "it is fused here and in parts there, and without raw bits (--level payload) it cannot be taken apart"
    info = DTYPES.get(site.meta.torch_dtype)
    if info is None or info.is_packed or len(site.meta.row_shape) != 1:
        return f"a row of {site.meta.torch_dtype} {list(site.meta.row_shape)} cannot be taken apart"
    if site.meta.tp_axis >= 0:
        return "it is one rank's share of a fused tensor"
    if lanes.layout == "halves" and _config(side).get("gated_linear_unit") is False:
        return "it is not gated: it has no two halves"
    return ""


def _config(side: _Side) -> Mapping[str, Json]:
    config = fact(side.capture, "config")
    return config if isinstance(config, Mapping) else {}


# ---- router choices -------------------------------------------------------------------------------------------------
def _dense(capture: CaptureLike) -> frozenset[str]:
    """Owners of router choices that are told as ids."""
    return frozenset(
        name.rpartition(":")[0]
        for name, site in capture.sites.items()
        if name.endswith("router.topk:out.1") and site.meta.torch_dtype != "bool"
    )


def _make_sparse(side: _Side, told_alike: frozenset[str]) -> None:
    """Router choices told as ids become maps over all experts, unless the other side tells them by id as well."""
    for owner in sorted(_dense(side.capture) - told_alike):
        logits = side.sites.get(f"{owner}:in.0")
        weights, ids = side.sites.get(f"{owner}:out.0"), side.sites.get(f"{owner}:out.1")
        own = ""
        for name in (f"{owner}:out.0", f"{owner}:out.1"):
            if name in side.sites:
                own = side.names[name].own
                side.drop(name, "not joinable: it tells experts by id, and without raw bits there is no map of them")
        _add_sparse(side, owner, logits, weights, ids, own)
    for family in side.families:
        for rule in family.sparse:
            for name in list(side.capture.sites):
                numbers = matches(rule.ids, name)
                if numbers is None or not all(filled(w, numbers) in side.modules for w in rule.when):
                    continue
                wide, weights, ids = (
                    side.capture.sites.get(filled(text, numbers)) for text in (rule.width, rule.weights, rule.ids)
                )
                _add_sparse(side, filled(rule.to, numbers), wide, weights, ids, name)


def _add_sparse(
    side: _Side, owner: str, wide: SiteLike | None, weights: SiteLike | None, ids: SiteLike | None, own: str
) -> None:
    if wide is None or weights is None or ids is None or not (weights.has_payload and ids.has_payload):
        return
    for own_port in ("out.0", "out.1"):
        if f"{owner}:{own_port}" in side.left_out:
            side.left_out[f"{owner}:{own_port}"] = "compared as a map over all experts"
    logits = f"{owner}:in.0"
    if logits not in side.sites:  # what the choice was made from: one tensor under two names
        side.sites[logits] = RenamedSite(wide, logits)
        side.names[logits] = Renaming(wide.meta.name, "logits of the choice")
    for made in sparse_of(weights, ids, wide.meta.row_shape[-1], owner):
        side.sites[made.meta.name] = made
        side.names[made.meta.name] = Renaming(own, "ids as a map over all experts")


# ---- parameters -----------------------------------------------------------------------------------------------------
def _states(side: _Side) -> dict[int, list[StateRecord]]:
    found: dict[int, list[StateRecord]] = {}
    for seq, records in side.capture.states.items():
        taken: set[str] = set()
        kept = found.setdefault(seq, [])
        for record in records:
            name, _, part = record.name.partition(":")
            common = side.common(name)[0] + (f":{part}" if part else "")
            common = record.name if common in taken else common
            taken.add(common)
            kept.append(replace(record, name=common))
    return found
