"""Which part of the whole model a rank holds: global names of its modules, and the part of a tensor that is its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: Elements of one axis: (first, count), in the order in which the rank has them.
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class AxisPart:
    """A rank's part of a tensor.

    Attributes:
        shape: of the whole tensor.
        axis: the axis that is cut.
        spans: what of it the rank has.
        index, count: its place in the group, and the group's size.
    """

    shape: tuple[int, ...]
    axis: int
    spans: Spans
    index: int
    count: int

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The rank's part of the whole tensor."""
        return torch.cat([whole.narrow(self.axis, first, count) for first, count in self.spans], self.axis)


def even_spans(width: int, index: int, count: int, blocks: int = 1) -> Spans:
    """The ``index``-th of ``count`` equal parts of each of ``blocks`` equal blocks (gate and up of a gated fc1: 2)."""
    block = width // blocks
    part = block // count
    return tuple((b * block + index * part, part) for b in range(blocks))


class ShardMap:
    """Global names and parts of a megatron-core model's modules and parameters.

    Everything is read off the modules themselves: layer numbers, local expert indices, the tensor-parallel group of
    each linear. A model of one rank maps to itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self._renames: list[tuple[re.Pattern[str], str]] = []
        self._modules: dict[str, nn.Module] = dict(model.named_modules())
        self._paths: dict[str, str] = {}
        for path, module in self._modules.items():
            self._layer(path, module)
            self._experts(path, module)

    def _layer(self, path: str, module: nn.Module) -> None:
        head, _, index = path.rpartition(".")
        number = getattr(module, "layer_number", None)
        if not index.isdigit() or not head.endswith("layers") or not isinstance(number, int) or number < 1:
            return
        if number - 1 != int(index):
            self._rename(path, f"{head}.{number - 1}")

    def _experts(self, path: str, module: nn.Module) -> None:
        indices = getattr(module, "local_expert_indices", None)
        if not indices or indices[0] == 0:
            return
        for local, index in enumerate(indices):
            self._rename(f"{path}.experts.local_experts.{local}", f"{path}.experts.local_experts.{index}")

    def _rename(self, local: str, whole: str) -> None:
        self._renames.append((re.compile(rf"^{re.escape(local)}(?=\.|/|:|$)"), whole))

    def path(self, local: str) -> str:
        """Name in the whole model of a module, parameter or site of this rank."""
        known = self._paths.get(local)
        if known is None:
            known = local
            # The deepest first: experts lie inside layers, and are named by local layers here.
            for pattern, whole in sorted(self._renames, key=lambda r: -len(r[0].pattern)):
                known = pattern.sub(whole, known, count=1)
            self._paths[local] = known
        return known

    @property
    def moves(self) -> bool:
        """Whether any name differs from the local one."""
        return bool(self._renames)

    def module(self, local: str) -> nn.Module | None:
        """The module of that local path."""
        return self._modules.get(local)

    def parameter(self, local: str, value: torch.Tensor) -> AxisPart | None:
        """This rank's part of a parameter, None where it has all of it."""
        owner, _, leaf = local.rpartition(".")
        module = self._modules.get(owner)
        if module is None or not getattr(value, "tensor_model_parallel", False):
            return None
        index, count = place_in_group(module)
        axis = int(getattr(value, "partition_dim", 0))
        if count == 1:
            return None
        shape = list(value.shape)
        shape[axis] *= count
        blocks = 2 if leaf in ("weight", "bias") and axis == 0 and is_gated(owner, module) else 1
        return AxisPart(tuple(shape), axis, even_spans(shape[axis], index, count, blocks), index, count)


def place_in_group(module: Any) -> tuple[int, int]:
    """(rank, size) of the tensor-parallel group a module works in; (0, 1) where it works in none."""
    group = getattr(module, "tp_group", None) or getattr(module, "_tp_group", None)
    if group is None or not hasattr(group, "size"):
        return 0, 1
    return int(group.rank()), int(group.size())


def is_gated(path: str, module: Any) -> bool:
    """Whether a linear is the fc1 of a gated MLP: gate in the first half of its output, up in the second."""
    config = getattr(module, "config", None)
    return path.rpartition(".")[2] == "linear_fc1" and bool(getattr(config, "gated_linear_unit", False))


def config_sizes(config: Any) -> Mapping[str, int]:
    """Sizes of the groups a config was made for."""
    return {
        "tp": int(getattr(config, "tensor_model_parallel_size", 1) or 1),
        "etp": int(getattr(config, "expert_tensor_parallel_size", 1) or 1),
    }
