"""The one-buffer trap: captured tensors that all view one reused buffer, as under a CUDA graph.

Such a capture compares equal with anything broken the same way, so it is refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import prod

import numpy as np

from zkl_debug.bits import DTYPES
from zkl_debug.diff.model import CaptureLike, Refusal, SiteLike, refuse
from zkl_debug.schema import U64, SiteName, parse_site

_LAYER = re.compile(r"(^|\.)layers\.\d+(?=\.|$)")
_MIN_ELEMENTS = 4
_MIN_SITES = 4
# Outputs that depend on weights or values of their own layer, unlike the residual stream of a zero-initialised layer.
_OWN_WEIGHTS = re.compile(r"linear|proj|fc\d|core_attention|experts")
_COMPUTES = re.compile(r"linear|norm|proj|output_layer|core_attention|gating|fc\d")


def check_buffers(name: str, capture: CaptureLike) -> Refusal | None:
    """Sites that cannot have the same values, but do in every row they share."""
    floats = {site: data for site, data in capture.sites.items() if _is_wide_float(data)}
    twins = _layers_alike(floats) or _all_alike(floats)
    if twins is None:
        return None
    return refuse(
        "one-buffer",
        f"capture {name} is not valid: {twins[0]} and {twins[1]} hold the same bytes in every row",
        "different operators whose captured tensors are all the same: they view one buffer that was reused",
        "tensors copied or digested at the time they are read",
        "capture without CUDA graphs, or with a probe that copies inside the graph",
        capture=name,
        sites=list(twins),
    )


def _is_wide_float(site: SiteLike) -> bool:
    info = DTYPES.get(site.meta.torch_dtype)
    return info is not None and info.is_float and prod(site.meta.row_shape) >= _MIN_ELEMENTS


def _layers_alike(sites: Mapping[str, SiteLike]) -> tuple[str, str] | None:
    """The same output in two layers. Inputs may be shared (masks, rotary tables); routing may agree by chance."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sites:
        parsed = parse_site(name)
        if parsed.layer >= 0 and not parsed.is_input and "router" not in parsed.owner:
            groups[_LAYER.sub(r"\1layers.*", name)].append(name)
    strong = [names for key, names in groups.items() if _OWN_WEIGHTS.search(parse_site(key).owner)]
    chosen = strong if any(len(names) > 1 for names in strong) else list(groups.values())
    return _first_twins(sites, (pair for names in chosen for pair in _neighbours(names)))


def _neighbours(names: list[str]) -> Iterator[tuple[str, str]]:
    ordered = sorted(names, key=lambda name: parse_site(name).layer)
    return pairwise(ordered)


def _first_twins(sites: Mapping[str, SiteLike], pairs: Iterator[tuple[str, str]]) -> tuple[str, str] | None:
    return next(((a, b) for a, b in pairs if same_bytes(sites[a], sites[b])), None)


def _all_alike(sites: Mapping[str, SiteLike]) -> tuple[str, str] | None:
    """All sites of one width. Only where an operator that changes values has both its input and its output there."""
    groups: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, site in sites.items():
        groups[site.meta.torch_dtype, prod(site.meta.row_shape)].append(name)
    for names in groups.values():
        worker = _input_and_output(names)
        if len(names) < _MIN_SITES or worker is None:
            continue
        if all(same_bytes(sites[names[0]], sites[name]) for name in names[1:]):
            return worker
    return None


def _input_and_output(names: list[str]) -> tuple[str, str] | None:
    ports: dict[str, dict[bool, str]] = defaultdict(dict)
    for name in names:
        parsed: SiteName = parse_site(name)
        if _COMPUTES.search(parsed.operator):
            ports[parsed.owner].setdefault(parsed.is_input, name)
    return next(((two[True], two[False]) for two in ports.values() if len(two) == 2), None)


def same_bytes(a: SiteLike, b: SiteLike) -> bool:
    """Whether two sites of a capture share rows and have equal digests, not all zero, in every one of them.

    Rows must also differ among themselves: an output that is the same for every token says nothing.
    """
    if a.meta.torch_dtype != b.meta.torch_dtype or prod(a.meta.row_shape) != prod(b.meta.row_shape):
        return False
    same_rows = a.rows is b.rows and bool((np.diff(a.rows) > 0).all())
    if same_rows and not np.array_equal(_head(a), _head(b)):
        return False  # seen from the first rows, without reading the others
    left, right = np.asarray(a.digest), np.asarray(b.digest)
    if not same_rows:
        _, at_a, at_b = np.intersect1d(a.rows, b.rows, return_indices=True)
        left, right = left[at_a], right[at_b]
    if not len(left) or not np.array_equal(left, right):
        return False
    return _varies(left)


def _head(site: SiteLike) -> U64:
    """Digests of the first rows of a site, as many as are cheap to read."""
    head = getattr(site, "head", None)
    return np.asarray(site.digest if head is None else head)


def _varies(digest: U64) -> bool:
    if not digest.any():
        return False
    return len(digest) == 1 or bool((digest != digest[0]).any())
