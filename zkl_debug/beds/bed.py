"""What a bed is: a name, a model, a workload; and the options a run of it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zkl_debug.errors import UsageError

SIDES = ("gen", "train")
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Bed:
    """A workload.

    Attributes:
        name: as used on the command line.
        description: one line for listings.
        model: keyword arguments of :class:`zkl_debug.engines.megatron.model.ModelSpec`.
        dtypes: dtypes it runs in.
        engine: ``cpu``, or the kind of GPU model (:data:`zkl_debug.engines.megatron.gpu.KINDS`).
        sizes: on a GPU, what ``small`` and ``full`` add to ``model``.
        pattern: layers of a hybrid model, one letter each (:func:`zkl_debug.engines.megatron.hybrid.build_hybrid`).
    """

    name: str
    description: str
    model: Mapping[str, Any]
    dtypes: tuple[str, ...] = DTYPES
    engine: str = "cpu"
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pattern: str = ""

    @property
    def hybrid(self) -> bool:
        """Whether it has Mamba layers."""
        return "M" in self.pattern

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return self.engine != "cpu"

    @property
    def experts(self) -> int:
        """Experts of a layer in the small size, 0 for a dense model."""
        return int({**self.model, **self.sizes.get("small", {})}.get("experts", 0))

    @property
    def switches(self) -> tuple[str, ...]:
        """Names of the switches of its stack, in ladder order."""
        if self.on_gpu:
            from zkl_debug.beds.gpu import gpu_ladder

            return tuple(s.name for s in gpu_ladder(self, graphs=True))
        from zkl_debug.stack import ladder

        return tuple(s.name for s in ladder(self.hybrid))

    @property
    def faults(self) -> tuple[str, ...]:
        """Ids of the faults that can be put into it."""
        from zkl_debug.beds.faults import FAULTS

        return tuple(f.id for f in FAULTS.values() if self.name in f.beds)


SIZES = ("small", "full")
_SMALL = {"layers": 2, "hidden": 1024, "heads": 16, "kv_groups": 4, "ffn": 2816, "vocab": 8192, "max_length": 512}
_FULL = {"layers": 16, "hidden": 2048, "heads": 16, "kv_groups": 8, "ffn": 8192, "vocab": 32768, "max_length": 512}
_DENSE = {"small": _SMALL, "full": _FULL}
_EXPERTS = {
    "small": {**_SMALL, "experts": 8, "topk": 2, "expert_ffn": 512},
    "full": {**_FULL, "experts": 64, "topk": 4, "expert_ffn": 768},
}
_ENGINE = "through the dynamic engine on a GPU"


def _on_gpu(name: str, kind: str, text: str, sizes: Mapping[str, Mapping[str, Any]]) -> Bed:
    return Bed(name, f"{text}, {_ENGINE} (--size small or full)", {}, ("bf16",), kind, sizes)


BEDS: dict[str, Bed] = {
    b.name: b
    for b in (
        Bed(
            "tiny-gpt",
            "dense GPT, 4 layers, hidden 64, 4 heads in 2 KV groups; 8 prompts through the dynamic engine",
            {"layers": 4},
        ),
        Bed(
            "tiny-moe",
            "the same with 8 experts, top-4, in layers 1-3 (all-to-all dispatcher, fp32 router)",
            {"layers": 4, "experts": 8, "topk": 4, "dense_layers": 1},
        ),
        Bed("tiny-tied", "tiny-gpt whose output layer is its embedding", {"layers": 2, "tied_output": True}),
        Bed(
            "tiny-window",
            "tiny-gpt with sliding-window attention, 16 keys, in every other layer",
            {"layers": 3, "window": 15},
        ),
        Bed("tiny-yarn", "tiny-gpt with YaRN rotary embedding, stretched 4 times", {"layers": 2, "yarn": 4.0}),
        Bed(
            "tiny-mtp",
            "tiny-gpt with a multi-token prediction layer, which scoring runs and generation does not",
            {"layers": 2, "mtp": 1},
        ),
        Bed(
            "tiny-hybrid",
            "HybridModel: Mamba, attention, Mamba, 8 experts top-2, MLP; the same prompts, without prefix cache",
            {"layers": 5, "experts": 8, "topk": 2, "dense_layers": 3},
            pattern="M*ME-",
        ),
        _on_gpu("gpt-te", "te", "dense GPT of 1.1 B parameters, Transformer Engine spec", _DENSE),
        _on_gpu("gpt-infopt", "infopt", "the same with the inference-optimised spec", _DENSE),
        _on_gpu("gpt-local-fa4", "local-fa4", "the same with the local spec and FlashAttention-4 in scoring", _DENSE),
        _on_gpu("moe-te", "te", "GPT with 64 experts, top-4, Transformer Engine spec (grouped GEMM)", _EXPERTS),
    )
}


def bed(name: str) -> Bed:
    """The bed of that name.

    Raises:
        UsageError: when there is none.
    """
    if name == "grpo":
        raise UsageError(
            "grpo is a loop, not one pair of captures",
            f"one of {', '.join(BEDS)}",
            "zkl-debug watch, certify or bisect steps run it",
        )
    if name not in BEDS:
        raise UsageError(f"no bed named {name!r}", f"one of {', '.join(BEDS)}", "zkl-debug beds")
    return BEDS[name]


@dataclass(frozen=True)
class BedOptions:
    """How one run of a bed is made. Everything is deterministic given these.

    Attributes:
        bed: name of the bed.
        seed: weights and prompts.
        dtype: ``fp32`` or ``bf16``.
        stack: whole switch ladder on or off.
        switches: single switches changed against ``stack``.
        one_sided: switches that are on round one side alone, and which.
        fault: id of the fault to put in, or None.
        sides: which sides to run; ``train`` alone still needs ``sequences`` or a ``gen`` run before.
        permute: 0, or a seed for the order of requests and of scored sequences.
        neighbours: extra requests and scored sequences that share every batch with the others.
        crowd: extra short sequences that are scored in the padded batches but were never generated.
        pad_multiple: padded scoring batches are widened to a multiple of this.
        packing: score three sequences packed (needs the ``attention-reference`` switch; off without it).
        pack_multiple: each packed sequence is padded to a multiple of this (1: no padding).
        chunk: token budget of an engine step, hence longest prefill chunk; a multiple of 64.
        chunked_prefill, prefix_caching: engine features.
        micro_batch: sequences in a padded scoring batch.
        left_pad: pad scoring batches on the left (mcore's rotary angles then shift with the padding).
        replay_routing: scoring's routers take the experts that generation recorded (``RouterReplay``).
        rescore: 0, or sequences per batch of a second scoring pass over all sequences, padded.
        reprefill: after generation, submit prompt + generated tokens as prompts.
        longest_prompt: prompts are cut to so many tokens; 0 leaves them as planned.
        greedy: greedy decoding; otherwise seeded sampling at temperature 1.
        size: ``small`` or ``full``; beds of a CPU have one size.
        graphs: on a GPU, decode through CUDA graphs.
        layout: sizes of the parallel groups of the training side (fields of
            :class:`~zkl_debug.engines.megatron.layout.ParallelLayout`); empty for one rank.
        gen_layout: the same of the generation side.
        threads: torch threads during the run (restored afterwards); 0 leaves the process's setting.
    """

    bed: str = "tiny-gpt"
    seed: int = 0
    dtype: str = "bf16"
    stack: bool = True
    switches: Mapping[str, bool] = field(default_factory=dict)
    one_sided: Mapping[str, str] = field(default_factory=dict)
    fault: str | None = None
    sides: tuple[str, ...] = SIDES
    permute: int = 0
    neighbours: int = 0
    crowd: int = 0
    pad_multiple: int = 8
    packing: bool = True
    pack_multiple: int = 8
    chunk: int = 64
    chunked_prefill: bool = True
    prefix_caching: bool = True
    micro_batch: int = 2
    left_pad: bool = False
    replay_routing: bool = False
    rescore: int = 0
    reprefill: bool = True
    longest_prompt: int = 0
    greedy: bool = True
    threads: int = 1
    size: str = "full"
    graphs: bool = False
    layout: Mapping[str, Any] = field(default_factory=dict)
    gen_layout: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spread(self) -> bool:
        """Whether a side runs on more than one rank."""
        return bool(self.layout or self.gen_layout)

    @property
    def on_gpu(self) -> bool:
        """Whether the bed runs on a GPU."""
        return bed(self.bed).on_gpu

    def __post_init__(self) -> None:
        known = bed(self.bed)
        if self.dtype not in known.dtypes:
            raise UsageError(f"bed {self.bed} has no dtype {self.dtype!r}", f"one of {', '.join(known.dtypes)}")
        if self.size not in SIZES:
            raise UsageError(f"size {self.size!r}", f"one of {', '.join(SIZES)}")
        if known.on_gpu and self.fault is not None:
            raise UsageError(
                f"fault {self.fault} cannot be put into bed {self.bed}", "a bed of a CPU", "zkl-debug beds"
            )
        if self.graphs and not known.on_gpu:
            raise UsageError(f"bed {self.bed} has no CUDA graphs", "a bed of a GPU", "zkl-debug beds")
        if self.graphs and known.experts:
            raise UsageError(
                f"bed {self.bed} has no CUDA graphs: its all-to-all dispatcher reads expert counts on the host",
                "--no-graphs",
            )
        wrong = [s for s in self.sides if s not in SIDES]
        if wrong or not self.sides:
            raise UsageError(f"sides {', '.join(self.sides) or 'none'}", f"some of {', '.join(SIDES)}")
        if self.replay_routing and (known.on_gpu or not known.experts):
            raise UsageError(f"bed {self.bed} has no routing to replay", "a bed of a CPU with experts: tiny-moe")
        if self.one_sided and known.on_gpu:
            raise UsageError(f"bed {self.bed} has no switches of one side alone", "a bed of a CPU", "zkl-debug beds")
        if self.spread and (known.on_gpu or known.hybrid or self.replay_routing):
            what = f"{self.bed} with routing replay" if self.replay_routing else self.bed
            raise UsageError(f"bed {what} does not run on several ranks", "tiny-gpt or tiny-moe", "zkl-debug beds")
        if self.chunk <= 0 or self.chunk % 64:
            raise UsageError(f"chunk {self.chunk}", "a positive multiple of 64: mcore pads mixed steps to 64 tokens")
