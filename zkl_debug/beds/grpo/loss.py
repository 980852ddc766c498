"""NeMo-RL's clipped policy-gradient loss (``ClippedPGLossFn``, token level, no reference policy)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossConfig:
    """Clip range of the probability ratio, and whether the ratio is taken to be on-policy."""

    clip_min: float = 0.2
    clip_max: float = 0.2
    force_on_policy_ratio: bool = False


def masked_mean(values: Tensor, mask: Tensor, valid: float) -> Tensor:
    """``sum(values * mask) / (valid + 1e-8)``."""
    return torch.sum(values * mask) / (valid + 1e-8)


def clipped_loss(
    curr: Sequence[Tensor],
    prev: Sequence[Tensor],
    advantages: Sequence[float],
    masks: Sequence[Tensor],
    valid: float,
    config: LossConfig | None = None,
) -> Tensor:
    """Loss of some sequences of a step.

    Args:
        curr: log-probs under the policy being trained, one vector [n_i] a sequence, with gradients.
        prev: the same before the update, as the training side scored them.
        advantages: one a sequence.
        masks: 1 for generated tokens, one vector [n_i] a sequence.
        valid: generated tokens of the whole step (not of these sequences only).
        config: clipping.
    """
    config = config or LossConfig()
    total = torch.zeros(())
    for now, before, advantage, mask in zip(curr, prev, advantages, masks, strict=True):
        anchor = now.detach() if config.force_on_policy_ratio else before
        ratio = torch.exp(now - anchor)
        clipped = ratio.clamp(1.0 - config.clip_min, 1.0 + config.clip_max)
        surrogate = torch.max(-advantage * ratio, -advantage * clipped)
        total = total + masked_mean(surrogate, mask, valid)
    return total
