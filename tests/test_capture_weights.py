"""The weights a capture speaks of are those its forwards ran with, at every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from zkl_debug.capture.api import Capture
from zkl_debug.diff.run import diff_captures as diff
from zkl_debug.store.reader import open_capture

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


class Chain(nn.Module):
    """An embedding and two square matrices, with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def model() -> Chain:
    torch.manual_seed(0)
    return Chain().eval()


def bump(parameter: torch.Tensor) -> None:
    """As a weight sync does it: through ``.data``, which leaves the version counter alone."""
    parameter.data.copy_(parameter.data * 1.25 + 0.5)


def record(out: Path, work: Callable[[Chain, Capture], None]) -> Path:
    chain = model()
    with torch.no_grad(), Capture(chain, out, side=out.name, strict=True) as capture:
        work(chain, capture)
    return out


def test_weights_loaded_after_the_probe_attached_are_the_ones_that_count(tmp_path: Path) -> None:
    def late(chain: Chain, _: object) -> None:
        bump(chain.layers[2].weight)  # type: ignore[arg-type]
        chain(IDS)

    a = record(tmp_path / "a", lambda chain, _: chain(IDS))
    b = record(tmp_path / "b", late)
    verdict = diff(a, b)
    assert verdict.refusal is not None
    assert verdict.refusal.code == "weights-differ"
    assert verdict.refusal.detail["parameters"] == ["layers.2.weight"]


def test_a_change_nobody_announced_begins_new_weights(tmp_path: Path) -> None:
    def silent(chain: Chain, _: object) -> None:
        chain(IDS)
        for parameter in chain.parameters():
            bump(parameter)
        chain(IDS)
        chain(IDS)

    with open_capture(record(tmp_path / "a", silent)) as capture:
        assert capture.frames["weight_version"].tolist() == [0, 1, 1]
        assert [e.name for e in capture.events] == ["weights"]
        first, second = (capture.states[seq] for seq in sorted(capture.states))
        assert all(x.digest != y.digest for x, y in zip(first, second, strict=True))
    # Rows under other weights are other rows: nothing is said to vary within the side.
    verdict = diff(tmp_path / "a", record(tmp_path / "b", silent))
    assert verdict.refusal is None
    assert verdict.outcome.value == "identical"


def test_weights_that_part_at_a_later_step_are_named_with_the_step(tmp_path: Path) -> None:
    def train(forget: str) -> Callable[[Chain, Capture], None]:
        def run(chain: Chain, capture: Capture) -> None:
            for step in range(4):
                capture.set_step(step, step)
                chain(IDS)
                for name, parameter in chain.named_parameters():
                    if step < 2 or name != forget:
                        bump(parameter)

        return run

    verdict = diff(record(tmp_path / "a", train("")), record(tmp_path / "b", train("layers.0.bias")))
    assert verdict.refusal is not None
    assert verdict.refusal.code == "weights-differ"
    assert verdict.refusal.detail["parameters"] == ["layers.0.bias"]
    assert verdict.refusal.detail["step"] == 3
    assert "equal at steps 0 to 2" in verdict.refusal.text


@pytest.mark.parametrize("gone", ["meta", "resized"])
def test_weights_without_memory_are_left_out(tmp_path: Path, gone: str) -> None:
    chain = model()
    spare = nn.Parameter(torch.zeros(64, 64, device="meta" if gone == "meta" else "cpu"))
    chain.register_parameter("spare", spare)
    if gone == "resized":
        spare.untyped_storage().resize_(0)
    with torch.no_grad(), Capture(chain, tmp_path / "a", side="a", strict=True):
        chain(IDS)
    with open_capture(tmp_path / "a") as capture:
        assert "spare" not in {record.name for record in capture.states[0]}
