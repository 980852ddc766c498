"""Taps inside the model: what module hooks cannot see in megatron-core.

One table row per operator; where training and generation reach it through different functions, both are tapped under
one site name. A function that this build of megatron-core does not have is skipped and listed in the manifest.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zkl_debug.capture.experts import (
    Permutation,
    choice_as_map,
    is_choice_by_id,
    record_expert_rows,
    set_permutation,
)
from zkl_debug.schema import SiteKind

if TYPE_CHECKING:
    from zkl_debug.capture.api import Capture

Tap = Callable[["Capture", Callable[..., Any]], Callable[..., Any]]
Record = Callable[["Capture", str, Any], None]


def install(capture: Capture) -> None:
    """Install every model tap into ``capture.taps``."""
    missing = install_table(capture, _TABLE)
    for module in capture.model.modules():
        for attribute in ("self_attn_bda", "mlp_bda", "cross_attn_bda", "mamba_bda"):
            if callable(vars(module).get(attribute)):
                capture.taps.wrap(module, attribute, functools.partial(_residual, capture, attribute))
    if isinstance(getattr(capture.model, "mtp", None), torch.nn.Module):
        capture.taps.wrap(capture.model.mtp, "forward", functools.partial(_unobserved, capture))
        owner = resolve_owner("megatron.core.models.gpt.gpt_model")
        if callable(getattr(owner, "process_mtp_loss", None)):
            capture.taps.wrap(owner, "process_mtp_loss", functools.partial(_unobserved, capture))
    capture.add_manifest("taps_missing", missing)


def install_table(capture: Capture, table: Sequence[tuple[str, str, Tap]]) -> list[str]:
    """Install the taps of a table (owner, attribute, tap); names of those that this build of megatron-core lacks."""
    missing = []
    for owner, name, tap in table:
        target = resolve_owner(owner)
        if target is None or getattr(target, name, None) is None:
            missing.append(f"{owner}.{name}")
            continue
        capture.taps.wrap(target, name, functools.partial(tap, capture))
    return missing


def in_and_out(operator: str, record: Record, at: int = 0, seen: Callable[[Capture], bool] | None = None) -> Tap:
    """A tap of an operator on one tensor, which is read before the function runs, for it may be written into.

    Args:
        operator: what the probe was at, should it fail.
        record: called with the capture, ``in`` or ``out``, and the argument or the result.
        at: place of the tensor among the arguments.
        seen: whether to record now; default :func:`active`.
    """
    on = seen or active

    def tap(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if on(capture):
                with capture.session.guarded(operator):
                    record(capture, "in", (*args, *kwargs.values())[at])
            result = function(*args, **kwargs)
            if on(capture):
                with capture.session.guarded(operator):
                    record(capture, "out", result)
            return result

        return tapped

    return tap


def _tensor(operator: str, semantic: str = "") -> Record:
    """Records the tensor under the operator's own site."""
    return lambda capture, port, value: _record(capture, operator, f"{port}.0", value, semantic)


def _unobserved(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    """Record nothing inside: multi-token prediction embeds, and projects, tokens that lie behind a row's own."""

    @functools.wraps(function)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        session = capture.session
        before, session.enabled = session.enabled, False
        try:
            return function(*args, **kwargs)
        finally:
            session.enabled = before

    return tapped


def resolve_owner(path: str) -> Any:
    """The module or class named ``module`` or ``module:Class``; None where there is none."""
    module, _, cls = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    return getattr(found, cls, None) if cls else found


def site(capture: Capture, operator: str, port: str) -> str:
    """Site name of a tapped operator in the module being run.

    An operator named ``router.topk`` that runs inside ``...mlp.router`` is filed under ``...mlp/router.topk``.
    """
    path = capture.session.current_path()
    owner = operator.rpartition(".")[0]
    if owner and path.endswith("." + owner):
        path = path[: -len(owner) - 1]
    return f"{path}/{operator}:{port}"


def _record(capture: Capture, operator: str, port: str, value: Any, semantic: str = "", flatten: bool = False) -> None:
    # One head of several ranks' and one sequence of several look the same in a packed tensor: heads lie flat there.
    flatten = flatten or (semantic in ("qkv", "rope") and capture.session.shard_of is not None)
    if isinstance(value, torch.Tensor):
        capture.session.record(site(capture, operator, port), value, semantic=semantic or operator, flatten=flatten)


def active(capture: Capture) -> bool:
    """Whether a frame is open and the probe is on."""
    return capture.session.enabled and capture.session.frame is not None


# ---- attention ----------------------------------------------------------------------------------------------------
def _qkv(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(module: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(module, *args, **kwargs)
        if active(capture):
            with capture.session.guarded("qkv"):
                for index, value in enumerate(result if isinstance(result, tuple) else ()):
                    _record(capture, "qkv", f"out.{index}", value, "qkv")
        return result

    return tapped


def _rope(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    """Training and static path: called for the query first, then for the key."""

    @functools.wraps(function)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        if not active(capture):
            return function(*args, **kwargs)
        frame = capture.session.frame
        assert frame is not None
        calls = frame.scratch.setdefault("rope_calls", {})
        path = capture.session.current_path()
        operator = "rope.q" if calls.get(path, 0) % 2 == 0 else "rope.k"
        calls[path] = calls.get(path, 0) + 1
        with capture.session.guarded(operator):
            _record(capture, operator, "in.0", args[0] if args else kwargs.get("t"), "rope")
        result = function(*args, **kwargs)
        with capture.session.guarded(operator):
            _record(capture, operator, "out.0", result, "rope")
        return result

    return tapped


def _rope_fused(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(context: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if active(capture):
            with capture.session.guarded("rope"):
                _record(capture, "rope.q", "in.0", query, "rope")
                _record(capture, "rope.k", "in.0", key, "rope")
        result = function(context, query, key, *args, **kwargs)
        if active(capture):
            with capture.session.guarded("rope"):
                _record(capture, "rope.q", "out.0", result[0], "rope")
                _record(capture, "rope.k", "out.0", result[1], "rope")
        return result

    return tapped


def _core_site(capture: Capture, port: str) -> str:
    return f"{capture.session.current_path()}.core_attention:{port}"


def _kv_write(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    """The key and value of each new row as they are written to the cache: inputs 1 and 2 of core attention."""

    @functools.wraps(function)
    def tapped(context: Any, layer_number: int, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any) -> Any:
        if active(capture):
            with capture.session.guarded("kv_write"):
                for port, tensor in (("in.1", key), ("in.2", value)):
                    if isinstance(tensor, torch.Tensor):
                        capture.session.record(
                            _core_site(capture, port), tensor, semantic="core_attention", flatten=True
                        )
        return function(context, layer_number, key, value, *args, **kw)

    return tapped


def _core(capture: Capture, port: str, value: Any) -> None:
    """Dynamic engine: the ``core_attention`` module never runs; a method does its work."""
    capture.session.record(_core_site(capture, port), value, semantic="core_attention", flatten=True)


# ---- residual adds ------------------------------------------------------------------------------------------------
def _residual(capture: Capture, operator: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``get_bias_dropout_add`` returns the function that adds; tap that one."""

    @functools.wraps(function)
    def make(*outer: Any, **outer_kwargs: Any) -> Any:
        add = function(*outer, **outer_kwargs)

        def tapped(x_with_bias: Any, residual: Any, *args: Any, **kwargs: Any) -> Any:
            if active(capture):
                with capture.session.guarded(operator):
                    branch = x_with_bias[0] if isinstance(x_with_bias, tuple) else x_with_bias
                    _record(capture, operator, "in.0", branch, "residual")
                    _record(capture, operator, "in.1", residual, "residual")
            result = add(x_with_bias, residual, *args, **kwargs)
            if active(capture):
                with capture.session.guarded(operator):
                    _record(capture, operator, "out.0", result, "residual")
            return result

        return tapped

    return make


_IN_TOPK = "in_topk"


# ---- mixture of experts -------------------------------------------------------------------------------------------
def _topk(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    """A choice told as ids (``dense_output``) is recorded as the map over all experts that training has."""

    @functools.wraps(function)
    def tapped(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        frame = capture.session.frame
        if torch.compiler.is_compiling() or frame is None or frame.scratch.get(_IN_TOPK):
            return function(logits, *args, **kwargs)  # the function round it is tapped
        if active(capture):
            with capture.session.guarded("router.topk"):
                _record(capture, "router.topk", "in.0", logits)
        frame.scratch[_IN_TOPK] = True
        try:
            result = function(logits, *args, **kwargs)
        finally:
            frame.scratch[_IN_TOPK] = False
        if active(capture):
            with capture.session.guarded("router.topk"):
                told, experts = result, int(logits.shape[-1])
                if is_choice_by_id(result[0], result[1], experts):
                    told = choice_as_map(result[0], result[1], experts)
                for index, value in enumerate(told):
                    _record(capture, "router.topk", f"out.{index}", value)
                chosen = told[1]
                if isinstance(chosen, torch.Tensor) and chosen.dtype == torch.bool and chosen.ndim == 2:
                    capture.session.record_call(site(capture, "router.counts", "out.0"), chosen.sum(0), "expert_counts")
        return result

    return tapped


def _static_topk(capture: Capture, function: Callable[..., Any]) -> Any:
    """The compiled function of the inference router: a static method, and to stay one."""
    return staticmethod(_topk(capture, function))


def _permute(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    """Also learns which token and expert each permuted row belongs to."""

    @functools.wraps(function)
    def tapped(tokens: torch.Tensor, routing_map: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if active(capture):
            with capture.session.guarded("permute"):
                _record(capture, "permute", "in.0", tokens)
        result = function(tokens, routing_map, *args, **kwargs)
        if active(capture):
            with capture.session.guarded("permute"):
                path = capture.session.current_path()
                if capture.session.recording:  # reading the map would end the recording
                    capture.session.out_of_reach(f"{path}/permute:out.0", "expert order is not known inside a graph")
                    return result
                pairs = routing_map.bool().T.nonzero()  # expert-major: the order of the permuted rows
                if len(pairs) == result[0].shape[0]:
                    config = getattr(capture.model, "config", None)
                    most = int(getattr(config, "moe_router_topk", 0) or 0) if _drops(config) else 0
                    found = Permutation(pairs[:, 1].cpu().numpy(), pairs[:, 0].cpu().numpy(), topk=most)
                    set_permutation(capture.session, path, found)
                record_expert_rows(capture.session, f"{path}/permute:out.0", result[0], SiteKind.TAP, "permute")
        return result

    return tapped


def _drops(config: Any) -> bool:
    """Whether tokens may be dropped, so that some have fewer experts than others."""
    return getattr(config, "moe_expert_capacity_factor", None) is not None


def _unpermute(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(permuted: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        path = capture.session.current_path()
        if active(capture):
            with capture.session.guarded("unpermute"):
                record_expert_rows(capture.session, f"{path}/unpermute:in.0", permuted, SiteKind.TAP, "unpermute")
        result = function(permuted, *args, **kwargs)
        if active(capture):
            with capture.session.guarded("unpermute"):
                _record(capture, "unpermute", "out.0", result)
        return result

    return tapped


_ATTENTION = "megatron.core.transformer.attention"
_DYNAMIC = "megatron.core.inference.contexts.dynamic_context:DynamicInferenceContext"
_ROUTER = "megatron.core.transformer.moe.router"
_DISPATCH = "megatron.core.transformer.moe.token_dispatcher"

#: (owner as "module" or "module:Class", attribute, tap). The owner is where the name is looked up when it runs.
_TABLE: tuple[tuple[str, str, Tap], ...] = (
    (f"{_ATTENTION}:SelfAttention", "get_query_key_value_tensors", _qkv),
    (_ATTENTION, "apply_rotary_pos_emb", _rope),
    (_DYNAMIC, "apply_rotary_emb_query", in_and_out("rope.q", _tensor("rope.q", "rope"), at=1)),
    (_DYNAMIC, "apply_rotary_emb_key", in_and_out("rope.k", _tensor("rope.k", "rope"), at=1)),
    (_DYNAMIC, "apply_fused_qk_rotary_emb", _rope_fused),
    (_DYNAMIC, "append_key_value_cache", _kv_write),
    (f"{_ATTENTION}:Attention", "flash_decode_and_prefill", in_and_out("core_attention", _core, at=1)),
    (_ROUTER, "router_gating_linear", in_and_out("router.gating", _tensor("router.gating"))),
    (_ROUTER, "topk_routing_with_score_function", _topk),
    (f"{_ROUTER}:InferenceTopKRouter", "_compiled_topk_routing", _static_topk),
    (_DISPATCH, "permute", _permute),
    (_DISPATCH, "unpermute", _unpermute),
)
