"""Module hooks: inputs and outputs of every module, and the path of the module being run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zkl_debug.capture.late import ends_part
from zkl_debug.capture.session import CaptureSession
from zkl_debug.schema import SiteKind

#: keyword arguments that carry an activation when a module is called by keyword
ACTIVATION_KWARGS = ("hidden_states", "input", "input_", "x", "query", "key", "value")

#: modules that return their argument: nothing of their own to observe
IDENTITIES = ("Identity", "IdentityOp", "IdentityFuncOp")


@dataclass(frozen=True)
class ModuleRule:
    """How sites under a module path are treated.

    Attributes:
        pattern: regular expression, matched against the whole module path.
        skip: record nothing; the reason is kept in the manifest.
        layout: layout of the module's tensors where the shape is ambiguous.
        semantic: operator class of the module.
        flatten: store rows as one dimension.
        tapped: record nothing here: taps see all of it.
        inputs: record input ports (off where one side passes its input in a holder that hooks must not open).
        outputs: record only the first so many tensors of the output; 0 for all.
        choice: the output is a router's choice, told as weights and a map over the experts, or as weights and ids.
        expert_rows: the tensors are ordered by the expert permutation: ``all`` or ``one`` expert's.
    """

    pattern: re.Pattern[str]
    skip: str = ""
    layout: str = ""
    semantic: str = ""
    flatten: bool = False
    expert_rows: str = ""
    choice: bool = False
    tapped: bool = False
    inputs: bool = True
    outputs: int = 0


class ModuleHooks:
    """Forward hooks on every submodule of a model.

    Args:
        session: where sites go.
        model: the model; site names are its ``named_modules`` paths.
        rules: first match wins; the default rule records everything.
        rename: name in the whole model of a path in this process's part of it.
    """

    def __init__(
        self,
        session: CaptureSession,
        model: nn.Module,
        rules: tuple[ModuleRule, ...] = (),
        rename: Callable[[str], str] | None = None,
    ) -> None:
        self.session = session
        self.model = model
        self.rules = rules
        self.rename = rename or (lambda path: path)
        self._handles: list[RemovableHandle] = []
        self.paths: dict[int, str] = {}

    def install(self) -> None:
        """Register the hooks."""
        for local, module in self.model.named_modules():
            path = self.rename(local)
            self.paths.setdefault(id(module), path)
            if not path or type(module).__name__ in IDENTITIES:
                continue
            rule = self._rule(path)
            if rule is not None and rule.skip:
                self.session.not_rows.setdefault(f"{path}:out", rule.skip)
                continue
            self._handles.append(module.register_forward_pre_hook(self._pre(path, rule), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._post(path, rule), always_call=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _rule(self, path: str) -> ModuleRule | None:
        return next((rule for rule in self.rules if rule.pattern.fullmatch(path)), None)

    def _pre(self, path: str, rule: ModuleRule | None) -> Any:
        session, name = self.session, f"{path}:in"
        unread = rule is not None and (rule.tapped or not rule.inputs)
        simple = rule is None or not rule.expert_rows
        how = _how(rule)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
            if not session.enabled:
                return
            session.path.append(path)
            if unread:
                return
            frame = session.beginning or session.frame
            if frame is None:
                return
            sites: Iterable[tuple[str, torch.Tensor]]
            if simple and frame.trusted:
                waits = session.postponed.waits
                alone = len(args) == 1 and kwargs.keys().isdisjoint(ACTIVATION_KWARGS)
                if alone and _is_activation(args[0]) and waits(name, args[0], *how):
                    return
                sites = [(site, t) for site, t in _ports(name, _inputs(args, kwargs)) if not waits(site, t, *how)]
                if not sites:
                    return
            else:
                sites = _ports(name, _inputs(args, kwargs))
            with session.guarded(name):
                for site, tensor in sites:
                    self._record(site, tensor, rule)

        return hook

    def _post(self, path: str, rule: ModuleRule | None) -> Any:
        session, name = self.session, f"{path}:out"
        unread = rule is not None and rule.tapped
        most = None if rule is None or not rule.outputs else rule.outputs
        simple = rule is None or not (rule.choice or rule.outputs or rule.expert_rows)
        last = ends_part(path)
        how = _how(rule)

        def hook(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
            if not session.enabled:
                return
            while session.path and session.path.pop() != path:
                pass
            if unread:
                return
            frame = session.beginning or session.frame
            if frame is None:
                return
            alone = _alone(output) if simple and frame.trusted else None
            if alone is None or not session.postponed.waits(name, alone, *how):
                with session.guarded(name):
                    if rule is not None and rule.choice:
                        output = _as_map(module, output)
                    for site, tensor in _ports(name, itertools.islice(_tensors(output), most)):
                        self._record(site, tensor, rule)
            if last and frame.waiting and frame.parts:
                with session.guarded(name):
                    session.postponed.part_ended(path)
            if session.graphs is not None and session.graphs.recording is not None:
                with session.guarded(name):
                    session.graphs.ended(path)

        return hook

    def _record(self, name: str, tensor: torch.Tensor, rule: ModuleRule | None) -> None:
        if rule is None:
            self.session.record(name, tensor, kind=SiteKind.MODULE, semantic="")
            return
        if rule.expert_rows:
            from zkl_debug.capture.experts import record_expert_rows

            record_expert_rows(self.session, name, tensor, SiteKind.MODULE, rule.semantic)
            return
        kind, semantic, layout, flatten = _how(rule)
        self.session.record(name, tensor, kind=kind, semantic=semantic, layout=layout, flatten=flatten)


def _how(rule: ModuleRule | None) -> tuple[SiteKind, str, str, bool]:
    """Kind, semantic, layout and flattening of a module's sites."""
    if rule is None:
        return SiteKind.MODULE, "", "", False
    return SiteKind.MODULE, rule.semantic, rule.layout, rule.flatten


def _is_activation(value: Any) -> bool:
    try:
        return isinstance(value, torch.Tensor) and value.is_floating_point()
    except Exception:  # found out under the guard
        return False


def _alone(output: Any) -> torch.Tensor | None:
    """The one tensor that a module gives, as it is or with a bias that it has not; None where there are more."""
    if type(output) is tuple and len(output) == 2 and output[1] is None:
        output = output[0]
    return output if isinstance(output, torch.Tensor) else None


def _ports(name: str, tensors: Iterator[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of the ports of a module, the first without a number; lazily, so that a guard has what a tensor does."""
    for index, tensor in enumerate(tensors):
        yield (name if index == 0 else f"{name}.{index}"), tensor


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in args:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value
    for name in ACTIVATION_KWARGS if kwargs else ():
        value = kwargs.get(name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value


def _as_map(module: nn.Module, output: Any) -> Any:
    """A router's choice in the form of training."""
    from zkl_debug.capture.experts import choice_as_map, is_choice_by_id

    experts = int(getattr(getattr(module, "config", None), "num_moe_experts", 0) or 0)
    if isinstance(output, tuple) and len(output) == 2 and is_choice_by_id(*output, experts):
        return choice_as_map(*output, experts)
    return output


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for value in output:
            if isinstance(value, torch.Tensor):
                yield value
