"""What holds whatever the preset: runs that are not zero by design, and advice that does not change the verdict."""

from __future__ import annotations

from functools import partial

from zkl_debug.stack.recipes.keys import TRAINING_FORWARD
from zkl_debug.stack.recipes.model import Kind, Rule, Severity, Side, When

ASYNC_ON = When(Side.RECIPE, "grpo.async_grpo.enabled", Kind.EQUALS, True)
NOT_COLOCATED = When(Side.RECIPE, "policy.generation.colocated.enabled", Kind.EQUALS, False)
SEVERAL_NODES = When(Side.RECIPE, "cluster.num_nodes", Kind.GREATER, 1)
MEGATRON_ON = When(Side.TRAIN, "enabled", Kind.EQUALS, True)
TRAIN_TP_1 = When(Side.TRAIN, "tensor_model_parallel_size", Kind.EQUALS, 1)
GEN_TP_1 = When(Side.GENERATION, "tensor_model_parallel_size", Kind.EQUALS, 1)
TRAIN_TP = When(Side.TRAIN, "tensor_model_parallel_size", Kind.GREATER, 1)
GEN_TP = When(Side.GENERATION, "tensor_model_parallel_size", Kind.GREATER, 1)
TRAIN_OPTIMIZED = When(Side.TRAIN, "transformer_impl", Kind.EQUALS, "inference_optimized")
GEN_OPTIMIZED = When(Side.GENERATION, "transformer_impl", Kind.EQUALS, "inference_optimized")
GEN_SETS_SP = When(Side.GENERATION, "sequence_parallel", Kind.OVERRIDDEN)
GEN_SETS_TP = When(Side.GENERATION, "tensor_model_parallel_size", Kind.OVERRIDDEN)
FP8_ON = When(Side.TRAIN, "fp8_cfg.enabled", Kind.EQUALS, True)

_design = partial(Rule, preset="every preset", source="NeMo-RL #3208", severity=Severity.BY_DESIGN, upstream="no")
_advice = partial(Rule, preset="every preset", source="NeMo-RL", severity=Severity.ADVICE, upstream="yes")

COMMON_RULES: tuple[Rule, ...] = (
    _design(
        id="async-age",
        side=Side.RECIPE,
        key="grpo.async_grpo.max_trajectory_age_steps",
        kind=Kind.EQUALS,
        required=0,
        when=(ASYNC_ON,),
        why="Asynchronous GRPO trains on tokens of older weights: the log-probs differ because the weights do",
        not_fixable="it is how this recipe trains, not a defect of a kernel",
    ),
    _design(
        id="in-flight-weight-updates",
        side=Side.RECIPE,
        key="grpo.async_grpo.in_flight_weight_updates",
        kind=Kind.OFF,
        required=False,
        when=(ASYNC_ON,),
        why="Weights change in the middle of a sequence: its tokens come from several weight versions",
        not_fixable="it is how this recipe trains, not a defect of a kernel",
    ),
    _advice(
        id="one-training-backend",
        side=Side.RECIPE,
        key="policy.dtensor_cfg.enabled",
        kind=Kind.OFF,
        required=False,
        when=(MEGATRON_ON,),
        why="NeMo-RL refuses a recipe with both the DTensor and the Megatron policy enabled",
    ),
    _advice(
        id="sequence-parallel-without-tp",
        side=Side.TRAIN,
        key="sequence_parallel",
        kind=Kind.OFF,
        required=False,
        when=(TRAIN_TP_1,),
        source="megatron-core",
        why="megatron-core refuses sequence parallelism without tensor parallelism",
    ),
    _advice(
        id="generation-sequence-parallel-without-tp",
        side=Side.GENERATION,
        key="sequence_parallel",
        kind=Kind.OFF,
        required=False,
        when=(GEN_TP_1, GEN_SETS_SP),
        source="megatron-core",
        why="megatron-core refuses sequence parallelism without tensor parallelism",
    ),
    _advice(
        id="sequence-parallel-with-tp",
        side=Side.TRAIN,
        key="sequence_parallel",
        kind=Kind.EQUALS,
        required=True,
        when=(TRAIN_TP, TRAIN_OPTIMIZED),
        why="inference_optimized layers require sequence parallelism above TP 1",
    ),
    _advice(
        id="generation-sequence-parallel-with-tp",
        side=Side.GENERATION,
        key="sequence_parallel",
        kind=Kind.EQUALS,
        required=True,
        when=(GEN_TP, GEN_OPTIMIZED),
        why="inference_optimized layers require sequence parallelism above TP 1",
    ),
    _advice(
        id="generation-gpus",
        side=Side.RECIPE,
        key="policy.generation.colocated.resources.gpus_per_node",
        kind=Kind.NOT_NULL,
        required=None,
        required_text="the number of GPUs per node for generation",
        when=(NOT_COLOCATED,),
        why="Dedicated generation needs its own GPUs; NeMo-RL stops without this number",
        not_fixable="how many GPUs generation gets is yours to decide",
    ),
    _advice(
        id="generation-nodes",
        side=Side.RECIPE,
        key="policy.generation.colocated.resources.num_nodes",
        kind=Kind.NOT_NULL,
        required=None,
        required_text="the number of nodes for generation",
        when=(NOT_COLOCATED, SEVERAL_NODES),
        why="On several nodes NeMo-RL asks which of them are for generation",
        not_fixable="how many nodes generation gets is yours to decide",
    ),
    _advice(
        id="prefix-caching",
        side=Side.GENERATION,
        key="enable_prefix_caching",
        kind=Kind.OFF,
        required=False,
        source="NeMo-RL #4683",
        preset="bf16",
        upstream="no",
        why="Prefix caching is named as allowed from the mxfp8 preset on; no bf16 run covers it",
    ),
    *(
        _advice(
            id=f"env-{name.lower().replace('_', '-')}-is-text",
            side=Side.TRAIN,
            key=f"env_vars.{name}",
            kind=Kind.IS_TEXT,
            required=None,
            source="Ray",
            why="Ray refuses environment variables that are not text",
        )
        for name in ("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "MAMBA_DETERMINISTIC")
    ),
    _advice(
        id="fp8-param",
        side=Side.TRAIN,
        key="fp8_cfg.fp8_param",
        kind=Kind.AGREE,
        required=None,
        source="NeMo-RL #4683",
        upstream="no",
        when=(FP8_ON,),
        why="FP8 parameters on one side only quantise the weights at another moment than on the other",
    ),
)

#: Advice that holds for one preset alone.
ADVICE_ONLY_FOR = {"prefix-caching": "bf16"}

#: Older names, each with the name to write today.
RENAMED: dict[str, str] = dict.fromkeys(TRAINING_FORWARD[:-1], TRAINING_FORWARD[-1])
