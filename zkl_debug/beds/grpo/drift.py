"""When did it start, is it state or data, and which state and which event: the whole question, on the GRPO bed.

Order of the evidence: every step is compared while the loop runs; the first step that diverges is repeated from its
kept state; weights, data and carried engine state are exchanged; then the state at that step is compared with every
version, and the step is captured on both sides down to the operator. Nothing here knows which fault was put in.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.grpo.affected import SequenceRule, sequence_rule
from zkl_debug.beds.grpo.cells import Cell, CellRunner, same_as_live
from zkl_debug.beds.grpo.loop import GrpoLoop, open_loop
from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.beds.grpo.proof import prove_blocks
from zkl_debug.beds.grpo.record import StepRecord, table_of, write_table
from zkl_debug.beds.grpo.watch import LoopValues, LoopWatch
from zkl_debug.bisect.outcome import Outcome
from zkl_debug.bisect.steps import Fault, Onset, OnsetStatus, SwapVerdict
from zkl_debug.diff.state import EventRef, StateFinding, freed_blocks, state_findings
from zkl_debug.diff.state_values import Match
from zkl_debug.logprobs.report import analyse
from zkl_debug.schema import Json

if TYPE_CHECKING:
    from zkl_debug.capture.events import Moment
    from zkl_debug.capture.session import CaptureSession

Say = Callable[[str], None]


@dataclass
class Drift:
    """Everything found out about one loop.

    Attributes:
        options: the run.
        records: its steps.
        onset: first step that diverged, or None.
        steps: all steps that diverged.
        rule: what the diverged sequences of that step have in common.
        repeats: whether the step, run again from its kept state, gave the bits of the live run (twice).
        swaps: the 2x2 of weights and data on fresh engines, and of carried state and data, with their verdicts.
        probe: from which step on the engine's state fails on the data of the onset step.
        cells: every run of the exchange.
        kind: ``state`` (carried by the engine), ``data``, ``weights``, ``either``, ``interaction``, ``always``,
            ``table`` (both sides computed the same, what was handed on differs) or ``undecided``.
        reason: why, in words.
        state: wrong state at the onset step, most telling first.
        between: events after the last good generation, up to the end of the first bad one.
        table: what the log-probs of the onset step say by themselves.
        operator: verdict of the captures of the onset step, both sides.
        captures: where these are; empty where they were not kept.
        parameters: parameters the engine has.
        cost: seconds by part, and what the event log cost.
        notes: what was not looked into, and other facts.
    """

    options: GrpoOptions
    records: list[StepRecord] = field(default_factory=list)
    onset: int | None = None
    steps: tuple[int, ...] = ()
    rule: SequenceRule | None = None
    repeats: bool | None = None
    swaps: dict[str, tuple[dict[str, str], SwapVerdict]] = field(default_factory=dict)
    probe: Onset | None = None
    cells: list[Cell] = field(default_factory=list)
    kind: str = ""
    reason: str = ""
    state: list[StateFinding] = field(default_factory=list)
    between: list[EventRef] = field(default_factory=list)
    table: list[dict[str, Any]] = field(default_factory=list)
    operator: Json = None
    captures: str = ""
    parameters: int = 0
    cost: dict[str, Json] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def event(self) -> EventRef | None:
        """The event that is to answer for it, or None where there is none to blame."""
        named = [f.event for f in self.state if f.event is not None]
        return named[0] if named and self.kind in ("state", "undecided") else None


def find_drift(
    options: GrpoOptions,
    out: Path | None = None,
    say: Say | None = None,
    *,
    keep: int | None = None,
    stop: bool = False,
    light: bool = False,
    after: Callable[[GrpoLoop], None] | None = None,
) -> Drift:
    """Run the loop, and where it diverges find out why.

    Args:
        options: the loop.
        out: folder for what is found: ``loop`` (events and state), ``train`` and ``gen`` (captures of the onset step),
            ``logprobs.npz``, ``onset.npz`` (a checkpoint before the onset step). Nothing is kept when None, but for
            the captures, which go to a temporary folder that is removed, and kept where something fails.
        say: told what is being done.
        keep: steps that can be run again (a ring buffer); None for all.
        stop: end the loop at the first step that diverges.
        light: state only after events.
        after: called with the open loop when no step diverged.
    """
    tell = say or (lambda _text: None)
    with ExitStack() as stack:
        loop = stack.enter_context(open_loop(options))
        drift = Drift(loop.options)
        drift.parameters = loop.layout.side.parameters
        session = stack.enter_context(_stored(out / "loop", loop)) if out is not None else None
        watch = LoopWatch(loop, keep=keep, session=session, light=light)
        started = time.perf_counter()
        with watch:
            for _ in range(loop.options.steps):
                tell(f"step {loop.step + 1} of {loop.options.steps}")
                if loop.run_step().diverged and stop:
                    break
        seconds = time.perf_counter() - started
        drift.records = loop.records
        drift.cost = {"loop_seconds": round(seconds, 2), "watch": watch.cost(seconds)}
        drift.notes += [f"not looked into: {text}" for text in watch.log.opaque]
        drift.steps = tuple(r.step for r in loop.records if r.diverged)
        if out is not None:
            write_table(drift.records, out / "logprobs.npz")
        if drift.steps and drift.steps[0] in watch.kept:
            started = time.perf_counter()
            drift.onset = drift.steps[0]
            _investigate(drift, loop, watch, out, tell)
            drift.cost["investigation_seconds"] = round(time.perf_counter() - started, 2)
        elif drift.steps:
            drift.onset, drift.kind = drift.steps[0], "undecided"
            drift.reason = f"step {drift.onset} is not kept any more: keep more steps, or stop at the first one"
        elif after is not None:
            after(loop)
    return drift


@contextmanager
def _stored(folder: Path, loop: GrpoLoop) -> Iterator[CaptureSession]:
    """A capture without frames: events and state of the loop."""
    from zkl_debug.capture.options import CaptureOptions
    from zkl_debug.capture.session import CaptureSession
    from zkl_debug.store.writer import CaptureWriter

    meta = {"bed": {"bed": "grpo", **{k: str(v) for k, v in vars(loop.options).items()}}}
    writer = CaptureWriter(folder, side="loop", meta=meta)
    session = CaptureSession(writer, CaptureOptions())
    try:
        yield session
    finally:
        writer.close(manifest=session.summary())


def _investigate(drift: Drift, loop: GrpoLoop, watch: LoopWatch, out: Path | None, say: Say) -> None:
    assert drift.onset is not None
    bad = drift.onset
    record = next(r for r in drift.records if r.step == bad)
    runner = CellRunner(loop, watch.kept, say)
    if out is not None:
        _keep_onset(loop, watch, bad, out)
    drift.repeats = all(
        same_as_live(c, record) for c in (runner.cell("carried", bad, bad), runner.repeat("carried", bad, bad))
    )
    _swap(drift, runner, bad)
    say("comparing state with every version")
    runner.put(bad)
    _state(drift, watch, record, runner)
    drift.between = _between(watch.log.moments, bad)
    report = analyse(table_of([record], mask_prompts=False))
    told: list[Any] = [finding.to_json(report.view.differs) for finding in report.findings]
    drift.table = sorted(told, key=lambda finding: -finding["evidence"]["explains"])
    _operator(drift, runner, bad, out, say)
    if drift.kind in ("always", "data") and isinstance(drift.operator, dict):
        _computed_equal(drift, drift.operator, record.only_cached_rows(drift.options.block))
    drift.cells = list(runner.done.values())


def _computed_equal(drift: Drift, verdict: Mapping[str, Json], rows: str) -> None:
    """Where every captured value is equal on both sides, the fault lies behind the model."""
    if verdict["verdict"] == "identical":
        drift.kind = "table"
        drift.reason = (
            "everything both sides computed is equal, log-probs included; what the engine handed on is not: not the "
            f"model, but the way from it to the table of log-probs{rows}"
        )


def _keep_onset(loop: GrpoLoop, watch: LoopWatch, bad: int, out: Path) -> None:
    """The trainer as it was when the onset step scored, on disk."""
    from zkl_debug.beds.grpo import checkpoint

    watch.kept[bad].image.restore()
    step, version = loop.step, loop.version
    loop.step, loop.version = bad - 1, watch.kept[bad].version
    checkpoint.save(loop, out / "onset.npz")
    loop.step, loop.version = step, version


# ---- state or data -------------------------------------------------------------------------------------------------


def _swap(drift: Drift, runner: CellRunner, bad: int) -> None:
    good = bad - 1
    if good not in runner.kept:
        _first_step(drift, runner, bad)
        return
    for engine in ("fresh", "carried"):
        swap, verdict = runner.swap(engine, good, bad)
        drift.swaps[engine] = ({k: v.value for k, v in vars(swap).items()}, verdict)
    fresh = drift.swaps["fresh"][1]
    alone = runner.done["fresh", bad, bad].outcome
    drift.probe, _ = runner.probe([s for s in sorted(runner.kept) if s <= bad], bad)
    if not drift.repeats:
        drift.kind, drift.reason = "undecided", "the step does not repeat itself from its kept state"
    elif alone is Outcome.ZERO:
        drift.kind = "state"
        drift.reason = (
            f"a new engine with the same weights gives zero on the data of step {bad}; the engine as it was does not: "
            "it is what the engine had kept, or what it was given instead of the weights"
        )
    else:
        drift.kind, drift.reason = _fresh_kind(fresh)


def _fresh_kind(verdict: SwapVerdict) -> tuple[str, str]:
    names = {
        Fault.DATA: "data",
        Fault.STATE: "weights",
        Fault.EITHER: "either",
        Fault.INTERACTION: "interaction",
        Fault.NOT_REPRODUCED: "undecided",
        Fault.UNDECIDED: "undecided",
    }
    return names[verdict.fault], f"on new engines, {verdict.reason}"


def _first_step(drift: Drift, runner: CellRunner, bad: int) -> None:
    """There is no good step before: only the engine can be exchanged."""
    fresh = runner.cell("fresh", bad, bad).outcome
    if fresh is Outcome.MISMATCH:
        drift.kind, drift.reason = "always", "it is there on a new engine too, and no step before it was kept"
    else:
        drift.kind, drift.reason = "state", "a new engine with the same weights gives zero"


# ---- which state, which event ----------------------------------------------------------------------------------------


def _state(drift: Drift, watch: LoopWatch, record: StepRecord, runner: CellRunner) -> None:
    moments = watch.log.moments
    values = LoopValues(watch)
    # The weights that ran are those after the engine woke.
    begin = next(m.seq for m in moments if m.step == record.step and m.name == "generate" and m.phase == "begin")
    woke = next((m.seq for m in moments if m.seq > begin and m.name == "wake" and m.phase == "end"), begin)
    found = state_findings(moments, woke, values)
    freed = freed_blocks(moments, record.step)
    old = {int(f.detail["block"]) for f in found if f.kind == "kv"}
    shared = _sharing(record)
    drift.rule = sequence_rule(record, [r for r in drift.records if r.step < record.step], old, shared)
    hit = {b for s in record.sequences if not s.equal for b in s.cached_blocks}
    kept = [f for f in found if f.kind != "kv" or int(f.detail["block"]) in hit]
    unused = len(found) - len(kept)
    if unused:
        drift.notes.append(
            f"{unused} more KV block(s) of old weights can be found by hash; no diverged sequence took them"
        )
    kept = prove_blocks(kept, record, watch, runner)
    drift.state = sorted([*freed, *_leftovers(record, moments[begin]), *kept], key=_weight)


def _leftovers(record: StepRecord, generation: Moment) -> list[StateFinding]:
    """Recurrent slots that held another sequence's state when the diverged sequences of a step began."""
    event = EventRef(generation.name, generation.step, generation.seq, generation.site)
    return [
        StateFinding(
            f"ssm/slot.{slot:04d}",
            "ssm",
            Match("not zeroed"),
            record.version,
            "reused",
            event,
            "bytes",
            {"slot": slot, "request": request, "previous": previous},
        )
        for request, slot, previous in record.traffic.leftovers
        if request in record.diverged
    ]


def _weight(finding: StateFinding) -> tuple[int, str]:
    """Bytes before digests before age; among equals parameters first, for caches and blocks depend on them."""
    strength = {"bytes": 0, "digest": 0, "age": 2}[finding.strength]
    kind = {"parameter": 0, "buffer": 1, "cache": 2, "kv": 3}.get(finding.kind, 4)
    return strength * 10 + kind, finding.path


def _sharing(record: StepRecord) -> set[int]:
    """Sequences one of whose KV blocks another sequence wrote into while they held it."""
    uses = [use for r in record.sequences for use in r.uses]
    return {s for use in uses for s in (*use.held_by, *([use.request] if use.written_by else []))}


def _between(moments: list[Moment], bad: int) -> list[EventRef]:
    """Events after the last good generation, up to the end of the first bad one."""
    start = max((m.seq for m in moments if m.step == bad - 1 and m.name == "generate" and m.phase == "end"), default=-1)
    stop = next(m.seq for m in moments if m.step == bad and m.name == "generate" and m.phase == "end")
    inside = [m for m in moments if start < m.seq < stop and m.phase != "begin"]
    return [EventRef(m.name, m.step, m.seq, m.site) for m in inside]


# ---- which operator --------------------------------------------------------------------------------------------------


def _operator(drift: Drift, runner: CellRunner, bad: int, out: Path | None, say: Say) -> None:
    """Capture both sides of the onset step, run again from its kept state, and compare them."""
    from zkl_debug.diff import diff_captures

    with _folder(out, bad) as folder:
        say(f"step {bad} once more, captured on both sides")
        _capture_step(runner, bad, folder)
        operator = diff_captures(folder / "train", folder / "gen").to_json()
    if out is None:
        operator["next"] = []  # the captures they would read are gone
    drift.captures = "" if out is None else str(out)
    drift.operator = operator


@contextmanager
def _folder(out: Path | None, bad: int) -> Iterator[Path]:
    """Where the captures of the onset step go: kept where they were asked for, and where something goes wrong."""
    folder = Path(tempfile.mkdtemp(prefix="zkl-steps-")) if out is None else out
    try:
        yield folder
    except BaseException:
        print(f"zkl-debug: what was captured of step {bad} is kept in {folder}", file=sys.stderr)
        raise
    if out is None:
        shutil.rmtree(folder, ignore_errors=True)


def _capture_step(runner: CellRunner, bad: int, folder: Path) -> None:
    from zkl_debug.capture.api import Capture

    loop = runner.loop
    meta: dict[str, Any] = {"bed": {"bed": "grpo", "seed": loop.options.seed, "dtype": loop.options.dtype}}
    runner.put(bad)
    batch = runner.kept[bad].batch
    lengths = {s: len(batch.prompts[batch.group(s)]) for s in range(len(batch.generate))}
    version = runner.kept[bad].version
    results = loop.layout.side.capture(folder / "gen", meta, bad, version, batch.requests(), batch.seed)
    with Capture(loop.layout.trainer, folder / "train", "train", meta=meta) as train:
        train.set_step(bad, version)
        train.adapter.prompt_lens.update(lengths)  # type: ignore[union-attr]
        loop.score(results)


def status(drift: Drift) -> OnsetStatus:
    """How the search for the onset ended; every step was compared, so there is no gap."""
    if drift.onset is None:
        return OnsetStatus.NEVER
    return OnsetStatus.ALWAYS if drift.onset == drift.records[0].step else OnsetStatus.FOUND
