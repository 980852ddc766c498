"""The capture session on a plain torch model: failures, reuse of digests, filters, off, and the Python API."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import zkl_debug
from zkl_debug.capture.api import Capture
from zkl_debug.capture.rows import padded_rows
from zkl_debug.errors import ProbeError, UsageError
from zkl_debug.store.reader import open_capture, verify_payload


class Block(nn.Module):
    """Adds in place and hands its result on under another tensor object, as real frameworks do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        y.add_(x)
        out = torch.empty(1)
        out.data = y.data  # same storage, a version counter of its own
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def run(model: Model) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(IDS)
    return out


def test_capture_holds_every_site_and_its_bits(model: Model, tmp_path: Path) -> None:
    with zkl_debug.capture(model, tmp_path / "a", side="train", level="payload", strict=True) as cap:  # type: ignore[operator]
        out = run(model)
    assert cap.session.errors == []
    with open_capture(tmp_path / "a") as capture:
        assert verify_payload(capture) == []
        site = capture.sites["layers.2:out"]
        rows = capture.rows[site.rows]
        bits = site.payload(slice(None)).view(np.float32)
        for row, values in zip(rows, bits, strict=True):
            assert np.array_equal(values, out[int(row["sample"]), int(row["position"])].numpy())
        assert {"layers.0.fc:in", "layers.0.fc:out", "layers.1:in", "embedding:out"} <= set(capture.sites)


def test_in_place_writes_behind_a_new_tensor_object_do_not_reuse_a_digest(model: Model, tmp_path: Path) -> None:
    with zkl_debug.capture(model, tmp_path / "a", side="train", level="digest", strict=True):  # type: ignore[operator]
        run(model)
    with open_capture(tmp_path / "a") as capture:
        before, after = capture.sites["layers.0.fc:out"], capture.sites["layers.0:out"]
        following = capture.sites["layers.1:in"]
        assert (before.digest != after.digest).any(axis=1).all()
        assert np.array_equal(after.digest, following.digest)


def test_the_result_is_the_same_with_and_without_the_probe(model: Model, tmp_path: Path) -> None:
    plain = run(model)
    with zkl_debug.capture(model, tmp_path / "a", side="train", level="payload"):  # type: ignore[operator]
        probed = run(model)
    assert torch.equal(plain.view(torch.int32), probed.view(torch.int32))
    assert torch.equal(plain.view(torch.int32), run(model).view(torch.int32))


def test_nothing_stays_attached(model: Model, tmp_path: Path) -> None:
    with zkl_debug.capture(model, tmp_path / "a", side="train"):  # type: ignore[operator]
        run(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_broken_probe_never_kills_the_run(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run(model)

    def broken(*_: object) -> None:
        raise RuntimeError("the digest kernel is not there")

    with zkl_debug.capture(model, tmp_path / "a", side="train") as cap:  # type: ignore[operator]
        run(model)
        monkeypatch.setattr("zkl_debug.capture.session.digest_tensor", broken)
        assert torch.equal(run(model), plain)
        assert torch.equal(run(model), plain)
    assert "the program goes on" in capsys.readouterr().err
    assert len(cap.session.errors) == 1
    with open_capture(tmp_path / "a") as capture:
        assert capture.manifest["probe"]["ok"] is False
        assert len(capture.frames) == 1  # what was whole before the failure is kept


class Touchy(torch.Tensor):
    """A tensor that cannot be asked for its type."""

    def is_floating_point(self) -> bool:
        raise RuntimeError("not to be asked")


class Identity(nn.Module):
    """Hands on such a tensor; the probe looks at no module of this name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.as_subclass(Touchy)


def test_a_tensor_that_cannot_be_looked_at_never_kills_the_run(tmp_path: Path) -> None:
    net = nn.Sequential(Identity(), nn.Dropout(0.0)).eval()
    with Capture(net, tmp_path / "c", "train") as capture:
        capture.next_rows(padded_rows(np.ones((1, 4), np.int64), samples=[0], lengths=[4]))
        assert torch.equal(net(torch.ones(1, 4)).as_subclass(torch.Tensor), torch.ones(1, 4))
        assert "1:in" in capture.session.errors[0]
        assert "not to be asked" in capture.session.errors[0]


def test_strict_raises(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("zkl_debug.capture.session.digest_tensor", broken)
    capture = zkl_debug.capture(model, tmp_path / "a", side="train", strict=True)  # type: ignore[operator]
    with pytest.raises(ProbeError), capture:
        run(model)


def test_off_writes_nothing(model: Model, tmp_path: Path) -> None:
    with zkl_debug.capture(model, None, side="train", level="off"):  # type: ignore[operator]
        run(model)
    assert list(tmp_path.iterdir()) == []


def test_filters_by_site_and_layer(model: Model, tmp_path: Path) -> None:
    with zkl_debug.capture(model, tmp_path / "a", side="x", layers=(1, 1), sites=["*fc:out", "layers.?:in"]):  # type: ignore[operator]
        run(model)
    with open_capture(tmp_path / "a") as capture:
        assert set(capture.sites) == {"layers.1.fc:out", "layers.1:in"}
        assert capture.manifest["filtered_sites"] > 0


def test_a_folder_with_something_in_it_is_refused(model: Model, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError), zkl_debug.capture(model, tmp_path / "a", side="train"):  # type: ignore[operator]
        run(model)
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


def test_unknown_level_is_refused(model: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        zkl_debug.capture(model, tmp_path / "a", side="train", level="everything")  # type: ignore[operator]


def test_rows_given_by_the_program_key_the_frame(model: Model, tmp_path: Path) -> None:
    rows = padded_rows(IDS.numpy(), samples=[70, 71], lengths=[3, 4])
    with zkl_debug.capture(model, tmp_path / "a", side="train") as cap:  # type: ignore[operator]
        cap.set_step(5, weight_version=2)
        cap.next_rows(rows)
        run(model)
        cap.selected(torch.zeros(7), torch.tensor([2, 3, -1, 6, 7, 8, -1]))
    with open_capture(tmp_path / "a") as capture:
        assert sorted(set(capture.rows["sample"].tolist())) == [70, 71]
        assert capture.frames["step"].tolist() == [5]
        assert capture.frames["weight_version"].tolist() == [2]
        assert len(capture.sites["logprobs/selected:out.0"].rows) == 5


def test_a_module_called_twice_gets_an_occurrence(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.fc = nn.Linear(8, 8)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.fc(self.fc(self.embedding(input_ids)))
            return out

    model = Twice()
    with zkl_debug.capture(model, tmp_path / "a", side="x", strict=True), torch.no_grad():  # type: ignore[operator]
        model(IDS)
    with open_capture(tmp_path / "a") as capture:
        assert {"fc:out", "fc#1:out"} <= set(capture.sites)
        assert np.array_equal(capture.sites["fc:out"].digest, capture.sites["fc#1:in"].digest)
