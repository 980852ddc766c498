"""The batch-invariant overrides of megatron-core 0.19.2, each by itself and reversible.

megatron-core turns all of them on together (``enable_batch_invariant_mode``), and its undo leaves the mode on when
TransformerEngine is missing. Here each override is put in place alone, from the same functions. Its TE functions ask a
module flag and saved originals before they act: both are set while one of them is on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from zkl_debug.engines.patching import PatchSet

_libraries: dict[str, torch.library.Library] = {}
_te_on: dict[str, int] = {}


def _kernels() -> Any:
    import megatron.core.transformer.custom_layers.batch_invariant_kernels as kernels

    return kernels


def _dispatch_key() -> str:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        raise ImportError("the batch-invariant kernels need a GPU")
    return accelerator.type.upper()


@contextmanager
def _aten(operator: str, function: str) -> Iterator[None]:
    """One ATen operator replaced on the accelerator."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = getattr(_kernels(), function)
        library.impl(operator, kernel, _dispatch_key(), allow_override=True)  # type: ignore[no-untyped-call]
    _libraries[operator] = library
    try:
        yield
    finally:
        _libraries.pop(operator)._destroy()  # type: ignore[no-untyped-call]


@contextmanager
def mm() -> Iterator[None]:
    """aten::mm."""
    with _aten("mm", "mm_batch_invariant"):
        yield


@contextmanager
def addmm() -> Iterator[None]:
    """aten::addmm."""
    with _aten("addmm", "addmm_batch_invariant"):
        yield


@contextmanager
def log_softmax() -> Iterator[None]:
    """aten::_log_softmax."""
    with _aten("_log_softmax", "_log_softmax_batch_invariant"):
        yield


@contextmanager
def mean_dim() -> Iterator[None]:
    """aten::mean.dim."""
    with _aten("mean.dim", "mean_batch_invariant"):
        yield


def mm_is_on() -> bool:
    """Whether the override of mm is registered."""
    return "mm" in _libraries


def addmm_is_on() -> bool:
    """Whether the override of addmm is registered."""
    return "addmm" in _libraries


def log_softmax_is_on() -> bool:
    """Whether the override of log-softmax is registered."""
    return "_log_softmax" in _libraries


def mean_dim_is_on() -> bool:
    """Whether the override of mean is registered."""
    return "mean.dim" in _libraries


# --- TransformerEngine ------------------------------------------------------------------------------------------------


@contextmanager
def _te(name: str, replace: Callable[[Any, PatchSet], None]) -> Iterator[None]:
    """Attributes of TE replaced by ``replace``, with megatron-core's flag on."""
    kernels = _kernels()
    with PatchSet() as patches:
        patches.set(kernels, "_batch_invariant_MODE", True)
        replace(kernels, patches)
        _te_on[name] = _te_on.get(name, 0) + 1
        try:
            yield
        finally:
            _te_on[name] -= 1


def _modules(*names: str) -> list[Any]:
    import importlib

    return [importlib.import_module(name) for name in names]


@contextmanager
def te_gemm() -> Iterator[None]:
    """``general_gemm`` wherever TE's linears and megatron-core look it up."""

    def replace(kernels: Any, patches: PatchSet) -> None:
        first, *rest = _modules(
            "transformer_engine.pytorch.cpp_extensions",
            "transformer_engine.pytorch.module.linear",
            "transformer_engine.pytorch.module.layernorm_linear",
            "megatron.core.extensions.transformer_engine",
        )
        patches.set(kernels, "_TE_GENERAL_GEMM_ORIG", first.general_gemm)
        for module in (first, *rest):
            if hasattr(module, "general_gemm"):
                patches.set(module, "general_gemm", kernels._te_general_gemm_patched)

    with _te("gemm", replace):
        yield


@contextmanager
def te_rmsnorm() -> Iterator[None]:
    """``RMSNorm.forward`` and the module-level rmsnorm functions."""

    def replace(kernels: Any, patches: PatchSet) -> None:
        te, functions = _modules("transformer_engine.pytorch", "transformer_engine.pytorch.module.layernorm")
        patches.set(te.RMSNorm, "forward", kernels._te_rmsnorm_forward_patched)
        for name in ("rmsnorm", "rmsnorm_forward", "rmsnorm_fwd"):
            if hasattr(functions, name):
                patches.set(functions, name, _rmsnorm(kernels, getattr(functions, name)))

    with _te("rmsnorm", replace):
        yield


def _rmsnorm(kernels: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def rmsnorm(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip(("x", "weight", "eps"), args, strict=False), **kwargs)
        if named.get("x") is None or named.get("weight") is None:
            return original(*args, **kwargs)
        eps = float(named.get("eps") or 1e-5)
        return kernels.rmsnorm_batch_invariant(named["x"], named["weight"], eps).to(named["weight"].dtype)

    return rmsnorm


@contextmanager
def te_normalization() -> Iterator[None]:
    """``apply_normalization`` inside TE's fused modules."""

    def replace(kernels: Any, patches: PatchSet) -> None:
        first, *rest = _modules(
            "transformer_engine.pytorch.module._common",
            "transformer_engine.pytorch.module.layernorm_linear",
            "transformer_engine.pytorch.module.layernorm_mlp",
        )
        originals = {**kernels._TE_APPLY_NORM_ORIGS, "module._common.apply_normalization": first.apply_normalization}
        patches.set(kernels, "_TE_APPLY_NORM_ORIGS", originals)
        for module in (first, *rest):
            if hasattr(module, "apply_normalization"):
                patches.set(module, "apply_normalization", kernels._te_apply_normalization_patched)

    with _te("normalization", replace):
        yield


def te_gemm_is_on() -> bool:
    """Whether the override of TE's GEMM is in place."""
    return _te_on.get("gemm", 0) > 0 and bool(_kernels()._batch_invariant_MODE)


def te_rmsnorm_is_on() -> bool:
    """Whether the override of TE's RMSNorm is in place."""
    return _te_on.get("rmsnorm", 0) > 0 and bool(_kernels()._batch_invariant_MODE)


def te_normalization_is_on() -> bool:
    """Whether the override inside TE's fused modules is in place."""
    return _te_on.get("normalization", 0) > 0 and bool(_kernels()._batch_invariant_MODE)


# --- all of them ------------------------------------------------------------------------------------------------------


@contextmanager
def all_kernels() -> Iterator[None]:
    """megatron-core's own ``enable_batch_invariant_mode``, cleaned up when it fails half way."""
    kernels = _kernels()
    _dispatch_key()
    with ExitStack() as stack:
        stack.callback(kernels.disable_batch_invariant_mode)
        kernels.enable_batch_invariant_mode()
        yield


def all_kernels_is_on() -> bool:
    """Whether megatron-core says that the mode is on."""
    return bool(_kernels().is_batch_invariant_mode_enabled())
