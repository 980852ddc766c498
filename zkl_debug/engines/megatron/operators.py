"""Which callables do the work of a site: where to look them up, so that an operator can be called once more."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from zkl_debug.schema import SiteName

_ATTENTION = "megatron.core.transformer.attention"
_DYNAMIC = "megatron.core.inference.contexts.dynamic_context:DynamicInferenceContext"
_ROUTER = "megatron.core.transformer.moe.router"
_DISPATCH = "megatron.core.transformer.moe.token_dispatcher"
_SCORING = "zkl_debug.engines.megatron.scoring"

_SELECTED = ((_SCORING, "select_logprobs"), (_DYNAMIC, "calculate_log_probs_tensors"))

#: operator of a tap -> ("module" or "module:Class", attribute) for each function that may do its work
_FUNCTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "rope.q": ((_ATTENTION, "apply_rotary_pos_emb"), (_DYNAMIC, "apply_rotary_emb_query")),
    "rope.k": ((_ATTENTION, "apply_rotary_pos_emb"), (_DYNAMIC, "apply_rotary_emb_key")),
    "router.gating": ((_ROUTER, "router_gating_linear"),),
    "router.topk": ((_ROUTER, "topk_routing_with_score_function"),),
    "unpermute": ((_DISPATCH, "unpermute"),),
    "log_softmax": ((_SCORING, "log_softmax"), (_DYNAMIC, "_processed_log_probs")),
    "selected": _SELECTED,
    "label": _SELECTED,
}


def bindings(site: SiteName, model: nn.Module) -> list[tuple[Any, str]]:
    """Places (owner, attribute) whose callable computes the output of a site; empty where none is known.

    Args:
        site: an output.
        model: the live model; for a module's site the owner is that module and the attribute ``forward``.
    """
    operator = site.op.split("#")[0]
    if operator:
        return [(_resolve(path), name) for path, name in _FUNCTIONS.get(operator, ())]
    try:
        module = model.get_submodule(site.path.split("#")[0])
    except AttributeError:
        return []
    places: list[tuple[Any, str]] = [(module, "forward")]
    if site.path.endswith(".core_attention"):  # the dynamic engine passes the module by
        places.append((_resolve(f"{_ATTENTION}:Attention"), "flash_decode_and_prefill"))
    return places


def entry(owner: Any, attribute: str) -> Any:
    """What to call so that hooks and taps see the call: the module itself, or the attribute as it is looked up now."""
    return owner if isinstance(owner, nn.Module) else getattr(owner, attribute)


def _resolve(path: str) -> Any:
    module, _, cls = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, cls) if cls else found
