"""What two captures of different layouts need to be compared: the same operators on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zkl_debug.diff.model import CaptureLike, Ints, SiteLike
from zkl_debug.schema import SiteMeta

_REDUCED = "/tp.reduce:out.0"


class _Renamed:
    """A site under another name."""

    def __init__(self, site: SiteLike, meta: SiteMeta) -> None:
        self._site, self.meta = site, meta

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site, name)

    def __len__(self) -> int:
        return len(self._site.rows)

    def payload(self, i: Ints) -> Any:
        """As that of the site."""
        return self._site.payload(i)


class Leveled:
    """A capture with further sites; everything else is the capture's."""

    def __init__(self, capture: CaptureLike, sites: Mapping[str, SiteLike]) -> None:
        self._capture, self.sites = capture, dict(sites)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture, name)


def level(a: CaptureLike, b: CaptureLike) -> tuple[CaptureLike, CaptureLike]:
    """Both captures with the same reductions.

    On one rank a linear's output is its sum; on several the sum comes out of a reduction. Where only one side has the
    reduction, the other side's output stands for it: there the reduction is the identity.
    """
    return _filled(a, b), _filled(b, a)


def _filled(capture: CaptureLike, other: CaptureLike) -> CaptureLike:
    added: dict[str, SiteLike] = {}
    for name, site in other.sites.items():
        if not name.endswith(_REDUCED) or name in capture.sites:
            continue
        output = capture.sites.get(name.removesuffix(_REDUCED) + ":out")
        if output is not None and output.meta.torch_dtype == site.meta.torch_dtype:
            meta = replace(output.meta, name=name, port="out.0", semantic=site.meta.semantic)
            added[name] = _Renamed(output, meta)
    if not added:
        return capture
    sites: dict[str, SiteLike] = {}
    by_output = {name.removesuffix(_REDUCED) + ":out": name for name in added}
    for name, site in capture.sites.items():
        if name in by_output:
            sites[by_output[name]] = added[by_output[name]]
        sites[name] = site
    return Leveled(capture, sites)
