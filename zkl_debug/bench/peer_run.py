"""One run of one tool, in a process of its own: tools patch torch for good. ``python -m zkl_debug.bench.peer_run``."""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zkl_debug.bench.peer_tools import TOOLS, Tool
from zkl_debug.schema import Json

#: Changes of one result of a linear layer that are put in while scoring: name -> what it does.
INJECTIONS = {"permuted-row": "two rows of a result exchanged", "sign-flip": "the signs of two elements of a result"}
#: The layer they are put into.
TARGET = "decoder.layers.2.mlp.linear_fc2"
FAULTS = {"K2": "tiny-gpt", "K4": "tiny-gpt", "K7": "tiny-moe"}
_ROUNDS = 3


def main(arguments: list[str]) -> int:
    """``TOOL cost FOLDER`` or ``TOOL CASE FOLDER``; prints one JSON document."""
    tool, case, folder = TOOLS[arguments[0]], arguments[1], Path(arguments[2])
    found = cost(tool, folder) if case == "cost" else record(tool, case, folder)
    print("\n" + json.dumps(found))
    return 0


def record(tool: Tool, case: str, folder: Path) -> Json:
    """Record both sides of a bed into ``folder/train`` and ``folder/gen``.

    Args:
        tool: what records.
        case: a fault of :data:`FAULTS`, an injection (recorded while scoring), or ``good-BED`` for a run without any.
        folder: where to.
    """
    from zkl_debug.beds.bed import BedOptions
    from zkl_debug.beds.run import open_bed

    name = FAULTS.get(case) or (case.removeprefix("good-") if case.startswith("good-") else "tiny-gpt")
    options = BedOptions(bed=name, fault=case if case in FAULTS else None)
    changed = 0
    with open_bed(options) as context:
        for side in ("gen", "train"):
            (folder / side).mkdir(parents=True)
            run = context.run_gen if side == "gen" else context.run_train
            put_in = case if side == "train" else ""
            with context.side(side), _products(context.model, put_in) as count:
                with tool.observe(context.model, folder / side):
                    run()
                changed += count[0]
    return {"injected": changed}


@contextlib.contextmanager
def _products(model: Any, case: str) -> Iterator[list[int]]:
    """Put an injection into what the target's first call gives, below every tool: inside the kernel of the product.

    With the stack on that kernel is the stack's own, which torch calls like any other. A layer's product may be
    several, over parts of K, whose sum is the result: all are changed alike, and so is the result. Yields how many.
    """
    from zkl_debug.engines.patching import patched
    from zkl_debug.stack.rowwise import TiledMatmul

    state = {"inside": False, "done": False}
    count = [0]

    def wrap(original: Any) -> Any:
        def product(self: Any, a: Any, b: Any) -> Any:
            out = original(self, a, b)
            if state["inside"]:
                _change(out, case)
                count[0] += 1
            return out

        return product

    def enter(*_: Any) -> None:
        state["inside"] = case in INJECTIONS and not state["done"]

    def leave(*_: Any) -> None:
        state["done"] |= state["inside"]
        state["inside"] = False

    target = dict(model.named_modules())[TARGET] if case in INJECTIONS else None
    hooks = [] if target is None else [target.register_forward_pre_hook(enter), target.register_forward_hook(leave)]
    try:
        with patched(TiledMatmul, "__call__", wrap):
            yield count
    finally:
        for hook in hooks:
            hook.remove()


def _change(rows: Any, case: str) -> None:
    if case == "permuted-row":
        rows[[1, 2]] = rows[[2, 1]]
    else:
        rows[1, 3].neg_()
        rows[1, 5].neg_()


def cost(tool: Tool, folder: Path) -> Json:
    """Scoring forwards of the model of ``bench capture``, plain and recorded in turn: ratio, seconds and bytes."""
    import numpy as np

    from zkl_debug.bench.capture_bench import CaptureBench, build
    from zkl_debug.engines.cpu import cpu_backend
    from zkl_debug.engines.megatron import scoring, world

    size = CaptureBench()
    times: dict[str, list[float]] = {"plain": [], "tool": []}
    nbytes = 0
    with cpu_backend(), world.world():
        model = build(size)
        tokens = np.random.default_rng(0).integers(0, size.vocab, size.tokens).tolist()
        batch = scoring.padded_batch(0, [(0, tokens)])
        scoring.score_microbatch(model, batch)
        for number in range(_ROUNDS):
            start = time.perf_counter()
            scoring.score_microbatch(model, batch)
            times["plain"].append(time.perf_counter() - start)
            out = folder / str(number)
            out.mkdir(parents=True)
            with tool.observe(model, out):
                start = time.perf_counter()
                scoring.score_microbatch(model, batch)
                seconds = time.perf_counter() - start
            times["tool"].append(seconds)
            nbytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            shutil.rmtree(out)
    ratios = [mine / plain for mine, plain in zip(times["tool"], times["plain"], strict=True)]
    return {"ratio": statistics.median(ratios), "bytes": nbytes, "plain_seconds": statistics.median(times["plain"])}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
