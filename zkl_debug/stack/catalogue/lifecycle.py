"""What must be dropped or refreshed when weights change."""

from __future__ import annotations

from zkl_debug.stack.applying import by_function, elsewhere
from zkl_debug.stack.needs import MAMBA, symbol
from zkl_debug.stack.switches import Switch

LIFECYCLE: tuple[Switch, ...] = (
    by_function(
        "mamba-cache-refreshed",
        "zkl_debug.engines.megatron.ladder_patches:mamba_cache_refreshed",
        fixes="a mixer's cached -exp(A) is computed anew after a weight swap, also in a model that stays in eval()",
        owner="mcore",
        group="lifecycle",
        mechanism="lifecycle",
        kind="lifecycle",
        target="MambaMixer._A_neg_exp_cache, resharding.refit.swap_model_weights",
        needs=(MAMBA, symbol("megatron.core.resharding.refit:swap_model_weights")),
        stacked=False,
    ),
    elsewhere(
        "prefix-cache-reset",
        fixes="a refit empties the prefix cache: no prompt row comes from older weights",
        owner="NeMo-RL",
        group="lifecycle",
        mechanism="lifecycle",
        kind="lifecycle",
        target="the engine's prefix cache, after every refit",
        alternatives=("no-prefix-caching", "kv-recompute"),
        needs=(),
    ),
    elsewhere(
        "fp8-caches-refreshed",
        fixes="TE's FP8 / MXFP8 weight caches and the concatenated expert weights are rebuilt after a refit",
        owner="TE",
        group="lifecycle",
        mechanism="lifecycle",
        kind="lifecycle",
        target="_extra_state, _fc1_weight / _fc2_weight",
        presets=("mxfp8", "mxfp8-flashinfer"),
        needs=(),
    ),
)
