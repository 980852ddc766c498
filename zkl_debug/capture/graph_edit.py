"""A recorded CUDA graph without some of its kernels, executable beside it; made by the driver's own calls."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import torch

_CALLS = (
    "cuGraphClone", "cuGraphNodeFindInClone", "cuGraphNodeGetDependencies", "cuGraphNodeGetDependentNodes",
    "cuGraphAddDependencies", "cuGraphDestroyNode", "cuGraphExecGetFlags", "cuGraphInstantiateWithFlags",
    "cuGraphDestroy", "cuGraphLaunch", "cuGraphExecDestroy",
)  # fmt: skip


class Executable:
    """A graph that can be launched on the current stream of the device it was made on; freed with this object.

    Raises:
        OSError: the driver refuses to make it.
    """

    def __init__(self, graph: int, flags: int) -> None:
        self._driver = _driver()
        self._device = torch.cuda.current_device()
        self._exec = ctypes.c_void_p()
        status = self._driver.cuGraphInstantiateWithFlags(
            ctypes.byref(self._exec), ctypes.c_void_p(graph), ctypes.c_ulonglong(flags)
        )
        if status != 0:
            raise OSError(f"a graph without the first readings cannot be made: CUDA error {status}")

    @property
    def ready(self) -> bool:
        """Whether this is the device it was made on."""
        return bool(torch._C._cuda_getDevice() == self._device)

    def launch(self) -> None:
        """Launch it on the current stream.

        Raises:
            OSError: the driver refuses.
        """
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self._device))
        status = self._driver.cuGraphLaunch(self._exec, stream)
        if status != 0:
            raise OSError(f"a graph without the first readings cannot be launched: CUDA error {status}")

    def __del__(self) -> None:
        if self._exec.value:
            self._driver.cuGraphExecDestroy(self._exec)


def without(template: int, executable: int, nodes: Iterable[int]) -> tuple[Executable, set[int]] | None:
    """A graph without some of its nodes; what ran behind one of them then runs behind what ran before it.

    The graph itself is not changed. A node whose edges the driver does not tell in full (a launch that may begin before
    the one before it has ended) or does not let go stays.

    Args:
        template: ``cudaGraph_t`` as an integer.
        executable: ``cudaGraphExec_t`` made of it, whose way of being made is taken over.
        nodes: ``cudaGraphNode_t`` of kernels of the template.

    Returns:
        The graph and the nodes that it lacks; None when it would lack none.

    Raises:
        OSError: there is no driver, or it refuses.
    """
    driver = _driver()
    copy, flags = ctypes.c_void_p(), ctypes.c_ulonglong()
    if driver.cuGraphClone(ctypes.byref(copy), ctypes.c_void_p(template)) != 0:
        raise OSError("the graph cannot be copied")
    try:
        gone = {node for node in nodes if _take_out(driver, copy, node)}
        if not gone:
            return None
        if driver.cuGraphExecGetFlags(ctypes.c_void_p(executable), ctypes.byref(flags)) != 0:
            raise OSError("how the graph was made executable cannot be told")
        return Executable(copy.value or 0, flags.value), gone
    finally:
        driver.cuGraphDestroy(copy)


def _take_out(driver: Any, graph: ctypes.c_void_p, original: int) -> bool:
    found = ctypes.c_void_p()
    if driver.cuGraphNodeFindInClone(ctypes.byref(found), ctypes.c_void_p(original), graph) != 0:
        return False
    node = found.value or 0
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
    return bool(driver.cuGraphDestroyNode(found) == 0)


def _order(driver: Any, graph: ctypes.c_void_p, first: int, second: int) -> bool:
    ends = [(ctypes.c_void_p * 1)(end) for end in (first, second)]
    return bool(driver.cuGraphAddDependencies(graph, *ends, ctypes.c_size_t(1)) == 0)


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
    driver = ctypes.CDLL("libcuda.so.1")
    missing = [name for name in _CALLS if not hasattr(driver, name)]
    if missing:
        raise OSError(f"this driver has no {missing[0]}")
    return driver
