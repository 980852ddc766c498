"""The bodies of the precision switches: linear layers whose operands are kept in a block format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from zkl_debug.engines import microscaling


@contextmanager
def _quantised(form: str, experts: bool) -> Iterator[None]:
    from zkl_debug.engines.megatron import seams

    def multiply(is_expert: bool, x: Tensor, weight: Tensor) -> Tensor | None:
        return microscaling.linear(x, weight, form) if is_expert == experts else None

    with seams.block_linears(multiply):
        yield


def mxfp8_linear() -> AbstractContextManager[None]:
    """Dense linear layers in MXFP8."""
    return _quantised("mxfp8", experts=False)


def mxfp8_experts() -> AbstractContextManager[None]:
    """Expert linear layers in MXFP8."""
    return _quantised("mxfp8", experts=True)


def nvfp4_linear() -> AbstractContextManager[None]:
    """Dense linear layers in per-token NVFP4."""
    return _quantised("nvfp4", experts=False)


def nvfp4_experts() -> AbstractContextManager[None]:
    """Expert linear layers in per-token NVFP4."""
    return _quantised("nvfp4", experts=True)
