"""Environment variables of RECIPES.md and of TransformerEngine."""

from __future__ import annotations

from zkl_debug.stack.applying import by_variables
from zkl_debug.stack.catalogue.cpu import EVERY_PRESET
from zkl_debug.stack.needs import MAMBA, NEMO_RL, TE, gpu
from zkl_debug.stack.switches import Setting, Switch

MXFP8_AND_LATER = EVERY_PRESET[1:]


def _settings(*pairs: tuple[str, str]) -> tuple[Setting, ...]:
    """The variable for a program started by hand, and the recipe key by which NeMo-RL gives it to its workers."""
    made = [Setting("env", name, value) for name, value in pairs]
    made += [Setting("recipe", f"policy.megatron_cfg.env_vars.{name}", f"'{value}'") for name, value in pairs]
    return tuple(made)


VARIABLES: tuple[Switch, ...] = (
    by_variables(
        "cublas-workspace",
        {"CUBLAS_WORKSPACE_CONFIG": ":0:0"},
        "cuda",
        fixes="cuBLAS has no workspace: no split-K, one reduction order for K",
        owner="environment",
        group="batch invariance",
        kind="environment",
        target="CUBLAS_WORKSPACE_CONFIG",
        settings=_settings(("CUBLAS_WORKSPACE_CONFIG", ":0:0")),
        presets=EVERY_PRESET,
        needs=(gpu(),),
        stacked=False,
    ),
    by_variables(
        "cublaslt-workspace",
        {"CUBLASLT_WORKSPACE_SIZE": "0"},
        "cuda",
        fixes="cuBLASLt has no workspace: no split-K, one reduction order for K",
        owner="environment",
        group="batch invariance",
        kind="environment",
        target="CUBLASLT_WORKSPACE_SIZE",
        settings=_settings(("CUBLASLT_WORKSPACE_SIZE", "0")),
        presets=EVERY_PRESET,
        needs=(gpu(),),
        stacked=False,
    ),
    by_variables(
        "mamba-deterministic",
        {"MAMBA_DETERMINISTIC": "1"},
        "",
        fixes="the SSM kernels add in a fixed order instead of with atomics",
        owner="environment",
        group="mamba",
        kind="environment",
        target="MAMBA_DETERMINISTIC",
        settings=_settings(("MAMBA_DETERMINISTIC", "1")),
        presets=MXFP8_AND_LATER,
        needs=(gpu(), MAMBA),
        stacked=False,
    ),
    by_variables(
        "te-flash-only",
        {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
        "transformer_engine",
        fixes="TransformerEngine may not fall back to cuDNN or unfused attention, which reduce in another order",
        owner="TE",
        group="batch invariance",
        kind="environment",
        target="NVTE_FLASH_ATTN, NVTE_FUSED_ATTN, NVTE_UNFUSED_ATTN",
        settings=tuple(
            Setting("env", name, value)
            for name, value in (("NVTE_FLASH_ATTN", "1"), ("NVTE_FUSED_ATTN", "0"), ("NVTE_UNFUSED_ATTN", "0"))
        ),
        alternatives=("attention-flash",),
        needs=(gpu(), TE),
        stacked=False,
    ),
    by_variables(
        "te-deterministic",
        {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
        "transformer_engine",
        fixes="TransformerEngine picks no attention kernel whose additions race",
        owner="TE",
        group="batch invariance",
        kind="environment",
        target="NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        settings=(Setting("env", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"),),
        needs=(gpu(), TE),
        stacked=False,
    ),
    by_variables(
        "refit-param-sync",
        {"NRL_REFIT_PARAM_SYNC": "1"},
        "nemo_rl",
        fixes="a refit waits for the parameter all-gather that overlap_param_gather leaves running",
        owner="NeMo-RL",
        group="lifecycle",
        mechanism="lifecycle",
        kind="environment",
        target="NRL_REFIT_PARAM_SYNC",
        settings=(Setting("env", "NRL_REFIT_PARAM_SYNC", "1"),),
        needs=(gpu(), NEMO_RL),
        stacked=False,
    ),
)
