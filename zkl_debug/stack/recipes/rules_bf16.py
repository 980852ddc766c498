"""Rules of the ``bf16`` preset (NeMo-RL #3208), as data."""

from __future__ import annotations

from functools import partial

from zkl_debug.stack.recipes.model import EnvRule, Kind, Need, Rule, Side, When

#: Padded lengths and graph buckets must be multiples of this many tokens.
TOKEN_MULTIPLE = 64

SAMPLING = "it changes what is sampled, which is yours to decide: NeMo-RL rejects it and never overwrites it"

_rule = partial(Rule, preset="bf16", source="NeMo-RL #3208")
_train = partial(_rule, side=Side.TRAIN)
_gen = partial(_rule, side=Side.GENERATION)
_recipe = partial(_rule, side=Side.RECIPE)

GEN_SETS_FP8 = When(Side.GENERATION, "fp8_cfg", Kind.OVERRIDDEN)
GEN_SETS_ENV = When(Side.GENERATION, "env_vars", Kind.OVERRIDDEN)
DYNAMIC_BATCHING = When(Side.RECIPE, "policy.dynamic_batching.enabled", Kind.EQUALS, True)

_WORKSPACE = "An empty cuBLAS workspace leaves split-K = 1: one fixed reduction order for every batch size"
_AGREE = "Training and generation must run the same {}; one side alone brings the mismatch back"

#: key -> what differs when the two sides disagree.
_AGREEMENTS = {
    "tensor_model_parallel_size": "tensor-parallel split of every reduction",
    "context_parallel_size": "context-parallel split of attention",
    "batch_invariant_mode": "batch-invariant kernels",
    "batch_invariant_backend": "batch-invariant GEMM backend",
    "batch_invariant_collective": "order of cross-rank sums",
    "batch_invariant_*": "batch-invariant setting",
    "attention_backend": "attention backend",
    "flash_attention_version": "FlashAttention kernels",
}

BF16_RULES: tuple[Rule, ...] = (
    _train(
        id="gate",
        key="zero_train_gen_mismatch",
        kind=Kind.EQUALS,
        required=True,
        why="The gate: without it NeMo-RL neither validates nor enables anything of this preset",
        upstream="the gate itself",
    ),
    _train(
        id="megatron-training",
        key="enabled",
        kind=Kind.EQUALS,
        required=True,
        why="The gate lives in the Megatron policy; another training backend never reads it",
        upstream="no",
    ),
    _train(
        id="batch-invariant-mode",
        key="batch_invariant_mode",
        kind=Kind.EQUALS,
        required=True,
        why="A token's result must not depend on which other tokens share its batch",
        upstream="sets",
    ),
    _train(
        id="batch-invariant-backend",
        key="batch_invariant_backend",
        kind=Kind.EQUALS,
        required="te_native",
        why="The GEMMs of both sides must come from the backend whose reduction order was matched",
        upstream="sets",
        explicit=True,
    ),
    _train(
        id="batch-invariant-collective",
        key="batch_invariant_collective",
        kind=Kind.EQUALS,
        required="ordered",
        why="Sums across ranks (the expert combine) must add in rank order, not in order of arrival",
        upstream="sets",
        explicit=True,
    ),
    _train(
        id="attention-backend",
        key="attention_backend",
        kind=Kind.EQUALS,
        required="flash",
        why="Scoring, prefill and decode must reach the same attention kernel; auto may choose per shape",
        upstream="sets",
    ),
    _train(
        id="flash-attention-version",
        key="flash_attention_version",
        kind=Kind.EQUALS,
        required=4,
        why="FlashAttention versions differ bitwise, so scoring must pin the one generation runs; unset means 2",
        upstream="sets",
    ),
    _train(
        id="moe-permute-fusion",
        key="moe_permute_fusion",
        kind=Kind.EQUALS,
        required=False,
        why="The fused permute combines experts in no fixed order; the gather combine does",
        upstream="sets",
    ),
    _train(
        id="env-cublaslt-workspace",
        key="env_vars.CUBLASLT_WORKSPACE_SIZE",
        kind=Kind.TEXT,
        required="0",
        why=_WORKSPACE,
    ),
    _train(
        id="env-cublas-workspace",
        key="env_vars.CUBLAS_WORKSPACE_CONFIG",
        kind=Kind.TEXT,
        required=":0:0",
        why=_WORKSPACE,
    ),
    _gen(
        id="generation-env-cublaslt-workspace",
        key="env_vars.CUBLASLT_WORKSPACE_SIZE",
        kind=Kind.TEXT,
        required="0",
        why=_WORKSPACE + "; the generation config replaces env_vars as a whole",
        when=(GEN_SETS_ENV,),
        upstream="no",
    ),
    _gen(
        id="generation-env-cublas-workspace",
        key="env_vars.CUBLAS_WORKSPACE_CONFIG",
        kind=Kind.TEXT,
        required=":0:0",
        why=_WORKSPACE + "; the generation config replaces env_vars as a whole",
        when=(GEN_SETS_ENV,),
        upstream="no",
    ),
    _recipe(
        id="generation-backend",
        key="policy.generation.backend",
        kind=Kind.EQUALS,
        required="megatron",
        why="Only Megatron generation shares the kernels of Megatron training",
    ),
    _gen(
        id="generation-transformer-impl",
        key="transformer_impl",
        kind=Kind.EQUALS,
        required="inference_optimized",
        why="The dedicated generation model of this preset is the inference_optimized one",
    ),
    _gen(
        id="raw-logprobs",
        key="logprobs_mode",
        kind=Kind.EQUALS,
        required="raw_logprobs",
        why="Training scores the raw logits; processed log-probs come after temperature, top-p and top-k",
        upstream="sets",
    ),
    _gen(
        id="chunked-prefill",
        key="enable_chunked_prefill",
        kind=Kind.EQUALS,
        required=False,
        why="A chunked prefill attends over other row groups than the scoring forward does",
        upstream="sets",
    ),
    _recipe(
        id="temperature",
        key="policy.generation.temperature",
        kind=Kind.EQUALS,
        required=1.0,
        why="Raw log-probs are scored, so the sampled distribution must be the raw one",
        not_fixable=SAMPLING,
    ),
    _recipe(
        id="top-p",
        key="policy.generation.top_p",
        kind=Kind.EQUALS,
        required=1.0,
        why="Raw log-probs are scored, so the sampled distribution must be the raw one",
        not_fixable=SAMPLING,
    ),
    _recipe(
        id="top-k",
        key="policy.generation.top_k",
        kind=Kind.NULL,
        required=None,
        why="Raw log-probs are scored, so the sampled distribution must be the raw one",
        not_fixable=SAMPLING,
    ),
    _recipe(
        id="dedicated-generation",
        key="policy.generation.colocated.enabled",
        kind=Kind.EQUALS,
        required=False,
        explicit=True,
        why="Colocated generation is exact for the first steps only (#3743: from step 4, 1-2 of 32 sequences differ)",
    ),
    _recipe(
        id="precision",
        key="policy.precision",
        kind=Kind.EQUALS,
        required="bfloat16",
        why="The batch-invariant kernels and inference_optimized are BF16",
    ),
    _train(
        id="train-fp8-off",
        key="fp8_cfg.enabled",
        kind=Kind.OFF,
        required=False,
        why="The bf16 preset has no FP8 on either side; the mxfp8 preset does",
    ),
    _gen(
        id="generation-fp8-off",
        key="fp8_cfg.enabled",
        kind=Kind.OFF,
        required=False,
        why="The bf16 preset has no FP8 on either side; the mxfp8 preset does",
        when=(GEN_SETS_FP8,),
    ),
    _train(
        id="tensor-parallel",
        key="tensor_model_parallel_size",
        kind=Kind.EQUALS,
        required=1,
        why="Tensor parallelism splits reductions across ranks; with the ordered collective mxfp8 allows 2",
    ),
    _train(
        id="context-parallel",
        key="context_parallel_size",
        kind=Kind.EQUALS,
        required=1,
        why="Context parallelism splits attention across ranks, which generation never does",
    ),
    _recipe(
        id="sequence-packing",
        key="policy.sequence_packing.enabled",
        kind=Kind.OFF,
        required=False,
        training_only=True,
        why="Packing changes what shares a micro-batch and scores through another log-softmax than generation",
    ),
    _train(
        id="fused-linear-logprobs",
        key="use_fused_linear_logprobs",
        kind=Kind.OFF,
        required=False,
        training_only=True,
        why="The chunked linear cross entropy never forms the logits that generation's log_softmax reads",
    ),
    _recipe(
        id="sequence-multiple",
        key="policy.make_sequence_length_divisible_by",
        kind=Kind.MULTIPLE_OF,
        required=TOKEN_MULTIPLE,
        training_only=True,
        why="Scoring must see shapes of the same class as generation, whose batches are multiples of 64 tokens",
    ),
    _recipe(
        id="dynamic-batching-multiple",
        key="policy.dynamic_batching.sequence_length_round",
        kind=Kind.MULTIPLE_OF,
        required=TOKEN_MULTIPLE,
        training_only=True,
        when=(DYNAMIC_BATCHING,),
        why="With dynamic batching this sets the padded length: the same multiple of 64 tokens",
    ),
    *(
        _train(
            id="agree-" + key.replace("_", "-"),
            key=key,
            kind=Kind.AGREE,
            required=None,
            why=_AGREE.format(what),
        )
        for key, what in _AGREEMENTS.items()
    ),
    _rule(
        id="model-mla",
        side=Side.MODEL,
        key="mla",
        kind=Kind.OFF,
        required=False,
        required_text="not multi-latent attention (MLA)",
        why="MLA runs attention kernels that no preset covers",
        not_fixable="the model is yours to choose",
    ),
    _rule(
        id="model-experimental-attention",
        side=Side.MODEL,
        key="experimental_attention",
        kind=Kind.OFF,
        required=False,
        required_text="no experimental attention variant",
        why="Experimental attention variants (gated delta net, DSA) run kernels that no preset covers",
        not_fixable="the model is yours to choose",
    ),
    _rule(
        id="model-hybrid",
        side=Side.MODEL,
        key="hybrid",
        kind=Kind.OFF,
        required=False,
        required_text="not an SSM / Mamba hybrid",
        why="The SSM scan of training, prefill and decode differ; the mxfp8 preset and later ones allow hybrids",
        not_fixable="the model is yours to choose; try --preset mxfp8",
    ),
)

_env = partial(EnvRule, preset="bf16", source="NeMo-RL #3208")

BF16_ENVIRONMENT: tuple[EnvRule, ...] = (
    _env(
        id="gpu-sm",
        need=Need.SM,
        names=(),
        minimum="100",
        why="The matched kernels (FlashAttention 4 with CuTe DSL) are for Blackwell; Hopper is not supported",
    ),
    _env(
        id="mcore-fields",
        need=Need.FIELDS,
        names=(
            "batch_invariant_mode",
            "batch_invariant_backend",
            "batch_invariant_collective",
            "flash_attention_version",
        ),
        why="megatron-core must know the settings, or they are dropped on the way to the model",
    ),
    _env(
        id="transformer-engine",
        need=Need.VERSION,
        names=("transformer_engine", "transformer_engine_cu13", "transformer_engine_cu12"),
        minimum="2.18",
        why="te_native needs TransformerEngine's batch-invariant attention",
    ),
    _env(
        id="flash-attn",
        need=Need.VERSION,
        names=("flash_attn",),
        minimum="2.8.1",
        why="The FlashAttention package under TransformerEngine and megatron-core",
    ),
    _env(
        id="flash-attn-4",
        need=Need.VERSION,
        names=("flash-attn-4",),
        minimum="4.0.0b19",
        why="flash_attention_version: 4. NeMo-RL pins 4.0.0b19; megatron-core's own gate asks for b20 or later",
    ),
    _env(
        id="cutlass-dsl",
        need=Need.VERSION,
        names=("nvidia-cutlass-dsl",),
        minimum="4.6.0.dev0",
        why="FlashAttention 4 is compiled by the CuTe DSL",
    ),
)
