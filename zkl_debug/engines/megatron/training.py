"""The training half of a loop: log-probs with gradients, and an optimizer that keeps fp32 masters."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zkl_debug.engines.megatron import scoring
from zkl_debug.engines.megatron.scoring import MicroBatch


def microbatch_logprobs(model: nn.Module, mb: MicroBatch) -> list[Tensor]:
    """Per sequence the log-probs [n - 1] of its tokens 1..n-1, with gradients; the same functions as scoring."""
    logits = model(mb.tokens, mb.position_ids, mb.attention_mask())
    selected = scoring.select_logprobs(scoring.log_softmax(logits.float()), mb.labels)
    found = []
    for which, length in enumerate(mb.lengths):
        row, start = mb.locate(which)
        found.append(selected[row, start : start + length - 1])
    return found


class MasterAdamW:
    """torch's AdamW over fp32 masters; the model's parameters are rounded copies of them.

    Args:
        model: its parameters are updated in place.
        lr: learning rate.
        weight_decay: decoupled weight decay.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.01) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = [parameter for _, parameter in model.named_parameters()]
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.999), weight_decay=weight_decay, foreach=False)

    def step(self) -> float:
        """Apply the gradients of the model's parameters and clear them; returns their global norm."""
        total = 0.0
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            gradient = parameter.grad
            master.grad = None if gradient is None else gradient.float()
            total += 0.0 if gradient is None else float(gradient.float().square().sum())
        self.adam.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)
                parameter.grad = None
        return math.sqrt(total)

    def state(self) -> dict[str, Tensor]:
        """Copies of all tensors that a later step depends on, by name."""
        out: dict[str, Tensor] = {}
        for name, master in zip(self.names, self.masters, strict=True):
            out[f"master/{name}"] = master.detach().clone()
            for key, value in self.adam.state.get(master, {}).items():
                out[f"{key}/{name}"] = torch.as_tensor(value).detach().clone()
        return out

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`state` returned; moments of steps not yet made are dropped."""
        with torch.no_grad():
            for name, master in zip(self.names, self.masters, strict=True):
                master.copy_(state[f"master/{name}"])
                moments = {k.split("/", 1)[0]: v for k, v in state.items() if k.split("/", 1)[1] == name}
                moments.pop("master")
                self.adam.state.pop(master, None)
                if moments:
                    self.adam.state[master] = {k: v.clone() for k, v in moments.items()}
