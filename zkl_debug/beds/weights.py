"""Parameters of one operator of a bed, as the model was built, outside any side."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.beds.rebuild import Recipe
from zkl_debug.beds.run import BedContext, open_bed
from zkl_debug.schema import SiteName


def operator_parameters(context: BedContext, site: SiteName) -> dict[str, torch.Tensor]:
    """Tensors that the operator of a site is made of, by name; scalars as tensors of shape ().

    ``weight``, ``bias`` of a linear layer or norm, ``eps`` of a norm, ``frequencies`` and ``interleaved`` of rope,
    ``scale`` of attention. Empty for operators without parameters.
    """
    model: Any = context.model
    operator = site.operator.split("#")[0]
    if operator.startswith("rope"):
        interleaved = bool(model.config.rotary_interleaved)
        return {"frequencies": model.rotary_pos_emb.inv_freq.detach(), "interleaved": torch.tensor(float(interleaved))}
    try:
        module = model.get_submodule(site.module.split("#")[0])
    except AttributeError:
        return {}
    found = {}
    for name in ("weight", "bias"):
        value = getattr(module, name, None)
        if isinstance(value, torch.Tensor):
            found[name] = value.detach()
    if operator == "output_layer" and "weight" not in found:  # tied to the embedding
        found["weight"] = model.shared_embedding_or_output_weight().detach()
    for name, attribute in (("eps", "eps"), ("scale", "softmax_scale")):
        value = getattr(module, attribute, None)
        if isinstance(value, float):
            found[name] = torch.tensor(value, dtype=torch.float64)
    return found


def exact_parameters(recipe: Recipe, site: SiteName) -> dict[str, NDArray[np.float64]]:
    """:func:`operator_parameters` of the rebuilt bed, as float64 arrays."""
    with open_bed(recipe.options) as context:
        found = operator_parameters(context, site)
        return {name: value.double().cpu().numpy() for name, value in found.items()}
