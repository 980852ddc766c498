"""Old KV blocks proved by computing them again: same prompt, new engine, weights of then and of now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zkl_debug.beds.grpo.record import Rollout, StepRecord
from zkl_debug.diff.state import StateFinding, confirmed

if TYPE_CHECKING:
    from zkl_debug.beds.grpo.cells import CellRunner
    from zkl_debug.beds.grpo.watch import LoopWatch

_MOST = 4  # blocks that are computed again; the others keep the evidence of their digests


def prove_blocks(
    findings: Sequence[StateFinding], record: StepRecord, watch: LoopWatch, runner: CellRunner
) -> list[StateFinding]:
    """The findings, those about KV blocks confirmed where computing the block again gives its bytes.

    A block is confirmed when the weights it is said to come from give its bytes, and the current weights do not.
    """
    steps = {kept.version: step for step, kept in watch.kept.items()}
    out: list[StateFinding] = []
    tried = 0
    for finding in findings:
        source = finding.match.source
        if finding.kind != "kv" or source is None or source.version not in steps or tried >= _MOST:
            out.append(finding)
            continue
        block = int(finding.detail["block"])
        place = next(((s, s.uses) for s in record.sequences if block in s.cached_blocks), None)
        if place is None:
            out.append(finding)
            continue
        tried += 1
        rollout = place[0]
        index = next(use.blocks.index(block) for use in rollout.uses if block in use.blocks)
        runner.put(record.step)
        live = runner.loop.layout.side.block(block)
        then = _again(runner, steps[source.version], rollout, index)
        now = _again(runner, record.step, rollout, index)
        runner.put(record.step)
        if live is None or then is None or now is None:
            out.append(finding)
            continue
        facts = {
            "bytes_of_old_weights": live == then,
            "bytes_of_current_weights": live == now,
            "proved_with": {"sample": rollout.sample, "block_of_prompt": index},
        }
        is_proved = facts["bytes_of_old_weights"] and not facts["bytes_of_current_weights"]
        out.append(confirmed(finding, **facts) if is_proved else finding)
    return out


def _again(runner: CellRunner, step: int, rollout: Rollout, index: int) -> bytes | None:
    """The same block of the same prompt, computed by a new engine with the weights of a step."""
    from zkl_debug.engines.megatron.generation import Request

    engine = runner.fresh(step)
    engine.generate([Request(rollout.sample, rollout.tokens[: rollout.prompt_length], 1)], 0)
    blocks = engine.uses[-1].blocks
    return engine.block(blocks[index]) if index < len(blocks) else None
