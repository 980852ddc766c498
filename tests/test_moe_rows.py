"""Rows of experts and routers: choices told as ids or as maps, and tokens that some experts dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from zkl_debug.capture.api import Capture
from zkl_debug.diff import diff_captures
from zkl_debug.engines.cpu import cpu_backend
from zkl_debug.engines.megatron import adapter, model, scoring, world
from zkl_debug.store.reader import open_capture

SPEC = model.ModelSpec(layers=2, experts=8, topk=3, dense_layers=1)
TOKENS = [(0, list(range(3, 14))), (1, list(range(40, 64, 3)))]
MLP = "decoder.layers.1.mlp"


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[None]:
    with cpu_backend(), world.world():
        yield


class OnlyRouter(nn.Module):
    """A router of megatron-core behind an embedding, its choice made by training's or by the inference router."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe import router

        torch.manual_seed(0)
        self.config = model.transformer_config(SPEC, torch.float32)
        self.embedding = nn.Embedding(SPEC.vocab, SPEC.hidden)
        self.mlp = nn.Module()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        made: Any = getattr(router, kind)(config=self.config, pg_collection=groups)
        nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(1))
        self.mlp.router = made

    def forward(self, input_ids: torch.Tensor) -> Any:
        chosen: Any = self.mlp.router
        return chosen(self.embedding(input_ids).transpose(0, 1).contiguous())


def routed(out: Path, kind: str, level: str) -> tuple[Any, Path]:
    from megatron.core.inference.utils import InferenceMode

    net = OnlyRouter(kind).eval()
    inside = InferenceMode.active() if kind.startswith("Inference") else torch.no_grad()
    with torch.no_grad(), inside, torch.compiler.set_stance("force_eager"):
        rows = torch.tensor([list(range(1, 8))])
        with Capture(net, out, "train", level=level, adapter=adapter.make_adapter(), strict=True):
            chosen = net(rows)
    return chosen, out


@pytest.mark.parametrize("level", ["digest", "payload"])
def test_dense_and_sparse_choices_are_one(tmp_path: Path, level: str) -> None:
    """The inference router returns ids [t, k], training's a map [t, experts]: recorded in one form, they are equal."""
    sparse, a = routed(tmp_path / "train", "TopKRouter", level)
    dense, b = routed(tmp_path / "gen", "InferenceTopKRouter", level)
    assert sparse[1].dtype == torch.bool
    assert dense[1].shape == (7, 3)
    document = diff_captures(a, b).to_json()
    assert document["verdict"] == "identical", document["first"]
    with open_capture(b) as capture:
        for name in ("mlp/router.topk:out.1", "mlp.router:out.1"):
            assert capture.sites[name].meta.torch_dtype == "bool"
            assert capture.sites[name].meta.row_shape == (8,)
        assert not any("#1" in name for name in capture.sites)


def scored(net: nn.Module, out: Path, level: str = "payload") -> Path:
    with Capture(net, out, "train", level=level, strict=True):
        scoring.score_microbatch(net, scoring.padded_batch(0, TOKENS))
    return out


def test_rows_of_tokens_that_were_dropped_are_aligned(tmp_path: Path) -> None:
    net = model.build_model(SPEC, "fp32", 0)
    config: Any = net.config
    config.moe_expert_capacity_factor = 0.7
    a = scored(net, tmp_path / "a")
    with open_capture(a) as capture:
        assert not any("expert" in name or "permute" in name for name in capture.manifest["not_rows"])
        rows = capture.sites[f"{MLP}/permute:out.0"]
        chosen = capture.sites[f"{MLP}.router:out.1"]
        assert rows.meta.row_shape == (3, 64)
        kept = chosen.payload(chosen.payload_index).view(bool).sum(1)
        filled = (rows.payload(rows.payload_index).reshape(-1, 3, 64) != 0).any(2).sum(1)
        assert 0 < int((kept < 3).sum()) < len(kept)
        assert np.array_equal(kept, filled)
    assert diff_captures(a, scored(net, tmp_path / "b")).to_json()["verdict"] == "identical"
    with torch.no_grad():
        net.get_submodule(f"{MLP}.experts.local_experts.5.linear_fc2").weight.neg_()  # type: ignore[operator]
    document = diff_captures(a, scored(net, tmp_path / "c")).to_json()
    assert document["refusal"]["detail"]["parameters"] == [f"{MLP}.experts.local_experts.5.linear_fc2.weight"]
