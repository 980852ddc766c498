"""Teacher forcing names every operator that diverges on its own, and nothing that inherited."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import zkl_debug
from zkl_debug.beds import BedOptions
from zkl_debug.beds.attribution import Gap, shares_of
from zkl_debug.beds.operators import scan_operators
from zkl_debug.capture.api import Capture
from zkl_debug.capture.forcing import Forcing
from zkl_debug.cli.main import main
from zkl_debug.errors import Refused
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


def test_shares_come_from_putting_operators_right_one_after_the_other() -> None:
    def gap(mean: float) -> Gap:
        return Gap(10, mean, mean)

    shares = shares_of(["x", "y"], [gap(4.0), gap(1.0), gap(0.0)], [gap(1.0), gap(5.0)])
    assert [(s.site, s.share, s.alone) for s in shares] == [("x", 0.75, 0.75), ("y", 0.25, -0.25)]
    nothing = shares_of(["x"], [gap(0.0), gap(0.0)], [gap(0.0)])
    assert [(s.share, s.alone) for s in nothing] == [(0.0, 0.0)]


def test_only_the_named_sites_are_put_right(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Chain().eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        with zkl_debug.capture(model, tmp_path / "a", side="a", level="payload", strict=True):  # type: ignore[operator]
            model(ids)
        handles = [model.layers[i].register_forward_hook(bend) for i in (1, 3)]
        with open_capture(tmp_path / "a") as reference:
            forcing = Forcing(reference, only=frozenset({"layers.1:out"}), watched="layers.3:out")
            with Capture(model, None, "b", strict=True, forcing=forcing):
                model(ids)
        for handle in handles:
            handle.remove()
    assert forcing.results["layers.1:out"].forced == 4
    assert forcing.results["layers.2:out"].mismatched == 0
    assert (forcing.results["layers.3:out"].mismatched, forcing.results["layers.3:out"].forced) == (4, 0)
    a, b = forcing.kept[0]
    assert [(x != y).sum() for x, y in zip(a, b, strict=True)] == [1, 1, 1, 1]


@pytest.mark.slow
def test_attribution_through_the_command_accounts_for_the_whole_gap(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bisect", "operators", "--bed", "tiny-moe", "--fault", "K7", "--attribution", "--json"])
    document = json.loads(capfd.readouterr().out)
    assert stop.value.code == 1
    found = document["attribution"]
    assert [o["site"] for o in found["operators"]] == [o["site"] for o in document["operators"]]
    assert len(found["operators"]) == 3
    assert found["gap"]["mean_abs"] > 0.0
    assert found["gap"]["rows"] > 300
    assert found["remaining"]["mean_abs"] == 0.0
    assert sum(o["share"] for o in found["operators"]) == pytest.approx(1.0)
    first = found["operators"][0]
    assert first["share"] == pytest.approx(first["alone"])
    assert first["share"] > 0.1


def test_a_label_put_right_takes_its_log_prob_along() -> None:
    table = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    before, now = torch.tensor([2, 1]), torch.tensor([0, 1])
    selected = torch.tensor([-3.0, -5.0])
    assert Forcing.looked_up_again(selected, table, before, now).tolist() == [-1.0, -5.0]
    assert Forcing.looked_up_again(selected, table, now, torch.tensor([-1, 1])) is selected


def test_a_side_that_does_not_repeat_is_refused() -> None:
    with pytest.raises(Refused, match="train does not repeat"):
        scan_operators(BedOptions(fault="L6", reprefill=False))


@pytest.mark.slow
def test_a_label_fault_accounts_for_its_gap(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bisect", "operators", "--bed", "tiny-gpt", "--fault", "M4", "--attribution", "--json"])
    document = json.loads(capfd.readouterr().out)
    assert stop.value.code == 1
    assert [o["site"] for o in document["operators"]] == ["logprobs/label:out.0"]
    found = document["attribution"]
    assert [o["share"] for o in found["operators"]] == [1.0]
    assert (found["unexplained"], found["still_differ"]) == (0.0, [])
