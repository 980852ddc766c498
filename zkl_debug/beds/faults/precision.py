"""Faults of precision: one rounding more, another place for it, another constant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.faults.registry import BOTH_BEDS, BOTH_DTYPES, Answer, Fault, register

if TYPE_CHECKING:
    from torch import Tensor

    from zkl_debug.beds.run import BedContext


@contextmanager
def bf16_logits(context: BedContext) -> Iterator[None]:
    """The output layer's result is rounded to bf16."""
    import torch

    from zkl_debug.engines.patching import patched

    def wrap(original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            logits, bias = original(*args, **kwargs)
            return logits.to(torch.bfloat16).to(logits.dtype), bias

        return forward

    with patched(context.model.output_layer, "forward", wrap):
        yield


@contextmanager
def bf16_router(_context: BedContext) -> Iterator[None]:
    """Router logits are rounded to bf16."""
    import torch

    from zkl_debug.engines.megatron import seams

    def wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def gating(*args: Any, **kwargs: Any) -> Tensor:
            logits = original(*args, **kwargs)
            return logits.to(torch.bfloat16).to(logits.dtype)

        return gating

    with seams.router_gating(wrap):
        yield


@contextmanager
def early_norm_rounding(_context: BedContext) -> Iterator[None]:
    """Norms round to the model's dtype before, not after, the multiplication by gamma."""
    import torch

    from zkl_debug.engines.patching import patched

    def wrap(_original: Any) -> Any:
        def forward(self: Any, x: Tensor) -> Tensor:
            wide = x.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            result: Tensor = (wide * scale).to(x.dtype) * self.weight
            return result

        return forward

    with patched(torch.nn.RMSNorm, "forward", wrap):
        yield


@contextmanager
def other_eps(context: BedContext) -> Iterator[None]:
    """Norms use eps 1e-6 instead of 1e-5."""
    import torch

    from zkl_debug.engines.patching import PatchSet

    with PatchSet() as patches:
        for module in context.model.modules():
            if isinstance(module, torch.nn.RMSNorm):
                patches.set(module, "eps", 1e-6)
        yield


@contextmanager
def bf16_inverse_frequencies(context: BedContext) -> Iterator[None]:
    """The rotary embedding's inverse frequencies are rounded to bf16."""
    import torch

    from zkl_debug.engines.megatron import seams
    from zkl_debug.engines.patching import patched

    seams.clear_rotary_cache()
    try:
        with patched(context.model.rotary_pos_emb, "inv_freq", lambda f: f.to(torch.bfloat16).to(f.dtype)):
            yield
    finally:
        seams.clear_rotary_cache()


register(
    Fault(
        "P1",
        "logits rounded to bf16 on one side",
        "NeMo-RL#3936",
        BOTH_BEDS,
        ("fp32",),
        ("gen",),
        bf16_logits,
        Answer(
            ("output_layer:out",),
            "score-prefill",
            "own",
            "every row",
            "equal after one more rounding to bf16",
            rule_says=("^every row",),
            names=("extra-rounding",),
            says=("bfloat16",),
        ),
    ),
    Fault(
        "P2",
        "router logits bf16 on one side",
        "prime-rl#2952",
        ("tiny-moe",),
        BOTH_DTYPES,
        ("gen",),
        bf16_router,
        Answer(
            ("decoder.layers.1.mlp/router.gating:out*",),
            "score-prefill",
            "own",
            "every row",
            "extra rounding to bf16; flipped (token, expert) pairs with margins",
            rule_says=("^every row",),
            names=("extra-rounding",),
            says=("bfloat16",),
        ),
    ),
    Fault(
        "P4",
        "norm rounds before, not after, the multiplication by gamma",
        "TransformerEngine#1132",
        BOTH_BEDS,
        ("bf16",),
        ("gen",),
        early_norm_rounding,
        Answer(
            ("decoder.layers.0.input_layernorm:out",),
            "score-prefill",
            "own",
            "every row",
            "rounding before gamma",
            rule_says=("^every row", "^no rule: every row alike"),
            names=("norm-rounding-order",),
        ),
    ),
    Fault(
        "P5",
        "norm eps 1e-6 instead of 1e-5",
        "aprender#1606",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("gen",),
        other_eps,
        Answer(
            ("decoder.layers.0.input_layernorm:out",),
            "score-prefill",
            "own",
            "every row",
            "eps, fitted 1e-6",
            rule_says=("^every row", "^no rule: every row alike"),
            names=("eps",),
            says=("1e-0?6",),
        ),
    ),
    Fault(
        "P7",
        "inverse rotary frequencies in bf16",
        "transformers#29496",
        BOTH_BEDS,
        BOTH_DTYPES,
        ("gen",),
        bf16_inverse_frequencies,
        Answer(
            ("decoder.layers.0.self_attention/rope.[qk]:out*",),
            "score-prefill",
            "own",
            "grows with position, zero at position 0",
            "inverse frequencies rounded to bf16",
            rule_says=(r"^position >= 1\b",),
            names=("rope-frequency",),
            says=("bfloat16",),
        ),
    ),
)
