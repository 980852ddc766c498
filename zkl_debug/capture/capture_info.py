"""Whether anything was recorded into a CUDA graph between two moments, asked of the CUDA runtime itself."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_ACTIVE = 1  # cudaStreamCaptureStatusActive
#: (library, function, whether it also returns edge data) from the newest on.
_FUNCTIONS = (
    ("libcudart.so.13", "cudaStreamGetCaptureInfo", True),
    ("libcudart.so.12", "cudaStreamGetCaptureInfo_v2", False),
)


def last_nodes() -> tuple[int, ...] | None:
    """Handles of the nodes that the next recorded kernel will depend on; None when nothing can be said.

    As long as this is unchanged, no kernel, copy or memset was recorded on the current stream.
    """
    found = _function()
    if found is None:
        return None
    function, with_edges = found
    status = ctypes.c_int()
    identity = ctypes.c_ulonglong()
    graph, nodes, edges = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    count = ctypes.c_size_t()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    arguments: list[Any] = [stream, *(ctypes.byref(v) for v in (status, identity, graph, nodes))]
    if with_edges:
        arguments.append(ctypes.byref(edges))
    if function(*arguments, ctypes.byref(count)) != 0 or status.value != _ACTIVE or not nodes.value:
        return None
    handles = ctypes.cast(nodes, ctypes.POINTER(ctypes.c_void_p))
    return tuple(handles[i] or 0 for i in range(count.value))


@functools.cache
def _function() -> tuple[Any, bool] | None:
    for library, name, with_edges in _FUNCTIONS:
        try:
            function = getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_int
        return function, with_edges
    return None
