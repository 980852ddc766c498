"""How a capture observes megatron-core: frames keyed from its engines, functions tapped where hooks see nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zkl_debug.capture.hooks import ModuleRule
from zkl_debug.capture.rows import FrameRows, Sketch
from zkl_debug.capture.state import TensorPart
from zkl_debug.engines.megatron import (
    taps_logprobs,
    taps_mamba,
    taps_model,
    taps_parallel,
    taps_precision,
    taps_routing,
    world,
)
from zkl_debug.engines.megatron.back_to_back import is_back_to_back
from zkl_debug.engines.megatron.frames import (
    EngineHistory,
    StaticHistory,
    StepRequests,
    dynamic_step,
    packed_forward,
    sketched,
)
from zkl_debug.engines.megatron.shard_sites import ShardSites
from zkl_debug.schema import Json, Phase

if TYPE_CHECKING:
    from zkl_debug.capture.api import Capture


def _rule(pattern: str, **options: Any) -> ModuleRule:
    return ModuleRule(re.compile(pattern), **options)


RULES: tuple[ModuleRule, ...] = (
    _rule(r"(?:.*\.)?rotary_pos_emb(?:\..*)?", skip="a table over positions, not rows"),
    _rule(r"mtp(?:\..*)?", skip="predicts further tokens: reads tokens behind its row"),
    _rule(r"decoder", inputs=False),
    _rule(r".*\.core_attention\..+", skip="inside core attention: rows are mixed with keys"),
    _rule(r".*\.core_attention", semantic="core_attention", flatten=True),
    _rule(r"embedding", inputs=False),
    _rule(r"(?:.*\.)?word_embeddings", semantic="embedding", layout="bs", inputs=False),
    _rule(r".*\.experts\.local_experts(?:\.\d+)?(?:\..+)?", semantic="expert", expert_rows="one"),
    _rule(r".*\.experts", semantic="experts", expert_rows="all"),
    _rule(r".*\.router", semantic="router", choice=True),
    _rule(r".*\.mixer\.norm", tapped=True),
    _rule(r".*(?:layernorm|_norm|\.norm)", semantic="norm"),
    _rule(r".*\.linear_\w+|output_layer", semantic="linear"),
)


class MegatronAdapter:
    """Frames and taps for ``GPTModel`` and its relatives, scored and generated."""

    rules = RULES

    def __init__(self, model: Any = None) -> None:
        self.place = world.place(getattr(model, "config", None))
        self.sites = ShardSites(model, self.place.at("tp"), self.place.at("etp")) if model is not None else None
        if not self.place.is_last_stage:
            self.rules = (_rule(r"decoder", skip="the output of one pipeline stage, not of the decoder"), *RULES)
        #: Record the reduction of a group of one rank as well, for a capture that is compared with more ranks.
        self.lone_collectives = False
        self.history = EngineHistory()
        self.static: dict[int, StaticHistory] = {}
        self.step_requests: StepRequests | None = None
        self.context: Any = None
        self.prompt_lens: dict[int, int] = {}
        self._next_sample = 0

    def rename(self, path: str) -> str:
        """Name in the whole model of a module of this rank."""
        return path if self.sites is None else self.sites.map.path(path)

    def parameter_part(self, local: str, tensor: torch.Tensor) -> TensorPart:
        """Name and place in the whole model of a parameter of this rank."""
        return TensorPart(local) if self.sites is None else self.sites.parameter_part(local, tensor)

    def install(self, capture: Capture) -> None:
        """Tap the functions of the ``taps_*`` modules."""
        if self.sites is not None and self.sites.needed:
            capture.session.shard_of = self.sites.shard_of
        taps_model.install(capture)
        taps_mamba.install(capture)
        taps_parallel.install(capture, self)
        taps_logprobs.install(capture, self)
        taps_precision.install(capture)
        if getattr(getattr(capture.model, "config", None), "moe_enable_routing_replay", False):
            taps_routing.install(capture)

    def fit_rows(self, rows: FrameRows) -> FrameRows:
        """Rows of a forward as this rank's tensors hold them."""
        rows.split = self.place.at("tp") if self.place.sp else (0, 1)
        return rows

    def graphs_in_a_row(self, model: torch.nn.Module) -> bool:
        """Whether the CUDA graphs of the layers are replayed with nothing in between that writes."""
        return is_back_to_back(model)

    def open_frame(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FrameRows | Sketch | None:
        """Key the coming forward from the inference context or the packing parameters it is called with."""
        self.step_requests = None
        context = kwargs.get("inference_context") or kwargs.get("inference_params")
        if context is not None and not context.is_static_batching():
            known = sketched(context)
            if known is None:
                return self._step(capture, context)
            n, graph = known
            return Sketch(Phase.DECODE, graph, n, lambda: self._step(capture, context))
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor):
            return None
        if context is not None:
            history = self.static.setdefault(id(context), StaticHistory())
            return history.rows(ids, int(context.sequence_len_offset))
        packed = kwargs.get("packed_seq_params")
        if packed is not None and packed.cu_seqlens_q is not None:
            rows = packed_forward(ids, packed, self._next_sample)
            self._next_sample += rows.n_seqs
            return rows
        return None

    def _step(self, capture: Capture, context: Any) -> FrameRows:
        """Rows of a dynamic step; before it has ended."""
        rows, self.step_requests = dynamic_step(context, self.history)
        self.context = context
        if rows.warmup:
            self.step_requests = None
        else:
            capture.session.unkeyed_rows += len(self.step_requests.request) - len(self.step_requests.keyed)
        return rows

    def metadata(self, capture: Capture) -> dict[str, Json]:
        """Path selection of megatron-core at the time of attaching, and the parallel layout."""
        from megatron.core.inference.utils import InferenceMode

        return {
            "engine": "megatron-core",
            "inference_mode": bool(InferenceMode.is_active()),
            "training_flag": capture.model.training,
            "parallel": self.place.to_json(),
        }

    def finish(self, capture: Capture) -> None:
        """Nothing is known at the end that was not before."""

    def following(self, requests: list[int], owner: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, Any]:
        """The prompt token behind each row of the current step, or -1 where it is yet to be sampled.

        Args:
            requests: requests of the step.
            owner: of each row, the index of its request, shape [n].

        Returns:
            Tokens, one per valid token slot of the step, int64 [n].
        """
        step = self.step_requests
        assert step is not None
        entries = [self.history.requests.get(rid) for rid in requests]
        tokens = [np.asarray(entry.tokens if entry is not None else (), np.int64) for entry in entries]
        lengths = np.array([len(known) for known in tokens], np.int64)
        starts = np.cumsum(lengths) - lengths
        every = np.concatenate(tokens)
        behind = step.position + 1
        inside = behind < lengths[owner]
        found = np.full(len(owner), -1, np.int64)
        found[inside] = every[(starts[owner] + behind)[inside]]
        return found


def make_adapter(model: Any = None) -> MegatronAdapter:
    """A fresh adapter; one per capture. ``model`` is this rank's part of the model."""
    return MegatronAdapter(model)
