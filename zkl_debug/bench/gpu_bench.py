"""What a capture costs on a GPU: a scoring forward of 16k tokens, and decoding 64 sequences in CUDA graphs.

Each figure stands beside the plain run of the same process, and beside a naive hook that copies every module output to
the host. Filing what was captured is not part of a forward: it happens behind it, and is timed by itself. Machines
are shared: :mod:`zkl_debug.bench.steady` tells apart what was disturbed.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from zkl_debug.beds.bed import bed
from zkl_debug.beds.gpu import require
from zkl_debug.bench.children import scratch
from zkl_debug.bench.steady import Steps, Times
from zkl_debug.schema import Json

ROUNDS = 5
SEQUENCES, SEQUENCE = 8, 2048
DECODED, DECODE_PROMPT, DECODE_TOKENS = 64, 128, 96
_PREFILL_STEPS = 3  # and the first decode steps behind them
_KERNEL_SHAPES = ((16384, 8192), (16384, 2048))

Say = Callable[[str], None]


PARTS = ("kernel", "scoring", "decode")


def bench_gpu(
    progress: Say | None = None,
    size: str = "full",
    rounds: int = ROUNDS,
    parts: Sequence[str] = PARTS,
    folder: Path | None = None,
) -> dict[str, Json]:
    """Time the digest kernel, scoring and decoding, or some of them; captures are written to ``folder``.

    Returns:
        ``kernel``: bytes read per second; ``scoring`` and ``decode``: seconds and ratios to the plain run, of decode
        those of a step, too.

    Raises:
        UsageError: this machine cannot run the bed ``gpt-te``.
    """
    known = bed("gpt-te")
    require(known)
    from zkl_debug.engines.megatron import gpu, world

    say = progress or (lambda _text: None)
    fields: dict[str, Any] = {**known.model, **known.sizes[size]}
    result: dict[str, Json] = {"device": torch.cuda.get_device_name(), "size": fields, "rounds": rounds}
    with scratch(folder, "zkl-bench-") as root:
        if "kernel" in parts:
            say("digest kernel")
            result["kernel"] = [bench_kernel(*shape) for shape in _KERNEL_SHAPES]
        spec = gpu.GpuSpec(kind="te", attention_backend="flash", flash_attention_version=4, **fields)
        with world.world(inference_rng=True):
            if "scoring" in parts:
                say("scoring")
                result["scoring"] = _scoring(gpu.build_gpu_model(spec, 0), spec, root, rounds)
                torch.cuda.empty_cache()
            if "decode" in parts:
                say("decoding")
                graphs = gpu.GpuSpec(**{**vars(spec), "cuda_graphs": True})
                result["decode"] = _decoding(gpu.build_gpu_model(graphs, 0), graphs, root, rounds)
    return result


def bench_kernel(rows: int, width: int) -> dict[str, Json]:
    """Bytes per second the digest kernel reads from a bf16 tensor [rows, width]; best of 20."""
    from zkl_debug.digest_gpu import digest_device

    tensor = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    digest_device(tensor, rows)
    best = float("inf")
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(4):
            digest_device(tensor, rows)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 4000)
    return {"shape": [rows, width], "seconds": best, "bytes_per_second": tensor.numel() * 2 / best}


@contextmanager
def _naive(model: nn.Module) -> Iterator[None]:
    """A hook on every module that copies its output to the host."""
    kept: list[Any] = []

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        kept.extend(t.detach().cpu() for t in (output if isinstance(output, tuple) else (output,)) if _is_tensor(t))

    handles = [m.register_forward_hook(hook) for m in model.modules() if m is not model]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _scoring(model: nn.Module, spec: Any, root: Path, rounds: int) -> dict[str, Json]:
    from zkl_debug.capture.api import Capture
    from zkl_debug.engines.megatron import scoring

    count = SEQUENCE
    rng = np.random.default_rng(0)
    rows = [(i, rng.integers(0, spec.vocab, count).tolist()) for i in range(SEQUENCES)]
    batch = scoring.padded_batch(0, rows)
    times = Times(torch.cuda.synchronize)
    facts: dict[str, Json] = {"tokens": SEQUENCES * count}
    filing = []

    def forward() -> None:
        scoring.score_microbatch(model, batch)

    for _ in range(2):
        forward()
    for number in range(rounds):
        times.time("plain", forward)
        with Capture(model, None, "train", level="off"):
            times.time("off", forward)
        times.time("plain", forward)
        with Capture(model, root / f"s{number}", "train") as capture:

            def captured(session: Any = capture.session) -> None:
                forward()
                session.end_frame()  # issues the read-out, which the next forward would do

            # The first makes files, memory and kernels, and reads every site twice.
            for name in ("digest-first", "digest", "digest"):
                times.time(name, captured)
                begin = time.perf_counter()
                capture.session.flush()
                filing.append(time.perf_counter() - begin)
            facts["sites"], facts["errors"] = len(capture.session.metas), list(capture.session.errors)
            facts["shared"] = len(capture.session.twins.known)
        shutil.rmtree(root / f"s{number}")
    with _naive(model):
        times.time("naive", forward)
    return {**facts, **times.figures(), "filing": round(statistics.median(filing), 5)}


def _decoding(model: nn.Module, spec: Any, root: Path, rounds: int) -> dict[str, Json]:
    from zkl_debug.capture.api import Capture
    from zkl_debug.engines.megatron.generation import DynamicGenerator, GenConfig, Request

    config = GenConfig(
        max_tokens=DECODED * DECODE_PROMPT,
        max_requests=DECODED,
        max_sequence_length=spec.max_length,
        block_size=256,
        buffer_gb=4.0,
        cuda_graphs=2,
    )
    generator = DynamicGenerator(model, config)
    rng = np.random.default_rng(0)
    requests = [
        Request(i, tuple(rng.integers(0, spec.vocab, DECODE_PROMPT).tolist()), DECODE_TOKENS) for i in range(DECODED)
    ]
    runs, steps = Times(torch.cuda.synchronize), Times()
    facts: dict[str, Json] = {"sequences": DECODED, "steps": DECODE_TOKENS}
    step = generator.engine.step_modern  # ends with the sampled tokens on the host

    def run(name: str = "") -> None:
        """A generation; without a name it is not timed."""
        timed = generator.engine.step_modern = Steps(step, _PREFILL_STEPS)
        if not name:
            generator.generate(requests)
            return
        runs.time(name, lambda: generator.generate(requests))
        steps.add(name, timed.samples)

    run()
    for number in range(rounds):
        run("plain")
        with Capture(model, None, "gen", level="off"):
            run("off")
        run("plain")
        with Capture(model, root / f"d{number}", "gen") as capture:
            generator.record_graphs()
            for name in ("digest-first", "digest", "digest"):
                run(name)
                capture.session.flush()
            facts["sites"], facts["errors"] = len(capture.session.metas), list(capture.session.errors)
            facts["graphs"] = capture.session.summary()["graphs"]
        shutil.rmtree(root / f"d{number}")
        generator.record_graphs()
        run()
    return {**facts, **runs.figures(), "step": steps.figures()}
