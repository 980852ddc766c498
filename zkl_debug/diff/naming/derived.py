"""Sites under another name, and sites made of the raw bits of others: lanes of a fused tensor, a choice as a map."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bits import dtype_info
from zkl_debug.diff.model import CaptureLike, Ints, SiteLike
from zkl_debug.diff.sound import sound_bits
from zkl_debug.digest import digest_rows
from zkl_debug.schema import U64, Json, SiteMeta, StateRecord, parse_site


class RenamedSite:
    """A site under its common name; everything else is the site's own."""

    def __init__(self, site: SiteLike, name: str) -> None:
        self._site = site
        parsed = parse_site(name)
        self.meta = replace(site.meta, name=name, layer=parsed.layer, port=parsed.port)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site, name)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def rows(self) -> Ints:
        """Index of each site row into the capture's rows."""
        return self._site.rows

    @property
    def digest(self) -> U64:
        """Digest of each site row."""
        return self._site.digest

    @property
    def has_payload(self) -> bool:
        """Whether raw bits of any row are there."""
        return self._site.has_payload

    @property
    def payload_index(self) -> Ints:
        """Which of the site's rows have raw bits."""
        return self._site.payload_index

    def payload(self, i: Ints, /) -> NDArray[Any]:
        """Raw bits of the given site rows."""
        return self._site.payload(i)


class DerivedSite:
    """Rows computed from the raw bits of one or more sites that were recorded for the same rows.

    Args:
        meta: of the result.
        sources: where the bits come from; rows that not all of them have are left out.
        make: raw bits of the sources, [m, W] each, to raw bits of the result, [m, W'].
    """

    def __init__(
        self, meta: SiteMeta, sources: Sequence[SiteLike], make: Callable[..., NDArray[np.unsignedinteger[Any]]]
    ) -> None:
        self.meta = meta
        self._sources = sources
        self._make = make

    @cached_property
    def _places(self) -> list[Ints]:
        """Rows of each source, in the order of this site's rows."""
        have = [np.asarray(site.rows, np.int64)[site.payload_index] for site in self._sources]
        firsts = [np.unique(rows, return_index=True) for rows in have]
        common = firsts[0][0]
        for rows, _ in firsts[1:]:
            common = np.intersect1d(common, rows)
        places = []
        for site, (rows, first) in zip(self._sources, firsts, strict=True):
            places.append(np.asarray(site.payload_index, np.int64)[first[np.searchsorted(rows, common)]])
        return places

    def __len__(self) -> int:
        return len(self._places[0])

    @cached_property
    def rows(self) -> Ints:
        """Index of each site row into the capture's rows."""
        return np.asarray(self._sources[0].rows, np.int64)[self._places[0]]

    @cached_property
    def digest(self) -> U64:
        """Digest of each derived row."""
        bits = self.payload(np.arange(len(self)))
        return digest_rows(np.ascontiguousarray(bits).view(np.uint8).reshape(len(bits), -1))

    @property
    def has_payload(self) -> bool:
        """Always, where there are rows."""
        return len(self) > 0

    @property
    def payload_index(self) -> Ints:
        """Every row."""
        return np.arange(len(self), dtype=np.int64)

    def payload(self, i: Ints, /) -> NDArray[Any]:
        """Raw bits of the given rows; what they are computed from is checked, for their digests are made of it."""
        bits = [sound_bits(site, places[i]) for site, places in zip(self._sources, self._places, strict=True)]
        return np.ascontiguousarray(self._make(*bits))


class RenamedCapture:
    """A capture whose sites and parameters go by common names."""

    def __init__(
        self, capture: CaptureLike, sites: Mapping[str, SiteLike], states: Mapping[int, Sequence[StateRecord]]
    ) -> None:
        self.original = capture
        self._sites = sites
        self._states = states

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    @property
    def side(self) -> str:
        """Label of the observed system."""
        return self.original.side

    @property
    def meta(self) -> Mapping[str, Json]:
        """What is known of the observed program."""
        return self.original.meta

    @property
    def manifest(self) -> Mapping[str, Json]:
        """The manifest."""
        return self.original.manifest

    @property
    def frames(self) -> NDArray[Any]:
        """Frames."""
        return self.original.frames

    @property
    def rows(self) -> NDArray[Any]:
        """Rows."""
        return self.original.rows

    @property
    def sites(self) -> Mapping[str, SiteLike]:
        """Sites by common name."""
        return self._sites

    @property
    def states(self) -> Mapping[int, Sequence[StateRecord]]:
        """State snapshots, their records by common name."""
        return self._states


def lane_index(layout: str, parts: int, width: int, config: Mapping[str, Json]) -> list[Ints] | None:
    """Which elements of a fused row belong to each part; None where the configuration does not tell.

    ``halves``: equal pieces, one after the other. ``per-group`` and ``all-q-all-k-all-v`` need the numbers of heads
    and of key-value groups and the width of a head, under megatron-core's or transformers' names.
    """
    if layout == "halves":
        return None if width % parts else list(np.arange(width).reshape(parts, -1))
    heads = _number(config, "num_attention_heads")
    groups = _number(config, "num_query_groups", "num_key_value_heads") or heads
    if heads is None or groups is None or heads % groups or width % (heads + 2 * groups):
        return None
    head = width // (heads + 2 * groups)
    stated = _number(config, "kv_channels", "head_dim")
    if stated is not None and stated != head:
        return None
    if layout == "per-group":
        blocks = np.arange(width).reshape(groups, heads // groups + 2, head)
        return [blocks[:, :-2].reshape(-1), blocks[:, -2].reshape(-1), blocks[:, -1].reshape(-1)]
    q, k = heads * head, groups * head
    return [np.arange(q), np.arange(q, q + k), np.arange(q + k, width)]


def _number(config: Mapping[str, Json], *names: str) -> int | None:
    found = (config.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def lanes_of(site: SiteLike, name: str, index: Ints) -> DerivedSite:
    """A part of a fused site: the elements ``index`` of each row."""
    meta = replace(site.meta, name=name, port="out.0", row_shape=(len(index),), semantic="lanes")
    return DerivedSite(meta, [site], lambda bits: bits[:, index])


def sparse_of(weights: SiteLike, ids: SiteLike, width: int, owner: str) -> tuple[DerivedSite, DerivedSite]:
    """A router's choice told as ids [k] and weights [k], as weights [experts] and a map [experts]."""
    info = dtype_info(ids.meta.torch_dtype)

    def numbers(raw: NDArray[Any]) -> Ints:
        return raw.view(f"<{'i' if info.is_signed else 'u'}{info.itemsize}").astype(np.int64)

    def chosen(raw: NDArray[Any]) -> NDArray[np.uint8]:
        wanted = numbers(raw)
        found = np.zeros((len(raw), width + 1), np.uint8)
        np.put_along_axis(found, np.where((wanted >= 0) & (wanted < width), wanted, width), 1, axis=1)
        return found[:, :width]

    def spread(values: NDArray[Any], raw: NDArray[Any]) -> NDArray[Any]:
        wanted = numbers(raw)
        found = np.zeros((len(raw), width + 1), values.dtype)
        np.put_along_axis(found, np.where((wanted >= 0) & (wanted < width), wanted, width), values, axis=1)
        return found[:, :width]

    first = replace(weights.meta, name=f"{owner}:out.0", port="out.0", row_shape=(width,), semantic="router.topk")
    second = replace(
        ids.meta, name=f"{owner}:out.1", port="out.1", row_shape=(width,), torch_dtype="bool", semantic="router.topk"
    )
    return DerivedSite(first, [weights, ids], spread), DerivedSite(second, [ids], chosen)
