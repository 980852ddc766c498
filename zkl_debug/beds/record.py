"""Capture a bed: each side twice plainly and once under the probe, the three compared on the final outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zkl_debug.beds.bed import BedOptions
from zkl_debug.beds.faults import fault
from zkl_debug.beds.run import BedContext, BedRun, GenSide, TrainSide, open_bed
from zkl_debug.beds.spread import layout_of, layouts
from zkl_debug.errors import UsageError
from zkl_debug.schema import Json

Progress = Callable[[str], None]


@dataclass(frozen=True)
class RecordOptions:
    """How a bed is captured; see :class:`zkl_debug.capture.session.CaptureOptions`."""

    level: str = "digest"
    sites: tuple[str, ...] = ()
    layers: tuple[int, int] | None = None
    budget: int | None = None
    strict: bool = False
    certify: bool = True
    at_once: bool = False


@dataclass(frozen=True)
class Recorded:
    """What was written: folders by side, the run itself and each side's self-certification."""

    folders: dict[str, Path]
    run: BedRun
    certification: dict[str, Json]


def record_bed(
    options: BedOptions, out: Path, record: RecordOptions | None = None, progress: Progress | None = None
) -> Recorded:
    """Run the bed and capture the sides of ``options.sides`` into ``out/train`` and ``out/gen``.

    The generation side always runs, for it makes the tokens that are scored. ``out/run.json`` says how to repeat it.

    Raises:
        UsageError: when a folder to be written holds something already.
    """
    record = record or RecordOptions()
    say = progress or (lambda _text: None)
    folders = {side: out / side for side in options.sides}
    for folder in folders.values():
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty", "a new folder", f"rm -r {folder}, or another --out")
    certification: dict[str, Json] = {}
    gen: GenSide | None = None
    train: TrainSide | None = None
    options = fault(options.fault, options.bed, options.dtype).adjust(options)
    if options.spread:
        return _record_spread(options, out, folders, record, say)
    with open_bed(options) as context:
        out.mkdir(parents=True, exist_ok=True)
        with context.side("gen"):
            gen = _side(context, "gen", folders.get("gen"), context.run_gen, record, certification, say, gen_outputs)
        if "train" in folders:
            with context.side("train"):
                train = _side(
                    context, "train", folders["train"], context.run_train, record, certification, say, train_outputs
                )
        switches = [s.name for s in context.switches]
    repeat = {"options": asdict(options), "switches_on": switches, "record": asdict(record)}
    (out / "run.json").write_text(json.dumps(repeat, indent=2, default=str) + "\n")
    return Recorded(folders, BedRun(options, gen, train), certification)


def _record_spread(
    options: BedOptions, out: Path, folders: Mapping[str, Path], record: RecordOptions, say: Progress
) -> Recorded:
    """A side on several ranks runs in processes of its own; one on a single rank here."""
    from zkl_debug.beds.ranks import run_ranks

    out.mkdir(parents=True, exist_ok=True)
    certification: dict[str, Json] = {}
    done: dict[str, Any] = {}
    switches: list[str] = []
    sequences: dict[int, tuple[int, ...]] = {}
    prompt_lens: dict[int, int] = {}
    for side in ("gen", "train"):
        folder = folders.get(side)
        if side == "train" and folder is None:
            continue
        if layout_of(options, side).world > 1:
            say(f"{side}: {layout_of(options, side).world} ranks ({layout_of(options, side).text}), each A0, A1, A2")
            done[side], certification[side] = run_ranks(options, side, folder, record, sequences, prompt_lens)
        else:
            with open_bed(options, other_side_spread=True) as context, context.side(side):
                context.sequences, context.prompt_lens = dict(sequences), dict(prompt_lens)
                done[side] = run_side(context, side, folder, record, certification, say)
                switches = [s.name for s in context.switches]
        if side == "gen":
            gen: GenSide = done["gen"]
            sequences, prompt_lens = gen.sequences, {r.sample: r.prompt_length for r in gen.results}
    repeat = {"options": asdict(options), "switches_on": switches, "record": asdict(record)}
    (out / "run.json").write_text(json.dumps(repeat, indent=2, default=str) + "\n")
    certification = {side: value for side, value in certification.items() if value}
    return Recorded(dict(folders), BedRun(options, done.get("gen"), done.get("train")), certification)


def run_side(
    context: BedContext,
    side: str,
    folder: Path | None,
    record: RecordOptions,
    certification: dict[str, Json],
    say: Progress | None = None,
) -> Any:
    """Run one side of an open bed, and capture it into ``folder`` if there is one; its surroundings are in place."""
    say = say or (lambda _text: None)
    if side == "gen":
        return _side(context, side, folder, context.run_gen, record, certification, say, gen_outputs)
    return _side(context, side, folder, context.run_train, record, certification, say, train_outputs)


def _side[T](
    context: BedContext,
    side: str,
    folder: Path | None,
    work: Callable[[], T],
    record: RecordOptions,
    certification: dict[str, Json],
    say: Progress,
    outputs: Callable[[T], dict[str, np.ndarray[Any, Any]]],
) -> T:
    """A0, A1 plainly, A2 under the probe; the certification goes into A2's manifest."""
    say(f"{side}: run A0 (plain)")
    first = work()
    if folder is None:
        return first
    plain: T | None = None
    if record.certify:
        say(f"{side}: run A1 (plain, again)")
        plain = work()
    say(f"{side}: run A2 (probed)")
    with _capture(context, side, folder, record) as capture:
        if context.options.spread:
            capture.adapter.lone_collectives = max(one.tp for one in layouts(context.options)) > 1
        # Scoring rows then carry which tokens were generated.
        capture.adapter.prompt_lens.update(context.prompt_lens)
        if side == "gen":
            context.generator.record_graphs()
        probed = work()
        if plain is not None:
            certification[side] = {
                "a0_a1": compare_outputs(outputs(first), outputs(plain)),
                "a0_a2": compare_outputs(outputs(first), outputs(probed)),
            }
            capture.add_manifest("self_repeat", certification[side])
        if side == "gen":
            _engine_state(context, capture)
        capture.add_manifest("switches", {s.name: s.effective() for s in context.switches})
    if side == "gen":
        context.generator.record_graphs()  # without the probe's kernels
    return probed


def _engine_state(context: BedContext, capture: Any) -> None:
    """What the engine keeps in its recurrent slots when all is generated, under an event of its own."""
    from zkl_debug.engines.megatron.kv import slot_records

    with capture.session.guarded("engine state"):
        records = slot_records(context.generator.context)
        if records:
            capture.session.event("generated", {"slots": len(records) // 2})
            capture.session.state(records)


def _capture(context: BedContext, side: str, folder: Path, record: RecordOptions) -> Any:
    from zkl_debug.capture.api import Capture

    shown = "bed seed dtype stack size graphs packing chunk chunked_prefill prefix_caching micro_batch"
    meta = {
        "bed": {name: getattr(context.options, name) for name in shown.split()},
        "switches_requested": [s.name for s in context.switches],
    }
    return Capture(
        context.model,
        folder,
        side,
        level=record.level,
        sites=record.sites,
        layers=record.layers,
        budget=record.budget,
        strict=record.strict,
        at_once=record.at_once,
        meta=meta,
        rank=context.rank[0],
        world=context.rank[1],
    )


def gen_outputs(side: GenSide) -> dict[str, np.ndarray[Any, Any]]:
    """Final values of generation by request: tokens, and the bits of the log-probs."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for result in (*side.results, *side.reprefill):
        found[f"{result.request_id}/tokens"] = np.asarray(result.tokens, np.int64)
        found[f"{result.request_id}/log_probs"] = result.log_probs.view(np.uint32)
    return found


def train_outputs(side: TrainSide) -> dict[str, np.ndarray[Any, Any]]:
    """Final values of scoring by sample: the bits of the log-probs."""
    return {f"{sample}/log_probs": values.view(np.uint32) for sample, values in side.log_probs.items()}


def compare_outputs(a: Mapping[str, np.ndarray[Any, Any]], b: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Json]:
    """Bitwise comparison of final outputs: how many values, how many differ, where first."""
    values = mismatched = 0
    first = ""
    for name in sorted(set(a) | set(b)):
        x, y = a.get(name), b.get(name)
        if x is None or y is None or x.shape != y.shape:
            differ, size = 1, 1
        else:
            differ, size = int((x != y).sum()), int(x.size)
        values += size
        mismatched += differ
        first = first or (name if differ else "")
    return {"equal": mismatched == 0 and values > 0, "values": values, "mismatched": mismatched, "first": first}
