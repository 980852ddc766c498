"""What a model's name says about its architecture, as data; a local checkpoint's ``config.json`` says it better."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A pattern on the model name (case ignored) and the facts it stands for."""

    pattern: str
    title: str
    mla: bool = False
    experimental_attention: bool = False
    hybrid: bool = False
    moe: bool = False


#: The first match decides. A name that matches nothing leaves every fact open.
FAMILIES: tuple[Family, ...] = (
    Family(r"r1-(0528-)?distill|r1-distill", "distilled into a Qwen or Llama"),
    Family(r"nemotron[-_]?3[-_]|nano[-_]?v3", "Nemotron 3 hybrid (Mamba)", hybrid=True, moe=True),
    Family(r"nemotron[-_]?h\b|nemotron[-_]nano.*[-_]v2", "Nemotron hybrid (Mamba)", hybrid=True),
    Family(r"deepseek[-_]?v3\.2", "DeepSeek sparse attention", mla=True, experimental_attention=True, moe=True),
    Family(r"glm[-_]?5", "GLM-5 (MLA, sparse attention)", mla=True, experimental_attention=True, moe=True),
    Family(r"kimi[-_]?linear", "Kimi linear attention", mla=True, experimental_attention=True, moe=True),
    Family(r"deepseek[-_]?(v2|v3|r1|coder[-_]?v2|prover[-_]?v2)", "DeepSeek (MLA)", mla=True, moe=True),
    Family(r"moonlight|kimi[-_]?k2|kimi[-_]?vl", "Moonshot (MLA)", mla=True, moe=True),
    Family(r"minicpm3", "MiniCPM3 (MLA)", mla=True),
    Family(r"longcat[-_]?flash", "LongCat-Flash (MLA)", mla=True, moe=True),
    Family(r"qwen3[-_]?next|qwen3\.5", "Qwen gated delta net", experimental_attention=True, moe=True),
    Family(
        r"jamba|bamba|zamba|falcon[-_]?(h1|mamba)|granite[-_]?4\.0[-_]?h|codestral[-_]?mamba|mamba", "SSM", hybrid=True
    ),
    Family(r"qwen3[-_].*a\d+b", "Qwen3 MoE", moe=True),
    Family(r"mixtral|olmoe|gpt[-_]?oss|glm[-_]?4\.5|qwen[\d.]+[-_]moe", "attention MoE", moe=True),
    Family(r"qwen|llama|mistral|gemma|phi[-_]?[34]|smollm|olmo|glm[-_]?4", "attention transformer"),
)

#: Keys of a Hugging Face config.json and the fact a truthy value stands for.
CONFIG_FACTS: dict[str, str] = {
    "kv_lora_rank": "mla",
    "index_topk": "experimental_attention",
    "linear_num_value_heads": "experimental_attention",
    "hybrid_override_pattern": "hybrid",
    "mamba_num_heads": "hybrid",
    "mamba_d_state": "hybrid",
    "ssm_cfg": "hybrid",
    "n_routed_experts": "moe",
    "num_local_experts": "moe",
    "num_experts": "moe",
}

#: Keys of megatron_cfg, its model_overrides or the generation config and the fact a truthy value stands for.
OVERRIDE_FACTS: dict[str, str] = {
    "multi_latent_attention": "mla",
    "experimental_attention_variant": "experimental_attention",
    "hybrid_layer_pattern": "hybrid",
    "hybrid_override_pattern": "hybrid",
    "is_hybrid_model": "hybrid",
    "num_moe_experts": "moe",
}
