"""Taking kernels out of a recorded CUDA graph by the driver's own calls; what ran behind them stays behind."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Any


def take_out(graph: int, nodes: Iterable[int]) -> set[int]:
    """Take nodes out of a graph; what ran behind one then runs behind what ran before it.

    An executable graph made of it earlier is not changed. A node whose edges the driver does not tell in full (a
    launch that may begin before the one before it has ended) or does not let go stays where it is.

    Args:
        graph: ``cudaGraph_t`` as an integer.
        nodes: ``cudaGraphNode_t`` of kernels of that graph.

    Returns:
        Those that were taken out.

    Raises:
        OSError: there is no driver.
    """
    driver = _driver()
    return {node for node in nodes if _take_out(driver, graph, node)}


def _take_out(driver: Any, graph: int, node: int) -> bool:
    before = _neighbours(driver.cuGraphNodeGetDependencies, node)
    behind = _neighbours(driver.cuGraphNodeGetDependentNodes, node)
    if before is None or behind is None:
        return False
    for first in before:
        known = _neighbours(driver.cuGraphNodeGetDependentNodes, first)
        if known is None:
            return False
        for second in behind:
            if second not in known and not _order(driver, graph, first, second):
                return False  # an edge too many changes nothing
    return bool(driver.cuGraphDestroyNode(ctypes.c_void_p(node)) == 0)


def _order(driver: Any, graph: int, first: int, second: int) -> bool:
    ends = [(ctypes.c_void_p * 1)(end) for end in (first, second)]
    status = driver.cuGraphAddDependencies(ctypes.c_void_p(graph), *ends, ctypes.c_size_t(1))
    return bool(status == 0)


def _neighbours(function: Any, node: int) -> list[int] | None:
    """Nodes at the other ends of a node's edges; None where the driver does not say."""
    count = ctypes.c_size_t()
    if function(ctypes.c_void_p(node), None, ctypes.byref(count)) != 0:
        return None
    found = (ctypes.c_void_p * count.value)()
    if count.value and function(ctypes.c_void_p(node), found, ctypes.byref(count)) != 0:
        return None
    return [int(handle or 0) for handle in found]


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
