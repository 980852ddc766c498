"""Faults of block formats: scales, data, weights, and a format that one side alone uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.faults.registry import BOTH_BEDS, BOTH_DTYPES, Answer, Fault, register

if TYPE_CHECKING:
    from torch import Tensor

    from zkl_debug.beds.run import BedContext


def _patched(name: str, wrap: Callable[..., Any]) -> AbstractContextManager[None]:
    from zkl_debug.engines import microscaling
    from zkl_debug.engines.patching import patched

    return patched(microscaling, name, wrap)


@contextmanager
def scales_rounded_down(_context: BedContext) -> Iterator[None]:
    """A block's scale is the power of two below its largest value, over 256: values above 448 times it saturate."""
    import torch

    def wrap(_original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def exponents(largest: Tensor) -> Tensor:
            exponent = torch.frexp(largest).exponent - 9
            return torch.where(largest > 0, exponent, -127).clamp(-127, 127)

        return exponents

    with _patched("mx_exponents", wrap):
        yield


@contextmanager
def scales_truncated(_context: BedContext) -> Iterator[None]:
    """e4m3 scales of blocks are cut off towards zero instead of rounded to nearest."""

    def wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def scales(largest: Tensor, overall: Tensor) -> Tensor:
            return _cut(original(largest, overall), largest / 6.0 / overall)

        return scales

    with _patched("block_scales", wrap):
        yield


@contextmanager
def data_truncated(_context: BedContext) -> Iterator[None]:
    """e4m3 data are cut off towards zero instead of rounded to nearest."""

    def wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda values: _cut(original(values), values)

    with _patched("e4m3", wrap):
        yield


def _cut(rounded: Tensor, exact: Tensor) -> Tensor:
    """``rounded`` (e4m3), one code nearer to zero where rounding went away from it."""
    import torch

    codes = rounded.view(torch.uint8)
    away = rounded.float().abs() > exact.abs()
    return torch.where(away, codes - 1, codes).view(torch.float8_e4m3fn)


@contextmanager
def weight_scales_halved(_context: BedContext) -> Iterator[None]:
    """Weights are quantised under half the scale of the activations' rule: the largest values of blocks saturate."""

    def halve(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda largest: original(largest) - 1

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def quantise_weight(*args: Any, **kwargs: Any) -> Any:
            with _patched("mx_exponents", halve):
                return original(*args, **kwargs)

        return quantise_weight

    with _patched("quantise_weight", wrap):
        yield


def _nothing(_context: BedContext) -> Any:
    return nullcontext()


_EXPERT = "decoder.layers.1.mlp.experts.local_experts.?.linear_fc1"
_DENSE = "decoder.layers.0.self_attention.linear_qkv"


def _answer(site: str, explanation: str, *says: str) -> Answer:
    return Answer(
        (site,),
        "score-prefill",
        "own",
        "every row, or any: by luck of the values",
        explanation,
        rule_says=("^every row", "^no rule: every row alike"),
        names=("quantisation-differs",),
        says=says,
    )


def _on(name: str) -> Mapping[str, Any]:
    return {"switches": {name: True}}


register(
    Fault(
        "Q1",
        "MXFP8 scales of blocks rounded down on one side, up on the other",
        "the two MX scale rules in use, floor and ceil",
        ("tiny-moe",),
        BOTH_DTYPES,
        ("gen",),
        scales_rounded_down,
        _answer(
            f"{_EXPERT}/quantize:out.1", "scale one step apart, data follow", "1 step of float8_e8m0fnu", "ceil.*floor"
        ),
        options=_on("mxfp8-experts"),
    ),
    Fault(
        "Q2",
        "NVFP4 scales of blocks cut off instead of rounded on one side",
        "cast of a scale to e4m3 by truncation",
        ("tiny-moe",),
        BOTH_DTYPES,
        ("train",),
        scales_truncated,
        _answer(f"{_EXPERT}/quantize:out.1", "scale one step apart, data follow", "1 step of float8_e4m3fn"),
        options=_on("nvfp4-experts"),
    ),
    Fault(
        "Q3",
        "MXFP8 data cut off instead of rounded on one side",
        "cast of data to e4m3 by truncation",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("gen",),
        data_truncated,
        _answer(f"{_DENSE}/quantize:out.0", "data differ under equal scales", "scales are equal", "not its input"),
        options=_on("mxfp8-linear"),
    ),
    Fault(
        "Q4",
        "weights quantised under another scale on one side",
        "weight cache of another recipe",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("gen",),
        weight_scales_halved,
        _answer(f"{_DENSE}:out", "the weight's block format differs, its parameter does not", "scale.*weight"),
        options=_on("mxfp8-linear"),
    ),
    Fault(
        "Q5",
        "experts quantised in generation alone",
        "NeMo-RL#4791: training forward without moe_training_matches_inference",
        ("tiny-moe",),
        BOTH_DTYPES,
        (),
        _nothing,
        _answer(f"{_EXPERT}/quantize:out.0", "one side alone quantises", "does not", "bit for bit"),
        options={"one_sided": {"nvfp4-experts": "gen"}},
    ),
)
