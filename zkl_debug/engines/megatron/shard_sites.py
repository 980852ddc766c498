"""What of a site's whole row one rank has, under tensor parallel: read off the module that makes or takes it."""

from __future__ import annotations

from typing import Any

from zkl_debug.capture.state import TensorPart
from zkl_debug.engines.megatron.shard_map import ShardMap, Spans, even_spans, is_gated, place_in_group
from zkl_debug.schema import Shard, SiteName, parse_site

#: Collectives of tensor parallel as operators inside the module that calls them.
REDUCE, GATHER = "tp.reduce", "tp.gather"
_HEADS = ("qkv", "rope.q", "rope.k")
_HEAD_NORMS = ("q_layernorm", "k_layernorm")


class ShardSites:
    """Shards of the sites of one model.

    Args:
        model: this rank's part of the model.
        tp, etp: (rank, size) of the tensor-parallel group of attention and dense MLPs, and of the experts.
    """

    def __init__(self, model: Any, tp: tuple[int, int], etp: tuple[int, int]) -> None:
        self.map = ShardMap(model)
        self.tp, self.etp = tp, etp
        self._modules = {self.map.path(path): module for path, module in model.named_modules()}

    @property
    def needed(self) -> bool:
        """Whether any site can be a shard."""
        return self.tp[1] > 1 or self.etp[1] > 1

    def parameter_part(self, local: str, tensor: Any) -> TensorPart:
        """Name and place of a parameter or buffer in the whole model."""
        part = self.map.parameter(local, tensor)
        name = self.map.path(local)
        if part is None:
            return TensorPart(name)
        return TensorPart(name, part.shape, part.axis, part.spans, part.index, part.count)

    def shard_of(self, name: str, semantic: str, row_shape: tuple[int, ...], itemsize: int) -> Shard | None:
        """The rank's part of a site's row, None where it has all of it."""
        site = parse_site(name)
        op = site.op.split("#")[0]
        if op in (REDUCE, GATHER):
            return self._collective(site, op, row_shape, itemsize)
        if op.partition(".")[0] == "router" or op in ("permute", "unpermute", "dispatch"):
            return None
        if op:
            return self._heads(row_shape, itemsize) if op in _HEADS else None
        return self._module(site, semantic, row_shape, itemsize)

    def _group_of(self, path: str) -> tuple[int, int]:
        return self.etp if ".experts" in path else self.tp

    def _collective(self, site: SiteName, op: str, row_shape: tuple[int, ...], itemsize: int) -> Shard | None:
        index, count = self._group_of(site.path)
        if not site.is_input or count == 1:
            return None
        if op == REDUCE:
            return _partial(index, count, row_shape)
        return _even(index, count, row_shape, len(row_shape) - 1, 1, itemsize)

    def _heads(self, row_shape: tuple[int, ...], itemsize: int) -> Shard | None:
        """Heads come first in the row; a rank has a run of them."""
        index, count = self.tp
        return None if count == 1 or not row_shape else _even(index, count, row_shape, 0, 1, itemsize)

    def _module(self, site: SiteName, semantic: str, row_shape: tuple[int, ...], itemsize: int) -> Shard | None:
        path = site.path.split("#")[0]
        leaf = path.rpartition(".")[2]
        if semantic == "core_attention" or leaf == "core_attention" or leaf in _HEAD_NORMS:
            return self._heads(row_shape, itemsize)
        module = self._modules.get(path)
        way = parallel_way(module)
        index, count = place_in_group(module)
        if not way or count == 1:
            return self._expert_sum(path, leaf, site, row_shape)
        last = len(row_shape) - 1
        if way == "column" and not site.is_input and not getattr(module, "gather_output", False):
            return _even(index, count, row_shape, last, 2 if is_gated(path, module) else 1, itemsize)
        if way == "row" and site.is_input:
            return _even(index, count, row_shape, last, 1, itemsize)
        if way == "row" and getattr(module, "explicit_expert_comm", False):
            return _partial(index, count, row_shape)
        return None

    def _expert_sum(self, path: str, leaf: str, site: SiteName, row_shape: tuple[int, ...]) -> Shard | None:
        """Under expert tensor parallel what leaves an expert is a partial sum; it is added up when it comes back."""
        index, count = self.etp
        whole = leaf == "experts" or (leaf.isdigit() and ".local_experts." in path)
        return _partial(index, count, row_shape) if count > 1 and whole and not site.is_input else None


def parallel_way(module: Any) -> str:
    """``column``, ``row`` or empty: how a linear is cut, by Transformer Engine's attribute or megatron-core's class."""
    way = getattr(module, "parallel_mode", None)
    if way in ("column", "row"):
        return str(way)
    names = [cls.__name__ for cls in type(module).__mro__]
    if any("ColumnParallel" in name for name in names):
        return "column"
    return "row" if any("RowParallel" in name for name in names) else ""


def _partial(index: int, count: int, row_shape: tuple[int, ...]) -> Shard:
    return Shard("tp", index, count, row_shape, partial=True)


def _even(index: int, count: int, row_shape: tuple[int, ...], axis: int, blocks: int, itemsize: int) -> Shard:
    shape = list(row_shape)
    shape[axis] *= count
    spans = even_spans(shape[axis], index, count, blocks)
    return Shard("tp", index, count, tuple(shape), flat_pieces(tuple(shape), axis, spans, itemsize))


def flat_pieces(shape: tuple[int, ...], axis: int, spans: Spans, itemsize: int) -> tuple[tuple[int, int], ...]:
    """Spans of one axis of a row as runs of its elements; none when a run is not whole 32-bit lanes."""
    inner = 1
    for size in shape[axis + 1 :]:
        inner *= size
    outer = 1
    for size in shape[:axis]:
        outer *= size
    width = shape[axis] * inner
    runs = [(o * width + first * inner, count * inner) for o in range(outer) for first, count in spans]
    if any(first * itemsize % 4 or count * itemsize % 4 for first, count in runs):
        return ()
    return tuple(runs)
