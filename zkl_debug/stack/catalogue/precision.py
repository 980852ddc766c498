"""Block formats as switches of a bed. Not part of `--stack on`: they change what is computed, where they are on."""

from __future__ import annotations

from zkl_debug.stack.applying import by_function
from zkl_debug.stack.switches import Setting, Switch

_BODIES = "zkl_debug.stack.precision:"
_TRAINS = Setting("recipe", "policy.megatron_cfg.moe_training_matches_inference", "true", "false")


def _switch(form: str, part: str, words: str, conflicts: tuple[str, ...], presets: tuple[str, ...]) -> Switch:
    return by_function(
        f"{form}-{part}",
        f"{_BODIES}{form}_{part}",
        fixes=f"{words}; the training forward is straight-through: the same product, the gradient of the plain one. "
        f"On one side alone ({form}-{part}=gen) training does not match generation",
        owner="mcore",
        group="precision",
        mechanism="precision",
        kind="cpu stand-in",
        target="ColumnParallelLinear, RowParallelLinear",
        settings=(_TRAINS,) if part == "experts" else (),
        conflicts=conflicts,
        presets=presets,
        needs=(),
        stacked=False,
        not_searched="it is a format of the model, not a mend",
    )


_MXFP8 = "MXFP8 operands: blocks of 32 values in e4m3 with an e8m0 scale"
_NVFP4 = "per-token NVFP4 operands: blocks of 16 values in e2m1 with an e4m3 scale, one float32 scale a token"

#: Switches that a bed of a CPU takes by name.
PRECISIONS: tuple[Switch, ...] = (
    _switch("mxfp8", "linear", f"dense linear layers take {_MXFP8}", ("nvfp4-linear",), ("mxfp8",)),
    _switch("mxfp8", "experts", f"expert linear layers take {_MXFP8}", ("nvfp4-experts",), ("mxfp8-flashinfer",)),
    _switch("nvfp4", "linear", f"dense linear layers take {_NVFP4}", ("mxfp8-linear",), ()),
    _switch("nvfp4", "experts", f"expert linear layers take {_NVFP4}", ("mxfp8-experts",), ("nvfp4-flashinfer",)),
)
