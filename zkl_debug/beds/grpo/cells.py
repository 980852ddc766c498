"""Running a step again with parts exchanged: the engine as it was or a new one, weights and data of either step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from zkl_debug.beds.grpo.data import Batch
from zkl_debug.beds.grpo.layouts import fresh_engine
from zkl_debug.beds.grpo.record import Rollout, StepRecord, sequences_of
from zkl_debug.beds.grpo.side import LocalSide
from zkl_debug.beds.grpo.watch import Kept
from zkl_debug.bisect.outcome import Outcome
from zkl_debug.bisect.steps import Onset, Swap, SwapVerdict, classify_swap, next_steps, swap_cells
from zkl_debug.capture.image import Image
from zkl_debug.schema import Json

if TYPE_CHECKING:
    from zkl_debug.beds.grpo.loop import GrpoLoop


@dataclass(frozen=True)
class Cell:
    """One run of generation and scoring.

    Attributes:
        engine: ``carried`` (as it was in the step, everything it had kept) or ``fresh`` (new, weights copied).
        state: step whose weights (and, carried, whose engine state) it ran with.
        data: step whose prompts and sampling it ran.
        rollouts: both sides of every sequence.
    """

    engine: str
    state: int
    data: int
    rollouts: tuple[Rollout, ...]

    @property
    def diverged(self) -> tuple[int, ...]:
        """Samples whose sides are not bitwise equal."""
        return tuple(r.sample for r in self.rollouts if not r.equal)

    @property
    def outcome(self) -> Outcome:
        """Zero or mismatch."""
        return Outcome.MISMATCH if self.diverged else Outcome.ZERO

    def to_json(self) -> Json:
        """Outcome and samples."""
        return {
            "engine": self.engine,
            "state": self.state,
            "data": self.data,
            "outcome": self.outcome.value,
            "diverged": list(self.diverged),
        }


class CellRunner:
    """Runs cells on an open loop whose steps were kept; every cell puts the loop into the state it asks for.

    Attributes:
        done: cells by (engine, state, data).
    """

    def __init__(self, loop: GrpoLoop, kept: Mapping[int, Kept], say: Callable[[str], None]) -> None:
        self.loop, self.kept, self.say = loop, kept, say
        self.done: dict[tuple[str, int, int], Cell] = {}
        self._fresh: dict[int, tuple[LocalSide, Image]] = {}

    def cell(self, engine: str, state: int, data: int) -> Cell:
        """The cell, run unless it was run before."""
        key = (engine, state, data)
        if key not in self.done:
            self.say(f"{engine} engine, state of step {state}, data of step {data}")
            self.done[key] = self._run(engine, state, self.kept[data].batch)
        return self.done[key]

    def repeat(self, engine: str, state: int, data: int) -> Cell:
        """The cell run once more, whatever was run before."""
        self.say(f"again: {engine} engine, state of step {state}, data of step {data}")
        return self._run(engine, state, self.kept[data].batch)

    def put(self, state: int) -> None:
        """Bring the loop into the state it had when step ``state`` was ready to generate."""
        self.kept[state].image.restore()
        self.loop.step, self.loop.version = state, self.kept[state].version

    def fresh(self, state: int) -> LocalSide:
        """An engine with the trainer's weights of a step, as new: it is put back before every use."""
        if state not in self._fresh:
            self.put(state)
            engine = fresh_engine(self.loop.options, self.loop.layout.trainer)
            self._fresh[state] = engine, engine.image()
        engine, as_new = self._fresh[state]
        as_new.restore()
        return engine

    def _run(self, engine: str, state: int, batch: Batch) -> Cell:
        other = self.fresh(state) if engine == "fresh" else None
        self.put(state)
        results = self.loop.generate(batch, other)
        uses = tuple((other or self.loop.layout.side).uses)
        return Cell(engine, state, batch.step, sequences_of(results, self.loop.score(results), uses))

    # ---- questions ------------------------------------------------------------------------------------------------
    def swap(self, engine: str, good: int, bad: int) -> tuple[Swap, SwapVerdict]:
        """The 2x2 of state and data of two steps."""
        outcomes = {
            (state, data): self.cell(engine, bad if state else good, bad if data else good).outcome
            for state in (False, True)
            for data in (False, True)
        }
        swap = swap_cells(outcomes)
        return swap, classify_swap(swap)

    def probe(self, steps: list[int], data: int) -> tuple[Onset, dict[int, Cell]]:
        """From which step on the engine's state fails on one fixed batch: a binary search over kept steps."""
        cells: dict[int, Cell] = {}
        while True:
            asked = next_steps(steps, {s: c.outcome for s, c in cells.items()})
            if isinstance(asked, Onset):
                return asked, cells
            for step in asked:
                cells[step] = self.cell("carried", step, data)


def same_as_live(cell: Cell, record: StepRecord) -> bool:
    """Whether a replay gave the bits of the live run, on both sides, in every sequence."""
    pairs = list(zip(cell.rollouts, record.sequences, strict=True))
    return all(a.tokens == b.tokens and _same(a.gen, b.gen) and _same(a.train, b.train) for a, b in pairs)


def _same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))
