"""One rank of a side of a bed: ``python -m zkl_debug.beds.rank JOB.json`` under torchrun's environment variables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from zkl_debug.beds.bed import BedOptions
from zkl_debug.beds.record import RecordOptions, run_side
from zkl_debug.beds.run import BedContext, GenSide, open_bed
from zkl_debug.errors import ZklError

RESULT = "rank{:05d}.npz"


def run(job: dict[str, Any], where: Path) -> None:
    """Run this process's rank of ``job["side"]`` and leave its results in ``where``."""
    side: str = job["side"]
    record = {**job["record"], "sites": tuple(job["record"]["sites"])}
    record["layers"] = tuple(record["layers"]) if record["layers"] else None
    options = BedOptions(**{**job["options"], "sides": tuple(job["options"]["sides"])})
    folder = Path(job["folder"]) if job["folder"] else None
    certification: dict[str, Any] = {}
    with open_bed(options, side) as context:
        if job["sequences"]:
            context.sequences = {int(sample): tuple(tokens) for sample, tokens in job["sequences"].items()}
            context.prompt_lens = {int(sample): int(n) for sample, n in job["prompt_lens"].items()}
        with context.side(side):
            done = run_side(context, side, folder, RecordOptions(**record), certification)
        save(context, done, where, certification)


def save(context: BedContext, done: Any, where: Path, certification: dict[str, Any]) -> None:
    """Write what the parent puts together: log-probs by sample, or the generated sequences."""
    arrays: dict[str, Any] = {"certification": np.array(json.dumps(certification))}
    if isinstance(done, GenSide):
        for kind, results in (("results", done.results), ("reprefill", done.reprefill)):
            for result in results:
                head = f"{kind}/{result.sample}"
                arrays[f"{head}/tokens"] = np.array(result.tokens, np.int64)
                arrays[f"{head}/meta"] = np.array([result.request_id, result.prompt_length, result.cached], np.int64)
                arrays[f"{head}/generated"] = result.generated_log_probs
                arrays[f"{head}/prompt"] = result.prompt_log_probs
    else:
        for kind, table in (("log_probs", done.log_probs), ("rescored", done.rescored)):
            arrays |= {f"{kind}/{sample}": values for sample, values in table.items()}
    np.savez(where / RESULT.format(context.rank[0]), **arrays)


def main() -> int:
    """Run a job; a user error ends with its exit code and one line."""
    path = Path(sys.argv[1])
    try:
        run(json.loads(path.read_text()), path.parent)
    except ZklError as error:
        print(f"zkl-debug: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
