"""How a capture observes a transformers model: its forwards keyed, rope and attention tapped.

A forward inside ``generate``, or with a cache object, is generation (prefill, then decode); any other is scoring.
Beam search and assisted decoding reorder or rewind caches: their later frames are left out and counted.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import torch

from zkl_debug.capture.hooks import ModuleRule
from zkl_debug.capture.rows import FrameRows
from zkl_debug.engines.hf.frames import Histories
from zkl_debug.schema import Json, SiteKind

if TYPE_CHECKING:
    from zkl_debug.capture.api import Capture

_CACHES = ("past_key_values", "cache", "cache_params")
_POSITIONS = "inputs/position_ids:in.0"


def _rule(pattern: str, **options: Any) -> ModuleRule:
    return ModuleRule(re.compile(pattern), layout="bs", **options)


RULES: tuple[ModuleRule, ...] = (
    _rule(r"(?:.*\.)?rotary_emb", skip="a table over positions, not rows"),
    _rule(r".*\.experts\..+", skip="inside the experts: rows are grouped by expert"),
    _rule(r".*(?:\.|^)(?:embed_tokens|wte)", semantic="embedding"),
    _rule(r".*\.conv1d", skip="tokens are its last dimension"),
    _rule(r".*(?:self_attn|attention|\.attn)", outputs=1),  # the second output is attention weights
    _rule(r".*(?:layernorm|_norm|\.norm|ln_\w+)", semantic="norm"),
    _rule(r".*\.\w+_proj|(?:.*\.)?lm_head", semantic="linear"),
    _rule(r".*"),
)


class HFAdapter:
    """Frames and taps for any ``PreTrainedModel`` that is a causal language model."""

    rules = RULES

    def __init__(self) -> None:
        self.histories = Histories()
        self.prompt_lens: dict[int, int] = {}
        self._generating = 0
        self._cached = 0
        self._prompt_mask: torch.Tensor | None = None

    def install(self, capture: Capture) -> None:
        """Tap ``generate``, the attention functions and rotary embeddings of the model's modeling files."""
        from transformers.generation.utils import GenerationMixin
        from transformers.modeling_utils import AttentionInterface

        capture.taps.wrap(GenerationMixin, "generate", self._generate(capture))
        capture.taps.wrap(AttentionInterface, "get_interface", self._interface(capture))
        files = {type(module).__module__ for module in capture.model.modules()}
        for name in sorted(files):
            file = sys.modules.get(name)
            if file is not None and hasattr(file, "apply_rotary_pos_emb"):
                capture.taps.wrap(file, "apply_rotary_pos_emb", self._rope(capture))
        for module in capture.model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                capture.keep(module.register_forward_pre_hook(self._positions(capture), with_kwargs=True))

    def open_frame(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FrameRows | None:  # noqa: ARG002
        """Key the coming forward from its ids, its mask and its cache."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            self.histories.skip("called without token ids")
            return None
        cache = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
        mask = kwargs.get("attention_mask")
        if self._generating and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
            mask = self._prompt_mask  # static caches get a prepared 4-d mask
        self._cached = self.histories.length(cache)
        return self.histories.frame(ids, mask, cache, self._generating > 0, self._cached)

    def finish(self, capture: Capture) -> None:
        """Say which forwards could not be keyed."""
        if self.histories.unkeyed:
            capture.add_manifest("unkeyed_frames", dict(self.histories.unkeyed))

    def metadata(self, capture: Capture) -> dict[str, Json]:
        """The attention implementation at the time of attaching."""
        import transformers

        config = capture.model.config
        return {
            "engine": "transformers",
            "transformers": transformers.__version__,
            "attention": str(getattr(config, "_attn_implementation", None)),
            "training_flag": capture.model.training,
        }

    # ---- taps -----------------------------------------------------------------------------------------------------
    def _generate(self, capture: Capture) -> Any:
        def wrapper(original: Any) -> Any:
            def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
                if model is not capture.model:
                    return original(model, *args, **kwargs)
                mask = kwargs.get("attention_mask")
                self._prompt_mask = mask if isinstance(mask, torch.Tensor) else None
                self._generating += 1
                try:
                    return original(model, *args, **kwargs)
                finally:
                    self._generating -= 1

            return generate

        return wrapper

    def _interface(self, capture: Capture) -> Any:
        session = capture.session

        def observed(function: Any) -> Any:
            def attention(
                module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
            ) -> Any:
                path = session.current_path()
                if session.frame is not None and session.enabled:
                    with session.guarded("core_attention:in"):
                        new = query.shape[2]
                        for port, tensor in enumerate((query, *(self._newest(t, new) for t in (key, value)))):
                            _record(capture, f"{path}/core_attention:in.{port}", tensor.transpose(1, 2))
                output = function(module, query, key, value, *args, **kwargs)
                if session.frame is not None and session.enabled:
                    with session.guarded("core_attention:out"):
                        _record(capture, f"{path}/core_attention:out.0", output[0])
                return output

            return attention

        def wrapper(original: Any) -> Any:
            def get_interface(mapping: Any, *args: Any, **kwargs: Any) -> Any:
                return observed(original(mapping, *args, **kwargs))

            return get_interface

        return wrapper

    def _newest(self, tensor: torch.Tensor, new: int) -> torch.Tensor:
        """Of K or V, [b, heads, columns, d], the columns of this call: older ones came from the cache.

        A static cache hands out all its columns, filled or not; one with a window only the last ones.
        """
        end = self._cached + new
        return tensor[:, :, self._cached : end] if tensor.shape[2] >= end else tensor[:, :, -new:]

    def _rope(self, capture: Capture) -> Any:
        session = capture.session

        def wrapper(original: Any) -> Any:
            def apply_rotary_pos_emb(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                path = session.current_path()
                active = session.frame is not None and session.enabled
                if active:
                    with session.guarded("rope:in"):
                        _record(capture, f"{path}/rope.q:in.0", q.transpose(1, 2))
                        _record(capture, f"{path}/rope.k:in.0", k.transpose(1, 2))
                q_out, k_out = original(q, k, *args, **kwargs)
                if active:
                    with session.guarded("rope:out"):
                        _record(capture, f"{path}/rope.q:out.0", q_out.transpose(1, 2))
                        _record(capture, f"{path}/rope.k:out.0", k_out.transpose(1, 2))
                return q_out, k_out

            return apply_rotary_pos_emb

        return wrapper

    def _positions(self, capture: Capture) -> Any:
        session = capture.session

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
            frame = session.frame
            if frame is None or not session.enabled or frame.passed_already(_POSITIONS):
                return
            value = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
            if isinstance(value, torch.Tensor) and value.ndim == 2:
                with session.guarded(_POSITIONS):
                    steps, batch = frame.rows.grid
                    whole = value.expand(batch, steps).to(torch.int64).contiguous()
                    session.record(_POSITIONS, whole, kind=SiteKind.INPUT, semantic="input", layout="bs")

        return hook


def _record(capture: Capture, name: str, tensor: torch.Tensor) -> None:
    """A [b, s, heads, d] tensor as rows of [heads, d]: what explains attention and rope must know the heads apart."""
    semantic = "core_attention" if "/core_attention:" in name else "rope"
    capture.session.record(name, tensor, semantic=semantic, layout="bs")


def make_adapter(model: Any = None) -> HFAdapter:  # noqa: ARG001 - adapters of other engines read it
    """A fresh adapter; one per capture."""
    return HFAdapter()
