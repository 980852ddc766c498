"""The CPU backend: what megatron-core 0.19 needs to run, training and inference, on a machine without a GPU.

One context manager. It installs on entry and removes on exit; it nests; where there is a GPU it does nothing. The
arithmetic of the model is not touched, with one exception: a CPU has no flash attention, so plain paged stand-ins
(:mod:`zkl_debug.engines.paged_attention`) take the place of the two flash-attention entry points.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import functools
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zkl_debug.engines.patching import PatchSet

_lock = threading.RLock()
_depth = 0
_patches: PatchSet | None = None
_rng_before: torch.Tensor | None = None

# Importing this module registers stack dumps for SIGTERM and SIGINT.
_COORDINATOR = "megatron.core.inference.data_parallel_inference_coordinator.coordinator"
# Factories that mcore calls with pin_memory=True.
_PINNED = (
    "empty",
    "full",
    "zeros",
    "ones",
    "tensor",
    "arange",
    "empty_like",
    "zeros_like",
    "full_like",
    "rand",
    "randn",
)


class CpuEvent:
    """Stands in for ``torch.cuda.Event``: everything has already happened."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing to record."""

    def wait(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Always done."""
        return True

    def elapsed_time(self, _other: CpuEvent) -> float:
        """Milliseconds between two events: unknown, 0."""
        return 0.0


class CpuStream:
    """Stands in for ``torch.cuda.Stream``: there is one order, program order."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    def wait_stream(self, *_args: Any) -> None:
        """Program order is already kept."""

    def wait_event(self, *_args: Any) -> None:
        """Program order is already kept."""

    def record_event(self, *_args: Any) -> CpuEvent:
        """An event that has happened."""
        return CpuEvent()

    def synchronize(self) -> None:
        """Nothing is pending."""


_STREAM = CpuStream()


def is_needed() -> bool:
    """Whether this machine has no GPU, so that the backend has something to do."""
    return not torch.cuda.is_available()


def is_active() -> bool:
    """Whether the backend is installed now."""
    return _patches is not None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence mcore's import and set-up chatter (warnings, and log records below ERROR) inside the block.

    An import of mcore also makes the whole process dump a stack at Ctrl-C; that is undone.
    """
    before = logging.root.manager.disable
    had_handlers, had_faulthandler = _COORDINATOR in sys.modules, faulthandler.is_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)
            if _COORDINATOR in sys.modules and not had_handlers:
                _forget_stack_dumps(had_faulthandler)


def _forget_stack_dumps(keep_enabled: bool) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        faulthandler.unregister(number)
    if not keep_enabled:
        faulthandler.disable()


@contextlib.contextmanager
def cpu_backend() -> Iterator[None]:
    """Make megatron-core usable on a CPU inside the block.

    Re-entrant; a no-op where ``torch.cuda.is_available()``. On the last exit every replaced attribute is the object it
    was before, and the CPU generator has the state it had on entry.
    """
    if not is_needed():
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _depth, _patches, _rng_before
    with _lock:
        _depth += 1
        if _depth > 1:
            return
        patches = PatchSet()
        try:
            _rng_before = torch.get_rng_state()
            _patch_torch(patches)
            with quiet():
                from zkl_debug.engines.megatron import seams

                seams.patch_for_cpu(patches)
        except BaseException:
            patches.undo()
            _depth -= 1
            raise
        _patches = patches


def _leave() -> None:
    global _depth, _patches, _rng_before
    with _lock:
        _depth -= 1
        if _depth or _patches is None:
            return
        _patches.undo()
        _patches = None
        if _rng_before is not None:
            torch.set_rng_state(_rng_before)
            _rng_before = None


def _patch_torch(patches: PatchSet) -> None:
    cuda = torch.cuda

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    replacements: dict[str, Any] = {
        "current_device": lambda: "cpu",
        "Event": CpuEvent,
        "Stream": CpuStream,
        "current_stream": lambda *_a, **_k: _STREAM,
        "default_stream": lambda *_a, **_k: _STREAM,
        "stream": lambda *_a, **_k: contextlib.nullcontext(),
        "synchronize": nothing,
        "empty_cache": nothing,
        "memory_stats": lambda *_a, **_k: collections.defaultdict(int),
        "memory_snapshot": lambda *_a, **_k: [],
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *_a, **_k: torch.get_rng_state(),
        "set_rng_state": lambda state, *_a, **_k: torch.set_rng_state(state),
        "manual_seed": manual_seed,
    }
    for name, value in replacements.items():
        patches.set(cuda, name, value)
    for name in _PINNED:
        patches.set(torch, name, _without_pinning(getattr(torch, name)))
    patches.set(torch.Tensor, "pin_memory", lambda self, *_a, **_k: self)
    patches.set(torch.Tensor, "cuda", lambda self, *_a, **_k: self)
    patches.set(torch.Tensor, "record_stream", nothing)


def _without_pinning(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def unpinned(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return unpinned


def replaced_attributes() -> list[tuple[Any, str]]:
    """The (owner, attribute) pairs the backend has replaced now; empty when it is not installed."""
    return [] if _patches is None else _patches.touched
