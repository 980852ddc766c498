"""What a capture costs: the scoring forward of a CPU model big enough to matter, plain, attached but off, and captured.

The variants take turns within each round, forwards and backwards, and a variant's figure is the median over rounds of
its ratio to the plain forward of the same round: a slow drift of the machine touches all of them alike.
"""

from __future__ import annotations

import io
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zkl_debug.bench.children import scratch
from zkl_debug.schema import Json

FIRST = "-first"
VARIANTS = ("plain", "off", "digest" + FIRST, "digest", "payload")
_TURN = ("plain", "off", "off", "plain", "plain", "off", "digest")  # the smallest ratio takes the most pairs
_PAYLOAD_ROUNDS = 3


@dataclass(frozen=True)
class CaptureBench:
    """Size of the measured forward.

    Attributes:
        layers, hidden, heads, ffn, vocab: model sizes.
        tokens: tokens of the forward.
        rounds: measured rounds; each runs every variant once.
        dtype: ``fp32`` or ``bf16``.
    """

    layers: int = 8
    hidden: int = 1024
    heads: int = 16
    ffn: int = 2816
    vocab: int = 4096
    tokens: int = 512
    rounds: int = 10
    dtype: str = "fp32"


def bench_capture(
    size: CaptureBench | None = None, progress: Callable[[str], None] | None = None, folder: Path | None = None
) -> dict[str, Json]:
    """Time the variants ``plain``, ``off``, ``digest`` and ``payload``; ratios are to ``plain`` of the same run.

    Captures are written to ``folder``; default the folder for temporary files.

    Returns:
        Seconds per forward (median and best), ratio of each variant, sites captured and payload bytes written.
    """
    size = size or CaptureBench()
    from zkl_debug.engines.cpu import cpu_backend
    from zkl_debug.engines.megatron import scoring, world

    say = progress or (lambda _text: None)
    with scratch(folder, "zkl-bench-") as root, cpu_backend(), world.world():
        say("building the model")
        model = build(size)
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, size.vocab, size.tokens).tolist()
        batch = scoring.padded_batch(0, [(0, tokens)])
        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        facts: dict[str, Json] = {}
        scoring.score_microbatch(model, batch)
        # Payload comes last: the disk still takes its bytes long after, at the cost of whatever is timed then.
        turns = [_TURN[:: 1 if number % 2 == 0 else -1] for number in range(size.rounds)]
        for number, turn in enumerate([*turns, *[("payload",)] * _PAYLOAD_ROUNDS]):
            say(f"round {number + 1} of {size.rounds + _PAYLOAD_ROUNDS}: {', '.join(dict.fromkeys(turn))}")
            for name in turn:
                for label, seconds in _timed(model, batch, name, root / f"{name}{number}", facts).items():
                    times[label].append(seconds)
    return _report(size, times, facts)


def build(size: CaptureBench) -> Any:
    """The model of the bench; call it inside its backend and world."""
    from zkl_debug.engines.megatron.model import ModelSpec, build_model

    spec = ModelSpec(
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        kv_groups=size.heads,
        ffn=size.ffn,
        vocab=size.vocab,
        max_length=size.tokens,
    )
    return build_model(spec, size.dtype, 0)


def _timed(model: Any, batch: Any, name: str, out: Path, facts: dict[str, Json]) -> dict[str, float]:
    """Seconds of a forward. Attaching and closing are outside the clock; waiting for the writer is inside.

    The first forward of a capture makes its files and datasets: it is timed by itself, and the one after it is the
    figure. Payload is timed on the first only, which already writes several hundred MB.
    """
    from zkl_debug.capture.api import Capture
    from zkl_debug.engines.megatron import scoring

    observer: AbstractContextManager[Any] = (
        nullcontext() if name == "plain" else Capture(model, out, "train", level=name)
    )
    seconds: dict[str, float] = {}
    with _quiet_failure(), observer as capture:
        for label in (name,) if name == "payload" else (name + FIRST, name):
            begin = time.perf_counter()
            scoring.score_microbatch(model, batch)
            if capture is not None and name != "off":
                capture.session.flush()
            seconds[label] = time.perf_counter() - begin
        if capture is not None and name == "digest":
            facts["sites"] = len(capture.session.metas)
            facts["errors"] = list(capture.session.errors)
    if name == "payload":
        facts["payload_bytes"] = sum(p.stat().st_size for p in out.rglob("*.h5"))
    shutil.rmtree(out, ignore_errors=True)
    return {label: value for label, value in seconds.items() if label in VARIANTS}


@contextmanager
def _quiet_failure() -> Iterator[None]:
    """Hold back what a capture says on stderr until it has ended well: the bench tells by itself why it failed.

    A capture that fails names ``repair``, and the folder of a bench is gone by then.
    """
    said = io.StringIO()
    with redirect_stderr(said):
        yield
    sys.stderr.write(said.getvalue())


def _ratio(values: list[float], plain: list[float], rounds: int) -> float:
    """Median over rounds of the ratio to the plain forwards of the same round; payload has no rounds of its own."""
    if len(values) % rounds:
        return statistics.median(values) / statistics.median(plain)
    return statistics.median(
        statistics.fmean(mine) / statistics.fmean(base)
        for mine, base in zip(_by_round(values, rounds), _by_round(plain, rounds), strict=True)
    )


def _by_round(values: list[float], rounds: int) -> list[list[float]]:
    each = len(values) // rounds
    return [values[i * each : (i + 1) * each] for i in range(rounds)]


def _report(size: CaptureBench, times: dict[str, list[float]], facts: dict[str, Json]) -> dict[str, Json]:
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "size": {k: getattr(size, k) for k in ("layers", "hidden", "ffn", "vocab", "tokens", "rounds", "dtype")},
        "seconds": {k: round(v, 4) for k, v in median.items()},
        "best": {k: round(min(v), 4) for k, v in times.items()},
        "ratio": {k: round(_ratio(v, times["plain"], size.rounds), 4) for k, v in times.items()},
        "ratio_of_best": {k: round(min(times[k]) / min(times["plain"]), 4) for k in times},
        **facts,
    }
