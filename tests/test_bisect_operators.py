"""Teacher forcing names every operator that diverges on its own, and nothing that inherited."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import zkl_debug
from zkl_debug.beds import BedOptions
from zkl_debug.beds.operators import scan_operators
from zkl_debug.capture.api import Capture
from zkl_debug.capture.forcing import Forcing
from zkl_debug.store.reader import open_capture


class Chain(nn.Module):
    """Four linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def bend(_module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
    changed = output.clone()
    changed[..., 3] = torch.nextafter(changed[..., 3], torch.tensor(torch.inf))
    return changed


def test_two_independent_defects_are_both_named_and_nothing_else(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Chain().eval()
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    with torch.no_grad():
        with zkl_debug.capture(model, tmp_path / "a", side="a", level="payload", strict=True):  # type: ignore[operator]
            right = model(ids)
        handles = [model.layers[i].register_forward_hook(bend) for i in (1, 3)]
        wrong = model(ids)
        with open_capture(tmp_path / "a") as reference:
            forcing = Forcing(reference)
            with Capture(model, None, "b", strict=True, forcing=forcing):
                forced = model(ids)
        for handle in handles:
            handle.remove()
    assert not torch.equal(right, wrong)
    assert [n for n, r in forcing.results.items() if r.mismatched] == ["layers.1:out", "layers.3:out"]
    assert forcing.results["layers.2:in"].mismatched == 0
    assert np.array_equal(right.numpy().view(np.uint32), forced.numpy().view(np.uint32))


def test_clean_bed_has_no_operator() -> None:
    scan = scan_operators(BedOptions(reprefill=False))
    assert scan.operators == ()
    assert scan.sites > 100
    assert scan.unmatched == ()


def test_moe_combine_is_named_in_every_layer() -> None:
    scan = scan_operators(BedOptions(bed="tiny-moe", fault="K7", reprefill=False))
    assert [o.site for o in scan.operators] == [f"decoder.layers.{i}.mlp/unpermute:out.0" for i in (1, 2, 3)]
    assert all(o.inputs_equal for o in scan.operators)


@pytest.mark.slow
def test_stack_off_names_attention_in_every_layer() -> None:
    scan = scan_operators(BedOptions(stack=False, reprefill=False))
    own = [o.site for o in scan.operators if o.inputs_equal]
    assert own[:4] == [f"decoder.layers.{i}.self_attention.core_attention:out" for i in range(4)]
    assert set(own[4:]) <= {"logprobs/log_softmax:out.0", "logprobs/label:out.0"}
