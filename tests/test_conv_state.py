"""A prefill chunk shorter than the convolution: what mcore loses there, the switch that keeps it, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zkl_debug.beds import BedOptions
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.diff import diff_captures
from zkl_debug.engines.cpu import cpu_backend
from zkl_debug.engines.mamba_reference import causal_conv1d_varlen_states
from zkl_debug.stack.mamba import conv_state_after
from zkl_debug.stack.switches import SwitchUnavailable, ladder

SWITCH = "conv-state-short-chunks"
CONV = "decoder.layers.0.mixer/conv:out.0"
# A request of this seed ends in a prefill chunk of fewer than three tokens.
SHORT = BedOptions(bed="tiny-hybrid", dtype="fp32", seed=1016, permute=1)


@pytest.mark.parametrize("lengths", [(1,), (2, 9, 3), (4, 1, 5, 2), (0, 1, 7)])
def test_state_is_that_of_the_sequence_in_one_piece(lengths: tuple[int, ...]) -> None:
    width, channels = 4, 3
    generator = torch.Generator().manual_seed(sum(lengths))
    fronts = [torch.randn(front, channels, generator=generator) for front in (5, 0, 2, 1)[: len(lengths)]]
    parts = [torch.randn(length, channels, generator=generator) for length in lengths]

    def edges(pieces: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([0, *(len(p) for p in pieces)]).cumsum(0).to(torch.int32)

    before = causal_conv1d_varlen_states(torch.cat(fronts), edges(fronts), width)
    found = causal_conv1d_varlen_states(torch.cat(parts), edges(parts), width)
    whole = [torch.cat(both) for both in zip(fronts, parts, strict=True)]
    expected = causal_conv1d_varlen_states(torch.cat(whole), edges(whole), width)
    assert torch.equal(conv_state_after(before, found, edges(parts)), expected)
    if min(lengths) < width:
        assert not torch.equal(found, expected)


def test_only_a_hybrid_ladder_has_the_switch() -> None:
    assert SWITCH in {s.name for s in ladder(hybrid=True)}
    assert SWITCH not in {s.name for s in ladder()}


def test_without_the_switch_the_state_is_named_and_with_it_nothing_differs(tmp_path: Path) -> None:
    record = RecordOptions(level="payload", certify=False, strict=True)
    record_bed(SHORT, tmp_path / "on", record)
    assert diff_captures(tmp_path / "on" / "train", tmp_path / "on" / "gen").to_json()["verdict"] == "identical"
    record_bed(BedOptions(**{**vars(SHORT), "switches": {SWITCH: False}}), tmp_path / "off", record)
    document = diff_captures(tmp_path / "off" / "train", tmp_path / "off" / "gen").to_json()
    first, why = document["first"], document["explanations"][0]
    assert (first["site"], first["kind"]) == (CONV, "own")
    assert document["edges"]["score-prefill"]["mismatched"] == 0
    assert why["name"] == "state-incomplete"
    handover = why["evidence"]["handovers"][0]
    assert (handover["sample"], handover["position"]) == (first["sample"], first["position"])
    assert handover["lacking"] == [first["position"] - 3]


def test_a_machine_without_the_kernel_says_so() -> None:
    with cpu_backend():  # and no stand-in for causal_conv1d
        import megatron.core.ssm.mamba_mixer as mixer

        if hasattr(mixer, "causal_conv1d_varlen_states"):
            pytest.skip("causal_conv1d is installed")
        one = next(s for s in ladder(hybrid=True) if s.name == SWITCH)
        with pytest.raises(SwitchUnavailable, match="causal_conv1d is not installed"), one.apply():
            pass
