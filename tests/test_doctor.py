"""What ``doctor`` says of versions that do not go together, of the driver, and of FlashAttention on each side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zkl_debug.cli import doctor


def _installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    known = {name.replace("_", "-") if name.startswith("flash") else name: v for name, v in versions.items()}
    monkeypatch.setattr(doctor, "_version", lambda name: known.get(name))


def test_a_known_bad_pair_is_warned_of_with_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, transformer_engine="2.20.2", flash_attn_4="4.0.0b36")
    (found,) = doctor._bad_pairs()
    assert found.level == "warn"
    assert "window (-1, 0)" in found.text
    assert "H200" in found.text
    assert found.next_step == "pip install another version of flash-attn-4"


@pytest.mark.parametrize("version", ["4.0.0b28", "4.0.0b37"])
def test_other_versions_of_the_pair_are_not(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    _installed(monkeypatch, transformer_engine="2.20.2", flash_attn_4=version)
    assert doctor._bad_pairs() == []


def test_the_driver_is_read_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 01:58:59 UTC 2025\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
    ]
    answers = iter(texts)
    monkeypatch.setattr(Path, "read_text", lambda _self: next(answers))
    assert doctor.driver_version() == "570.124.06"
    assert doctor.driver_version() == "580.65.06"


def test_without_a_driver_there_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_self: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert doctor.driver_version() is None


def test_each_side_names_the_flash_attention_it_can_call(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"gen": {"FA2": False, "FA3": False, "FA4": True}, "train": {"FA2": "", "FA4": "4.0.0b28"}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "_ask_attention", lambda: (answer, ""))
    assert [f.text for f in doctor._attention()] == ["can call FA4", "Transformer Engine finds FA4 4.0.0b28"]
    monkeypatch.setattr(doctor, "_ask_attention", lambda: (None, "ImportError: no"))
    assert doctor._attention()[0].level == "note"


def test_the_question_is_answered_by_the_installed_megatron_core() -> None:
    answer, problem = doctor._ask_attention()
    assert problem == ""
    assert answer is not None
    assert set(answer["gen"]) == {"FA2", "FA3", "FA4"}
