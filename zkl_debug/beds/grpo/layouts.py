"""Who holds the weights that generate, and how an update gets to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.beds.grpo.side import EngineSide, LocalSide

if TYPE_CHECKING:
    from torch import nn

    from zkl_debug.beds.grpo.dedicated import Worker
    from zkl_debug.engines.megatron.generation import GenConfig
    from zkl_debug.engines.megatron.model import ModelSpec
    from zkl_debug.engines.megatron.rollout import RolloutGenerator


#: Layers of a hybrid model: Mamba, then attention.
HYBRID_PATTERN = "M*"


class Layout(Protocol):
    """A trainer and a generator, and the way from one to the other."""

    @property
    def trainer(self) -> nn.Module:
        """The model that is trained and scores."""

    @property
    def side(self) -> EngineSide:
        """What generates."""

    def refit(self) -> None:
        """Bring the trainer's weights to the engine, which is asleep."""


def model_spec(options: GrpoOptions) -> ModelSpec:
    """Sizes of the model of a run."""
    from zkl_debug.engines.megatron.model import ModelSpec

    return ModelSpec(
        layers=options.layers,
        hidden=options.hidden,
        max_length=64,
        experts=options.experts,
        topk=2 if options.experts else 0,
        dense_layers=1 if options.experts else 0,
        tied_output=options.tied,
    )


def gen_config(options: GrpoOptions) -> GenConfig:
    """How the engine of a run is built."""
    from zkl_debug.engines.megatron.generation import GenConfig

    return GenConfig(
        max_tokens=options.max_tokens,
        max_requests=options.sequences,
        max_sequence_length=64,
        block_size=options.block,
        chunked_prefill=options.chunked_prefill,
        prefix_caching=options.prefix_caching,
        keep_prefix_blocks=True,
        kv_management=options.kv,
        greedy=False,
        buffer_gb=0.004,
    )


def bed_model(options: GrpoOptions) -> nn.Module:
    """The model of a run, from its seed. A tied one gets a smaller embedding, or its logits would be all or nothing."""
    import torch

    from zkl_debug.engines.megatron.hybrid import build_hybrid
    from zkl_debug.engines.megatron.model import build_model

    if options.hybrid:
        return build_hybrid(model_spec(options), options.dtype, options.seed, HYBRID_PATTERN, gated_norm=False)
    model = build_model(model_spec(options), options.dtype, options.seed)
    if options.tied:
        with torch.no_grad():
            dict(model.named_parameters())["embedding.word_embeddings.weight"].mul_(0.25)
    return model


def rollouts(options: GrpoOptions, model: nn.Module) -> RolloutGenerator:
    """The engine of a run over a model."""
    from zkl_debug.engines.megatron.rollout import RolloutGenerator

    return RolloutGenerator(model, gen_config(options), options.prompt_log_probs)


def fresh_engine(options: GrpoOptions, weights: nn.Module) -> LocalSide:
    """An engine nothing has happened to, over a new model with a plain copy of ``weights``."""
    import torch

    model = bed_model(options)
    given = dict(weights.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(given[name])
    return LocalSide(rollouts(options, model))


class SharedLayout:
    """``colocated-shared``: the engine runs the trainer's own model; there is nothing to copy."""

    def __init__(self, options: GrpoOptions) -> None:
        self.trainer = bed_model(options)
        self.engine_model = self.trainer
        self.generator = rollouts(options, self.trainer)
        self.side = LocalSide(self.generator, (self,))

    def refit(self) -> None:
        """The weights are the engine's already."""


class InferenceModelLayout:
    """``colocated-inference-model``: a second model in eval mode, updated through ``swap_model_weights``."""

    def __init__(self, options: GrpoOptions) -> None:
        self.trainer = bed_model(options)
        self.engine_model = bed_model(options).eval()
        self.generator = rollouts(options, self.engine_model)
        self.side = LocalSide(self.generator, (self,))

    def refit(self) -> None:
        """mcore's own resharding, both models in one process."""
        from zkl_debug.engines.megatron.refit import swap_weights

        swap_weights(self.trainer, self.engine_model)


def build_layout(options: GrpoOptions, worker: Worker | None = None) -> Layout:
    """The layout of a run; ``worker`` is the engine's process of a dedicated one."""
    if options.layout == "colocated-shared":
        return SharedLayout(options)
    if options.layout == "colocated-inference-model":
        return InferenceModelLayout(options)
    from zkl_debug.beds.grpo.dedicated import DedicatedLayout

    assert worker is not None
    return DedicatedLayout(options, worker)
