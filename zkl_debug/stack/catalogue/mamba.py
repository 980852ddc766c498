"""What a bed with Mamba layers can switch on top of the CPU stack."""

from __future__ import annotations

from zkl_debug.stack.applying import by_function
from zkl_debug.stack.switches import Switch

_BODIES = "zkl_debug.stack.mamba:"

MAMBA_LADDER: tuple[Switch, ...] = (
    by_function(
        "ssm-recurrence",
        _BODIES + "one_scan",
        fixes="training, prefill and decode run one SSM scan, token by token: no chunk edge, no block, no other order",
        owner="mcore",
        group="mamba",
        target="mamba_split_conv1d_scan_combined, mamba_chunk_scan_combined_varlen",
        alternatives=("one-ssm-scan",),
    ),
    by_function(
        "ssm-gate-in-norm",
        _BODIES + "one_gate",
        fixes="training rounds what it scanned, then gates it in the mixer's norm, as prefill and decode do",
        owner="mcore",
        group="mamba",
        mechanism="precision",
        target="MambaMixer._ssm_training",
        alternatives=("mamba-exact-path", "one-ssm-scan"),
    ),
    by_function(
        "ssm-fp32-state",
        _BODIES + "fp32_state",
        fixes="the recurrent state is not rounded to the model's dtype between two steps of the engine",
        owner="mcore",
        group="mamba",
        mechanism="precision",
        target="MambaInferenceStateConfig.ssm_states_dtype",
        needs=(),
    ),
    by_function(
        "conv-state-short-chunks",
        _BODIES + "whole_conv_state",
        fixes="a last prefill chunk shorter than the convolution keeps the inputs of the chunk before it, not zeros",
        owner="mcore",
        group="mamba",
        mechanism="lifecycle",
        kind="patch",
        target="MambaMixer._ssm_prefill, causal_conv1d_varlen_states",
        alternatives=("no-chunked-prefill",),
        needs=(),
    ),
)
