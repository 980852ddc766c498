"""What the ``mxfp8`` preset (NeMo-RL #4683) adds to ``bf16``, as data: MXFP8, Mamba hybrids, TP 2; later CP."""

from __future__ import annotations

from functools import partial

from zkl_debug.stack.recipes.model import EnvRule, Kind, Rule, Side, When
from zkl_debug.stack.recipes.rules_bf16 import GEN_SETS_ENV, GEN_SETS_FP8

_rule = partial(Rule, preset="mxfp8", source="NeMo-RL #4683")
_train = partial(_rule, side=Side.TRAIN)
_gen = partial(_rule, side=Side.GENERATION)

CP_ABOVE_1 = When(Side.TRAIN, "context_parallel_size", Kind.GREATER, 1)
CP_A2A = When(Side.TRAIN, "cp_comm_type", Kind.EACH_EQUALS, "a2a")
HYBRID = When(Side.MODEL, "hybrid", Kind.EQUALS, True)
QWEN3_30B = When(Side.RECIPE, "policy.model_name", Kind.MATCHES, r"qwen3-30b")

#: Ids of ``bf16`` rules that no longer hold, each with its successor below (or lifted altogether).
MXFP8_REPLACES = (
    "train-fp8-off",
    "generation-fp8-off",
    "tensor-parallel",
    "context-parallel",
    "agree-context-parallel-size",
    "model-hybrid",
    "sequence-packing",
    "chunked-prefill",
)

#: The part that later presets keep whatever their precision.
LAYOUT_RULES: tuple[Rule, ...] = (
    _train(
        id="tensor-parallel-2",
        key="tensor_model_parallel_size",
        kind=Kind.ONE_OF,
        required=(1, 2),
        fix=2,
        why="TP 2 was matched with the ordered collective; larger splits were not",
    ),
    _train(
        id="context-parallel-a2a",
        key="cp_comm_type",
        kind=Kind.EACH_EQUALS,
        required="a2a",
        when=(CP_ABOVE_1,),
        training_only=True,
        why="Above CP 1 only the all-to-all exchange keeps each head's attention whole, as generation computes it",
    ),
    _train(
        id="agree-context-parallel-size-or-a2a",
        key="context_parallel_size",
        kind=Kind.AGREE,
        required=None,
        unless=(CP_ABOVE_1, CP_A2A),
        why="Context parallelism must be the same on both sides, unless training runs CP > 1 with cp_comm_type a2a",
    ),
    _train(
        id="env-mamba-deterministic",
        key="env_vars.MAMBA_DETERMINISTIC",
        kind=Kind.TEXT,
        required="1",
        when=(HYBRID,),
        why="A hybrid model is allowed only with the deterministic Mamba kernels: one scan order",
    ),
    _gen(
        id="generation-env-mamba-deterministic",
        key="env_vars.MAMBA_DETERMINISTIC",
        kind=Kind.TEXT,
        required="1",
        when=(HYBRID, GEN_SETS_ENV),
        why="A hybrid needs the deterministic Mamba kernels; the generation config replaces env_vars as a whole",
        upstream="no",
    ),
    _train(
        id="qwen3-30b-optimizer",
        key="optimizer.use_precision_aware_optimizer",
        kind=Kind.EQUALS,
        required=False,
        when=(QWEN3_30B,),
        training_only=True,
        why="Qwen3-30B was matched with the plain optimizer only; #4683 requires it for this model",
    ),
)

FP8_RULES: tuple[Rule, ...] = (
    _train(
        id="train-mxfp8-enabled",
        key="fp8_cfg.enabled",
        kind=Kind.EQUALS,
        required=True,
        why="MXFP8 must be on for training; one side alone rounds what the other does not",
    ),
    _train(
        id="train-mxfp8-recipe",
        key="fp8_cfg.fp8_recipe",
        kind=Kind.EQUALS,
        required="mxfp8",
        why="Only the MXFP8 block scaling was matched; blockwise, delayed and tensorwise scaling were not",
    ),
    _gen(
        id="generation-mxfp8-enabled",
        key="fp8_cfg.enabled",
        kind=Kind.EQUALS,
        required=True,
        when=(GEN_SETS_FP8,),
        why="MXFP8 must be on for generation; the generation config replaces fp8_cfg as a whole",
    ),
    _gen(
        id="generation-mxfp8-recipe",
        key="fp8_cfg.fp8_recipe",
        kind=Kind.EQUALS,
        required="mxfp8",
        when=(GEN_SETS_FP8,),
        why="Only the MXFP8 block scaling was matched; the generation config replaces fp8_cfg as a whole",
    ),
    _train(
        id="agree-fp8-format",
        key="fp8_cfg.fp8",
        kind=Kind.AGREE,
        required=None,
        why="Both sides must quantise along the same scaling path: one FP8 format",
    ),
    _train(
        id="agree-te-precision-config",
        key="te_precision_config_file",
        kind=Kind.AGREE,
        required=None,
        why="Both sides must quantise along the same scaling path: one per-layer precision file, or none",
        upstream="no",
    ),
)

MXFP8_RULES = LAYOUT_RULES + FP8_RULES
MXFP8_ENVIRONMENT: tuple[EnvRule, ...] = ()
