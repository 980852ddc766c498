"""Faults for tests of the diagnosis alone: operators that read what no capture holds, and faults of one layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zkl_debug.beds.faults.registry import Answer, Fault
from zkl_debug.beds.run import BedContext
from zkl_debug.engines.patching import patched

BOTH = ("tiny-gpt", "tiny-moe")

#: What the hidden-input norm reads besides its argument and weight.
HIDDEN = {"gain": 1.0}
LAST = {"rows": 0}


class State:
    """A workspace as a program may keep one."""

    gain = 1.0


STATE = State()


def _norm(x: torch.Tensor, norm: Any, gain: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps) * gain
    result: torch.Tensor = (normed * norm.weight.float()).to(x.dtype)
    return result


def _gained(_original: Any) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return _norm(x, self, HIDDEN["gain"])

    return forward


@contextmanager
def gain_of_the_entry(context: BedContext) -> Iterator[None]:
    """The same norm on both sides; a global is left with another value by what runs before scoring."""
    before = HIDDEN["gain"]
    HIDDEN["gain"] = 1.0 + 2.0**-6 if context.sequences else 1.0
    try:
        with patched(torch.nn.RMSNorm, "forward", _gained):
            yield
    finally:
        HIDDEN["gain"] = before


@contextmanager
def gain_on_one_side(_context: BedContext) -> Iterator[None]:
    """One side's norm reads a global that the same side sets."""
    before = HIDDEN["gain"]
    HIDDEN["gain"] = 1.0 + 2.0**-6
    try:
        with patched(torch.nn.RMSNorm, "forward", _gained):
            yield
    finally:
        HIDDEN["gain"] = before


@contextmanager
def gain_after_resize(_context: BedContext) -> Iterator[None]:
    """The norm keeps the number of rows of the call before in a global; its first call after a change is off."""

    def wrap(_original: Any) -> Any:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            rows = x.numel() // x.shape[-1]
            before, LAST["rows"] = LAST["rows"], rows
            return _norm(x, self, 1.0 if before == rows else 1.0 + 2.0**-14)

        return forward

    with patched(torch.nn.RMSNorm, "forward", wrap):
        yield


@contextmanager
def gain_closed_over(context: BedContext) -> Iterator[None]:
    """The norm reads a list that it closed over: a workspace of its own that scoring finds in another state."""
    workspace = [1.0 + 2.0**-6 if context.sequences else 1.0]

    def wrap(_original: Any) -> Any:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return _norm(x, self, workspace[0])

        return forward

    with patched(torch.nn.RMSNorm, "forward", wrap):
        yield


@contextmanager
def gain_from_iterator(_context: BedContext) -> Iterator[None]:
    """The norm takes its gain from an iterator, which no copy of plain data can bring back."""
    gains = itertools.cycle([1.0 + 2.0**-14, 1.0 + 2.0**-13, 1.0 + 3 * 2.0**-14])

    def wrap(_original: Any) -> Any:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return _norm(x, self, next(gains))

        return forward

    with patched(torch.nn.RMSNorm, "forward", wrap):
        yield


@contextmanager
def gain_in_object(context: BedContext) -> Iterator[None]:
    """The combine reads an attribute of an object that lives in a module."""
    from zkl_debug.engines.megatron import seams

    before = STATE.gain
    STATE.gain = 1.0 + 2.0**-6 if context.sequences else 1.0

    def wrap(original: Any) -> Any:
        def combine(*args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor = original(*args, **kwargs) * STATE.gain
            return result

        return combine

    try:
        with seams.unpermute(wrap):
            yield
    finally:
        STATE.gain = before


def _early_rounding(norm: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        result: torch.Tensor = (wide * scale).to(x.dtype) * norm.weight
        return result

    return forward


@contextmanager
def norm_of_layer(context: BedContext, layer: int) -> Iterator[None]:
    """The norm before attention of one layer rounds before it multiplies by gamma."""
    norm = context.model.decoder.layers[layer].input_layernorm
    with patched(norm, "forward", lambda _original: _early_rounding(norm)):
        yield


@contextmanager
def combine_of_layer(context: BedContext, layer: int) -> Iterator[None]:
    """The combine of one layer adds expert outputs in descending order, that of the others in ascending order."""
    from zkl_debug.engines.megatron import seams
    from zkl_debug.stack.combine import ordered_unpermute

    inside = [False]
    module = context.model.decoder.layers[layer].mlp

    def enter(*_args: Any) -> None:
        inside[0] = True

    def leave(*_args: Any) -> None:
        inside[0] = False

    def wrap(_original: Any) -> Any:
        def combine(*args: Any, **kwargs: Any) -> torch.Tensor:
            return ordered_unpermute(*args, **{**kwargs, "reverse": inside[0]})

        return combine

    handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        with seams.unpermute(wrap):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def norm_of_layer_3(context: BedContext) -> Iterator[None]:
    with norm_of_layer(context, 3):
        yield


@contextmanager
def two_faults(context: BedContext) -> Iterator[None]:
    with combine_of_layer(context, 2), norm_of_layer(context, 5):
        yield


@contextmanager
def rounded_away(context: BedContext) -> Iterator[None]:
    """A projection is one unit off wherever adding it to the residual stream gives the same bits either way."""
    layer = context.model.decoder.layers[1]
    residual: list[torch.Tensor] = []

    def keep(_module: Any, args: tuple[Any, ...]) -> None:
        residual[:] = [args[0]]

    def wrap(original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            out, bias = original(*args, **kwargs)
            nudged = out * (1.0 + 2.0**-7)
            return torch.where(residual[0] + nudged == residual[0] + out, nudged, out), bias

        return forward

    handle = layer.pre_mlp_layernorm.register_forward_pre_hook(keep)
    try:
        with patched(layer.mlp.linear_fc2, "forward", wrap):
            yield
    finally:
        handle.remove()


def _fault(name: str, breaks: Any, sides: tuple[str, ...], **more: Any) -> Fault:
    return Fault(name, name, "", BOTH, ("fp32", "bf16"), sides, breaks, Answer(), **more)


TEST_FAULTS = {
    f.id: f
    for f in (
        _fault("test-gain-entry", gain_of_the_entry, ("gen", "train")),
        _fault("test-gain-side", gain_on_one_side, ("gen",)),
        _fault("test-gain-resize", gain_after_resize, ("gen", "train")),
        _fault("test-gain-closure", gain_closed_over, ("gen", "train")),
        _fault("test-gain-iterator", gain_from_iterator, ("gen",)),
        _fault("test-gain-object", gain_in_object, ("gen", "train")),
        _fault("test-layer-3", norm_of_layer_3, ("gen",)),
        _fault("test-two", two_faults, ("gen",), model={"layers": 6}),
        _fault("test-masked", rounded_away, ("gen",)),
    )
}
