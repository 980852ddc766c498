"""Operands of a product in a block format, for a bundle: the values that the product really ran over.

A layer in MXFP8 or NVFP4 multiplies neither its input nor its weight as they are. Its rows are put together from the
captured parts, its weight by the rebuilt bed's own quantiser, as each side has it while it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from zkl_debug.beds.bundle_tensors import Stored
from zkl_debug.diff.explain.gather import Chosen
from zkl_debug.diff.explain.gather_quantised import OPERATOR, operand
from zkl_debug.engines import microscaling

if TYPE_CHECKING:
    from zkl_debug.diff.explain.model import Operand, Values

_FORMS = {"float8_e8m0fnu": "mxfp8", "float8_e4m3fn": "nvfp4"}  # by the dtype of the scales


def operands(chosen: Chosen) -> tuple[Operand, Operand]:
    """What each side hands to the product of the chosen site, in the rows of its pairs."""
    comparison = chosen.comparison
    owner = comparison.sites[chosen.site].parsed.owner + OPERATOR
    side = comparison.space.side
    left, right = (operand(comparison, owner, int(side[rows[0]]), rows) for rows in chosen.rows(chosen.read))
    return left, right


def form_of(found: Operand) -> str:
    """``mxfp8`` or ``nvfp4``; empty where the side does not quantise, or in another form."""
    return _FORMS.get(found.dtypes.get("scale", ""), "")


def rows_of(found: Operand) -> Stored | None:
    """The values of the rows, float32 [m, k]; None without raw bits of all parts."""
    form = form_of(found)
    if not form or found.data is None or found.scale is None or (form == "nvfp4" and found.overall is None):
        return None
    overall = None if found.overall is None else _tensor(found.overall).reshape(-1)
    values = microscaling.Quantised(form, _tensor(found.data), _tensor(found.scale), overall).values()
    return stored(values)


def weight_of(weight: torch.Tensor, form: str) -> torch.Tensor:
    """The values that a side's quantiser makes of a weight [n, k], float32; call it while the side is in place."""
    return microscaling.quantise_weight(weight, form).values()


def stored(values: torch.Tensor) -> Stored:
    """A float32 tensor as it goes into the file."""
    return Stored(values.contiguous().numpy().view(np.uint32), "float32", tuple(values.shape))


def _tensor(values: Values) -> torch.Tensor:
    flat = np.ascontiguousarray(values.bits.reshape(len(values.bits), -1))
    integers = torch.from_numpy(flat.view(f"i{flat.dtype.itemsize}"))
    return integers.view(getattr(torch, values.dtype))
