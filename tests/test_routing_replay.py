"""Routing recorded by the engine and replayed in scoring through ``RouterReplay``; named where it is misplaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zkl_debug.beds import BedOptions
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.diff import diff_captures
from zkl_debug.engines.megatron import replaying, scoring
from zkl_debug.errors import UsageError

Routing = dict[int, Any]
#: Without these two patches of the ladder the engine hands back no routing for some requests (fault R0).
WHOLE = {"routing-before-update": True, "routing-on-bookkeep": True}


def verdict_of(out: Path, **options: Any) -> dict[str, Any]:
    chosen = BedOptions(bed="tiny-moe", replay_routing=True, switches=WHOLE, longest_prompt=40, **options)
    record_bed(chosen, out, RecordOptions(level="payload", certify=False, strict=True))
    document: dict[str, Any] = diff_captures(out / "train", out / "gen").to_json()
    return document


def test_every_slot_gets_the_experts_of_its_token() -> None:
    routing = {7: np.arange(4 * 2 * 3).reshape(4, 2, 3), 9: 100 + np.arange(3 * 2 * 3).reshape(3, 2, 3)}
    tokens = [(7, [1, 2, 3, 4]), (8, [5, 6]), (9, [1, 2, 3, 4, 5])]
    padded = scoring.padded_batch(0, tokens, multiple=4)
    packed = scoring.packed_batch(0, tokens, multiple=4)
    left = scoring.padded_batch(0, tokens, multiple=4, left=True)
    for batch in (padded, packed, left):
        found = replaying.targets(batch, routing)
        assert found is not None
        assert found.shape == (2, batch.n_slots, 3)
        known = 0
        for which, (sample, _) in enumerate(tokens):
            row, start = batch.locate(which)
            for position, experts in enumerate(routing.get(sample, ())):
                slot = (start + position) * batch.tokens.shape[0] + row
                assert found[:, slot].tolist() == experts.tolist()
                known += 1
        assert int((found[0, :, 0] >= 0).sum()) == known == 7
    assert replaying.targets(scoring.padded_batch(0, [(1, [1, 2])]), routing) is None


def test_replayed_routing_is_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def targets(*args: Any) -> Any:
            found = original(*args)
            seen.append(int((found >= 0).sum()))
            return found

        return targets

    monkeypatch.setattr(replaying, "targets", counted(replaying.targets))
    document = verdict_of(tmp_path / "run")
    assert document["verdict"] == "identical"
    assert document["checks"]["routing_returned"].startswith("complete for")
    assert sum(seen) > 1000, "nothing was replayed"


def _shifted(mb: Any, routing: Routing) -> Any:
    return _TARGETS(mb, {s: r[[0, *range(len(r) - 1)]] for s, r in routing.items()})


def _other_sample(mb: Any, routing: Routing) -> Any:
    samples = sorted(routing)
    return _TARGETS(mb, {s: routing[samples[(k + 1) % len(samples)]] for k, s in enumerate(samples)})


_TARGETS = replaying.targets


@pytest.mark.parametrize(
    ("broken", "name", "says"),
    [
        (_shifted, "row-shift", "1 position earlier in the same sequence"),
        pytest.param(_other_sample, "equals-other-sample", "0 has those of 1", marks=pytest.mark.slow),
    ],
)
def test_misplaced_routing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Any, name: str, says: str
) -> None:
    monkeypatch.setattr(replaying, "targets", broken)
    document = verdict_of(tmp_path / "run")
    first, told = document["first"], document["explanations"][0]
    assert (first["site"], first["kind"]) == ("decoder.layers.1.mlp/router.topk:out.0", "own")
    assert (told["name"], told["strength"]) == (name, "exact")
    assert says in told["text"]
    if name == "row-shift":
        assert first["position"] == 1  # the first token has its own experts either way
        assert told["evidence"]["shift"] == -1


@pytest.mark.slow
def test_replay_hides_flips_and_not_what_made_them(tmp_path: Path) -> None:
    """Router logits rounded on one side: the experts are replayed, so only the logits and weights differ."""
    document = verdict_of(tmp_path / "run", fault="P2")
    assert document["first"]["site"] == "decoder.layers.1.mlp/router.gating:out.0"
    assert [found["name"] for found in document["explanations"]] == ["extra-rounding"]


def test_a_bed_without_experts_has_nothing_to_replay() -> None:
    with pytest.raises(UsageError, match="no routing to replay"):
        BedOptions(bed="tiny-gpt", replay_routing=True)
